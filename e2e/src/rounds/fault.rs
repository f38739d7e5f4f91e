//! Faults as data: which there are, how often each is drawn, and which acts make one, with its end.
//!
//! Every fault ends by itself: a link is mended, a daemon that was killed is started again, a full disk has room again.
//! A migration that was cancelled is begun again by [`super::trip`].

use std::time::Duration;

use lab::workload::random::Random;
use testbed::LinkState;

use super::plan::{Act, Role, pick};

/// What is done to a trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The link is cut for a while: connections break.
    LinkCut,
    /// The link carries nothing for a while, and connections stay.
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
    /// Another program changes an image that was kept of an earlier stay.
    KeptTouched,
    /// A host forgets the other one, and is paired with it again.
    Unpaired,
    /// The migration rests for a while.
    Paused,
    /// The migration is cancelled.
    Cancelled,
}

/// How often a fault is drawn while a volume moves: one in the sum of all weights.
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

/// The same between two trips, when the volume is at its owner and nothing moves.
pub(super) const AT_REST: [(Fault, u64); 6] = [
    (Fault::Killed, 3),
    (Fault::Restarted, 2),
    (Fault::ImageTouched, 4),
    (Fault::KeptTouched, 2),
    (Fault::Unpaired, 1),
    (Fault::DataFull, 1),
];

/// How long a link may be away, and a disk be full.
const AWAY_MS: (u64, u64) = (100, 3000);
/// One link in so many that is away stays so for longer than connections live without an answer.
const LONG_ONE_IN: u64 = 12;
/// How long that is.
const LONG_MS: u64 = 12_000;
/// How long a daemon may be gone, or a migration rest.
const PAUSE_MS: (u64, u64) = (10, 800);
/// How long a daemon may be stopped.
const FROZEN_MS: (u64, u64) = (5_000, 20_000);
/// Where a daemon that is started again kills itself: at some later time of this trip, or in a later one.
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
        // The dice is below the sum of the weights; this is what the compiler does not see.
        Self::LinkCut
    }

    /// What makes this fault, each act with its time since the beginning; the last one ends it.
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

/// Starts a daemon again; every second one is to kill itself at a step that it comes to.
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
