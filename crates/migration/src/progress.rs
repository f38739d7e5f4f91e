//! The progress of a migration, as it is shown to users: it never falls, and ends only with the migration.

use std::time::Duration;

use crate::handover::phase::Phase;
use crate::handover::source::Costs;
use crate::identity::VolumeIndex;
use crate::strategy::{Round, Tally};

/// The progress of a migration at one instant.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// The current phase of the migration.
    pub phase: Phase,
    /// The bytes of blocks that have become synchronised; a block counts each time.
    pub bytes_synchronised: u64,
    /// The bytes of blocks still missing or in flight. `None` if not known: after a restart, for volumes that left incomplete,
    /// until the target's next report.
    pub bytes_missing: Option<u64>,
    /// The part of the copying that is done, 0 to 1. It never falls, and is 1 only when nothing is missing.
    pub fraction: f64,
    /// The bytes that the mover has written to the target.
    pub bytes_copied: u64,
    /// The bytes of guest writes that went to the target by value.
    pub bytes_mirrored: u64,
    /// The bytes that were zero, and became holes at the target.
    pub bytes_zero: u64,
    /// The bytes that share their blocks with the source, and were neither read nor written.
    pub bytes_cloned: u64,
    /// The bytes a second that the mover synchronised recently.
    pub copy_bytes_per_second: f64,
    /// The expected rest of the copying: earliest and latest end, from now; `None` while unknown.
    pub remaining: Option<(Duration, Duration)>,
    /// The reason of a wait, and its limit.
    pub waiting: Option<Waiting>,
    /// The reason why mirroring is suspended; `None` while it is not.
    pub suspended: Option<&'static str>,
    /// The number of the current attempt at the handover; 0 before the first.
    pub attempt: u32,
    /// The decisions of the strategies so far.
    pub tally: Tally,
    /// The ended rounds of each volume; empty unless the strategy copies in rounds.
    pub rounds: Vec<(VolumeIndex, Round)>,
    /// The least rate and the greatest loss of guests at its disks; `None`: it is not paced.
    pub paced: Option<pacer::Status>,
    /// What limits the copying; `None`: nothing is copied.
    pub limited_by: Option<LimitedBy>,
    /// What its deadline demands; `None`: it has none.
    pub hurry: Option<Hurry>,
}

/// What a deadline demands of a copying.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hurry {
    /// What guests may lose at present; `None`: it does not give way to them.
    pub impact: Option<pacer::Impact>,
    /// Whether that is more than was ordered.
    pub is_raised: bool,
    /// Whether the deadline will be missed although nothing is left that would make it faster.
    pub is_late: bool,
}

impl Hurry {
    /// Returns what two volumes of one migration do together.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        let impact = self.impact.zip(other.impact).map(|(one, two)| if one < two { two } else { one });
        Self { impact, is_raised: self.is_raised || other.is_raised, is_late: self.is_late || other.is_late }
    }
}

/// What limits a copy at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitedBy {
    /// Reading at the source.
    SourceDisk,
    /// Writing at the target.
    TargetDisk,
    /// Guests of the source's disk, which come first.
    SourceGuests,
    /// Guests of the target's disk, which come first.
    TargetGuests,
    /// The link to the target's host.
    Link,
    /// The ordered limit.
    Bandwidth,
    /// A short pause, in which guests are measured.
    Measuring,
}

/// Where the chunks in flight are.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChunksInFlight {
    /// The bytes that are being read.
    pub reading: u64,
    /// Those at the target's host; `None`: it is this host, or has not said.
    pub arrived: Option<ArrivedChunks>,
}

/// The chunks that have arrived at the target's host.
#[derive(Clone, Copy, Debug)]
pub struct ArrivedChunks {
    /// Their bytes that are not stored yet.
    pub bytes: u64,
    /// What holds them back.
    pub limit: pacer::Limit,
}

/// The progress of one volume's copying at one instant.
#[derive(Clone, Debug, Default)]
pub struct VolumeProgress {
    /// The bytes of blocks that have become synchronised; a block counts each time.
    pub bytes_synchronised: u64,
    /// The bytes of blocks still missing or in flight.
    pub bytes_missing: u64,
    /// The part of the copying that is done. It never falls, and never reaches 1.
    pub fraction: f64,
    /// The reason of a wait, and its limit.
    pub waiting: Option<Waiting>,
    /// The expected rest: earliest and latest end, from now; `None` while unknown.
    pub remaining: Option<(Duration, Duration)>,
    /// The bytes a second that became synchronised recently.
    pub copy_bytes_per_second: f64,
    /// The reason why mirroring is suspended; `None` while it is not.
    pub suspended: Option<&'static str>,
    /// The cost of the copying so far.
    pub costs: Costs,
    /// The ended rounds; empty unless the strategy copies in rounds.
    pub rounds: Vec<Round>,
    /// The least rate and the greatest loss of guests at its disks; `None`: it is not paced.
    pub paced: Option<pacer::Status>,
    /// What limits the copying; `None`: nothing is copied.
    pub limited_by: Option<LimitedBy>,
    /// What its deadline demands; `None`: it has none.
    pub hurry: Option<Hurry>,
}

/// The progress of a volume's copying that a restarted daemon continues.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Carried {
    /// The bytes of blocks that had become synchronised; a block counts each time.
    pub bytes_synchronised: u64,
    /// The part of the copying that was done.
    pub fraction: f64,
    /// The cost of the copying until then.
    pub costs: Costs,
    /// The rounds that had ended.
    pub rounds: Vec<Round>,
}

/// A wait, with its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The reason of the wait, as it is shown to users.
    pub reason: &'static str,
    /// The time until the wait is given up; `None`: it has no limit.
    pub remaining: Option<Duration>,
}
