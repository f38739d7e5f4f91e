//! The history of a migration: what a report shows.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Migration, Phase, Round};

/// A migration and what was recorded of it. All times are in milliseconds since it began, negative before that.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationHistory {
    /// The migration as it stands.
    pub migration: Migration,
    /// What was recorded; `None` if that is gone, or never was.
    pub recording: Option<Recording>,
}

/// What was recorded of a migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Recording {
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// How it was copied: `mirror`, `tracking`.
    pub strategy: String,
    /// The rounds that it took, if it was copied in rounds.
    #[serde(default)]
    pub rounds: Vec<Round>,
    /// Bytes a second that might be copied; `None`: as fast as it went.
    pub bandwidth_bytes_per_second: Option<u64>,
    /// Longest that a guest's write might be held, or wait for the target.
    pub mirror_wait_max_ms: f64,
    /// When it ended; `None` while it is under way, or if the daemon ended first.
    pub ended_ms: Option<f64>,
    /// What guests did and what was copied, in order of time. Those of a long migration are longer, not more.
    pub samples: Vec<HistorySample>,
    /// Phases in the order in which they were entered; copying is entered at 0.
    pub phases: Vec<PhaseEntered>,
    /// Times in which guest writes did not go to the target.
    pub suspensions: Vec<Suspension>,
    /// What was waited for while nothing was written to the target, and how long altogether.
    pub waits: Vec<Waited>,
    /// What was decided, counted.
    pub decisions: Decisions,
    /// What guests did in the samples before it began; `None` if there are none.
    pub before: Option<GuestFigures>,
    /// What they did while it was under way.
    pub during: Option<GuestFigures>,
    /// What they did in the samples after its end.
    pub after: Option<GuestFigures>,
}

/// One stretch of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistorySample {
    /// When it began.
    pub at_ms: f64,
    /// How long it was.
    pub length_ms: f64,
    /// Guest reads that ended in it.
    pub reads: u64,
    /// Guest writes, discards and zeroing that ended in it.
    pub writes: u64,
    /// Guest flushes that ended in it.
    pub flushes: u64,
    /// Bytes that guests read.
    pub bytes_read: u64,
    /// Bytes that guests wrote.
    pub bytes_written: u64,
    /// Guest requests that failed.
    pub errors: u64,
    /// Latency that half of the requests did not exceed, in microseconds; `None` if there was no request.
    pub median_us: Option<u64>,
    /// Latency that 99 of 100 requests did not exceed.
    pub p99_us: Option<u64>,
    /// The longest latency.
    pub worst_us: Option<u64>,
    /// Bytes that were copied to the target.
    pub bytes_copied: u64,
    /// Bytes of guest writes that the target took.
    pub bytes_mirrored: u64,
    /// Bytes that were found to be zero.
    pub bytes_zero: u64,
    /// Bytes that the target still missed at its end; `None`: that was not recorded, or the migration was not under way.
    #[serde(default)]
    pub bytes_missing: Option<u64>,
}

/// What guests did in a longer time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuestFigures {
    /// How long it was, in seconds.
    pub seconds: f64,
    /// Requests a second.
    pub iops: f64,
    /// Bytes read and written a second.
    pub bytes_per_second: f64,
    /// Latency that half of the requests did not exceed, in microseconds; `None` if there was no request.
    pub median_us: Option<u64>,
    /// Latency that 99 of 100 requests did not exceed.
    pub p99_us: Option<u64>,
    /// The longest latency.
    pub worst_us: Option<u64>,
    /// Requests that failed.
    pub errors: u64,
}

/// That a phase was entered.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PhaseEntered {
    /// When.
    pub at_ms: f64,
    /// Which.
    pub phase: Phase,
}

/// A time in which guest writes did not go to the target, as far as the samples show.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Suspension {
    /// When it was seen first.
    pub at_ms: f64,
    /// When it was over; `None` if it never was.
    pub ended_ms: Option<f64>,
    /// Why.
    pub reason: String,
}

/// What a migration waited for while it stood still, as far as the samples show.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Waited {
    /// What.
    pub reason: String,
    /// How long altogether, in milliseconds.
    pub total_ms: f64,
}

/// What was decided, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Decisions {
    /// Guest writes that went to both stores in whole.
    pub writes_mirrored: u64,
    /// Guest writes of which a part went to both stores.
    pub writes_in_part: u64,
    /// Guest writes that went to the source only, to be copied later.
    pub writes_source_only: u64,
    /// Of all these, those that were held for a while.
    pub writes_held: u64,
    /// Longest that one was held, in milliseconds.
    pub held_longest_ms: f64,
    /// Mirrored writes that were answered before the target had answered.
    pub writes_answered_late: u64,
    /// Chunks that were copied.
    pub chunks_copied: u64,
    /// Of these, those copied a second time at once, because guests wrote to them meanwhile.
    pub chunks_copied_again: u64,
    /// Flushes of the target before the handover.
    pub target_flushes: u64,
    /// Errors of the target.
    pub target_faults: u64,
    /// Errors of the source.
    pub source_faults: u64,
    /// How often mirroring was suspended.
    pub suspensions: u64,
    /// Bytes that followed after the handover (`post-copy`, `three-phase`), as far as the source has sent them since its start.
    #[serde(default)]
    pub bytes_followed: u64,
    /// Of these, those that a guest waited for at the target: pulled. The others came in the background.
    #[serde(default)]
    pub bytes_pulled: u64,
}
