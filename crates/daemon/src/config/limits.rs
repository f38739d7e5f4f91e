//! Limits that depend on the site.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use migration::PacingSettings;
use migration::queue::QueueLimits;
use migration::shares::ShareLimits;
use migration::target::SourcePatience;
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
/// Migrations of one other host that are on their way here, if nobody says: each has a thread, files and memory here. Hosts that keep
/// to their own limits have a handful.
const PEER_MIGRATIONS_DEFAULT: u32 = 64;
/// Volumes of one other host, if nobody says: more than a host has that keeps to its files and threads.
const PEER_VOLUMES_DEFAULT: u32 = 4096;
/// Offers of one other host in a burst, and the time that each costs after it: more than hosts make that are emptied.
const OFFERS_BURST: u32 = 1000;
const OFFER_INTERVAL: Duration = Duration::from_millis(100);
const VOLUMES: RangeInclusive<u64> = 1..=1_000_000;
/// How long a source that can be reached may say nothing, in seconds: it answers every 30 s.
const SILENT_S: RangeInclusive<u64> = 60..=86_400;
const SILENT_S_DEFAULT: u64 = 600;
/// How long one that cannot be reached is waited for, in seconds: what is copied already is worth a day.
const AWAY_S: RangeInclusive<u64> = 60..=31_536_000;
const AWAY_S_DEFAULT: u64 = 86_400;
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
    /// What one other host may have here at a time.
    pub shares: ShareLimits,
    /// How long the source of an arrival may say nothing.
    pub patience: SourcePatience,
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
    peer_migrations: u64,
    peer_volumes: u64,
    /// Zero: what the stores have.
    peer_space_bytes: u64,
    arrival_silent_max_s: u64,
    arrival_away_max_s: u64,
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
            peer_migrations: PEER_MIGRATIONS_DEFAULT.into(),
            peer_volumes: PEER_VOLUMES_DEFAULT.into(),
            peer_space_bytes: 0,
            arrival_silent_max_s: SILENT_S_DEFAULT,
            arrival_away_max_s: AWAY_S_DEFAULT,
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
        let seconds = |key, value, range| within(path, key, value, range).map(Duration::from_secs);
        let shares = both(
            number("limits.peer_migrations", self.peer_migrations, &COUNT),
            number("limits.peer_volumes", self.peer_volumes, &VOLUMES),
        );
        let patience = both(
            seconds("limits.arrival_silent_max_s", self.arrival_silent_max_s, &SILENT_S),
            seconds("limits.arrival_away_max_s", self.arrival_away_max_s, &AWAY_S),
        );
        let (checked, (shares, patience)) =
            both(both(both(waits, pacing), both(queue, kept)), both(shares, patience))?;
        let ((waits, pacing), (queue, kept)) = checked;
        let ((migrations, volumes), (silent_max, away_max)) = (shares, patience);
        let ((mirror_wait_max, stop_wait_max), (depth, chunk_bytes)) = (waits, pacing);
        let (per_host, per_store) = queue;
        let (images_per_volume, percent_of_store) = kept;
        Ok(Limits {
            mirror_wait_max,
            stop_wait_max,
            mover: MoverLimits { depth, chunk_bytes },
            queue: QueueLimits { per_host, per_store },
            shares: ShareLimits {
                migrations,
                volumes,
                bytes: (self.peer_space_bytes > 0).then_some(self.peer_space_bytes),
                offers: OFFERS_BURST,
                offer_interval: OFFER_INTERVAL,
            },
            patience: SourcePatience { silent_max, away_max },
            kept: KeptLimits { images_per_volume, percent_of_store },
        })
    }
}
