//! A short tour of three hosts with bad luck; `cargo run -p e2e --bin tour` makes long ones.

use e2e::tour::play_tour;

#[test]
fn volumes_that_tour_three_hosts_lose_nothing_whatever_is_killed() {
    if let Err(error) = play_tour(1, 18, |step| println!("{step}")) {
        panic!("{error:#}");
    }
}
