//! The history of a migration, for its report.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Migration, Phase, Round};

/// A migration and its recording. All times are in milliseconds since it began, negative before that.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationHistory {
    /// The migration with its present state.
    pub migration: Migration,
    /// Its recording; `None` if it was deleted, or never made.
    pub recording: Option<Recording>,
}

/// The recording of a migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Recording {
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// The strategy, for example `mirror` or `tracking`.
    pub strategy: String,
    /// The ended rounds, if it was copied in rounds.
    #[serde(default)]
    pub rounds: Vec<Round>,
    /// Limit of the copying in bytes a second; `None`: no limit.
    pub bandwidth_bytes_per_second: Option<u64>,
    /// Longest time that a guest's write might be held, in milliseconds.
    pub mirror_wait_max_ms: f64,
    /// When it ended; `None` while it is under way, or if the daemon ended first.
    pub ended_ms: Option<f64>,
    /// Guests' requests and copied bytes, in order of time. A long migration has longer samples, not more.
    pub samples: Vec<HistorySample>,
    /// The phases in their order; copying begins at 0.
    pub phases: Vec<PhaseEntered>,
    /// Times in which guest writes were not sent to the target.
    pub suspensions: Vec<Suspension>,
    /// The reasons of waits in which nothing was written to the target, with their total time.
    pub waits: Vec<Waited>,
    /// Counts of the decisions for writes and chunks.
    pub decisions: Decisions,
    /// Guests' figures before the migration; `None` if there are no samples.
    pub before: Option<GuestFigures>,
    /// Guests' figures during the migration.
    pub during: Option<GuestFigures>,
    /// Guests' figures after the migration.
    pub after: Option<GuestFigures>,
}

/// A sample of the recording: one stretch of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistorySample {
    /// Begin of the sample.
    pub at_ms: f64,
    /// Length of the sample, in milliseconds.
    pub length_ms: f64,
    /// Guest reads that ended in it.
    pub reads: u64,
    /// Guest writes, discards and zeroing that ended in it.
    pub writes: u64,
    /// Guest flushes that ended in it.
    pub flushes: u64,
    /// Bytes that guests have read.
    pub bytes_read: u64,
    /// Bytes that guests have written.
    pub bytes_written: u64,
    /// Guest requests that failed.
    pub errors: u64,
    /// Latency that half of the requests did not exceed, in microseconds; `None` if there was no request.
    pub median_us: Option<u64>,
    /// Latency that 99 of 100 requests did not exceed, in microseconds.
    pub p99_us: Option<u64>,
    /// The longest latency, in microseconds.
    pub worst_us: Option<u64>,
    /// Bytes that were copied to the target.
    pub bytes_copied: u64,
    /// Bytes of guest writes that were mirrored to the target.
    pub bytes_mirrored: u64,
    /// Bytes that were found to be zero.
    pub bytes_zero: u64,
    /// Bytes that the target lacked at the end of the sample; `None`: not recorded, or the migration was not under way.
    #[serde(default)]
    pub bytes_missing: Option<u64>,
}

/// Figures of guests' requests over a longer time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuestFigures {
    /// Length of the time, in seconds.
    pub seconds: f64,
    /// Requests a second, of all kinds.
    pub iops: f64,
    /// Bytes read and written a second.
    pub bytes_per_second: f64,
    /// Latency that half of the requests did not exceed, in microseconds; `None` if there was no request.
    pub median_us: Option<u64>,
    /// Latency that 99 of 100 requests did not exceed, in microseconds.
    pub p99_us: Option<u64>,
    /// The longest latency, in microseconds.
    pub worst_us: Option<u64>,
    /// Number of requests that failed.
    pub errors: u64,
}

/// The begin of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PhaseEntered {
    /// When the phase began.
    pub at_ms: f64,
    /// The phase that began.
    pub phase: Phase,
}

/// A time in which guest writes were not sent to the target, by the samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Suspension {
    /// Begin of its first sample.
    pub at_ms: f64,
    /// Its end; `None` if it did not end.
    pub ended_ms: Option<f64>,
    /// The reason, as text.
    pub reason: String,
}

/// A reason for which a migration waited, by the samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Waited {
    /// The reason of the waits, as text.
    pub reason: String,
    /// Total time of these waits, in milliseconds.
    pub total_ms: f64,
}

/// Counts of the decisions for writes and chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Decisions {
    /// Guest writes that were sent to both stores completely.
    pub writes_mirrored: u64,
    /// Guest writes of which only a part was sent to both stores.
    pub writes_in_part: u64,
    /// Guest writes that were sent to the source only, and copied later.
    pub writes_source_only: u64,
    /// Of all these, writes that were held for a while.
    pub writes_held: u64,
    /// Longest time that a write was held, in milliseconds.
    pub held_longest_ms: f64,
    /// Mirrored writes that were answered before the target had answered.
    pub writes_answered_late: u64,
    /// Number of copied chunks.
    pub chunks_copied: u64,
    /// Of these, chunks that were copied a second time at once, because guests had written to them meanwhile.
    pub chunks_copied_again: u64,
    /// Flushes of the target before the handover.
    pub target_flushes: u64,
    /// Errors of the target.
    pub target_faults: u64,
    /// Errors of the source.
    pub source_faults: u64,
    /// Number of times that mirroring was suspended.
    pub suspensions: u64,
    /// How often the rounds of `tracking` did not converge, and a mirror went on instead.
    #[serde(default)]
    pub rounds_given_up: u64,
    /// Bytes that the source has sent after the handover (`post-copy`, `three-phase`), since its start.
    #[serde(default)]
    pub bytes_followed: u64,
    /// Of these, bytes that a guest at the target waited for (pulled). The others were sent in the background.
    #[serde(default)]
    pub bytes_pulled: u64,
}
