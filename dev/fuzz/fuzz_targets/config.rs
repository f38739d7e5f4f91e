//! Lets libFuzzer feed the target `config` of the crate `hostile`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::feed("config", bytes));
