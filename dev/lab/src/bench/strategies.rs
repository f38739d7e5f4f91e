//! `bench strategies`: the experiments of \[ESX\] §3 on this machine. Each strategy is compared with the others, and with a copy
//! of the same unused image.
//!
//! ```text
//!   experiment ─► x (requests in flight, size, load) ─► round ─► column (strategy) ─► one migration under fio ─► sample
//!                      └──► off-line: the same stores and mover, no guest                                          │
//!   report ◄── figures: a table and a plot each, with what the paper says ◄────────────────────────────────────────┘
//! ```
//!
//! Source and target are stores with delays of their own ([`Device`]): two devices on top of one disk. Each moved image is
//! compared with its source.

mod course;
mod database;
mod figure;
mod hosts;
mod outstanding;
mod page;
mod plot;
mod rounds;
mod run;

use std::time::Duration;

use api::{MigrateVolume, Strategy};
use serde::Serialize;

pub(super) use self::figure::Form;
pub use self::figure::{Figure, Point, Series};
pub use self::run::Sample;
use self::run::Stage;
use super::folder::BenchFolder;
pub use super::guest::{Moment, Spent};
use super::image::{Holes, fill};
pub use super::migration::Progressed;
use super::tools::{FIO, check_fio_engines};
use super::{BenchOptions, Environment, Versions, in_folder};
use crate::demo::Progress;

/// The options of `bench strategies`.
#[derive(Clone, Debug)]
pub struct StrategiesOptions {
    /// The options that all benchmarks share.
    pub bench: BenchOptions,
    /// The experiments to be measured.
    pub experiments: Vec<Experiment>,
    /// The size of the measurement.
    pub scale: Scale,
    /// The mover's settings during all migrations.
    pub mover: Mover,
    /// The device that source and target each are; [`Scale::device`] is the default.
    pub device: Device,
    /// `--max-downtime` of every migration, in milliseconds.
    pub max_downtime_ms: u64,
}

/// The settings of the mover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Mover {
    /// Number of chunks in flight.
    pub depth: u32,
    /// Size of a chunk in bytes.
    pub chunk_bytes: u64,
}

/// The sizes of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scale {
    /// Enough for meaningful figures.
    Full,
    /// Takes about six minutes.
    Quick,
    /// Takes half a minute: makes every figure, without meaning.
    Tiny,
}

impl Scale {
    /// Returns the image's default size in bytes.
    pub fn size_bytes(self) -> u64 {
        match self {
            Self::Full => 512 << 20,
            Self::Quick => 128 << 20,
            Self::Tiny => 32 << 20,
        }
    }

    /// Returns the default number of rounds.
    pub fn rounds(self) -> u32 {
        match self {
            Self::Full => 3,
            Self::Quick | Self::Tiny => 1,
        }
    }

    fn margin(self) -> Duration {
        match self {
            Self::Full => Duration::from_secs(5),
            Self::Quick => Duration::from_secs(1),
            Self::Tiny => Duration::from_millis(200),
        }
    }

    /// Returns how long a guest without migration is measured.
    fn look(self) -> Duration {
        match self {
            Self::Full => Duration::from_secs(10),
            Self::Quick => Duration::from_secs(4),
            Self::Tiny => Duration::from_millis(400),
        }
    }

    /// Returns the guest's requests in flight (\[ESX\] Figure 4: 2 to 32).
    fn depths(self) -> &'static [u32] {
        match self {
            Self::Full => &[2, 4, 8, 16, 32],
            Self::Quick => &[2, 8, 32],
            Self::Tiny => &[16],
        }
    }

    /// Returns the sizes of disks, in quarters of the default.
    fn quarters(self) -> &'static [u64] {
        match self {
            Self::Full => &[2, 4, 8],
            Self::Quick => &[2, 4],
            Self::Tiny => &[4],
        }
    }

    /// Returns the image's size for the target that is ten times as slow: rounds are given up after four times
    /// the time of a copy.
    fn slow_size(self, size_bytes: u64) -> u64 {
        match self {
            Self::Quick => size_bytes / 4,
            Self::Full | Self::Tiny => size_bytes,
        }
    }

    /// Returns the default device of source and target: the mover uses all that it carries.
    pub fn device(self) -> Device {
        let factor = if self == Self::Tiny { 4 } else { 1 };
        Device {
            latency_us: 2000 / factor,
            bytes_per_second: factor * (64 << 20),
            operations_per_second: factor * 3500,
        }
    }
}

/// The speed of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Added latency of each read and each write, in microseconds.
    pub latency_us: u64,
    /// Limit of bytes per second.
    pub bytes_per_second: u64,
    /// Limit of requests per second.
    pub operations_per_second: u64,
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

/// A group of figures that are measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Experiment {
    /// Figures 4, 6, 8 and 9: requests in flight.
    Outstanding,
    /// Figures 5 and 7: sizes of disks.
    Size,
    /// Tables 1 and 2: a database.
    Database,
    /// Figure 2, and the shares of rewrites of \[TPM\].
    Rewrites,
    /// Figure 3: the blocks of each round.
    Rounds,
    /// Figure 10: a slow target.
    SlowTarget,
    /// Figure 11: the guest over time.
    OverTime,
    /// All strategies, between two hosts.
    Hosts,
}

impl Experiment {
    /// All experiments, in the order of measurement.
    pub const ALL: [Self; 8] = [
        Self::Outstanding,
        Self::Size,
        Self::Database,
        Self::Rewrites,
        Self::Rounds,
        Self::SlowTarget,
        Self::OverTime,
        Self::Hosts,
    ];

    /// Returns a short name for command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Outstanding => "outstanding",
            Self::Size => "size",
            Self::Database => "database",
            Self::Rewrites => "rewrites",
            Self::Rounds => "rounds",
            Self::SlowTarget => "slow-target",
            Self::OverTime => "over-time",
            Self::Hosts => "hosts",
        }
    }

    /// Returns a title for tables and pages.
    pub fn title(self) -> &'static str {
        match self {
            Self::Outstanding => "Migration time, downtime and penalty against requests in flight",
            Self::Size => "Migration time and downtime against disk size",
            Self::Database => "A database at one and two times its intensity",
            Self::Rewrites => "How often the same blocks are written",
            Self::Rounds => "Blocks copied in each round",
            Self::SlowTarget => "A target that is ten times as slow",
            Self::OverTime => "A guest's requests over time",
            Self::Hosts => {
                "All strategies between two hosts, under a guest that writes faster than the link carries"
            }
        }
    }
}

/// A way to migrate: a column of every table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// The column's name, for tables and JSON.
    pub name: &'static str,
    strategy: Strategy,
    not_incremental: bool,
    ignore_hot_blocks: bool,
}

impl Column {
    /// Returns all columns: each strategy of the API, in its variants.
    pub fn all() -> Vec<Self> {
        Strategy::ALL.into_iter().flat_map(|strategy| Self::of(strategy).iter().copied()).collect()
    }

    /// Returns the variants of a strategy. A new strategy has none until they are added here.
    fn of(strategy: Strategy) -> &'static [Self] {
        match strategy {
            Strategy::Mirror => const { &[Self::usual("mirror", Strategy::Mirror)] },
            Strategy::Tracking => const { &[Self::TRACKING, Self::NOT_INCREMENTAL] },
            // These strategies need two hosts, and these tables are of one.
            Strategy::ThreePhase | Strategy::PostCopy => &[],
        }
    }

    const TRACKING: Self = Self::usual("tracking", Strategy::Tracking);
    const NOT_INCREMENTAL: Self = Self { name: "not incremental", not_incremental: true, ..Self::TRACKING };

    /// The columns of Figure 3: rounds with both optimisations, with either, and with none.
    const OF_ROUNDS: [Self; 4] = [
        Self::TRACKING,
        Self { name: "hot as others", ignore_hot_blocks: true, ..Self::TRACKING },
        Self::NOT_INCREMENTAL,
        Self { name: "neither", ignore_hot_blocks: true, ..Self::NOT_INCREMENTAL },
    ];

    /// The strategies that move a volume to another host.
    const BETWEEN_HOSTS: [Self; 4] = [
        Self::usual("mirror", Strategy::Mirror),
        Self::TRACKING,
        Self::usual("three-phase", Strategy::ThreePhase),
        Self::usual("post-copy", Strategy::PostCopy),
    ];

    const fn usual(name: &'static str, strategy: Strategy) -> Self {
        Self { name, strategy, not_incremental: false, ignore_hot_blocks: false }
    }

    fn has_rounds(&self) -> bool {
        self.strategy == Strategy::Tracking
    }

    fn order(&self, to: &str, max_downtime_ms: u64) -> MigrateVolume {
        MigrateVolume {
            strategy: self.strategy,
            not_incremental: self.not_incremental,
            ignore_hot_blocks: self.ignore_hot_blocks,
            // Strategies without rounds do not take this option.
            max_downtime_ms: self.has_rounds().then_some(max_downtime_ms),
            keep_source: true,
            ..MigrateVolume::to(to)
        }
    }
}

/// All figures of `bench strategies`.
#[derive(Clone, Debug, Serialize)]
pub struct StrategiesReport {
    /// The machine and the programs that were measured.
    pub environment: Environment,
    /// Size of an image in bytes, unless a figure names another.
    pub size_bytes: u64,
    /// Number of rounds, each of which measured everything.
    pub rounds: u32,
    /// The size of the measurement.
    pub scale: Scale,
    /// The mover's settings during all migrations.
    pub mover: Mover,
    /// The device that each store was.
    pub device: Device,
    /// How long guests might be held at the end of rounds, in milliseconds.
    pub max_downtime_ms: u64,
    /// The figures, in the order of the experiments.
    pub figures: Vec<Figure>,
    /// The samples of all migrations.
    pub samples: Vec<Sample>,
}

/// Runs the benchmark. Fails if a program or room is missing, or if an image differs from its source; the error ends with the
/// daemon's log. A signal ends it in order, with [`crate::demo::Interrupted`].
pub async fn run(options: &StrategiesOptions, progress: &mut Progress) -> anyhow::Result<StrategiesReport> {
    let mut versions = Versions::new();
    versions.insert("sterna".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    versions.insert(FIO.program.to_owned(), FIO.version().await?);
    check_fio_engines().await?;
    let bench = &options.bench;
    let largest = options.scale.quarters().iter().max().copied().unwrap_or(4).max(4);
    // The image, its copy in the source's store, and the copy in the target's.
    let folder = BenchFolder::create(bench.parent.as_deref(), 3, bench.size_bytes / 4 * largest)?;
    let environment = Environment::of(folder.root(), versions).await?;
    let (figures, samples) = in_folder(folder, progress, async |folder, progress| {
        let mut stage = Stage::new(options, folder);
        let mut figures = Vec::new();
        for experiment in &options.experiments {
            progress.begin(experiment.name());
            figures.extend(match experiment {
                Experiment::Outstanding => outstanding::by_depth(&mut stage, progress).await?,
                Experiment::Size => outstanding::by_size(&mut stage, progress).await?,
                Experiment::Database => database::measure(&mut stage, progress).await?,
                Experiment::Rewrites => rounds::rewrites(&mut stage, progress).await?,
                Experiment::Rounds => rounds::blocks(&mut stage, progress).await?,
                Experiment::SlowTarget => course::slow_target(&mut stage, progress).await?,
                Experiment::OverTime => course::over_time(&mut stage, progress).await?,
                Experiment::Hosts => hosts::measure(&mut stage, progress).await?,
            });
        }
        Ok((figures, stage.samples))
    })
    .await?;
    Ok(StrategiesReport {
        environment,
        size_bytes: bench.size_bytes,
        rounds: bench.rounds,
        scale: options.scale,
        mover: options.mover,
        device: options.device,
        max_downtime_ms: options.max_downtime_ms,
        figures,
        samples,
    })
}
