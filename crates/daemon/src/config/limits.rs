//! The limits that depend on the site.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use migration::PacingSettings;
use migration::queue::QueueLimits;
use migration::shares::ShareLimits;
use migration::target::SourcePatience;
use serde::Deserialize;

use super::faults::{Faults, both};
use super::{ConfigError, within};

/// The range of `mirror_wait_max_ms`. Below it, a busy disk counts as hung; above it, guests' file systems give up.
const MIRROR_WAIT_MS: RangeInclusive<u64> = 10..=30_000;
/// The range of `stop_wait_max_ms`. Above it, service managers kill the daemon.
const STOP_WAIT_MS: RangeInclusive<u64> = 100..=80_000;

/// The default number of running migrations: the two that fill a pair of stores, and two more, so that one that switches over
/// or waits for a link leaves nothing idle. Each takes a share of the disk from its guest. More of them are not faster, and
/// all of them last longer.
const MIGRATIONS_PER_HOST_DEFAULT: u32 = 4;
/// The default number of these that use one store: one keeps a disk busy, and a second one fills the pauses of the first. More
/// of them turn sequential requests into random ones.
const MIGRATIONS_PER_STORE_DEFAULT: u32 = 2;
/// The default number of kept images of one volume: a volume that moves round a few stores or hosts finds the latest image of
/// each. Further images are only older.
const KEPT_IMAGES_PER_VOLUME_DEFAULT: u32 = 8;
/// The default share of a store that kept images may use, in percent: as much remains for images in use.
const KEPT_PERCENT_OF_STORE_DEFAULT: u32 = 50;
/// The range of chunks that are copied at once. With one, the disk idles between two chunks. Above 64 a disk gets no faster,
/// and each chunk needs a buffer.
const CHUNKS_IN_FLIGHT: RangeInclusive<u64> = 1..=64;
/// The range of their size in bytes: from a block to what a guest's write may have to wait for.
const CHUNK_BYTES: RangeInclusive<u64> = 65_536..=4_194_304;
/// The range of numbers of migrations and of kept images. With 0 nothing could be moved; each has a thread and buffers.
const COUNT: RangeInclusive<u64> = 1..=1000;
/// The default number of incoming migrations of one other host. Each has a thread, files and memory here. Hosts within their
/// own limits have a handful.
const PEER_MIGRATIONS_DEFAULT: u32 = 64;
/// The default number of volumes of one other host: more than a host can serve with its files and threads.
const PEER_VOLUMES_DEFAULT: u32 = 4096;
/// The burst of offers of one other host, and the interval after it: enough even for hosts that are being emptied.
const OFFERS_BURST: u32 = 1000;
const OFFER_INTERVAL: Duration = Duration::from_millis(100);
const VOLUMES: RangeInclusive<u64> = 1..=1_000_000;
/// The range of a reachable source's silence, in seconds; a source answers every 30 s.
const SILENT_S: RangeInclusive<u64> = 60..=86_400;
const SILENT_S_DEFAULT: u64 = 600;
/// The range of the wait for an unreachable source, in seconds: the data copied so far is worth a day.
const AWAY_S: RangeInclusive<u64> = 60..=31_536_000;
const AWAY_S_DEFAULT: u64 = 86_400;
const PERCENT: RangeInclusive<u64> = 1..=100;
/// The default for guests' loss, in percent.
const IMPACT_PERCENT_DEFAULT: u64 = 20;
/// The range of what guests may lose, in percent; beside it 100.
const IMPACT_PERCENT: RangeInclusive<u64> = 1..=90;

/// The limits that depend on the site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest time that a migration may hold a guest's write (design §5.7).
    pub mirror_wait_max: Duration,
    /// The longest time that a stopping daemon waits for a volume's requests.
    pub stop_wait_max: Duration,
    /// How much a migration copies at once.
    pub mover: MoverLimits,
    /// The number of running migrations; further ones wait for their turn.
    pub queue: QueueLimits,
    /// What one other host may use here at a time.
    pub shares: ShareLimits,
    /// How long the source of an arrival may be silent.
    pub patience: SourcePatience,
    /// How many kept images remain after migrations.
    pub kept: KeptLimits,
    /// What guests of a disk may lose to migrations without an impact of their own, in percent; 100: these do not give way.
    pub impact_percent: u8,
}

/// How much a migration copies at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoverLimits {
    /// The number of chunks in flight.
    pub depth: u32,
    /// The size of each chunk in bytes.
    pub chunk_bytes: u64,
}

impl MoverLimits {
    pub(crate) fn pacing(self) -> PacingSettings {
        PacingSettings { depth: self.depth as usize, chunk_bytes: self.chunk_bytes, bytes_per_second: None }
    }
}

/// How many images that migrations left are kept. Above the limits the oldest are deleted on which nothing relies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptLimits {
    /// The number of kept images of one volume.
    pub images_per_volume: u32,
    /// The space of all kept images, in percent of their store's size.
    pub percent_of_store: u32,
}

/// The table in its TOML form.
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
    /// Zero: the size of the stores.
    peer_space_bytes: u64,
    arrival_silent_max_s: u64,
    arrival_away_max_s: u64,
    impact_percent: u64,
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
            impact_percent: IMPACT_PERCENT_DEFAULT,
        }
    }
}

impl FileLimits {
    pub(super) fn check(&self, path: &Path) -> Result<Limits, Faults> {
        let milliseconds = |key, value, range| within(path, key, value, range).map(Duration::from_millis);
        // Every value of the range fits.
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
        let impact = impact(path, self.impact_percent);
        let ((checked, (shares, patience)), impact_percent) =
            both(both(both(both(waits, pacing), both(queue, kept)), both(shares, patience)), impact)?;
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
            impact_percent,
        })
    }
}

/// Guests may lose a part, or the copying does not give way to them at all.
fn impact(path: &Path, percent: u64) -> Result<u8, ConfigError> {
    match u8::try_from(percent) {
        Ok(full @ api::FULL_SPEED_PERCENT) => Ok(full),
        _ => within(path, "limits.impact_percent", percent, &IMPACT_PERCENT).map(|percent| percent as u8),
    }
}
