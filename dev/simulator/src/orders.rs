//! Orders of administrators, at any moment, for a volume that goes to and fro between two hosts. This is a separate simulation, with
//! the product's journals, machines and decisions, but without lanes and disks.
//!
//! ```text
//!   a step: a guest reads or writes │ a message, a commit, a store's answer │ an order │ a kill, a cut link
//!   the end: no more faults; perhaps one host is lost for good ──► what messages name is ordered ──► nothing waits
//! ```
//! Each order is given in each phase, and answered as the rules say. Guests of each branch find what they wrote. No state is a
//! dead end: in the end each volume is served, or somebody has given it up by name.

mod ending;
mod given;
mod host;
mod met;
mod truth;
mod world;

use crate::random::Random;
use crate::restored::Telling;

pub(crate) use self::met::Met;
use self::world::World;

const STREAM: u64 = 0x0D3E_5C0D;
const STEPS: u32 = 500;

#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) seeds: u64,
    pub(crate) met: Met,
    /// Orders that were carried out, and refused.
    pub(crate) done: u64,
    pub(crate) refused: u64,
    /// Orders in the end, without which something would have waited for ever.
    pub(crate) needed: u64,
    pub(crate) lost: u64,
    pub(crate) violations: Vec<(u64, String)>,
}

pub(crate) fn campaign(first: u64, count: u64, until_found: bool) -> Shown {
    let mut shown = Shown::default();
    for seed in first..first.saturating_add(count) {
        let world = run(seed, Telling::Silent);
        shown.seeds += 1;
        shown.met.add_seed(&world.met);
        shown.done += world.shown.done;
        shown.refused += world.shown.refused;
        shown.needed += world.shown.needed;
        shown.lost += u64::from(world.hosts.iter().any(|host| host.is_lost));
        if let Some(violation) = world.violation {
            shown.violations.push((seed, violation));
            if until_found {
                break;
            }
        }
    }
    shown
}

pub(crate) fn replay(seed: u64, telling: Telling) -> Option<String> {
    run(seed, telling).violation
}

fn run(seed: u64, telling: Telling) -> World {
    let mut world = World::new(Random::new(seed ^ STREAM), telling);
    for _ in 0..STEPS {
        world.step();
        if world.violation.is_some() {
            return world;
        }
    }
    world.end();
    world
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_hundred_seeds_break_no_rule_and_say_the_same_each_time() {
        let first = campaign(0, 300, false);
        assert_eq!(first.violations, []);
        let again = campaign(0, 300, false);
        assert_eq!((first.done, first.refused, first.needed), (again.done, again.refused, again.needed));
        assert!(first.done > 300 && first.refused > 300 && first.needed > 3 && first.lost > 30);
    }
}
