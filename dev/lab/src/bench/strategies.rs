//! `bench strategies`: the experiments of \[ESX\] §3 on this machine. Each strategy is compared with the others, and with a copy
//! of the same unused image.
//!
//! ```text
//!   experiment ─► x (requests in flight, size, load) ─► strategy ─► one migration under fio ─► sample
//!                      └──► off-line: the same stores and mover, no guest ───────────────────────┘
//! ```
//!
//! Source and target are stores with delays of their own ([`Device`]): two devices on top of one disk. Each moved image is
//! compared with its source.

mod equation;
mod experiments;
mod migrations;

use std::time::Duration;

use api::{MigrateVolume, Strategy};
use clap::ValueEnum;
use console::units::{parse_rate, parse_size};
use serde::Serialize;
use serde_json::json;

use self::experiments::{Case, EXPERIMENTS, Experiment};
use self::migrations::Stage;
use super::guest::Load;
use super::migration::AT_FULL_SPEED;
use super::report::Sample;
use super::runner::{About, Ground, Part, Scenario, Turn};
use super::tools::FIO;
use super::{Common, chosen, one_of};
use crate::demo::{Bytes, Progress};

/// Compares the strategies, after the figures of a paper.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct StrategiesOptions {
    #[command(flatten)]
    common: Common,
    /// Extent of the measurement.
    #[arg(long, value_enum, default_value_t = Scale::Full)]
    scale: Scale,
    /// The same as --scale quick: everything in six minutes.
    #[arg(long, conflicts_with = "scale")]
    quick: bool,
    /// Chunks that the mover copies at once.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(DEPTH))]
    depth: u32,
    /// Bytes of each chunk.
    #[arg(long, default_value = "64KiB", value_parser = parse_chunk_size)]
    chunk: u64,
    /// Extra time of each read and write of a store, in milliseconds; usually 2.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(0..=1000))]
    store_latency: Option<u64>,
    /// Rate of a store; usually 64MiB/s, which the mover uses completely.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    store_rate: Option<u64>,
    /// Requests a second of a store; usually 3500.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    store_operations: Option<u64>,
    /// Longest hold of guests at the end of rounds, in milliseconds.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    max_downtime: u64,
    /// Measure this alone; may be given several times.
    #[arg(long, value_name = "EXPERIMENT", value_parser = one_of(EXPERIMENTS.iter().map(|(name, _, title)| (*name, *title))))]
    only: Vec<String>,
}

const HELP: &str = "\
Examples:
  sterna bench strategies --quick --html strategies.html
  sterna bench strategies --only outstanding --rounds 5
  sterna bench strategies --only outstanding --store-latency 10 --store-rate 128MiB/s
  sterna bench strategies --only rounds --depth 8 --chunk 512KiB --json > rounds.json

Each strategy moves an image between two stores of this machine, while fio works on it. Both stores are slowed down, so that \
they behave as two devices on one disk. Every migration is shown beside the time of an idle image, and \
beside the figures of the paper that compared such strategies first. For \"hosts\" the image moves to a second daemon instead, \
over a slow link, also by the strategies that need two hosts. It needs no root, leaves nothing behind, and needs fio \
(Debian: fio). Let the machine be idle meanwhile. The image has 512 MiB, and there are 3 rounds (with --quick 128 MiB and one round), \
unless you say otherwise. Without --quick it takes about two hours.";

/// Range of chunks in flight, as in the daemon's configuration.
const DEPTH: std::ops::RangeInclusive<i64> = 1..=64;
/// Range of chunk sizes, as in the daemon's configuration.
const CHUNK_BYTES: std::ops::RangeInclusive<u64> = 65_536..=4_194_304;

fn parse_chunk_size(text: &str) -> Result<u64, String> {
    match parse_size(text).map_err(|error| error.to_string())? {
        bytes if CHUNK_BYTES.contains(&bytes) && bytes.is_multiple_of(*CHUNK_BYTES.start()) => Ok(bytes),
        _ => Err("it must be a multiple of 64KiB, and at most 4MiB".to_owned()),
    }
}

/// Extent of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Scale {
    /// Everything, with enough rounds for conclusions.
    Full,
    /// Everything in six minutes.
    Quick,
    /// Everything in half a minute, only to test that every figure is made.
    Tiny,
}

impl Scale {
    fn of<T>(self, full: T, quick: T, tiny: T) -> T {
        match self {
            Self::Full => full,
            Self::Quick => quick,
            Self::Tiny => tiny,
        }
    }

    /// Returns for how long a guest works before and after a migration.
    fn margin(self) -> Duration {
        Duration::from_millis(self.of(5000, 1000, 200))
    }

    /// Returns for how long a guest without migration is measured.
    fn look(self) -> Duration {
        Duration::from_millis(self.of(10_000, 4000, 400))
    }

    /// Returns the guest's requests in flight (\[ESX\] Figure 4: 2 to 32).
    fn depths(self) -> &'static [u32] {
        self.of(&[2, 4, 8, 16, 32], &[2, 8, 32], &[16])
    }

    /// Returns the sizes of disks, in quarters of the usual one.
    fn quarters(self) -> &'static [u64] {
        self.of(&[2, 4, 8], &[2, 4], &[4])
    }

    /// Returns the image's size for the target that is ten times as slow: rounds are given up after four times
    /// the time of a copy.
    fn slow_size(self, size_bytes: u64) -> u64 {
        size_bytes / self.of(1, 4, 1)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Device {
    /// Added latency of each read and each write, in microseconds.
    latency_us: u64,
    bytes_per_second: u64,
    operations_per_second: u64,
}

impl Device {
    fn slower(self, times: u64) -> Self {
        Self {
            latency_us: self.latency_us * times,
            bytes_per_second: self.bytes_per_second / times,
            operations_per_second: self.operations_per_second / times,
        }
    }
}

/// A way to migrate: a row of every table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Column {
    strategy: Strategy,
    not_incremental: bool,
    ignore_hot_blocks: bool,
}

type Named = (&'static str, Column);

const MIRROR: Named = ("mirror", Column::usual(Strategy::Mirror));
const TRACKING: Named = ("tracking", Column::usual(Strategy::Tracking));
const NOT_INCREMENTAL: Named = ("not incremental", Column { not_incremental: true, ..TRACKING.1 });

/// The columns of Figure 3: rounds with both optimisations, with either, and with none.
const OF_ROUNDS: [Named; 4] = [
    TRACKING,
    ("hot as others", Column { ignore_hot_blocks: true, ..TRACKING.1 }),
    NOT_INCREMENTAL,
    ("neither", Column { ignore_hot_blocks: true, ..NOT_INCREMENTAL.1 }),
];

/// The strategies that move a volume to another host.
const BETWEEN_HOSTS: [Named; 4] = [
    MIRROR,
    TRACKING,
    ("three-phase", Column::usual(Strategy::ThreePhase)),
    ("post-copy", Column::usual(Strategy::PostCopy)),
];

/// Returns each strategy that moves a volume between stores of one host, in its variants.
fn between_stores() -> Vec<Named> {
    // A new strategy has no variants until they are added here.
    let variants = |strategy| match strategy {
        Strategy::Mirror => vec![MIRROR],
        Strategy::Tracking => vec![TRACKING, NOT_INCREMENTAL],
        // These strategies need two hosts, or are chosen among the others.
        Strategy::Auto | Strategy::ThreePhase | Strategy::PostCopy => Vec::new(),
    };
    Strategy::ALL.into_iter().flat_map(variants).collect()
}

impl Column {
    const fn usual(strategy: Strategy) -> Self {
        Self { strategy, not_incremental: false, ignore_hot_blocks: false }
    }

    fn order(self, to: &str, max_downtime_ms: u64) -> MigrateVolume {
        MigrateVolume {
            strategy: self.strategy,
            not_incremental: self.not_incremental,
            ignore_hot_blocks: self.ignore_hot_blocks,
            // Strategies without rounds do not take this option.
            max_downtime_ms: (self.strategy == Strategy::Tracking).then_some(max_downtime_ms),
            keep_source: true,
            impact_percent: AT_FULL_SPEED,
            ..MigrateVolume::to(to)
        }
    }
}

/// What competes: ways to migrate, or guests that are only looked at.
#[derive(Clone, Copy, Debug)]
pub(super) enum Variant {
    Moves(Column),
    Works(Load),
}

impl StrategiesOptions {
    fn scale(&self) -> Scale {
        if self.quick { Scale::Quick } else { self.scale }
    }

    /// Returns the device that source and target each are. Usually the mover uses all that it carries.
    fn device(&self) -> Device {
        let factor = self.scale().of(1, 1, 4);
        let latency_us = self.store_latency.map(|milliseconds| milliseconds * 1000);
        Device {
            latency_us: latency_us.unwrap_or(2000 / factor),
            bytes_per_second: self.store_rate.unwrap_or(factor * (64 << 20)),
            operations_per_second: self.store_operations.unwrap_or(factor * 3500),
        }
    }
}

impl Scenario for StrategiesOptions {
    type Case = Case;
    type Stage = Stage;
    type Variant = Variant;

    fn about(&self) -> anyhow::Result<About> {
        let Self { depth, chunk, max_downtime, .. } = self;
        let device = self.device();
        let Device { latency_us, bytes_per_second, operations_per_second } = device;
        Ok(About {
            name: "strategies",
            title: "Strategies beside each other",
            words: format!(
                "The image is moved between two stores of this machine. Each store is slowed down to {latency_us} us more a request, \
                 {operations_per_second} requests and {} a second; the mover copies {depth} chunks of {} at once; rounds may hold \
                 guests for {max_downtime} ms. Off-line: the same mover, and no guest. Every image that has moved was compared.",
                Bytes(bytes_per_second),
                Bytes(*chunk),
            ),
            tools: &[FIO],
            // The image, its copy in the source's store, and that in the target's, of up to twice the usual size.
            images: 6,
            usual: self.scale().of((3, 512 << 20), (1, 128 << 20), (1, 32 << 20)),
            settings: json!({
                "device": device, "depth": depth, "chunk_bytes": chunk, "max_downtime_ms": max_downtime,
            }),
        })
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn stages(&self, ground: &Ground<'_>) -> Vec<Vec<Part<Case, Variant>>> {
        let of = |(_, experiment, _): (_, Experiment, _)| self.parts(experiment, ground.size_bytes);
        let stages: Vec<_> = chosen(&EXPERIMENTS, |(name, ..)| name, &self.only).map(of).collect();
        match self.scale() {
            // Each experiment measures its own off-line copies, close to the migrations that they are compared with.
            Scale::Full | Scale::Quick => stages,
            Scale::Tiny => vec![stages.into_iter().flatten().collect()],
        }
    }

    async fn set(&self, _: &Ground<'_>, _: Case, _: &mut Progress) -> anyhow::Result<Stage> {
        Ok(Stage::default())
    }

    async fn play(
        &self,
        ground: &Ground<'_>,
        stage: &mut Stage,
        turn: Turn<'_, Case, Variant>,
    ) -> anyhow::Result<Vec<Sample>> {
        match turn.variant {
            Variant::Works(load) => self.only_guest(ground, load).await,
            Variant::Moves(column) => self.migrate(ground, stage, turn.case, column, turn.round).await,
        }
    }
}
