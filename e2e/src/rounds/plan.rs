//! The bad luck of one trip, from a seed: what happens when, counted from when the migration is asked for.
//!
//! Every mishap ends by itself: a link is mended, a killed daemon started again, a migration that rests goes on. What is
//! cancelled has to be asked for again.

use std::fmt;
use std::time::Duration;

use lab::workload::random::Random;

use crate::wire::State;

/// Mishaps of one trip at most; each may fall into another one.
const MISHAPS_MAX: u64 = 3;
/// One trip in so many has no mishap at all: it shows that the others were bad luck.
const QUIET_ONE_IN: u64 = 8;
/// Latest beginning of a mishap. A copy without a limit takes about a second in a debug build, so many come later.
const BEGINS_MS_MAX: u64 = 2500;
/// How long a link may be away.
const AWAY_MS: (u64, u64) = (100, 3000);
/// One link in so many that is away stays so for longer than connections live without an answer.
const LONG_ONE_IN: u64 = 12;
/// How long that is.
const LONG_MS: u64 = 12_000;
/// How long a daemon may be gone, or a migration rest.
const PAUSE_MS: (u64, u64) = (10, 800);
/// The rates at which a trip may be copied, in MiB a second.
const RATES_MIB: [u32; 3] = [16, 40, 100];
/// Where a daemon that is started again kills itself: at some later time of this trip, or in a later one.
const FAIL_POINTS: [&str; 13] = [
    "after-started",
    "before-prepared",
    "after-prepared",
    "after-aborted",
    "before-released",
    "after-released",
    "before-owned",
    "after-owned",
    "before-discard",
    "before-retire",
    "after-retire",
    "before-ended",
    "after-ended",
];

/// One of the two hosts of a trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The host that the volume leaves.
    Source,
    /// The host that it goes to.
    Target,
}

/// Something that is done to a trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// The link becomes this.
    Link(State),
    /// A daemon is killed.
    Kill(Role),
    /// It is started again, and may kill itself at a step later on.
    Start(Role, Option<&'static str>),
    /// The migration is to rest.
    Pause,
    /// It is to go on.
    Resume,
    /// It is cancelled at this host.
    Cancel(Role),
}

/// What happens in one trip.
#[derive(Debug)]
pub(super) struct Plan {
    /// How fast it is copied, as `--bandwidth` takes it.
    pub(super) bandwidth: Option<String>,
    /// What is done when, in order.
    pub(super) acts: Vec<(Duration, Act)>,
}

impl Plan {
    /// Draws a trip.
    pub(super) fn draw(random: &mut Random) -> Self {
        let bandwidth = pick(random, &[None, Some(0), Some(1), Some(2)])
            .map(|rate: usize| format!("{}MiB/s", RATES_MIB[rate]));
        let count = if random.below(QUIET_ONE_IN) == 0 { 0 } else { 1 + random.below(MISHAPS_MAX) };
        let mut acts = Vec::new();
        for _ in 0..count {
            let began = Duration::from_millis(random.below(BEGINS_MS_MAX));
            acts.extend(mishap(random).into_iter().map(|(after, act)| (began + after, act)));
        }
        acts.sort_by_key(|(at, _)| *at);
        Self { bandwidth, acts }
    }
}

/// One mishap and its end.
fn mishap(random: &mut Random) -> Vec<(Duration, Act)> {
    let now = Duration::ZERO;
    match random.below(12) {
        kind @ 0..6 => {
            let state = if kind < 3 { State::Cut } else { State::BlackHole };
            let away = match random.below(LONG_ONE_IN) {
                0 => Duration::from_millis(LONG_MS),
                _ => between(random, AWAY_MS),
            };
            vec![(now, Act::Link(state)), (away, Act::Link(State::Whole))]
        }
        kind @ 6..10 => {
            let role = if kind < 8 { Role::Source } else { Role::Target };
            let fail_point = (random.below(2) == 0).then(|| pick(random, &FAIL_POINTS));
            vec![(now, Act::Kill(role)), (between(random, PAUSE_MS), Act::Start(role, fail_point))]
        }
        10 => vec![(now, Act::Pause), (between(random, PAUSE_MS), Act::Resume)],
        _ => vec![(now, Act::Cancel(pick(random, &[Role::Source, Role::Source, Role::Target])))],
    }
}

fn between(random: &mut Random, (least, most): (u64, u64)) -> Duration {
    Duration::from_millis(least + random.below(most - least))
}

/// One of a few.
pub(super) fn pick<T: Copy>(random: &mut Random, of: &[T]) -> T {
    // Below the length, and so an index.
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
            Self::Link(State::Whole) => formatter.write_str("link mended"),
            Self::Link(State::Cut) => formatter.write_str("link cut"),
            Self::Link(State::BlackHole) => formatter.write_str("link swallows all"),
            Self::Link(State::Slow) => formatter.write_str("link slow"),
            Self::Link(State::Late) => formatter.write_str("link late"),
            Self::Kill(role) => write!(formatter, "{role} killed"),
            Self::Start(role, None) => write!(formatter, "{role} started"),
            Self::Start(role, Some(step)) => write!(formatter, "{role} started, to die {step}"),
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
    fn a_seed_draws_one_plan_and_every_mishap_ends() {
        for seed in 0..1000 {
            let plan = Plan::draw(&mut Random::new(seed));
            let again = Plan::draw(&mut Random::new(seed));
            assert_eq!(plan.acts, again.acts);
            let count = |of: fn(&Act) -> bool| plan.acts.iter().filter(|(_, act)| of(act)).count();
            assert_eq!(count(|act| matches!(act, Act::Kill(_))), count(|act| matches!(act, Act::Start(..))));
            assert_eq!(count(|act| *act == Act::Pause), count(|act| *act == Act::Resume));
            let last = plan.acts.iter().rev().find(|(_, act)| matches!(act, Act::Link(_)));
            assert!(last.is_none_or(|(_, act)| *act == Act::Link(State::Whole)), "{plan:?}");
            assert!(plan.acts.is_sorted_by_key(|(at, _)| *at));
        }
    }
}
