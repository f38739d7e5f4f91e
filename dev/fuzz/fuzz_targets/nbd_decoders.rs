//! Lets libFuzzer feed the target `nbd_decoders` of the crate `hostile`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::feed("nbd_decoders", bytes));
