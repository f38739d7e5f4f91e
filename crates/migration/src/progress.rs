//! How far a migration is, for people: never backwards, never finished too early.

use std::time::Duration;

use crate::handover::phase::Phase;
use crate::handover::source::Costs;
use crate::identity::VolumeIndex;
use crate::strategy::{Round, Tally};

/// How far a migration is, at one instant.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Where it stands.
    pub phase: Phase,
    /// Bytes of blocks that have become synchronised since it began, each time counted.
    pub bytes_synchronised: u64,
    /// Bytes of blocks still missing or in flight; `None`: that is not known, as of volumes that have left with blocks missing after
    /// a restart, until the target has said it.
    pub bytes_missing: Option<u64>,
    /// Part of the copying that is done, 0 to 1. Never falls, and is 1 only when nothing is missing.
    pub fraction: f64,
    /// Bytes that the mover has written to the target.
    pub bytes_copied: u64,
    /// Bytes of guest writes that went to the target by value.
    pub bytes_mirrored: u64,
    /// Bytes that were zero, and became holes at the target.
    pub bytes_zero: u64,
    /// Bytes a second that the mover synchronised of late.
    pub copy_bytes_per_second: f64,
    /// When the copying is expected to end, counted from now, at the earliest and at the latest; `None` while nothing
    /// is known.
    pub remaining: Option<(Duration, Duration)>,
    /// What it waits for, and how much longer it will.
    pub waiting: Option<Waiting>,
    /// Why mirroring is suspended; `None` while it is not.
    pub suspended: Option<&'static str>,
    /// Number of the current try at the handover, 0 before the first.
    pub attempt: u32,
    /// What the strategies have decided so far.
    pub tally: Tally,
    /// The rounds that have ended, of each volume; empty unless the strategy copies in rounds.
    pub rounds: Vec<(VolumeIndex, Round)>,
}

/// How far the copying of one volume is, at one instant.
#[derive(Clone, Debug, Default)]
pub struct VolumeProgress {
    /// Bytes of blocks that have become synchronised since it began, each time counted.
    pub bytes_synchronised: u64,
    /// Bytes of blocks still missing or in flight.
    pub bytes_missing: u64,
    /// Part of it that is done. Never falls, never reaches 1.
    pub fraction: f64,
    /// What it waits for, and how much longer it will.
    pub waiting: Option<Waiting>,
    /// When it will have ended, counted from now, at the earliest and at the latest; `None` while nothing is known.
    pub remaining: Option<(Duration, Duration)>,
    /// Bytes a second that became synchronised of late.
    pub copy_bytes_per_second: f64,
    /// Why mirroring is suspended; `None` while it is not.
    pub suspended: Option<&'static str>,
    /// What it has cost.
    pub costs: Costs,
    /// The rounds that have ended; empty unless the strategy copies in rounds.
    pub rounds: Vec<Round>,
}

/// What the copying of a volume had come to when a daemon that went on with it began.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Carried {
    /// Bytes of blocks that had become synchronised, each time counted.
    pub bytes_synchronised: u64,
    /// Part of it that was done.
    pub fraction: f64,
    /// What it had cost.
    pub costs: Costs,
    /// The rounds that had ended.
    pub rounds: Vec<Round>,
}

/// Something that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// What.
    pub reason: &'static str,
    /// How much longer before something else is done; `None`: as long as it takes.
    pub remaining: Option<Duration>,
}
