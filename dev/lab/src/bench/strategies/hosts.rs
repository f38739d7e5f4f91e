//! Every strategy between two hosts, under a guest that writes half of what their link carries, and twice as much.
//!
//! ```text
//!   host a: image, fio ──► daemon ── link ──► daemon, image :host b
//! ```
//! The guest stays at its host: after the handover its requests cross the link, whatever the strategy.

use anyhow::Context as _;
use api::MigrateVolume;
use testbed::Folder;
use tokio::time::sleep;

use super::figure::Form;
use super::outstanding::lines;
use super::run::{Case, sample};
use super::{Column, Experiment, Figure, Sample, Scale, Stage};
use crate::bench::fio::{Job, Pattern};
use crate::bench::guest::{Guest, Limit, Load, wait_for_guest};
use crate::bench::migration::{Course, compared};
use crate::bench::two_hosts::{THERE, TwoHosts};
use crate::demo::Progress;
use crate::network::BitRate;

const RATE: BitRate = BitRate::megabits(400);
/// The guest writes all over three quarters of its disk, with requests as large as those of file systems.
const JOB: Job = Job { pattern: Pattern::RandomWrites, block_bytes: 64 << 10, depth: 8 };
/// The guest's rate of writes, in hundredths of the link's.
const PERCENT_OF_LINK: [u64; 2] = [50, 200];

/// Measures every strategy at both loads, and at several sizes.
pub(super) async fn measure(stage: &mut Stage<'_>, progress: &mut Progress) -> anyhow::Result<Vec<Figure>> {
    let (scale, device) = (stage.options.scale, stage.options.device);
    let size_bytes = stage.options.bench.size_bytes;
    let case = |percent: u64, size_bytes: u64, x: f64| Case {
        size_bytes,
        load: Load { job: JOB, limit: Some(Limit::Bytes(RATE.bytes_per_second() as u64 * percent / 100)) },
        target: device,
        x,
    };
    // A guest that writes faster than the link takes too long for this scale.
    let percents = if scale == Scale::Tiny { &PERCENT_OF_LINK[..1] } else { &PERCENT_OF_LINK };
    let part = |percent: u64| percent as f64 / 100.0;
    let loads: Vec<_> = percents.iter().map(|&percent| case(percent, size_bytes, part(percent))).collect();
    let loads = under_guests(stage, &loads, progress).await.context("by load")?;
    let mut figures = by_load(&loads);
    if scale != Scale::Tiny {
        let [percent, _] = PERCENT_OF_LINK;
        let mebibytes = |size_bytes: u64| (size_bytes >> 20) as f64;
        // The usual size has just been measured.
        let sizes = scale.quarters().iter().map(|quarters| size_bytes / 4 * quarters);
        let sizes = sizes.filter(|other| *other != size_bytes);
        let sizes: Vec<_> = sizes.map(|size| case(percent, size, mebibytes(size))).collect();
        let mut sizes = under_guests(stage, &sizes, progress).await.context("by size")?;
        let usual = loads.into_iter().filter(|sample| sample.x == part(percent));
        sizes.extend(usual.map(|sample| Sample { x: mebibytes(sample.size_bytes), ..sample }));
        figures.extend(by_size(&sizes));
    }
    Ok(figures)
}

async fn under_guests(
    stage: &mut Stage<'_>,
    cases: &[Case],
    progress: &mut Progress,
) -> anyhow::Result<Vec<Sample>> {
    let columns = Column::BETWEEN_HOSTS;
    let rounds = stage.options.bench.rounds as usize;
    let (first, all) = (stage.samples.len(), rounds * cases.len() * columns.len());
    for round in 0..rounds {
        for case in cases {
            progress.note("off-line");
            let offline_seconds = off_line(stage, case).await.context("off-line")?;
            for place in 0..columns.len() {
                // The strategy that begins changes from round to round.
                let column = columns[(place + round) % columns.len()];
                progress.note(column.name);
                progress.advance((stage.samples.len() - first) as f64 / all as f64);
                let sample = under_guest(stage, column, case, offline_seconds).await;
                stage.samples.push(sample.with_context(|| column.name)?);
            }
        }
    }
    Ok(stage.samples[first..].to_vec())
}

async fn set(stage: &Stage<'_>, case: &Case) -> anyhow::Result<TwoHosts> {
    let image = stage.image(case.size_bytes).await?;
    TwoHosts::set(&stage.options.bench.program, stage.folder, RATE, &image).await
}

async fn off_line(stage: &Stage<'_>, case: &Case) -> anyhow::Result<f64> {
    let scene = set(stage, case).await?;
    let order = MigrateVolume { keep_source: true, ..MigrateVolume::to(THERE) };
    let course = Course::of(&scene.pair.near, &order).await?;
    anyhow::ensure!(course.has_moved()?, "it was given up, although nobody wrote");
    scene.end().await?;
    Ok(course.seconds())
}

async fn under_guest(
    stage: &Stage<'_>,
    column: Column,
    case: &Case,
    offline_seconds: f64,
) -> anyhow::Result<Sample> {
    let margin = stage.options.scale.margin();
    let scene = set(stage, case).await?;
    // N.B. the guest leaves a quarter of its disk alone, so that there is always something to compare.
    let guest = Guest::start(&scene.uri, case.size_bytes / 4 * 3, case.load, stage.folder)?;
    wait_for_guest(scene.pair.near.process_id()).await?;
    sleep(margin).await;
    let course = Course::of(&scene.pair.near, &column.order(THERE, stage.options.max_downtime_ms)).await?;
    sleep(margin).await;
    let requests = guest.stop().await?;
    let stores = scene.stores();
    let folders = scene.end_daemons().await?;
    let compared_bytes = match course.has_moved()? {
        // The log misses the requests that were in flight when the guest was stopped.
        true => compared(&stores, JOB.block_bytes.into(), &course, &requests, JOB.depth.into()).await?,
        false => 0,
    };
    folders.into_iter().try_for_each(Folder::remove)?;
    let experiment = Experiment::Hosts.name();
    Ok(sample(experiment, column, case, offline_seconds, compared_bytes, &requests, course, margin))
}

fn by_load(samples: &[Sample]) -> Vec<Figure> {
    let of = |name, title: &str, y, value: fn(&Sample) -> Option<f64>, note| Figure {
        series: series_of(samples, value),
        ..figure(name, title, "guest's writes / link", y, note)
    };
    vec![
        of(
            "hosts-handover",
            "time until the volume is the other host's",
            "time / off-line",
            |sample| Some(sample.handed_over_seconds? / sample.offline_seconds),
            "A guest that is to be away soon has to be handed over before its disk has arrived.",
        ),
        of(
            "hosts-time",
            "migration time between hosts",
            "time / off-line",
            |sample| Some(sample.to_offline()),
            "After the handover what the guest asks for crosses the link, too: it stays at the first host.",
        ),
        of(
            "hosts-downtime",
            "downtime between hosts",
            "ms",
            |sample| sample.downtime_ms,
            "Requests were held for so long at the switch.",
        ),
        of(
            "hosts-penalty",
            "writes that the guest lost between hosts",
            "part of before",
            |sample| Some(sample.penalty(1)),
            "Writes in the time of the migration, beside those of the same time before it.",
        ),
        of(
            "hosts-followed",
            "what followed the volume",
            "part of the image",
            |sample| Some(sample.bytes_followed as f64 / sample.size_bytes as f64),
            "The paper's: 62 blocks of 4 KiB of 40 GB, 349 ms, after four rounds at most (a web server).",
        ),
        of(
            "hosts-pulled",
            "what the guest waited for",
            "KiB",
            |sample| Some(sample.bytes_pulled as f64 / 1024.0),
            "A guest that only writes whole blocks waits for nothing.",
        ),
    ]
}

fn by_size(samples: &[Sample]) -> Vec<Figure> {
    let of = |name, title: &str, y, value: fn(&Sample) -> Option<f64>, note| Figure {
        series: series_of(samples, value),
        ..figure(name, title, "MiB", y, note)
    };
    vec![
        of(
            "hosts-size-handover",
            "time until the volume is the other host's, by size",
            "s",
            |sample| sample.handed_over_seconds,
            "By post-copy it does not grow with the disk.",
        ),
        of(
            "hosts-size-downtime",
            "downtime between hosts, by size",
            "ms",
            |sample| sample.downtime_ms,
            "What is missing is told ahead of the switch, so it does not grow with the disk.",
        ),
    ]
}

fn series_of(samples: &[Sample], value: fn(&Sample) -> Option<f64>) -> Vec<super::Series> {
    lines(&Column::BETWEEN_HOSTS, samples, value)
}

fn figure(name: &'static str, title: &str, x: &'static str, y: &'static str, note: &'static str) -> Figure {
    Figure {
        name,
        title: title.to_owned(),
        x,
        y,
        series: Vec::new(),
        paper: Vec::new(),
        note,
        form: Form::Table,
    }
}
