//! Makes a short tour of three hosts with faults; `cargo run -p e2e --bin tour` makes long ones.

#![expect(clippy::panic, reason = "a test fails by panicking")]

use e2e::tour::play_tour;

fn play(seed: u64, steps: u32) {
    if let Err(error) = play_tour(seed, steps, |step| println!("{step}")) {
        panic!("{error:#}");
    }
}

#[test]
fn volumes_that_tour_three_hosts_lose_nothing_whatever_is_killed() {
    play(1, 18);
}

/// With this seed clients stay behind while the volumes move twice, and a daemon ends while it relays requests of others.
#[test]
fn volumes_that_move_on_from_their_clients_are_found_and_daemons_end_in_order() {
    play(5, 30);
}
