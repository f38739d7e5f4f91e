//! One migration of an experiment: a daemon of its own, a guest before, during and after, and a comparison in the end.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use api::{
    Decisions, MigrateVolume, Migration, MigrationState, NewVolume, Phase, Round, VolumeSource, Watch,
};
use serde::Serialize;
use testbed::{Daemon, Folder};
use tokio::time::sleep;

use super::{BenchFolder, Column, Device, Holes, Scale, StrategiesOptions, fill};
use crate::bench::guest::{Direction, Guest, Load, Moment, Requests, Spent, now_ms, wait_for_guest};
use crate::bench::image::{Blocks, Compared, compare};
use crate::bench::server::NAME;
use crate::demo::{Progress, STORES, start_daemon};

/// How much earlier than recorded gates may have closed by the guest's clock: both round, and the record is made a little later.
const SWITCH_SLACK_MS: u64 = 100;
/// Time between two looks at a volume that still does something.
const LOOK: Duration = Duration::from_millis(10);

/// The experiments' folder, its images, and all that was measured so far.
#[derive(Debug)]
pub(super) struct Stage<'a> {
    pub(super) options: &'a StrategiesOptions,
    pub(super) folder: &'a BenchFolder,
    pub(super) samples: Vec<Sample>,
    /// Copyings without a guest: round, size and target of each, and its seconds.
    offline: Vec<((usize, u64, Device), f64)>,
}

/// What is measured once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    /// Size of the image.
    pub(super) size_bytes: u64,
    /// What the guest does.
    pub(super) load: Load,
    /// What the target's store is like.
    pub(super) target: Device,
    /// Where it is on the x-axis.
    pub(super) x: f64,
}

/// How far a migration was.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Progressed {
    /// Seconds since it was ordered.
    pub seconds: f64,
    /// Part of the image that was synchronised, 0 to 1.
    pub fraction: f64,
    /// Bytes copied until then.
    pub bytes_copied: u64,
}

/// One migration.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// Which experiment.
    pub experiment: &'static str,
    /// By which strategy.
    pub column: &'static str,
    /// Where on the x-axis.
    pub x: f64,
    /// Size of the image.
    pub size_bytes: u64,
    /// Whether the volume is at the target.
    pub moved: bool,
    /// Why not.
    pub message: Option<String>,
    /// From the order until the volume was the target's; `None`: it did not move.
    pub handed_over_seconds: Option<f64>,
    /// Bytes that followed it after that.
    pub bytes_followed: u64,
    /// Of these, those that the guest waited for.
    pub bytes_pulled: u64,
    /// From the order to the end.
    pub seconds: f64,
    /// The same of an image of this size that nobody used, in the same round.
    pub offline_seconds: f64,
    /// How long guests were held at the switch, in milliseconds.
    pub downtime_ms: Option<f64>,
    /// Reads and writes before the order.
    pub before: [Spent; 2],
    /// From the order to the end.
    pub during: [Spent; 2],
    /// While everything was copied for the first time.
    pub copy_phase: [Spent; 2],
    /// While what was written was copied again, and until the end; `None`: there was no such phase.
    pub iterative_phase: Option<[Spent; 2]>,
    /// Rounds, of a strategy that has them.
    pub rounds: Vec<Round>,
    /// What the mover wrote.
    pub bytes_copied: u64,
    /// What guests' writes took to both stores.
    pub bytes_mirrored: u64,
    /// Bytes in which source and target were equal in the end; all but what the guest wrote since the switch.
    pub compared_bytes: u64,
    /// The guest's life, from before the order until after the end.
    pub moments: Vec<Moment>,
    /// How far the migration was, as it was seen.
    pub progress: Vec<Progressed>,
}

impl Sample {
    /// The time, in that of the off-line copy.
    pub(super) fn to_offline(&self) -> f64 {
        self.seconds / self.offline_seconds
    }

    /// How much of its reads (0) or writes (1) the guest lost, 0 to 1.
    pub(super) fn penalty(&self, kind: usize) -> f64 {
        1.0 - self.during[kind].iops / self.before[kind].iops
    }

    /// The same of all its requests.
    pub(super) fn total_penalty(&self) -> f64 {
        let all = |spent: &[Spent; 2]| spent[0].iops + spent[1].iops;
        1.0 - all(&self.during) / all(&self.before)
    }
}

/// When a migration did what, in milliseconds since 1970.
pub(super) struct Course {
    pub(super) begun_ms: u64,
    pub(super) switched_ms: u64,
    pub(super) ended_ms: u64,
    pub(super) decisions: Decisions,
    progress: Vec<Progressed>,
    pub(super) ended: Migration,
}

impl Course {
    /// Has `daemon` move the volume, and waits for the end, whatever that is.
    ///
    /// # Errors
    /// What the daemon says.
    pub(super) async fn of(daemon: &Daemon, order: &MigrateVolume) -> anyhow::Result<Self> {
        let client = daemon.client();
        let begun_ms = now_ms();
        let mut progress = Vec::new();
        let ordered = client.migrate(NAME, order).await.context("order the migration");
        let mut seen = ordered.map_err(|error| daemon.with_log(error))?;
        while !seen.state.has_ended() {
            let now = now_ms();
            progress.push(Progressed {
                seconds: now.saturating_sub(begun_ms) as f64 / 1e3,
                fraction: seen.fraction,
                bytes_copied: seen.bytes_copied,
            });
            let watch = Watch { after: Some(seen.change), wait_ms: api::WAIT_MAX_MS };
            seen = client.migration(&seen.id, watch).await.context("watch the migration")?;
        }
        let ended_ms = now_ms();
        let history = daemon.history(&seen.id).await.and_then(|history| history.recording);
        let history = history.context("nothing was recorded of the migration")?;
        let closing = history.phases.iter().rev().find(|entered| entered.phase == Phase::Closing);
        let closed_ms = closing.map_or(0.0, |entered| entered.at_ms.max(0.0)) as u64;
        let switched_ms = (seen.started_unix_ms + closed_ms).saturating_sub(SWITCH_SLACK_MS);
        let decisions = history.decisions;
        Ok(Self { begun_ms, switched_ms, ended_ms, decisions, progress, ended: seen })
    }

    /// Makes sure that it ended at the target, or was given up for a reason that is a figure.
    ///
    /// # Errors
    /// If it has failed in another way.
    pub(super) fn has_moved(&self) -> anyhow::Result<bool> {
        let Migration { state, failure, message, .. } = &self.ended;
        let moved = *state == MigrationState::Moved;
        ensure!(moved || failure.as_deref() == Some("not-converging"), "it failed: {message:?}");
        Ok(moved)
    }

    /// From the order to its end.
    pub(super) fn seconds(&self) -> f64 {
        self.ended_ms.saturating_sub(self.begun_ms).max(1) as f64 / 1e3
    }

    /// What it was, for an error.
    pub(super) fn told(&self) -> String {
        let Self { begun_ms, switched_ms, ended_ms, .. } = self;
        let at = |ms: u64| ms.saturating_sub(*begun_ms);
        format!(
            "the gates closed {} ms after the order, it ended after {} ms",
            at(*switched_ms),
            at(*ended_ms)
        )
    }
}

impl<'a> Stage<'a> {
    pub(super) fn new(options: &'a StrategiesOptions, folder: &'a BenchFolder) -> Self {
        Self { options, folder, samples: Vec::new(), offline: Vec::new() }
    }

    /// Measures every column at every case, in turns, round after round; returns what was measured, by column.
    ///
    /// # Errors
    /// What went wrong, with the daemon's log.
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
        // Each experiment has its own, near to what is divided by it, where figures mean something.
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
                    // Nobody is always first.
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

    /// Lets a guest work without any migration; returns what it did.
    ///
    /// # Errors
    /// What went wrong.
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

    /// The image of this size, which is made if it is not there.
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
        let delays = [(STORES[0], self.options.scale.device()), (STORES[1], case.target)].map(
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
        let compared_bytes = match course.has_moved()? {
            true => compared(&images, case, &course, &requests, unlogged).await?,
            false => 0,
        };
        folder.remove()?;
        Ok(sample(experiment, column, case, offline_seconds, compared_bytes, &requests, course, margin))
    }
}

/// Makes the volume in a daemon's first store, a copy of an image; returns where it is served.
///
/// # Errors
/// What the daemon says.
pub(super) async fn copy_in(daemon: &Daemon, image: &Path) -> anyhow::Result<String> {
    let image = image.to_str().context("the folder's name is no Unicode")?;
    let source = VolumeSource::Create {
        size_bytes: None,
        store: Some(STORES[0].to_owned()),
        image: Some(image.to_owned()),
        format: None,
    };
    let order = NewVolume { name: NAME.to_owned(), source, export: api::ExportSettings::default() };
    let made = daemon.client().create_volume(&order).await.context("make the volume");
    Ok(made.map_err(|error| daemon.with_log(error))?.uri)
}

/// A daemon with the volume in its first store.
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

    /// Writes that the volume has taken. Its guest has ended: fio does not log what was under way then.
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

/// Compares the image that was kept of the source with that of the target, each the only one in its folder. They may differ in what
/// the guest has written since the switch, and in so many writes that it did not log; returns in how many bytes they are equal.
///
/// # Errors
/// If they differ in anything else.
pub(super) async fn compared(
    stores: &[PathBuf; 2],
    case: &Case,
    course: &Course,
    requests: &Requests,
    mut unlogged: u64,
) -> anyhow::Result<u64> {
    let mut except = requests.written_since(course.switched_ms);
    let block_bytes = u64::from(case.load.job.block_bytes);
    loop {
        let compared = compare_copies(stores, except.clone()).await?;
        let Some(offset) = compared.first_difference else { return Ok(compared.bytes) };
        if unlogged == 0 {
            let when = match requests.written_last(offset) {
                None => "nobody wrote there".to_owned(),
                Some(at) => {
                    let before_ms = (course.switched_ms + SWITCH_SLACK_MS).saturating_sub(at);
                    format!("by its clock the guest wrote there last {before_ms} ms before")
                }
            };
            bail!("the target differs from the source at byte {offset}: {}; {when}", course.told());
        }
        unlogged -= 1;
        except.add(offset / block_bytes * block_bytes, block_bytes);
    }
}

async fn compare_copies([source, target]: &[PathBuf; 2], except: Blocks) -> anyhow::Result<Compared> {
    let compared = compare(&only_image(source)?, &only_image(target)?, except).await?;
    ensure!(
        compared.bytes > 0 || compared.first_difference.is_some(),
        "the guest has written every block since the switch: nothing could be compared"
    );
    Ok(compared)
}

fn only_image(store: &Path) -> anyhow::Result<PathBuf> {
    for entry in std::fs::read_dir(store).context("look for an image")? {
        let entry = entry.context("look for an image")?;
        if entry.file_name().to_string_lossy().starts_with(NAME) {
            return Ok(entry.path());
        }
    }
    bail!("there is no image in {}", store.display())
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
    let seconds = course.seconds();
    let Course { begun_ms, switched_ms, ended_ms, decisions, progress, ended } = course;
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
        handed_over_seconds: moved
            .then(|| (switched_ms + SWITCH_SLACK_MS).saturating_sub(begun_ms) as f64 / 1e3),
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
