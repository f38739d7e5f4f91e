//! Lets libFuzzer feed the target `vm_commands` of the crate `hostile`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::feed("vm_commands", bytes));
