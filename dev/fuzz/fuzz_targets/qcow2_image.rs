//! Lets libFuzzer feed the target `qcow2_image` of the crate `hostile`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::feed("qcow2_image", bytes));
