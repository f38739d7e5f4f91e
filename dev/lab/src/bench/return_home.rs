//! `bench return`: the experiment of \[TPM\] §VI. A volume goes to another host and returns, by three-phase migration, while its
//! guest works.
//!
//! ```text
//!   before ─┬─ there ─┬─ at the other host ─┬─ home ─┬─ after ─┐
//!           everything │    writes are marked │ what they changed
//!                                                    compare ◄─┘
//! ```
//! The guest stays connected to the first host, so its requests cross the link while the volume is at the other one.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{MigrateVolume, Strategy};
use serde_json::json;
use testbed::Folder;
use tokio::time::sleep;

use super::fio::{Job, Pattern};
use super::guest::{Limit, Load as GuestLoad, Requests, Work, under_guest};
use super::image::{Holes, fill};
use super::metric::{Metric, Unit};
use super::migration::{AT_FULL_SPEED, Course, Times, compared};
use super::report::{Curve, Sample, Section};
use super::runner::{About, Ground, Part, Scenario, Turn};
use super::tools::FIO;
use super::two_hosts::{HOME, THERE, TwoHosts};
use super::{Common, chosen, one_of};
use crate::demo::Progress;
use crate::network::BitRate;

/// Measures how a volume moves to another host and returns, after the tables of a paper.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct ReturnOptions {
    #[command(flatten)]
    common: Common,
    /// How long the guest works before, between and after the migrations.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Measure this load alone; may be given several times.
    #[arg(long, value_name = "LOAD", value_parser = one_of(LOADS.iter().map(|load| (load.name, load.title))))]
    only: Vec<String>,
}

const HELP: &str = "\
Examples:
  sterna bench return
  sterna bench return --only web --rounds 1 --size 256MiB
  sterna bench return --html return.html --json > return.json

A volume moves to another host and returns, by three-phase migration, while fio works on it; the return sends only the writes \
since. As root the hosts are network namespaces with a link of 1 Gbit/s, otherwise two daemons on loopback \
with a proxy of that rate. Every returned image is compared with the image that the other host has kept. The image has 512 MiB, and \
there are 3 rounds, unless you say otherwise. It leaves nothing behind; it needs fio (Debian: fio). Let the machine be idle \
meanwhile.";

/// The link's rate: the paper's was Gigabit Ethernet.
const RATE: BitRate = BitRate::megabits(1000);

/// What a guest does with its disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    name: &'static str,
    title: &'static str,
    guest: GuestLoad,
    /// Limit of the migration, in bytes a second.
    bandwidth: Option<u64>,
    /// What the paper measured, for a disk of 39 070 MB and a link of 1 Gbit/s.
    paper: &'static str,
}

const STREAMING: Job =
    Job { pattern: Pattern::RandomMixed { reads_percent: 98 }, block_bytes: 64 << 10, depth: 2 };
/// As much as the disk takes, half of it writes.
const DIABOLICAL: GuestLoad = GuestLoad {
    job: Job { pattern: Pattern::RandomMixed { reads_percent: 50 }, block_bytes: 16 << 10, depth: 8 },
    limit: None,
};

const LOADS: [Load; 4] = [
    Load {
        name: "web",
        title: "a web server: Zipf, 30 % writes, 600 requests a second",
        guest: GuestLoad::zipf(Some(600)),
        bandwidth: None,
        paper: "The paper (39 GB): 796 s, 60 ms of downtime, 39 097 MB; 62 blocks followed in 349 ms, one of them pulled; no drop \
                of throughput to be noticed (Figure 5).",
    },
    Load {
        name: "streaming",
        title: "a video server: 1 MiB a second, 2 % writes",
        guest: GuestLoad { job: STREAMING, limit: Some(Limit::Requests(16)) },
        bandwidth: None,
        paper: "The paper (39 GB): 798 s, 62 ms of downtime, 39 072 MB; 5 blocks followed in 380 ms, none pulled.",
    },
    Load {
        name: "diabolical",
        title: "a diabolical server: half reads, half writes, as much as it can",
        guest: DIABOLICAL,
        bandwidth: None,
        paper: "The paper (39 GB): 957 s, 110 ms of downtime, 40 934 MB; little throughput while the disk is read as fast as it can \
                (Figure 6). Marking writes cost its benchmark less than 1 %.",
    },
    Load {
        name: "diabolical-limited",
        title: "the same, with a migration that may copy 40 MiB a second",
        guest: DIABOLICAL,
        bandwidth: Some(40 << 20),
        paper: "The paper (§VI-C-3): half of the loss, and 37 % more time.",
    },
];

const IOPS: Metric = Metric::more("iops", "IOPS", Unit::PerSecond);
const SECONDS: Metric = Metric::less("seconds", "SECONDS", Unit::Seconds);
const HANDED_OVER: Metric = Metric::less("handed_over_seconds", "HANDED OVER s", Unit::Seconds);
const MOVED: Metric = Metric::less("bytes_moved", "MOVED", Unit::Bytes);
const DOWNTIME: Metric = Metric::less("downtime_ms", "DOWNTIME ms", Unit::Milliseconds);
const FOLLOWED: Metric = Metric::less("bytes_followed", "FOLLOWED", Unit::Bytes);
const PULLED: Metric = Metric::less("bytes_pulled", "PULLED", Unit::Bytes);
const COMPARED: Metric = Metric::more("compared_bytes", "COMPARED", Unit::Bytes);

/// The rows: the guest before, on both ways, between them, and after.
const PHASES: [&str; 5] = ["before", "there", "away", "home", "after"];

impl Scenario for ReturnOptions {
    type Case = Load;
    type Stage = PathBuf;
    type Variant = ();

    fn about(&self) -> anyhow::Result<About> {
        Ok(About {
            name: "return",
            title: "There and home again",
            words: "The image goes to another host and comes home, by three-phase migration, under a guest. Every image that has come \
                    home was compared with what the other host had kept."
                .to_owned(),
            tools: &[FIO],
            // The image, and a copy at each host.
            images: 3,
            usual: (3, 512 << 20),
            settings: json!({ "seconds": self.seconds, "link_bytes_per_second": RATE.bytes_per_second() }),
        })
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn stages(&self, _: &Ground<'_>) -> Vec<Vec<Part<Load, ()>>> {
        let part = |load: Load| {
            let section = Section {
                name: load.name.to_owned(),
                title: load.title.to_owned(),
                columns: vec![IOPS, SECONDS, HANDED_OVER, MOVED, DOWNTIME, FOLLOWED, PULLED],
                note: load.paper.to_owned(),
                ..Section::default()
            };
            Part { section, points: vec![(None, load)], variants: vec![("sterna", ())] }
        };
        vec![chosen(&LOADS, |load| load.name, &self.only).map(part).collect()]
    }

    async fn set(&self, ground: &Ground<'_>, _: Load, progress: &mut Progress) -> anyhow::Result<PathBuf> {
        let image = ground.folder.path("image");
        progress.begin("filling the image");
        fill(&image, ground.size_bytes, Holes::None, progress).await?;
        Ok(image)
    }

    async fn play(
        &self,
        ground: &Ground<'_>,
        image: &mut PathBuf,
        turn: Turn<'_, Load, ()>,
    ) -> anyhow::Result<Vec<Sample>> {
        let load = turn.case;
        let margin = Duration::from_secs(self.seconds.into());
        let hosts = TwoHosts::set(ground, RATE, image).await?;
        let order = |to: &str| MigrateVolume {
            strategy: Strategy::ThreePhase,
            bandwidth_bytes_per_second: load.bandwidth,
            keep_source: true,
            impact_percent: AT_FULL_SPEED,
            ..MigrateVolume::to(to)
        };
        let journey = async {
            let there = Course::of(&hosts.pair.near, &order(THERE)).await.context("there")?;
            ensure!(there.has_moved()?, "it was given up");
            hosts.pair.far.serves(super::server::NAME).await?;
            sleep(margin).await;
            let home = Course::of(&hosts.pair.far, &order(HOME)).await.context("home")?;
            ensure!(home.has_moved()?, "it was given up on the way home");
            hosts.pair.near.serves(super::server::NAME).await?;
            Ok([there, home])
        };
        let (uri, server) = (hosts.uri.as_str(), hosts.pair.near.process_id());
        // N.B. the guest leaves a quarter of its disk alone, so that there is always something to compare.
        let size_bytes = ground.size_bytes / 4 * 3;
        let work = Work { uri, server, size_bytes, load: load.guest, before: margin, after: margin };
        let (requests, ways) = under_guest(&ground.folder, work, journey).await?;
        let [near, far] = hosts.stores();
        let folders = hosts.end_daemons().await?;
        let Job { block_bytes, depth, .. } = load.guest.job;
        // The log misses the requests that were in flight when the guest was stopped.
        let compared_bytes =
            compared(&[far, near], block_bytes.into(), &ways[1], &requests, depth.into()).await?;
        folders.into_iter().try_for_each(Folder::remove)?;
        samples(load, &requests, &ways, u64::from(self.seconds) * 1000, compared_bytes)
    }
}

/// Returns a row for each phase. Marked writes are those after the return: the paper's Table III.
fn samples(
    load: Load,
    requests: &Requests,
    ways: &[Course; 2],
    margin_ms: u64,
    compared_bytes: u64,
) -> anyhow::Result<Vec<Sample>> {
    let [there, home] = ways.each_ref().map(|way| way.times);
    let begun_ms = there.begun_ms.saturating_sub(margin_ms);
    let spans = [
        begun_ms..there.begun_ms,
        there.begun_ms..there.ended_ms,
        there.ended_ms..home.begun_ms,
        home.begun_ms..home.ended_ms,
        home.ended_ms..home.ended_ms + margin_ms,
    ];
    let rows = PHASES.into_iter().zip(spans);
    let mut samples: Vec<Sample> =
        rows.map(|(phase, span)| Sample::of([(IOPS, requests.iops(span))]).row(phase)).collect();
    for (way, phase) in ways.iter().zip(["there", "home"]) {
        let switch = way.ended.switch_over.context("the daemon does not tell of the switch")?;
        let sample = Sample::of([
            (SECONDS, way.times.seconds()),
            (MOVED, way.ended.bytes_moved as f64),
            (DOWNTIME, switch.gate_closed_ms),
            (FOLLOWED, way.decisions.bytes_followed as f64),
            (PULLED, way.decisions.bytes_pulled as f64),
        ]);
        samples.push(sample.and(HANDED_OVER, way.handed_over_seconds()).row(phase));
    }
    let mebibytes = f64::from(load.guest.job.block_bytes) / f64::from(1 << 20);
    // Tenths of a second vary too much.
    let life = requests.life(begun_ms..home.ended_ms + margin_ms, there.begun_ms, 500);
    let life = life.into_iter().map(|(seconds, iops)| (seconds, iops * mebibytes)).collect();
    let since_order = |ms: u64| (ms as f64 - there.begun_ms as f64) / 1e3;
    let migrations = [there, home].map(|way: Times| (since_order(way.begun_ms), since_order(way.ended_ms)));
    let curve = Curve::life("MiB a second that the guest got of its disk", life, migrations.to_vec());
    samples.push(Sample::of([(COMPARED, compared_bytes as f64)]).row("home").curve(curve));
    Ok(samples)
}
