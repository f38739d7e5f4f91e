//! `bench nbd`: what Sterna costs a client, between it and the disk.
//!
//! ```text
//!   one image, fully written
//!   round 1 ─ workload 1 ─ raw │ Sterna │ storage daemon     each server is started for its turn, and is alone
//!           ─ workload 2 ─ raw │ Sterna │ storage daemon
//!   round 2 ─ workload 1 ─ Sterna │ storage daemon │ raw     nobody is always first
//! ```

mod figures;
mod page;
mod table;
mod trace;

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;

pub use self::figures::{ContenderFigures, NbdReport, WorkloadFigures};
pub use self::trace::StageFigures;
use self::trace::StageSample;
use super::fio::{Disk, Job, Measured, Pattern};
use super::folder::BenchFolder;
use super::image::{Holes, drop_caches, fill};
use super::server::{Sterna, StorageDaemon};
use super::tools::{FIO, STORAGE_DAEMON, check_fio_engines};
use super::{BenchOptions, Environment, Versions, in_folder};
use crate::demo::Progress;

/// The options of `bench nbd`.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// The options that all benchmarks share.
    pub bench: BenchOptions,
    /// How long each measurement lasts, in seconds.
    pub seconds: u32,
    /// The workloads, in the order of measurement.
    pub workloads: Vec<Workload>,
    /// Whether the daemon measures where the time of its requests goes.
    pub tracing: Tracing,
}

/// Whether a daemon measures where the time of its requests goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracing {
    /// The daemon runs without tracing.
    Off,
    /// The daemon reads the clock at each step of a request.
    On,
}

/// The workloads of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// 8 KiB, 70 % reads, one request at a time: the time of a single request.
    Mixed1,
    /// 8 KiB, 70 % reads, 16 in flight: a busy database.
    Mixed16,
    /// 4 KiB reads, 16 in flight: the most requests a second.
    Reads16,
    /// 1 MiB reads one after the other: a backup.
    SequentialReads,
    /// 1 MiB writes one after the other: a restore.
    SequentialWrites,
}

/// The servers that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// The image without a server: the limit.
    Raw,
    /// A daemon of this program.
    Sterna,
    /// QEMU's daemon.
    StorageDaemon,
}

/// Requests of a sequential workload in flight: enough to keep a disk busy with 1 MiB each, as `qemu-img` does.
const SEQUENTIAL_DEPTH: u32 = 8;

impl Workload {
    /// All workloads, in the order of measurement.
    pub const ALL: [Self; 5] =
        [Self::Mixed1, Self::Mixed16, Self::Reads16, Self::SequentialReads, Self::SequentialWrites];

    /// Returns a short name for command lines and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixed1 => "mixed-1",
            Self::Mixed16 => "mixed-16",
            Self::Reads16 => "reads-16",
            Self::SequentialReads => "sequential-reads",
            Self::SequentialWrites => "sequential-writes",
        }
    }

    /// Returns a title for tables and pages.
    pub fn title(self) -> &'static str {
        match self {
            Self::Mixed1 => "8 KiB random, 70 % reads, depth 1",
            Self::Mixed16 => "8 KiB random, 70 % reads, depth 16",
            Self::Reads16 => "4 KiB random reads, depth 16",
            Self::SequentialReads => "1 MiB sequential reads, depth 8",
            Self::SequentialWrites => "1 MiB sequential writes, depth 8",
        }
    }

    /// Returns the job of fio.
    pub fn job(self) -> Job {
        let mixed = Pattern::RandomMixed { reads_percent: 70 };
        match self {
            Self::Mixed1 => Job { pattern: mixed, block_bytes: 8 << 10, depth: 1 },
            Self::Mixed16 => Job { pattern: mixed, block_bytes: 8 << 10, depth: 16 },
            Self::Reads16 => Job { pattern: Pattern::RandomReads, block_bytes: 4 << 10, depth: 16 },
            Self::SequentialReads => {
                Job { pattern: Pattern::SequentialReads, block_bytes: 1 << 20, depth: SEQUENTIAL_DEPTH }
            }
            Self::SequentialWrites => {
                Job { pattern: Pattern::SequentialWrites, block_bytes: 1 << 20, depth: SEQUENTIAL_DEPTH }
            }
        }
    }
}

impl Contender {
    /// All contenders, the limit first.
    pub const ALL: [Self; 3] = [Self::Raw, Self::Sterna, Self::StorageDaemon];

    /// Returns the name for tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Sterna => "sterna",
            Self::StorageDaemon => "qemu-storage-daemon",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Sample {
    measured: Measured,
    /// CPU time of the server; `None` without a server.
    server_cpu: Option<Duration>,
    /// Time in the server by stage; empty without tracing.
    trace: Vec<StageSample>,
}

/// Runs the benchmark. Fails if a program or room is missing, or if a server fails; the error ends with the server's log. A
/// signal ends it in order, with [`crate::demo::Interrupted`].
pub async fn run(options: &NbdOptions, progress: &mut Progress) -> anyhow::Result<NbdReport> {
    let mut versions = Versions::new();
    versions.insert("sterna".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    for tool in [FIO, STORAGE_DAEMON] {
        versions.insert(tool.program.to_owned(), tool.version().await?);
    }
    check_fio_engines().await?;
    let bench = &options.bench;
    let folder = BenchFolder::create(bench.parent.as_deref(), 1, bench.size_bytes)?;
    let environment = Environment::of(folder.root(), versions).await?;
    in_folder(folder, progress, async |folder, progress| {
        let image = folder.path("disk.img");
        progress.begin("filling the image");
        fill(&image, bench.size_bytes, Holes::None, progress).await?;
        let samples = measure(options, folder, &image, progress).await?;
        let workloads = options.workloads.iter().zip(samples);
        let workloads = workloads.map(|(&workload, samples)| WorkloadFigures::of(workload, &samples));
        let workloads = workloads.collect::<Option<_>>().context("a measurement has no figures")?;
        Ok(NbdReport {
            environment,
            size_bytes: bench.size_bytes,
            rounds: bench.rounds,
            seconds: options.seconds,
            workloads,
        })
    })
    .await
}

/// Returns the samples of each workload, of each contender in the order of [`Contender::ALL`], round by round.
async fn measure(
    options: &NbdOptions,
    folder: &BenchFolder,
    image: &Path,
    progress: &mut Progress,
) -> anyhow::Result<Vec<[Vec<Sample>; 3]>> {
    let BenchOptions { rounds, .. } = options.bench;
    let mut samples = vec![<[Vec<Sample>; 3]>::default(); options.workloads.len()];
    let turns = rounds as usize * options.workloads.len() * Contender::ALL.len();
    let mut turn = 0;
    for round in 0..rounds as usize {
        for (workload, samples) in options.workloads.iter().zip(&mut samples) {
            let name = workload.name();
            progress.begin(&format!("round {} of {rounds}: {name}", round + 1));
            for place in 0..Contender::ALL.len() {
                let index = (place + round) % Contender::ALL.len();
                let contender = Contender::ALL[index];
                let who = contender.name();
                progress.note(who);
                progress.advance(turn as f64 / turns as f64);
                let sample = measure_one(options, *workload, contender, folder, image).await;
                samples[index].push(sample.with_context(|| format!("measure {name} of {who}"))?);
                turn += 1;
            }
        }
    }
    Ok(samples)
}

async fn measure_one(
    options: &NbdOptions,
    workload: Workload,
    contender: Contender,
    folder: &BenchFolder,
    image: &Path,
) -> anyhow::Result<Sample> {
    let job = workload.job();
    let run =
        async |disk: Disk<'_>| job.run(disk, options.bench.size_bytes, options.seconds, folder.root()).await;
    drop_caches(&[image]).await?;
    match contender {
        Contender::Raw => {
            Ok(Sample { measured: run(Disk::File(image)).await?, server_cpu: None, trace: Vec::new() })
        }
        Contender::Sterna => {
            let variables = match options.tracing {
                Tracing::Off => &[][..],
                Tracing::On => &trace::LOG,
            };
            let server = Sterna::start_with(&options.bench.program, folder, image, variables).await?;
            let before = server.cpu_time()?;
            let measured = run(Disk::Nbd { uri: &server.volume.uri }).await?;
            let server_cpu = Some(server.cpu_time()?.saturating_sub(before));
            let trace = match options.tracing {
                Tracing::Off => server.stop().await.map(|()| Vec::new()),
                Tracing::On => server.stop_and(trace::read).await,
            };
            Ok(Sample { measured, server_cpu, trace: trace? })
        }
        Contender::StorageDaemon => {
            let server = StorageDaemon::start(folder, &[("disk", image)]).await?;
            let before = server.cpu_time()?;
            let measured = run(Disk::Nbd { uri: server.uri() }).await?;
            let server_cpu = Some(server.cpu_time()?.saturating_sub(before));
            server.stop().await?;
            Ok(Sample { measured, server_cpu, trace: Vec::new() })
        }
    }
}
