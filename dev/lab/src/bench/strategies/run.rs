//! One migration of an experiment: a daemon of its own, a guest before, during and after, and a comparison at the end.

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use api::{MigrateVolume, MigrationState, Round};
use serde::Serialize;
use testbed::{Daemon, Folder};
use tokio::time::sleep;

use super::{BenchFolder, Column, Device, Holes, Scale, StrategiesOptions, fill};
use crate::bench::guest::{Direction, Guest, Load, Moment, Requests, Spent, now_ms, wait_for_guest};
use crate::bench::image::Blocks;
use crate::bench::migration::{Course, Progressed, compare_copies, compared, copy_in};
use crate::bench::server::NAME;
use crate::demo::{Progress, STORES, start_daemon};

const LOOK: Duration = Duration::from_millis(10);

#[derive(Debug)]
pub(super) struct Stage<'a> {
    pub(super) options: &'a StrategiesOptions,
    pub(super) folder: &'a BenchFolder,
    pub(super) samples: Vec<Sample>,
    /// Copies without a guest: round, size, target and seconds of each.
    offline: Vec<((usize, u64, Device), f64)>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) size_bytes: u64,
    pub(super) load: Load,
    pub(super) target: Device,
    pub(super) x: f64,
}

/// The figures of one migration.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// The experiment's name on the command line.
    pub experiment: &'static str,
    /// The column that was measured: a strategy's variant.
    pub column: &'static str,
    /// The place on the x-axis.
    pub x: f64,
    /// Size of the image in bytes.
    pub size_bytes: u64,
    /// Whether the volume is at the target.
    pub moved: bool,
    /// The reason why the volume has not moved.
    pub message: Option<String>,
    /// Time from the order until the target owned the volume; `None`: it did not move.
    pub handed_over_seconds: Option<f64>,
    /// Bytes that followed after the handover.
    pub bytes_followed: u64,
    /// The part of these bytes that the guest waited for.
    pub bytes_pulled: u64,
    /// Time from the order to the end.
    pub seconds: f64,
    /// Time of an off-line copy of the same size, in the same round.
    pub offline_seconds: f64,
    /// How long guests were held at the switch, in milliseconds.
    pub downtime_ms: Option<f64>,
    /// Reads and writes before the order.
    pub before: [Spent; 2],
    /// Reads and writes from the order to the end.
    pub during: [Spent; 2],
    /// Reads and writes during the first copy of everything.
    pub copy_phase: [Spent; 2],
    /// Reads and writes from the end of the first copy to the end; `None`: there was no such phase.
    pub iterative_phase: Option<[Spent; 2]>,
    /// The rounds, if the strategy has them.
    pub rounds: Vec<Round>,
    /// Bytes that the mover wrote.
    pub bytes_copied: u64,
    /// Bytes of guests' writes to both stores.
    pub bytes_mirrored: u64,
    /// Bytes in which source and target were equal at the end: all but what the guest wrote since the switch.
    pub compared_bytes: u64,
    /// The guest's moments, from before the order until after the end.
    pub moments: Vec<Moment>,
    /// The migration's progress over time.
    pub progress: Vec<Progressed>,
}

impl Sample {
    /// Returns the time as a multiple of the off-line copy's.
    pub(super) fn to_offline(&self) -> f64 {
        self.seconds / self.offline_seconds
    }

    /// Returns the share of its reads (0) or writes (1) that the guest lost, 0 to 1.
    pub(super) fn penalty(&self, kind: usize) -> f64 {
        1.0 - self.during[kind].iops / self.before[kind].iops
    }

    pub(super) fn total_penalty(&self) -> f64 {
        let all = |spent: &[Spent; 2]| spent[0].iops + spent[1].iops;
        1.0 - all(&self.during) / all(&self.before)
    }
}

impl<'a> Stage<'a> {
    pub(super) fn new(options: &'a StrategiesOptions, folder: &'a BenchFolder) -> Self {
        Self { options, folder, samples: Vec::new(), offline: Vec::new() }
    }

    /// Measures every column at every case, in turns, round after round; returns the samples by column.
    pub(super) async fn measure(
        &mut self,
        experiment: &'static str,
        columns: &[Column],
        cases: &[Case],
        progress: &mut Progress,
    ) -> anyhow::Result<Vec<Sample>> {
        let rounds = self.options.bench.rounds;
        let all = rounds as usize * cases.len() * columns.len();
        let first = self.samples.len();
        // Each experiment measures its own off-line copies, close to the migrations that they are compared with.
        if self.options.scale != Scale::Tiny {
            self.offline.clear();
        }
        for round in 0..rounds as usize {
            for case in cases {
                let key = (round, case.size_bytes, case.target);
                let known = self.offline.iter().find(|(known, _)| *known == key);
                let known = known.map(|(_, seconds)| *seconds);
                let offline_seconds = match known {
                    Some(seconds) => seconds,
                    None => {
                        progress.note("off-line");
                        let seconds = self.off_line(case).await.context("off-line")?;
                        self.offline.push((key, seconds));
                        seconds
                    }
                };
                for place in 0..columns.len() {
                    // The column that begins changes from round to round.
                    let column = columns[(place + round) % columns.len()];
                    progress.note(column.name);
                    progress.advance((self.samples.len() - first) as f64 / all as f64);
                    let sample = self.under_guest(experiment, column, case, offline_seconds).await;
                    self.samples.push(sample.with_context(|| column.name)?);
                }
            }
        }
        Ok(self.samples[first..].to_vec())
    }

    /// Lets a guest work without any migration; returns its requests.
    pub(super) async fn only_guest(
        &self,
        case: &Case,
        span: Duration,
    ) -> anyhow::Result<(Requests, Range<u64>)> {
        let scene = self.scene(case).await?;
        let guest = scene.guest(self, case).await?;
        let begun = now_ms();
        sleep(span).await;
        let ended = now_ms();
        let requests = guest.stop().await?;
        scene.end().await?.remove()?;
        Ok((requests, begun..ended))
    }

    /// Returns the image of this size, and makes it if it is missing.
    pub(super) async fn image(&self, size_bytes: u64) -> anyhow::Result<PathBuf> {
        let path = self.folder.path(&format!("image-{size_bytes}"));
        if !path.exists() {
            fill(&path, size_bytes, Holes::None, &mut Progress::silent()).await?;
        }
        Ok(path)
    }

    async fn scene(&self, case: &Case) -> anyhow::Result<Scene> {
        let image = self.image(case.size_bytes).await?;
        let folder = Folder::create(self.folder.root(), STORES)?;
        let delays = [(STORES[0], self.options.device), (STORES[1], case.target)].map(
            |(store, Device { latency_us, bytes_per_second, operations_per_second })| {
                format!(
                    "[stores.{store}.delay]\nread_us = {latency_us}\nwrite_us = {latency_us}\n\
                     bytes_per_second = {bytes_per_second}\noperations_per_second = {operations_per_second}\n"
                )
            },
        );
        let mover = self.options.mover;
        folder.configure(&format!(
            "{}[limits]\nchunks_in_flight = {}\nchunk_bytes = {}\n",
            delays.concat(),
            mover.depth,
            mover.chunk_bytes
        ))?;
        let program = std::process::Command::new(&self.options.bench.program);
        let daemon = start_daemon(program, &folder).await?;
        let uri = copy_in(&daemon, &image).await?;
        Ok(Scene { uri, daemon, folder })
    }

    async fn off_line(&self, case: &Case) -> anyhow::Result<f64> {
        let scene = self.scene(case).await?;
        let order = MigrateVolume { keep_source: true, ..MigrateVolume::to(STORES[1]) };
        let course = Course::of(&scene.daemon, &order).await?;
        ensure!(course.ended.state == MigrationState::Moved, "it failed: {:?}", course.ended.message);
        let folder = scene.end().await?;
        let images = [folder.path(STORES[0]), folder.path(STORES[1])];
        let compared = compare_copies(&images, Blocks::default()).await?;
        if let Some(offset) = compared.first_difference {
            bail!("the target differs from the source at byte {offset}, although nobody wrote");
        }
        folder.remove()?;
        Ok(course.seconds())
    }

    async fn under_guest(
        &self,
        experiment: &'static str,
        column: Column,
        case: &Case,
        offline_seconds: f64,
    ) -> anyhow::Result<Sample> {
        let margin = self.options.scale.margin();
        let scene = self.scene(case).await?;
        let guest = scene.guest(self, case).await?;
        sleep(margin).await;
        let order = column.order(STORES[1], self.options.max_downtime_ms);
        let course = Course::of(&scene.daemon, &order).await?;
        sleep(margin).await;
        let requests = guest.stop().await?;
        let unlogged = scene.writes().await?.saturating_sub(requests.writes());
        let folder = scene.end().await?;
        let images = [folder.path(STORES[0]), folder.path(STORES[1])];
        let block_bytes = case.load.job.block_bytes.into();
        let compared_bytes = match course.has_moved()? {
            true => compared(&images, block_bytes, &course, &requests, unlogged).await?,
            false => 0,
        };
        folder.remove()?;
        Ok(sample(experiment, column, case, offline_seconds, compared_bytes, &requests, course, margin))
    }
}

struct Scene {
    daemon: Daemon,
    folder: Folder,
    uri: String,
}

impl Scene {
    async fn guest(&self, stage: &Stage<'_>, case: &Case) -> anyhow::Result<Guest> {
        let guest = Guest::start(&self.uri, case.size_bytes, case.load, stage.folder)?;
        wait_for_guest(self.daemon.process_id()).await?;
        Ok(guest)
    }

    /// Returns the number of writes that the volume has taken. Its guest has ended: fio does not log those in flight at its end.
    async fn writes(&self) -> anyhow::Result<u64> {
        loop {
            let volume = self.daemon.client().volume(NAME).await.context("look at the volume")?;
            let statistics = volume.statistics.context("the volume is not served")?;
            if statistics.requests_in_flight == 0 {
                return Ok(statistics.writes);
            }
            sleep(LOOK).await;
        }
    }

    async fn end(self) -> anyhow::Result<Folder> {
        self.daemon.stop().await?;
        Ok(self.folder)
    }
}

#[expect(clippy::too_many_arguments, reason = "they are the parts of one sample")]
pub(super) fn sample(
    experiment: &'static str,
    column: Column,
    case: &Case,
    offline_seconds: f64,
    compared_bytes: u64,
    requests: &Requests,
    course: Course,
    margin: Duration,
) -> Sample {
    let (seconds, handed_over_seconds) = (course.seconds(), course.handed_over_seconds());
    let Course { begun_ms, ended_ms, decisions, progress, ended, .. } = course;
    let moved = ended.state == MigrationState::Moved;
    let margin_ms = u64::try_from(margin.as_millis()).unwrap_or(u64::MAX);
    let spent = |span: Range<u64>| {
        [Direction::Read, Direction::Write].map(|direction| requests.spent(direction, span.clone()))
    };
    let first_round = ended.rounds.first().map(|round| begun_ms + (round.seconds * 1e3) as u64);
    let copied_ms = first_round.unwrap_or(ended_ms).min(ended_ms);
    Sample {
        experiment,
        column: column.name,
        x: case.x,
        size_bytes: case.size_bytes,
        moved,
        message: ended.message.filter(|_| !moved),
        handed_over_seconds,
        bytes_followed: decisions.bytes_followed,
        bytes_pulled: decisions.bytes_pulled,
        seconds,
        offline_seconds,
        downtime_ms: ended.switch_over.map(|switch| switch.gate_closed_ms),
        before: spent(begun_ms - margin_ms..begun_ms),
        during: spent(begun_ms..ended_ms),
        copy_phase: spent(begun_ms..copied_ms),
        iterative_phase: (copied_ms + 100 < ended_ms).then(|| spent(copied_ms..ended_ms)),
        rounds: ended.rounds,
        bytes_copied: ended.bytes_copied,
        bytes_mirrored: ended.bytes_mirrored,
        compared_bytes,
        moments: requests.moments(begun_ms - margin_ms..ended_ms + margin_ms, begun_ms),
        progress,
    }
}
