//! `bench return`: the experiment of \[TPM\] §VI. A volume goes to another host and returns, by three-phase migration, while its
//! guest works.
//!
//! ```text
//!   load ─ round ─ before ─┬─ there ─┬─ at the other host ─┬─ home ─┬─ after ─┐
//!                          everything │    writes are marked │ what they changed
//!                                                                   compare ◄─┘
//! ```
//! The guest stays connected to the first host, so its requests cross the link while the volume is at the other one.

mod figures;
mod report;

use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{MigrateVolume, Strategy};
use serde::Serialize;
use testbed::Folder;
use tokio::time::sleep;

pub use self::report::{LoadReport, ReturnReport, WayReport};
use super::fio::{Job, Pattern};
use super::folder::BenchFolder;
use super::guest::{Guest, Limit, Load as GuestLoad, Moment, Requests, wait_for_guest};
use super::image::{Holes, fill};
use super::migration::{Course, compared};
use super::tools::{FIO, check_fio_engines};
use super::two_hosts::{HOME, THERE, TwoHosts};
use super::{BenchOptions, Environment, Versions, in_folder};
use crate::demo::Progress;
use crate::network::BitRate;

/// The link's rate: the paper's was Gigabit Ethernet.
const RATE: BitRate = BitRate::megabits(1000);

/// The options of `bench return`.
#[derive(Clone, Debug)]
pub struct ReturnOptions {
    /// The options that all benchmarks share.
    pub bench: BenchOptions,
    /// The loads of the guests.
    pub loads: Vec<Load>,
    /// How long each guest works before, between and after the migrations, in seconds.
    pub seconds: u32,
}

/// The load of a guest on its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// A dynamic web server: 600 requests a second, three in ten of them writes, to a few blocks again and again.
    Web,
    /// A video server: it reads 1 MiB a second and hardly writes.
    Streaming,
    /// The paper's "diabolical" server: as much as the disk takes, half of it writes.
    Diabolical,
    /// The diabolical load, with the migration limited to 40 MiB a second (§VI-C-3).
    DiabolicalLimited,
}

impl Load {
    /// All loads, in the order of measurement.
    pub const ALL: [Self; 4] = [Self::Web, Self::Streaming, Self::Diabolical, Self::DiabolicalLimited];

    /// Returns a short name for command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Web => "web",
            Self::Streaming => "streaming",
            Self::Diabolical => "diabolical",
            Self::DiabolicalLimited => "diabolical-limited",
        }
    }

    /// Returns a title for tables and pages.
    pub fn title(self) -> &'static str {
        match self {
            Self::Web => "a web server: Zipf, 30 % writes, 600 requests a second",
            Self::Streaming => "a video server: 1 MiB a second, 2 % writes",
            Self::Diabolical => "a diabolical server: half reads, half writes, as much as it can",
            Self::DiabolicalLimited => "the same, with a migration that may copy 40 MiB a second",
        }
    }

    fn guest(self) -> GuestLoad {
        let job = |pattern, block_bytes, depth| Job { pattern, block_bytes, depth };
        match self {
            Self::Web => GuestLoad::zipf(Some(600)),
            Self::Streaming => GuestLoad {
                job: job(Pattern::RandomMixed { reads_percent: 98 }, 64 << 10, 2),
                limit: Some(Limit::Requests(16)),
            },
            Self::Diabolical | Self::DiabolicalLimited => {
                GuestLoad { job: job(Pattern::RandomMixed { reads_percent: 50 }, 16 << 10, 8), limit: None }
            }
        }
    }

    fn bandwidth(self) -> Option<u64> {
        (self == Self::DiabolicalLimited).then_some(40 << 20)
    }

    fn order(self, to: &str) -> MigrateVolume {
        MigrateVolume {
            strategy: Strategy::ThreePhase,
            bandwidth_bytes_per_second: self.bandwidth(),
            keep_source: true,
            ..MigrateVolume::to(to)
        }
    }
}

#[derive(Debug)]
struct Trip {
    ways: [Course; 2],
    /// Requests a second: before, on the way there, at the other host, on the return, and afterwards.
    iops: [f64; 5],
    /// The guest's moments from the first order on.
    moments: Vec<Moment>,
    compared_bytes: u64,
}

/// Runs the benchmark. Fails if something is missing, or if an image differs from its source; the error ends with the daemons'
/// logs. A signal ends it in order, with [`crate::demo::Interrupted`].
pub async fn run(options: &ReturnOptions, progress: &mut Progress) -> anyhow::Result<ReturnReport> {
    let mut versions = Versions::new();
    versions.insert("sterna".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    versions.insert(FIO.program.to_owned(), FIO.version().await?);
    check_fio_engines().await?;
    let bench = &options.bench;
    // The image, and a copy at each host.
    let folder = BenchFolder::create(bench.parent.as_deref(), 3, bench.size_bytes)?;
    let environment = Environment::of(folder.root(), versions).await?;
    in_folder(folder, progress, async |folder, progress| {
        progress.begin("filling the image");
        fill(&folder.path("image"), bench.size_bytes, Holes::None, progress).await?;
        let (mut loads, mut lives) = (Vec::new(), Vec::new());
        for &load in &options.loads {
            let mut trips = Vec::new();
            for round in 0..bench.rounds {
                progress.begin(&format!("{}: round {} of {}", load.name(), round + 1, bench.rounds));
                trips.push(travel(options, folder, load).await.with_context(|| load.name())?);
            }
            loads.push(LoadReport::of(load, &trips).context("a measurement has no figures")?);
            lives.extend(trips.into_iter().next().map(|trip| (load, trip)));
        }
        let (size_bytes, rounds) = (bench.size_bytes, bench.rounds);
        Ok(ReturnReport {
            environment,
            size_bytes,
            rounds,
            link_bytes_per_second: RATE.bytes_per_second(),
            loads,
            figures: figures::of(&lives),
        })
    })
    .await
}

async fn travel(options: &ReturnOptions, folder: &BenchFolder, load: Load) -> anyhow::Result<Trip> {
    let margin = Duration::from_secs(options.seconds.into());
    let guest_load = load.guest();
    let hosts = TwoHosts::set(&options.bench.program, folder, RATE, &folder.path("image")).await?;
    // N.B. the guest leaves a quarter of its disk alone, so that there is always something to compare.
    let guest = Guest::start(&hosts.uri, options.bench.size_bytes / 4 * 3, guest_load, folder)?;
    wait_for_guest(hosts.pair.near.process_id()).await?;
    sleep(margin).await;
    let there = Course::of(&hosts.pair.near, &load.order(THERE)).await.context("there")?;
    ensure!(there.has_moved()?, "it was given up");
    hosts.pair.far.serves(super::server::NAME).await?;
    sleep(margin).await;
    let home = Course::of(&hosts.pair.far, &load.order(HOME)).await.context("home")?;
    ensure!(home.has_moved()?, "it was given up on the way home");
    hosts.pair.near.serves(super::server::NAME).await?;
    sleep(margin).await;
    let requests = guest.stop().await?;
    let iops = iops(&requests, &there, &home, options.seconds);
    let margin_ms = u64::from(options.seconds) * 1000;
    let life = there.begun_ms.saturating_sub(margin_ms)..home.ended_ms + margin_ms;
    let moments = requests.moments(life, there.begun_ms);
    let [near, far] = hosts.stores();
    let folders = hosts.end_daemons().await?;
    let Job { block_bytes, depth, .. } = guest_load.job;
    // The log misses the requests that were in flight when the guest was stopped.
    let compared_bytes = compared(&[far, near], block_bytes.into(), &home, &requests, depth.into()).await?;
    folders.into_iter().try_for_each(Folder::remove)?;
    Ok(Trip { ways: [there, home], iops, moments, compared_bytes })
}

fn iops(requests: &Requests, there: &Course, home: &Course, seconds: u32) -> [f64; 5] {
    let margin_ms = u64::from(seconds) * 1000;
    [
        there.begun_ms.saturating_sub(margin_ms)..there.begun_ms,
        there.begun_ms..there.ended_ms,
        there.ended_ms..home.begun_ms,
        home.begun_ms..home.ended_ms,
        home.ended_ms..home.ended_ms + margin_ms,
    ]
    .map(|span| requests.iops(span))
}
