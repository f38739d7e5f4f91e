//! A copy by servers, at one host or between two, of an unused image or under a guest: by Sterna, or by QEMU's mirror.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{MigrateVolume, Strategy};
use testbed::{Daemon, Folder};
use tokio::time::timeout;

use super::guest::{Load, Work, now_ms, under_guest};
use super::image::{Blocks, Finished, Images, drop_caches};
use super::metric::{Metric, Unit};
use super::migration::{AT_FULL_SPEED, Course, Times};
use super::process::cpu_time;
use super::report::{Curve, Sample};
use super::runner::Ground;
use super::server::{CopyMode, NAME, SWITCH_SLACK_MS, StorageDaemon};

pub(super) const SECONDS: Metric = Metric::less("seconds", "SECONDS", Unit::Seconds);
pub(super) const SPEED: Metric = Metric::more("bytes_per_second", "MiB/s", Unit::BytesPerSecond);
/// Without the beginning, in which TCP measures a link, and without the work after the copying.
pub(super) const SECOND_HALF: Metric =
    Metric::more("second_half_bytes_per_second", "MiB/s", Unit::BytesPerSecond);
pub(super) const CPU: Metric = Metric::less("server_cpu_seconds", "CPU s", Unit::Seconds);
pub(super) const TAKES: Metric = Metric::less("allocated_bytes", "TAKES", Unit::Bytes);
const COMPARED: Metric = Metric::more("compared_bytes", "COMPARED", Unit::Bytes);
pub(super) const ENDED: Metric = Metric::more("ended", "ENDED", Unit::Happened);
pub(super) const BEFORE: Metric = Metric::more("iops_before", "IOPS BEFORE", Unit::PerSecond);
pub(super) const DURING: Metric = Metric::more("iops_during", "DURING", Unit::PerSecond);
const AFTER: Metric = Metric::more("iops_after", "AFTER", Unit::PerSecond);
pub(super) const BYTES_BEFORE: Metric =
    Metric::more("guest_bytes_per_second_before", "MiB/s BEFORE", Unit::BytesPerSecond);
pub(super) const BYTES_DURING: Metric =
    Metric::more("guest_bytes_per_second", "DURING", Unit::BytesPerSecond);
pub(super) const LOST: Metric = Metric::less("iops_lost", "LOST", Unit::Part);
/// For how long the guest might as well have stood still.
pub(super) const TIME_X_LOSS: Metric = Metric::less("seconds_times_lost", "TIME x LOSS s", Unit::Seconds);
pub(super) const WORST: Metric = Metric::less("worst_latency_ms", "WORST ms", Unit::Milliseconds);
pub(super) const P99: Metric = Metric::less("p99_latency_ms", "99 % ms", Unit::Milliseconds);
const WORST_BEFORE: Metric = Metric::less("worst_latency_before_ms", "BEFORE ms", Unit::Milliseconds);

/// Servers that can make one copy.
#[derive(Debug)]
pub(super) enum Copying {
    Sterna {
        source: Box<Daemon>,
        /// The other host's daemon.
        target: Option<Box<Daemon>>,
        folders: Vec<Folder>,
        uri: String,
        /// The store to which the volume goes.
        to: String,
        /// What guests may lose, in percent; `None`: the copy is at full speed, as those of the others.
        impact_percent: Option<u8>,
        /// The copy, if the daemon does not tell where it is.
        copy: Option<PathBuf>,
    },
    Mirror {
        source: Box<StorageDaemon>,
        /// The other host's daemon.
        target: Option<Box<StorageDaemon>>,
        /// Node of the target, at the source.
        node: &'static str,
        mode: CopyMode,
        /// Bytes a second; 0: as many as it can.
        speed: u64,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Guested {
    pub(super) load: Load,
    pub(super) before: Duration,
    pub(super) after: Duration,
    /// A copy that has not ended after this time is given up.
    pub(super) give_up_after: Duration,
}

/// When a copy ends.
#[derive(Clone, Copy, Debug)]
enum Until {
    /// It is on the disk: QEMU's mirror does not wait for that.
    Durable,
    /// The guest uses it, or this time is over.
    Used(Duration),
}

#[derive(Debug)]
struct Copied {
    begun_ms: u64,
    ended_ms: u64,
    /// Until this time every write also went to the source; `None`: it was given up.
    switched_ms: Option<u64>,
    cpu_seconds: f64,
    /// Bytes copied over seconds, if the server tells.
    pace: Vec<(f64, u64)>,
}

impl Copying {
    /// Copies an unused image, of which `data_bytes` are data: from the order until the copy is on the disk, with all checks.
    pub(super) async fn idle(mut self, images: &Images, data_bytes: u64) -> anyhow::Result<Sample> {
        drop_caches(&[&images.source]).await?;
        let copied = self.copy(images, Until::Durable).await?;
        let finished = self.finish(images, Blocks::default()).await?;
        let sample = idle_sample(images, copied.seconds(), data_bytes, &copied.pace);
        Ok(sample.with(finished.values()).with([(CPU, copied.cpu_seconds)]))
    }

    /// Copies an image under a guest, and compares what the guest has left alone since the switch.
    pub(super) async fn loaded(
        mut self,
        ground: &Ground<'_>,
        images: &Images,
        guest: Guested,
    ) -> anyhow::Result<Sample> {
        drop_caches(&[&images.source]).await?;
        let (uri, server) = (self.uri().to_owned(), self.process_id()?);
        let Guested { load, before, after, give_up_after } = guest;
        let work = Work { uri: &uri, server, size_bytes: ground.size_bytes, load, before, after };
        let copy = self.copy(images, Until::Used(give_up_after));
        let (requests, copied) = under_guest(&ground.folder, work, copy).await?;
        let mut compared_bytes = None;
        match copied.switched_ms {
            Some(since_ms) => {
                let finished = self.finish(images, requests.written_since(since_ms)).await?;
                compared_bytes = Some(finished.compared_bytes as f64);
            }
            None => {
                // A copy that was given up needs no orderly end.
                drop(self);
                images.delete_target()?;
            }
        }
        let ms = |margin: Duration| u64::try_from(margin.as_millis()).unwrap_or(u64::MAX);
        let Copied { begun_ms, ended_ms, .. } = copied;
        let (begin_ms, end_ms) = (begun_ms - ms(before), ended_ms + ms(after));
        let felt_before = requests.felt(begin_ms..begun_ms).context("before the migration")?;
        let felt = requests.felt(begun_ms..ended_ms).context("during the migration")?;
        ensure!(felt_before.iops > 0.0, "the guest did nothing before the migration: measure for longer");
        let (seconds, lost) = (copied.seconds(), 1.0 - felt.iops / felt_before.iops);
        let block_bytes = f64::from(load.job.block_bytes);
        let sample = Sample::of([
            (SECONDS, seconds),
            (ENDED, f64::from(u8::from(copied.switched_ms.is_some()))),
            (BEFORE, felt_before.iops),
            (DURING, felt.iops),
            (BYTES_BEFORE, felt_before.iops * block_bytes),
            (BYTES_DURING, felt.iops * block_bytes),
            (LOST, lost),
            (TIME_X_LOSS, seconds * lost),
            (WORST, felt.worst_latency_ms),
            (P99, felt.p99_latency_ms),
            (WORST_BEFORE, felt_before.worst_latency_ms),
            (CPU, copied.cpu_seconds),
        ]);
        let felt_after = (!after.is_zero()).then(|| requests.iops(ended_ms..end_ms));
        let life = requests.life(begin_ms..end_ms, begun_ms, 100);
        let curve = Curve::life("the guest's requests a second", life, vec![(0.0, seconds)]);
        Ok(sample.and(AFTER, felt_after).and(COMPARED, compared_bytes).curve(curve))
    }

    fn uri(&self) -> &str {
        match self {
            Self::Sterna { uri, .. } => uri,
            Self::Mirror { source, .. } => source.uri(),
        }
    }

    fn process_id(&self) -> anyhow::Result<u32> {
        match self {
            Self::Sterna { source, .. } => Ok(source.process_id()),
            Self::Mirror { source, .. } => source.process_id(),
        }
    }

    async fn copy(&mut self, images: &Images, until: Until) -> anyhow::Result<Copied> {
        let process = self.process_id()?;
        let cpu = cpu_time(process)?;
        let mut copied = match self {
            Self::Sterna { source, to, impact_percent, .. } => {
                let order = MigrateVolume {
                    impact_percent: impact_percent.or(AT_FULL_SPEED),
                    strategy: Strategy::Mirror,
                    ..MigrateVolume::to(to.as_str())
                };
                migrate(source, &order, until).await?
            }
            Self::Mirror { source, node, mode, speed, .. } => {
                mirror(source, node, (*mode, *speed), images, until).await?
            }
        };
        copied.cpu_seconds = cpu_time(process)?.saturating_sub(cpu).as_secs_f64();
        Ok(copied)
    }

    /// Stops the servers, compares the copy with its source, deletes it, and puts the source back.
    async fn finish(self, images: &Images, except: Blocks) -> anyhow::Result<Finished> {
        match self {
            Self::Sterna { source, target, folders, copy, .. } => {
                let copy = match copy {
                    Some(copy) => copy,
                    None => target.as_ref().unwrap_or(&source).volume(NAME).await?.image.into(),
                };
                source.stop().await?;
                if let Some(target) = target {
                    target.stop().await?;
                }
                let finished = images.finish(&copy, except).await?;
                folders.into_iter().try_for_each(Folder::remove)?;
                Ok(finished)
            }
            Self::Mirror { source, target, .. } => {
                source.stop().await?;
                if let Some(target) = target {
                    target.stop().await?;
                }
                images.finish(&images.target, except).await
            }
        }
    }
}

impl Finished {
    pub(super) fn values(self) -> [(Metric, f64); 2] {
        [(TAKES, self.allocated_bytes as f64), (COMPARED, self.compared_bytes as f64)]
    }
}

impl Copied {
    fn of(times: Times, switched_ms: Option<u64>) -> Self {
        let Times { begun_ms, ended_ms, .. } = times;
        Self { begun_ms, ended_ms, switched_ms, cpu_seconds: 0.0, pace: Vec::new() }
    }

    fn seconds(&self) -> f64 {
        self.ended_ms.saturating_sub(self.begun_ms).max(1) as f64 / 1e3
    }
}

/// Returns the sample of a copy that nobody uses, by whatever program.
pub(super) fn idle_sample(images: &Images, seconds: f64, data_bytes: u64, pace: &[(f64, u64)]) -> Sample {
    let sample = Sample::of([(SECONDS, seconds), (SPEED, data_bytes as f64 / seconds)]);
    sample.and(SECOND_HALF, second_half(pace, images.size_bytes))
}

async fn migrate(daemon: &Daemon, order: &MigrateVolume, until: Until) -> anyhow::Result<Copied> {
    let begun_ms = now_ms();
    let migrated = Course::of(daemon, order);
    let course = match until {
        Until::Durable => Some(migrated.await?),
        Until::Used(deadline) => timeout(deadline, migrated).await.ok().transpose()?,
    };
    let Some(course) = course else {
        let ended_ms = now_ms();
        return Ok(Copied::of(Times { begun_ms, switched_ms: ended_ms, ended_ms }, None));
    };
    ensure!(course.has_moved()?, "it was given up");
    let pace = course.progress.iter().map(|seen| (seen.seconds, seen.bytes_copied)).collect();
    Ok(Copied { pace, ..Copied::of(course.times, Some(course.times.switched_ms)) })
}

async fn mirror(
    daemon: &mut StorageDaemon,
    node: &str,
    (mode, speed): (CopyMode, u64),
    images: &Images,
    until: Until,
) -> anyhow::Result<Copied> {
    let (begun_ms, mut ready_ms) = (now_ms(), None);
    let mirrored = daemon.mirror("source", node, mode, speed, || ready_ms = Some(now_ms()));
    let ended = match until {
        Until::Durable => {
            mirrored.await?;
            images.flush().await?;
            Some(())
        }
        Until::Used(deadline) => timeout(deadline, mirrored).await.ok().transpose()?,
    };
    let times = Times { begun_ms, switched_ms: begun_ms, ended_ms: now_ms() };
    let switched_ms = ended.and(ready_ms).map(|ready_ms| ready_ms.saturating_sub(SWITCH_SLACK_MS));
    Ok(Copied::of(times, switched_ms))
}

/// Returns bytes per second from the middle of `all` bytes to their end; `None` if there are too few readings.
fn second_half(pace: &[(f64, u64)], all: u64) -> Option<f64> {
    let (began, before) = pace.iter().find(|(_, bytes)| *bytes >= all / 2)?;
    let (_, after) = pace.last()?;
    // The first reading with all of it.
    let (ended, _) = pace.iter().find(|(_, bytes)| bytes == after)?;
    (ended > began).then(|| (after - before) as f64 / (ended - began))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_half_ends_with_the_last_byte() {
        let pace = [(0.0, 0), (4.0, 500), (5.0, 1000), (9.0, 1000)];
        assert_eq!(second_half(&pace, 1000), Some(500.0));
        assert_eq!(second_half(&pace[..2], 1000), None);
    }
}
