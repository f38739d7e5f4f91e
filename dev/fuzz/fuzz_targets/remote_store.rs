//! Lets libFuzzer feed the target `remote_store` of the crate `hostile`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::feed("remote_store", bytes));
