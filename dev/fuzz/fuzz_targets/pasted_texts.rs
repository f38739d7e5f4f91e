//! Lets libFuzzer feed the target `pasted_texts` of the crate `hostile`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::feed("pasted_texts", bytes));
