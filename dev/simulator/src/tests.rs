//! Tests the simulator as a whole: seeds without violations, and the same seed twice.

use crate::campaign::{self, Order, Until};
use crate::scenario::{Options, Rounds};
use crate::simulation::simulate;
use crate::trace::Audience;

const OPTIONS: Options = Options { operations: 200, hosts: 1, rounds: Rounds::Drawn };

#[test]
fn three_hundred_seeds_break_no_rule() {
    let order = Order { first: 0, count: 300, threads: 2, options: OPTIONS, until: Until::AllAreRun };
    let summary = campaign::run(&order, || {});
    assert_eq!(summary.seeds, 300);
    assert!(summary.violations.is_empty(), "{:#?}", summary.violations);
    assert!(summary.operations_min >= Some(200), "{:?}", summary.operations_min);
    assert_eq!(summary.contradictions, []);
}

#[test]
fn a_seed_gives_the_same_trace_every_time() {
    let hashes = |seed| simulate(seed, &OPTIONS, Audience::Nobody).hash;
    for seed in 0..20 {
        assert_eq!(hashes(seed), hashes(seed), "seed {seed}");
    }
    assert_ne!(hashes(1), hashes(2));
}
