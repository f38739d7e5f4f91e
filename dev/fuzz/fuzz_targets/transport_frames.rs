//! Lets libFuzzer feed the target `transport_frames` of the crate `hostile`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::feed("transport_frames", bytes));
