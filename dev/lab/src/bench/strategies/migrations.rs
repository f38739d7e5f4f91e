//! One migration of an experiment: a daemon of its own, a guest before, during and after, and a comparison at the end.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use api::MigrateVolume;
use testbed::{Daemon, Folder};
use tokio::time::sleep;

use super::equation::{Latencies, equation};
use super::experiments::{
    BLOCKS, COMPARED, COPIED, Case, DATABASE_PHASES, DOWNTIME, Experiment, FOLLOWED, HANDED_OVER,
    HANDOVER_TO_OFFLINE, HOSTS_SIZE, LATENCY, LOST, LOST_READS, LOST_WRITES, MIRRORED, MOVED, PHASE, PULLED,
    RATE, REWRITTEN, SECONDS, TIME_X_LOSS, TO_OFFLINE, VARIANCE, is_usual_size, mebibytes,
};
use super::{Column, Device, MIRROR, StrategiesOptions};
use crate::bench::guest::{Direction, Load, Requests, Spent, Work, now_ms, under_guest};
use crate::bench::image::{Blocks, Holes, fill};
use crate::bench::migration::{AT_FULL_SPEED, Course, compare_copies, compared, copy_in};
use crate::bench::report::{Curve, Line, Sample};
use crate::bench::runner::Ground;
use crate::bench::server::NAME;
use crate::bench::two_hosts::{THERE, TwoHosts};
use crate::demo::{Progress, STORES, start_daemon};

const LOOK: Duration = Duration::from_millis(10);
/// Bytes of a counted block: one of the guests' requests.
const BLOCK_BYTES: u64 = 8 << 10;
/// Points of a logarithmic line: enough to look smooth.
const POINTS: usize = 40;
/// Tenths of a second vary too much on a slow device.
const STEP_MS: u64 = 500;

/// The copies without a guest of an experiment: whether between hosts, round, size, target, and seconds of each.
#[derive(Debug, Default)]
pub(in crate::bench) struct Stage {
    offline: Vec<((bool, usize, u64, Device), f64)>,
}

/// A daemon, or two, with the volume.
enum Scene {
    Stores { daemon: Daemon, folder: Folder, uri: String },
    Hosts(Box<TwoHosts>),
}

impl Scene {
    fn daemon(&self) -> &Daemon {
        match self {
            Self::Stores { daemon, .. } => daemon,
            Self::Hosts(hosts) => &hosts.pair.near,
        }
    }

    fn uri(&self) -> &str {
        match self {
            Self::Stores { uri, .. } => uri,
            Self::Hosts(hosts) => &hosts.uri,
        }
    }

    fn target(&self) -> &'static str {
        match self {
            Self::Stores { .. } => STORES[1],
            Self::Hosts(_) => THERE,
        }
    }

    /// Returns how many of the volume's writes are not in the log of its guest, which has ended: those in flight at its end.
    async fn unlogged(&self, load: Load, requests: &Requests) -> anyhow::Result<u64> {
        let Self::Stores { daemon, .. } = self else { return Ok(load.job.depth.into()) };
        loop {
            let volume = daemon.client().volume(NAME).await.context("look at the volume")?;
            let statistics = volume.statistics.context("the volume is not served")?;
            if statistics.requests_in_flight == 0 {
                return Ok(statistics.writes.saturating_sub(requests.writes()));
            }
            sleep(LOOK).await;
        }
    }

    /// Stops the daemons; returns the stores of source and target, and the folders to remove.
    async fn end(self) -> anyhow::Result<([PathBuf; 2], Vec<Folder>)> {
        match self {
            Self::Stores { daemon, folder, .. } => {
                daemon.stop().await?;
                Ok((STORES.map(|store| folder.path(store)), vec![folder]))
            }
            Self::Hosts(hosts) => Ok((hosts.stores(), hosts.end_daemons().await?.into())),
        }
    }
}

impl StrategiesOptions {
    async fn scene(&self, ground: &Ground<'_>, case: Case) -> anyhow::Result<Scene> {
        let image = ground.folder.path(&format!("image-{}", case.size_bytes));
        if !image.exists() {
            fill(&image, case.size_bytes, Holes::None, &mut Progress::silent()).await?;
        }
        if case.is_between_hosts() {
            return Ok(Scene::Hosts(Box::new(TwoHosts::set(ground, RATE, &image).await?)));
        }
        let folder = Folder::create(ground.folder.root(), STORES)?;
        let delays = [(STORES[0], self.device()), (STORES[1], case.target)].map(
            |(store, Device { latency_us, bytes_per_second, operations_per_second })| {
                format!(
                    "[stores.{store}.delay]\nread_us = {latency_us}\nwrite_us = {latency_us}\n\
                     bytes_per_second = {bytes_per_second}\noperations_per_second = {operations_per_second}\n"
                )
            },
        );
        let (delays, depth, chunk) = (delays.concat(), self.depth, self.chunk);
        folder
            .configure(&format!("{delays}[limits]\nchunks_in_flight = {depth}\nchunk_bytes = {chunk}\n"))?;
        let daemon = start_daemon(std::process::Command::new(ground.program), &folder).await?;
        let uri = copy_in(&daemon, &image).await?;
        Ok(Scene::Stores { daemon, folder, uri })
    }

    /// Lets a guest work without any migration: how often it writes the same blocks.
    pub(super) async fn only_guest(&self, ground: &Ground<'_>, load: Load) -> anyhow::Result<Vec<Sample>> {
        let case = Case {
            experiment: Experiment::Rewrites,
            size_bytes: ground.size_bytes,
            load,
            target: self.device(),
        };
        let scene = self.scene(ground, case).await?;
        let look = async {
            let begun_ms = now_ms();
            sleep(self.scale().look()).await;
            Ok(begun_ms..now_ms())
        };
        let (requests, span) = under_guest(&ground.folder, work(&scene, case, Duration::ZERO), look).await?;
        let (_, folders) = scene.end().await?;
        folders.into_iter().try_for_each(Folder::remove)?;
        let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
        for offset in requests.offsets_written(span) {
            *counts.entry(offset / BLOCK_BYTES).or_default() += 1;
        }
        let writes: u64 = counts.values().sum();
        let share = (writes - counts.len() as u64) as f64 / writes.max(1) as f64;
        let mut sorted: Vec<u64> = counts.into_values().collect();
        sorted.sort_unstable_by(|one, other| other.cmp(one));
        let lines = vec![Line { name: "writes".to_owned(), points: ranks(&sorted) }];
        let curve = Curve { x: "rank", y: "writes", lines, is_logarithmic: true, ..Curve::default() };
        Ok(vec![Sample::of([(REWRITTEN, share)]).curve(curve)])
    }

    /// Measures one migration under a guest.
    pub(super) async fn migrate(
        &self,
        ground: &Ground<'_>,
        stage: &mut Stage,
        case: Case,
        column: Column,
        round: usize,
    ) -> anyhow::Result<Vec<Sample>> {
        let offline_seconds = self.off_line(ground, stage, case, round).await.context("off-line")?;
        let scene = self.scene(ground, case).await?;
        let order = column.order(scene.target(), self.max_downtime);
        let work = work(&scene, case, self.scale().margin());
        let (requests, course) =
            under_guest(&ground.folder, work, Course::of(scene.daemon(), &order)).await?;
        let unlogged = scene.unlogged(case.load, &requests).await?;
        let (stores, folders) = scene.end().await?;
        let block_bytes = case.load.job.block_bytes.into();
        let compared_bytes = match course.has_moved()? {
            true => Some(compared(&stores, block_bytes, &course, &requests, unlogged).await?),
            false => None,
        };
        folders.into_iter().try_for_each(Folder::remove)?;
        let measured =
            Measured { options: self, case, column, offline_seconds, compared_bytes, requests, course };
        Ok(measured.samples())
    }

    /// Returns the time of the same copy without a guest, in the same round.
    async fn off_line(
        &self,
        ground: &Ground<'_>,
        stage: &mut Stage,
        case: Case,
        round: usize,
    ) -> anyhow::Result<f64> {
        let key = (case.is_between_hosts(), round, case.size_bytes, case.target);
        if let Some((_, seconds)) = stage.offline.iter().find(|(known, _)| *known == key) {
            return Ok(*seconds);
        }
        let scene = self.scene(ground, case).await?;
        let order = MigrateVolume {
            keep_source: true,
            impact_percent: AT_FULL_SPEED,
            ..MigrateVolume::to(scene.target())
        };
        let course = Course::of(scene.daemon(), &order).await?;
        ensure!(course.has_moved()?, "it was given up, although nobody wrote");
        let (stores, folders) = scene.end().await?;
        if let Some(offset) = compare_copies(&stores, Blocks::default()).await?.first_difference {
            bail!("the target differs from the source at byte {offset}, although nobody wrote");
        }
        folders.into_iter().try_for_each(Folder::remove)?;
        stage.offline.push((key, course.times.seconds()));
        Ok(course.times.seconds())
    }
}

impl Case {
    fn is_between_hosts(&self) -> bool {
        matches!(self.experiment, Experiment::Hosts | Experiment::HostsSize)
    }
}

fn work(scene: &Scene, case: Case, margin: Duration) -> Work<'_> {
    let size_bytes = match scene {
        Scene::Stores { .. } => case.size_bytes,
        // N.B. the guest leaves a quarter of its disk alone, so that there is always something to compare.
        Scene::Hosts(_) => case.size_bytes / 4 * 3,
    };
    let (uri, server) = (scene.uri(), scene.daemon().process_id());
    Work { uri, server, size_bytes, load: case.load, before: margin, after: margin }
}

/// One migration, its guest, and the off-line copy beside it.
struct Measured<'a> {
    options: &'a StrategiesOptions,
    case: Case,
    column: Column,
    offline_seconds: f64,
    /// `None`: it was given up.
    compared_bytes: Option<u64>,
    requests: Requests,
    course: Course,
}

impl Measured<'_> {
    fn samples(&self) -> Vec<Sample> {
        let mut samples = vec![self.sample()];
        match self.case.experiment {
            Experiment::Database => samples.extend(self.phases()),
            Experiment::Rounds => samples.extend(self.rounds()),
            Experiment::SlowTarget | Experiment::OverTime => samples.extend(self.over_time()),
            Experiment::Hosts if is_usual_size(self.options.scale(), self.case) => {
                samples.push(self.sample().part(HOSTS_SIZE).at(mebibytes(self.case.size_bytes), None));
            }
            _ => {}
        }
        samples
    }

    /// Returns the figures of the migration. One that was given up is in no median, but for the target that is too slow.
    fn sample(&self) -> Sample {
        let Course { times, decisions, ended, .. } = &self.course;
        let moved = Sample::of([(MOVED, f64::from(u8::from(self.compared_bytes.is_some())))]);
        if self.compared_bytes.is_none() && self.case.experiment != Experiment::SlowTarget {
            return moved;
        }
        let before = self.spent(self.before());
        let during = self.spent(times.begun_ms..times.ended_ms);
        let lost = |iops: fn(&[Spent; 2]) -> f64| 1.0 - iops(&during) / iops(&before);
        let to_offline = times.seconds() / self.offline_seconds;
        let lost_of_all = lost(|[reads, writes]| reads.iops + writes.iops);
        let handed_over = self.course.handed_over_seconds();
        let values = [
            (SECONDS, times.seconds()),
            (TO_OFFLINE, to_offline),
            (LOST_READS, lost(|[reads, _]| reads.iops)),
            (LOST_WRITES, lost(|[_, writes]| writes.iops)),
            (LOST, lost_of_all),
            (TIME_X_LOSS, to_offline * lost_of_all),
            (FOLLOWED, decisions.bytes_followed as f64),
            (PULLED, decisions.bytes_pulled as f64),
            (COPIED, ended.bytes_copied as f64),
            (MIRRORED, ended.bytes_mirrored as f64),
        ];
        moved
            .with(values)
            .and(DOWNTIME, ended.switch_over.map(|switch| switch.gate_closed_ms))
            .and(HANDED_OVER, handed_over)
            .and(HANDOVER_TO_OFFLINE, handed_over.map(|seconds| seconds / self.offline_seconds))
            .and(COMPARED, self.compared_bytes.map(|bytes| bytes as f64))
    }

    fn margin_ms(&self) -> u64 {
        u64::try_from(self.options.scale().margin().as_millis()).unwrap_or(u64::MAX)
    }

    fn before(&self) -> Range<u64> {
        let begun_ms = self.course.times.begun_ms;
        begun_ms - self.margin_ms()..begun_ms
    }

    fn spent(&self, span: Range<u64>) -> [Spent; 2] {
        [Direction::Read, Direction::Write].map(|direction| self.requests.spent(direction, span.clone()))
    }

    /// Returns when everything had been copied once.
    fn copied_ms(&self) -> u64 {
        let times = self.course.times;
        let first = self.course.ended.rounds.first();
        first
            .map_or(times.ended_ms, |round| times.begun_ms + (round.seconds * 1e3) as u64)
            .min(times.ended_ms)
    }

    /// Returns the latency of writes before, while everything is copied, and in the later rounds, at one time the intensity.
    fn phases(&self) -> Vec<Sample> {
        let once = self.options.parts(Experiment::Database, self.case.size_bytes);
        let is_once = once
            .iter()
            .flat_map(|part| &part.points)
            .next()
            .is_some_and(|(_, case)| case.load == self.case.load);
        if !is_once {
            return Vec::new();
        }
        let (times, copied_ms) = (self.course.times, self.copied_ms());
        let later = (copied_ms + 100 < times.ended_ms).then_some(("rounds", copied_ms..times.ended_ms));
        let spans = [("before", self.before()), ("copy", times.begun_ms..copied_ms)].into_iter().chain(later);
        let phase = |(index, (label, span)): (usize, (&'static str, Range<u64>))| {
            let [_, writes] = self.spent(span);
            let values = [(LATENCY, writes.mean_ms), (VARIANCE, writes.variance_ms2)];
            Sample::of(values).part(DATABASE_PHASES).at(index as f64, Some(label))
        };
        spans.enumerate().map(phase).collect()
    }

    /// Returns the blocks of each round after the first, which copies everything.
    fn rounds(&self) -> impl Iterator<Item = Sample> {
        let rounds = &self.course.ended.rounds;
        let all = rounds.first().map_or(1, |first| first.blocks.max(1)) as f64;
        let later = rounds.iter().enumerate().skip(1);
        later.map(move |(index, round)| {
            Sample::of([(BLOCKS, round.blocks as f64 / all)]).at((index + 1) as f64, None)
        })
    }

    /// Returns the guest's life, and how long each phase took. Equation 1 is beside it for a slow target.
    fn over_time(&self) -> Vec<Sample> {
        let times = self.course.times;
        let span = self.before().start..times.ended_ms + self.margin_ms();
        let life = self.requests.life(span, times.begun_ms, STEP_MS);
        let mut curve = Curve::life("the guest's requests a second", life, vec![(0.0, times.seconds())]);
        let options = self.options;
        if self.case.experiment == Experiment::SlowTarget && self.column == MIRROR.1 {
            let queued_bytes = u64::from(options.depth) * options.chunk;
            let latencies = Latencies::of(options.device(), self.case.target, queued_bytes);
            let margin = options.scale().margin().as_secs_f64();
            let points = equation(&self.course.progress, times.seconds(), margin, latencies);
            curve.lines.push(Line { name: "Equation 1".to_owned(), points });
        }
        let copied = self.copied_ms().saturating_sub(times.begun_ms) as f64 / 1e3;
        let phases = [(0.0, "copy", copied), (1.0, "rounds", times.seconds() - copied)];
        let phases = phases.map(|(x, label, seconds)| Sample::of([(PHASE, seconds)]).at(x, Some(label)));
        std::iter::once(Sample::default().curve(curve)).chain(phases).collect()
    }
}

/// Returns some of the ranks with their counts, evenly by their logarithm.
fn ranks(sorted: &[u64]) -> Vec<(f64, f64)> {
    let last = sorted.len().max(1) as f64;
    let rank = |step: usize| last.powf(step as f64 / POINTS as f64).round() as usize;
    let mut ranks: Vec<usize> = (0..=POINTS).map(rank).collect();
    ranks.dedup();
    let at = |rank: usize| Some((rank as f64, *sorted.get(rank.checked_sub(1)?)? as f64));
    ranks.into_iter().filter_map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_go_from_the_most_to_the_least_written() {
        let sorted: Vec<u64> = (1..=1000).rev().collect();
        let points = ranks(&sorted);
        assert_eq!((points[0], points[points.len() - 1]), ((1.0, 1000.0), (1000.0, 1.0)));
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(ranks(&[]).is_empty());
    }
}
