//! Migrations of a guest that writes faster than its link carries: whether they end, and what the guest notices.
//!
//! A migration is given up after several times the time that the link needs for the whole image. It counts as not ending.

use std::time::Duration;

use anyhow::Context as _;
use api::{MigrateVolume, Phase};
use tokio::time::{sleep, timeout};

use super::figures::{GuestReport, GuestSample};
use super::stage::{Stage, StorageDaemons, Way};
use super::{Contender, show_turn, turns};
use crate::bench::fio::{Job, Pattern};
use crate::bench::guest::{Guest, Limit, Load, Requests, now_ms, wait_for_guest};
use crate::bench::image::drop_caches;
use crate::bench::server::CopyMode;
use crate::demo::Progress;

/// The guest writes all over its disk, with requests as large as those of file systems.
const JOB: Job = Job { pattern: Pattern::RandomWrites, block_bytes: 64 << 10, depth: 8 };
/// The guest's limit, as a multiple of the link's rate.
const LINK_RATES: u64 = 2;
/// A migration is given up after this many times the time that the link needs for the image.
const TIMES_MAX: u32 = 4;
/// An addition to the time limit, for small images.
const GIVE_UP_AFTER_MIN: Duration = Duration::from_secs(10);
/// A switch may have begun this much before it was seen: events arrive late, and clocks are rounded.
const SWITCH_SLACK_MS: u64 = 250;

/// The times of a migration, in milliseconds since 1970.
#[derive(Clone, Copy, Debug)]
struct Course {
    begun_ms: u64,
    /// Until this time every write also went to the source; `None` if the migration was given up.
    switched_ms: Option<u64>,
    ended_ms: u64,
}

pub(super) async fn measure(stage: &Stage<'_>, progress: &mut Progress) -> anyhow::Result<GuestReport> {
    let contenders = Contender::GUEST;
    let rounds = stage.options.bench.rounds;
    let mut samples = vec![Vec::new(); contenders.len()];
    for (round, index) in turns(rounds, contenders) {
        let contender = contenders[index];
        show_turn(progress, stage.part, (round, rounds), contender);
        let sample = match contender {
            Contender::Tcp => anyhow::bail!("TCP has no guests"),
            Contender::Sterna => sterna(stage, Way::Host).await,
            Contender::SternaNbd => sterna(stage, Way::NbdStore).await,
            Contender::Background => storage_daemon(stage, CopyMode::Background).await,
            Contender::WriteBlocking => storage_daemon(stage, CopyMode::WriteBlocking).await,
        };
        samples[index].push(sample.with_context(|| contender.name())?);
    }
    let link = link_bytes_per_second(stage);
    GuestReport::of(stage.part, link, contenders, &samples).context("a measurement has no figures")
}

async fn sterna(stage: &Stage<'_>, way: Way) -> anyhow::Result<GuestSample> {
    let servers = stage.sternas(way).await?;
    drop_caches(&[stage.source]).await?;
    let process = servers.source.process_id();
    let order = MigrateVolume::to(servers.store());
    let migration = async {
        let begun_ms = now_ms();
        let mut copying_ms = begun_ms;
        let seen = |migration: &api::Migration| {
            if migration.phase == Phase::Copying {
                copying_ms = now_ms();
            }
        };
        let migrated = servers.source.migrate(&servers.volume.name, &order, seen);
        let switched = timeout(give_up_after(stage), migrated).await.ok().transpose()?;
        Ok(Course { begun_ms, switched_ms: switched.map(|_| copying_ms), ended_ms: now_ms() })
    };
    let (requests, course) = under_guest(stage, &servers.volume.uri, process, migration).await?;
    let sample = sample(stage, &requests, course)?;
    let Some(switched_ms) = course.switched_ms else {
        // An unfinished migration needs no orderly end.
        drop(servers);
        return given_up(stage, sample);
    };
    let except = requests.written_since(switched_ms.saturating_sub(SWITCH_SLACK_MS));
    stage.finish_sternas(servers, except).await?;
    Ok(sample)
}

async fn storage_daemon(stage: &Stage<'_>, mode: CopyMode) -> anyhow::Result<GuestSample> {
    let mut servers = stage.storage_daemons().await?;
    drop_caches(&[stage.source]).await?;
    let (uri, process) = (servers.source.uri().to_owned(), servers.source.process_id()?);
    let migration = async {
        let (begun_ms, mut ready_ms) = (now_ms(), None);
        let (source, target) = StorageDaemons::NODES;
        let mirrored = servers.source.mirror(source, target, mode, || ready_ms = Some(now_ms()));
        let switched = timeout(give_up_after(stage), mirrored).await.ok().transpose()?;
        Ok(Course { begun_ms, switched_ms: switched.and(ready_ms), ended_ms: now_ms() })
    };
    let (requests, course) = under_guest(stage, &uri, process, migration).await?;
    let sample = sample(stage, &requests, course)?;
    let Some(switched_ms) = course.switched_ms else {
        drop(servers);
        return given_up(stage, sample);
    };
    servers.stop().await?;
    let except = requests.written_since(switched_ms.saturating_sub(SWITCH_SLACK_MS));
    stage.verify([stage.source, &stage.target], except).await?;
    Ok(sample)
}

async fn under_guest(
    stage: &Stage<'_>,
    uri: &str,
    process: u32,
    migration: impl Future<Output = anyhow::Result<Course>>,
) -> anyhow::Result<(Requests, Course)> {
    let limit = Limit::Bytes(LINK_RATES * link_bytes_per_second(stage) as u64);
    let load = Load { job: JOB, limit: Some(limit) };
    let guest = Guest::start(uri, stage.options.bench.size_bytes, load, stage.folder)?;
    wait_for_guest(process).await?;
    sleep(Duration::from_secs(stage.options.seconds.into())).await;
    let course = migration.await?;
    Ok((guest.stop().await?, course))
}

fn given_up(stage: &Stage<'_>, sample: GuestSample) -> anyhow::Result<GuestSample> {
    stage.delete_target()?;
    Ok(sample)
}

fn sample(stage: &Stage<'_>, requests: &Requests, course: Course) -> anyhow::Result<GuestSample> {
    let Course { begun_ms, switched_ms, ended_ms } = course;
    let margin_ms = u64::from(stage.options.seconds) * 1000;
    let before = requests.felt(begun_ms - margin_ms..begun_ms).context("before the migration")?;
    let during = requests.felt(begun_ms..ended_ms).context("during the migration")?;
    let block_bytes = f64::from(JOB.block_bytes);
    Ok(GuestSample {
        has_ended: switched_ms.is_some(),
        seconds: ended_ms.saturating_sub(begun_ms) as f64 / 1e3,
        written_bytes_per_second_before: before.iops * block_bytes,
        written_bytes_per_second: during.iops * block_bytes,
        worst_latency_ms: during.worst_latency_ms,
        p99_latency_ms: during.p99_latency_ms,
        moments: requests.moments(begun_ms - margin_ms..ended_ms, begun_ms),
    })
}

fn link_bytes_per_second(stage: &Stage<'_>) -> f64 {
    stage.links().map(|(rate, _)| rate.bytes_per_second()).sum()
}

fn give_up_after(stage: &Stage<'_>) -> Duration {
    let once = stage.options.bench.size_bytes as f64 / link_bytes_per_second(stage);
    Duration::from_secs_f64(once) * TIMES_MAX + GIVE_UP_AFTER_MIN
}
