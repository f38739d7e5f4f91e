//! The faults of one trip from a seed, with their times since the order of the migration.

use std::fmt;
use std::time::Duration;

use lab::workload::random::Random;
use testbed::LinkState;

use super::fault::{AT_REST, Fault, ON_THE_WAY};

/// Largest number of faults on one trip; they may overlap.
const FAULTS_MAX: u64 = 3;
/// The number of trips of which one has no faults, for comparison.
const QUIET_ONE_IN: u64 = 8;
/// The number of pauses between trips of which one has a fault.
const REST_ONE_IN: u64 = 2;
/// Latest beginning of a fault. A copy without a limit takes about a second in a debug build, so many faults come after it.
const BEGINS_MS_MAX: u64 = 2500;
/// Rates of the copying, in MiB a second.
const RATES_MIB: [u32; 3] = [16, 40, 100];

/// A host of a trip, by its part in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The host that the volume leaves.
    Source,
    /// The host that the volume moves to.
    Target,
}

/// An act on the hosts of a trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// The link changes to this state.
    Link(LinkState),
    Kill(Role),
    /// A daemon is ended in order.
    Stop(Role),
    /// A daemon is started again, perhaps with a fail point.
    Start(Role, Option<&'static str>),
    /// A daemon is stopped by SIGSTOP.
    Freeze(Role),
    Thaw(Role),
    /// The disk of a daemon's data folder is filled to the last byte.
    FillData(Role),
    /// The disk of a daemon's data folder is freed.
    FreeData(Role),
    /// The source's daemon is ended in order, and the volume's image is changed if the source still owns it.
    TouchImage,
    /// A kept image is changed, at a host that has one.
    TouchKept,
    /// A host removes the other one.
    Unpair(Role),
    Pair,
    Pause,
    Resume,
    /// The migration is cancelled at this host.
    Cancel(Role),
}

/// Tells whether the source's image is kept after the move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaves {
    Nothing,
    /// It is kept, and the return may reuse it.
    Replica,
}

#[derive(Debug)]
pub(super) struct Plan {
    /// Acts before the order of the migration, by time.
    pub(super) at_rest: Vec<(Duration, Act)>,
    pub(super) bandwidth: Option<String>,
    pub(super) leaves: Leaves,
    /// Acts during the migration, by time.
    pub(super) acts: Vec<(Duration, Act)>,
}

impl Plan {
    pub(super) fn draw(random: &mut Random) -> Self {
        let at_rest = if random.below(REST_ONE_IN) == 0 {
            Fault::draw(random, &AT_REST).acts(random)
        } else {
            Vec::new()
        };
        let bandwidth = pick(random, &[None, Some(0), Some(1), Some(2)])
            .map(|rate: usize| format!("{}MiB/s", RATES_MIB[rate]));
        let leaves = pick(random, &[Leaves::Nothing, Leaves::Replica]);
        let count = if random.below(QUIET_ONE_IN) == 0 { 0 } else { 1 + random.below(FAULTS_MAX) };
        let mut acts = Vec::new();
        for _ in 0..count {
            let began = Duration::from_millis(random.below(BEGINS_MS_MAX));
            let fault = Fault::draw(random, &ON_THE_WAY);
            acts.extend(fault.acts(random).into_iter().map(|(after, act)| (began + after, act)));
        }
        acts.sort_by_key(|(at, _)| *at);
        Self { at_rest, bandwidth, leaves, acts }
    }
}

pub(super) fn pick<T: Copy>(random: &mut Random, of: &[T]) -> T {
    // The number is below the length.
    of[random.below(of.len() as u64) as usize]
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Source => "source",
            Self::Target => "target",
        })
    }
}

impl fmt::Display for Act {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link(LinkState::Up) => formatter.write_str("link mended"),
            Self::Link(LinkState::Cut) => formatter.write_str("link cut"),
            Self::Link(LinkState::BlackHole) => formatter.write_str("link swallows all"),
            Self::Link(LinkState::Slow) => formatter.write_str("link slow"),
            Self::Link(LinkState::Late) => formatter.write_str("link late"),
            Self::Kill(role) => write!(formatter, "{role} killed"),
            Self::Stop(role) => write!(formatter, "{role} ended"),
            Self::Start(role, None) => write!(formatter, "{role} started"),
            Self::Start(role, Some(step)) => write!(formatter, "{role} started, to die {step}"),
            Self::Freeze(role) => write!(formatter, "{role} stopped by SIGSTOP"),
            Self::Thaw(role) => write!(formatter, "{role} continued"),
            Self::FillData(role) => write!(formatter, "data folder of the {role} filled"),
            Self::FreeData(role) => write!(formatter, "data folder of the {role} has room"),
            Self::TouchImage => formatter.write_str("source ended, to touch its image"),
            Self::TouchKept => formatter.write_str("a kept image is touched"),
            Self::Unpair(role) => write!(formatter, "{role} forgets the other host"),
            Self::Pair => formatter.write_str("paired again"),
            Self::Pause => formatter.write_str("paused"),
            Self::Resume => formatter.write_str("resumed"),
            Self::Cancel(role) => write!(formatter, "cancelled at the {role}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_one_plan_and_every_fault_ends() {
        for seed in 0..1000 {
            let plan = Plan::draw(&mut Random::new(seed));
            let again = Plan::draw(&mut Random::new(seed));
            assert_eq!((&plan.acts, &plan.at_rest), (&again.acts, &again.at_rest));
            assert!(plan.acts.is_sorted_by_key(|(at, _)| *at));
            for acts in [&plan.at_rest, &plan.acts] {
                expect_ends(&acts.iter().map(|(_, act)| *act).collect::<Vec<_>>());
            }
        }
    }

    /// Checks that every fault that begins in `acts` also ends in them.
    fn expect_ends(acts: &[Act]) {
        let count = |of: fn(&Act) -> bool| acts.iter().filter(|act| of(act)).count();
        let ended = count(|act| matches!(act, Act::Kill(_) | Act::Stop(_) | Act::TouchImage));
        assert_eq!(ended, count(|act| matches!(act, Act::Start(..))), "{acts:?}");
        assert_eq!(count(|act| *act == Act::Pause), count(|act| *act == Act::Resume));
        assert_eq!(count(|act| matches!(act, Act::Unpair(_))), count(|act| *act == Act::Pair));
        for role in [Role::Source, Role::Target] {
            let last = |of: &[Act]| acts.iter().rev().find(|act| of.contains(act)).copied();
            for (begins, ends) in
                [(Act::Freeze(role), Act::Thaw(role)), (Act::FillData(role), Act::FreeData(role))]
            {
                assert!(last(&[begins, ends]).is_none_or(|act| act == ends), "{acts:?}");
            }
        }
        let last = acts.iter().rev().find(|act| matches!(act, Act::Link(_)));
        assert!(last.is_none_or(|act| *act == Act::Link(LinkState::Up)), "{acts:?}");
    }

    #[test]
    fn every_fault_is_drawn() {
        let mut random = Random::new(1);
        for table in [&ON_THE_WAY[..], &AT_REST[..]] {
            let drawn: Vec<Fault> = (0..1000).map(|_| Fault::draw(&mut random, table)).collect();
            for (fault, _) in table {
                assert!(drawn.contains(fault), "{fault:?}");
            }
        }
    }
}
