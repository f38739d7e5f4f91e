//! Faults as data: their weights, and the acts that make and end each of them.
//!
//! Every fault ends by itself: a link is restored, a killed daemon is restarted, a full disk is freed. [`super::trip`]
//! begins a cancelled migration again.

use std::time::Duration;

use lab::workload::random::Random;
use testbed::LinkState;

use super::plan::{Act, Role, pick};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The link is cut for a while: connections break.
    LinkCut,
    /// The link carries nothing for a while, but connections stay open.
    LinkSilent,
    /// A daemon is killed, and started again; it may kill itself at a later step.
    Killed,
    /// A daemon is ended in order, and started again.
    Restarted,
    /// A daemon is stopped (SIGSTOP) for long, and continued.
    Frozen,
    /// The disk with a daemon's data folder is full for a while.
    DataFull,
    /// A daemon is ended in order; another program changes the volume's image, and the daemon is started again.
    ImageTouched,
    /// Another program changes a kept image.
    KeptTouched,
    /// A host removes the other one, and is paired with it again.
    Unpaired,
    Paused,
    Cancelled,
}

/// The weights of faults while a volume moves.
pub(super) const ON_THE_WAY: [(Fault, u64); 10] = [
    (Fault::LinkCut, 3),
    (Fault::LinkSilent, 3),
    (Fault::Killed, 5),
    (Fault::Restarted, 3),
    (Fault::Frozen, 1),
    (Fault::DataFull, 2),
    (Fault::ImageTouched, 2),
    (Fault::Unpaired, 2),
    (Fault::Paused, 1),
    (Fault::Cancelled, 1),
];

/// The weights of faults between two trips.
pub(super) const AT_REST: [(Fault, u64); 6] = [
    (Fault::Killed, 3),
    (Fault::Restarted, 2),
    (Fault::ImageTouched, 4),
    (Fault::KeptTouched, 2),
    (Fault::Unpaired, 1),
    (Fault::DataFull, 1),
];

/// Range of the time for a broken link and a full disk.
const AWAY_MS: (u64, u64) = (100, 3000);
/// The number of broken links of which one stays so for longer than connections survive without an answer.
const LONG_ONE_IN: u64 = 12;
/// Duration of such a long break.
const LONG_MS: u64 = 12_000;
/// Range of the time for an ended daemon and a paused migration.
const PAUSE_MS: (u64, u64) = (10, 800);
/// Range of the time for a stopped daemon.
const FROZEN_MS: (u64, u64) = (5_000, 20_000);
/// Fail points of restarted daemons, which they reach in this trip or in a later one.
pub(crate) const FAIL_POINTS: [&str; 13] = [
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

impl Fault {
    /// Draws a fault by its weight.
    pub(super) fn draw(random: &mut Random, from: &[(Self, u64)]) -> Self {
        let sum = from.iter().map(|(_, weight)| weight).sum();
        let mut dice = random.below(sum);
        for (fault, weight) in from {
            if dice < *weight {
                return *fault;
            }
            dice -= weight;
        }
        // This is not reached, because the number is below the sum of the weights.
        Self::LinkCut
    }

    /// Returns the acts of this fault with their times since its beginning. The last one ends it.
    pub(super) fn acts(self, random: &mut Random) -> Vec<(Duration, Act)> {
        let now = Duration::ZERO;
        let role = pick(random, &[Role::Source, Role::Target]);
        match self {
            Self::LinkCut => vec![(now, Act::Link(LinkState::Cut)), (away(random), Act::Link(LinkState::Up))],
            Self::LinkSilent => {
                vec![(now, Act::Link(LinkState::BlackHole)), (away(random), Act::Link(LinkState::Up))]
            }
            Self::Killed => vec![(now, Act::Kill(role)), (between(random, PAUSE_MS), start(random, role))],
            Self::Restarted => vec![(now, Act::Stop(role)), (between(random, PAUSE_MS), start(random, role))],
            Self::Frozen => vec![(now, Act::Freeze(role)), (between(random, FROZEN_MS), Act::Thaw(role))],
            Self::DataFull => {
                vec![(now, Act::FillData(role)), (between(random, AWAY_MS), Act::FreeData(role))]
            }
            Self::ImageTouched => vec![(now, Act::TouchImage), (now, start(random, Role::Source))],
            Self::KeptTouched => vec![(now, Act::TouchKept)],
            Self::Unpaired => vec![(now, Act::Unpair(role)), (between(random, AWAY_MS), Act::Pair)],
            Self::Paused => vec![(now, Act::Pause), (between(random, PAUSE_MS), Act::Resume)],
            Self::Cancelled => {
                vec![(now, Act::Cancel(pick(random, &[Role::Source, Role::Source, Role::Target])))]
            }
        }
    }
}

/// Returns the restart of a daemon. Every second one gets a fail point.
fn start(random: &mut Random, role: Role) -> Act {
    let fail_point = (random.below(2) == 0).then(|| pick(random, &FAIL_POINTS));
    Act::Start(role, fail_point)
}

fn away(random: &mut Random) -> Duration {
    match random.below(LONG_ONE_IN) {
        0 => Duration::from_millis(LONG_MS),
        _ => between(random, AWAY_MS),
    }
}

fn between(random: &mut Random, (least, most): (u64, u64)) -> Duration {
    Duration::from_millis(least + random.below(most - least))
}
