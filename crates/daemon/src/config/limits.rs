//! Limits that depend on the site.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use migration::PacingSettings;
use migration::queue::QueueLimits;
use serde::Deserialize;

use super::faults::{Faults, both};
use super::within;

/// Range of `mirror_wait_max_ms`. Below, a busy disk counts as hung; above, guests' file systems give up.
const MIRROR_WAIT_MS: RangeInclusive<u64> = 10..=30_000;
/// Range of `stop_wait_max_ms`. Above, service managers kill.
const STOP_WAIT_MS: RangeInclusive<u64> = 100..=80_000;

/// Migrations under way at a time, if nobody says: the two that fill a pair of stores, and two more, so that one that
/// switches over or waits for a link leaves nothing idle. Each costs its guest a share of the disk for as long as it lasts:
/// as many at once are not faster, and all of them last longer.
const MIGRATIONS_PER_HOST_DEFAULT: u32 = 4;
/// Of these, those that use one store, if nobody says: one keeps a disk busy, a second one fills the pauses of the first. More
/// copyings make random requests of sequential ones.
const MIGRATIONS_PER_STORE_DEFAULT: u32 = 2;
/// Images of one volume that are kept, if nobody says: a volume that goes round between a few stores or hosts finds the latest of
/// each; more of them are only older.
const KEPT_IMAGES_PER_VOLUME_DEFAULT: u32 = 8;
/// Hundredths of a store that kept images may take, if nobody says: as much again is there for what is in use.
const KEPT_PERCENT_OF_STORE_DEFAULT: u32 = 50;
/// Range of chunks that are copied at once. With one the disk idles between two of them; with more than 64 a migration on this
/// host has no more of any disk, and each is a buffer.
const CHUNKS_IN_FLIGHT: RangeInclusive<u64> = 1..=64;
/// Range of their size in bytes: from a block to what a guest's write may have to wait for.
const CHUNK_BYTES: RangeInclusive<u64> = 65_536..=4_194_304;
/// Range of numbers of migrations, and of kept images. Without any nothing could ever be moved; each has a thread and buffers.
const COUNT: RangeInclusive<u64> = 1..=1000;
/// Range of shares.
const PERCENT: RangeInclusive<u64> = 1..=100;

/// Limits that depend on the site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest that a migration may hold a guest's write (design §5.7).
    pub mirror_wait_max: Duration,
    /// Longest that a stopping daemon waits for the requests of a volume.
    pub stop_wait_max: Duration,
    /// How much a migration copies at once.
    pub mover: MoverLimits,
    /// Migrations under way at a time; more wait for their turn.
    pub queue: QueueLimits,
    /// How much of what migrations left is kept.
    pub kept: KeptLimits,
}

/// How much a migration copies at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoverLimits {
    /// Chunks in flight.
    pub depth: u32,
    /// Bytes of each.
    pub chunk_bytes: u64,
}

impl MoverLimits {
    /// As the core has it.
    pub(crate) fn pacing(self) -> PacingSettings {
        PacingSettings { depth: self.depth as usize, chunk_bytes: self.chunk_bytes, bytes_per_second: None }
    }
}

/// How many of the images that migrations left are kept; beyond that the oldest go that nothing relies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptLimits {
    /// Of one volume.
    pub images_per_volume: u32,
    /// In hundredths of a store's size: the space of all of them.
    pub percent_of_store: u32,
}

/// The table as it is written.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub(super) struct FileLimits {
    mirror_wait_max_ms: u64,
    stop_wait_max_ms: u64,
    chunks_in_flight: u64,
    chunk_bytes: u64,
    migrations_per_host: u64,
    migrations_per_store: u64,
    kept_images_per_volume: u64,
    kept_percent_of_store: u64,
}

impl Default for FileLimits {
    fn default() -> Self {
        let PacingSettings { depth, chunk_bytes, .. } = PacingSettings::default();
        Self {
            mirror_wait_max_ms: 1000,
            stop_wait_max_ms: 10_000,
            chunks_in_flight: depth as u64,
            chunk_bytes,
            migrations_per_host: MIGRATIONS_PER_HOST_DEFAULT.into(),
            migrations_per_store: MIGRATIONS_PER_STORE_DEFAULT.into(),
            kept_images_per_volume: KEPT_IMAGES_PER_VOLUME_DEFAULT.into(),
            kept_percent_of_store: KEPT_PERCENT_OF_STORE_DEFAULT.into(),
        }
    }
}

impl FileLimits {
    /// Checks what is written in the file at `path`.
    pub(super) fn check(&self, path: &Path) -> Result<Limits, Faults> {
        let milliseconds = |key, value, range| within(path, key, value, range).map(Duration::from_millis);
        // What is in the range fits.
        let number = |key, value, range| {
            within(path, key, value, range).map(|value| u32::try_from(value).unwrap_or(u32::MAX))
        };
        let waits = both(
            milliseconds("limits.mirror_wait_max_ms", self.mirror_wait_max_ms, &MIRROR_WAIT_MS),
            milliseconds("limits.stop_wait_max_ms", self.stop_wait_max_ms, &STOP_WAIT_MS),
        );
        let pacing = both(
            number("limits.chunks_in_flight", self.chunks_in_flight, &CHUNKS_IN_FLIGHT),
            within(path, "limits.chunk_bytes", self.chunk_bytes, &CHUNK_BYTES),
        );
        let queue = both(
            number("limits.migrations_per_host", self.migrations_per_host, &COUNT),
            number("limits.migrations_per_store", self.migrations_per_store, &COUNT),
        );
        let kept = both(
            number("limits.kept_images_per_volume", self.kept_images_per_volume, &COUNT),
            number("limits.kept_percent_of_store", self.kept_percent_of_store, &PERCENT),
        );
        let ((waits, pacing), (queue, kept)) = both(both(waits, pacing), both(queue, kept))?;
        let ((mirror_wait_max, stop_wait_max), (depth, chunk_bytes)) = (waits, pacing);
        let (per_host, per_store) = queue;
        let (images_per_volume, percent_of_store) = kept;
        Ok(Limits {
            mirror_wait_max,
            stop_wait_max,
            mover: MoverLimits { depth, chunk_bytes },
            queue: QueueLimits { per_host, per_store },
            kept: KeptLimits { images_per_volume, percent_of_store },
        })
    }
}
