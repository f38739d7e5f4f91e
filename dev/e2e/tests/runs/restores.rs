//! Restores a few journals, and promotes a copy; `cargo run -p e2e --bin restores` makes many.

use e2e::restores::{play_promotions, play_returns};

#[test]
fn a_journal_that_is_put_back_among_three_hosts_makes_no_second_owner() {
    if let Err(error) = play_returns(7, 1, |round| println!("{round}")) {
        panic!("{error:#}");
    }
}

#[test]
fn a_copy_that_is_promoted_by_force_is_served_and_nothing_is_deleted_for_it() {
    if let Err(error) = play_promotions(7, 1, |round| println!("{round}")) {
        panic!("{error:#}");
    }
}
