//! Makes a few round trips between two hosts with faults; `cargo run -p e2e --bin rounds` makes many.

#![expect(clippy::panic, reason = "a test fails by panicking")]

use e2e::rounds::{Settings, play_rounds, play_vm_rounds};

fn play(rounds: u32, seed: u64) {
    let settings = Settings { rounds, seed, disk_bytes: 32 << 20, logs: None };
    if let Err(error) = play_rounds(&settings, |trip| println!("{trip}")) {
        panic!("{error:#}");
    }
}

#[test]
fn round_trip_with_bad_luck_loses_nothing_for_a_guest_that_looks_for_its_volume_at_either_host() {
    play(1, 4);
}

#[test]
fn round_trip_with_bad_luck_loses_nothing_for_a_guest_that_is_always_served_by_one_host() {
    play(2, 3);
}

#[test]
fn round_trip_of_a_vm_with_bad_luck_loses_nothing() {
    let settings = Settings { rounds: 1, seed: 1, disk_bytes: 32 << 20, logs: None };
    if let Err(error) = play_vm_rounds(&settings, |trip| println!("{trip}")) {
        panic!("{error:#}");
    }
}
