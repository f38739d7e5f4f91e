//! Lets libFuzzer feed the target `http_api` of the crate `hostile`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::feed("http_api", bytes));
