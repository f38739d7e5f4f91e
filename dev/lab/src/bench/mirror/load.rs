//! Migrations under a guest that makes as many requests as it can.
//!
//! Afterwards source and target are compared, except for the blocks that the guest has written since the switch: only the target
//! has them. Other tests check, with guests that know their data, that the guest reads what it wrote.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{MigrateVolume, Phase};
use tokio::time::sleep;

use super::figures::{LoadReport, LoadSample};
use super::{
    BenchFolder, Contender, Holes, MirrorOptions, Part, Progress, Stage, Sterna, StorageDaemon, cpu_seconds,
    drop_caches, show_turn,
};
use crate::bench::guest::{Guest, Load, Requests, now_ms, wait_for_guest};
use crate::demo::STORES;

/// A switch may have begun this much before it was seen: events arrive late, and clocks are rounded.
const SWITCH_SLACK_MS: u64 = 250;

#[derive(Clone, Copy, Debug)]
struct Course {
    begun_ms: u64,
    /// Until this time every write also went to the source.
    switched_ms: u64,
    ended_ms: u64,
    server_cpu_seconds: f64,
}

pub(super) async fn measure(
    options: &MirrorOptions,
    folder: &BenchFolder,
    progress: &mut Progress,
) -> anyhow::Result<LoadReport> {
    let stage = Stage::set(options, folder, Holes::None, progress).await?;
    let rounds = options.bench.rounds;
    let contenders = Contender::LOAD;
    let mut samples: [Vec<LoadSample>; 3] = Default::default();
    for round in 0..rounds as usize {
        for place in 0..contenders.len() {
            let index = (place + round) % contenders.len();
            let contender = contenders[index];
            show_turn(progress, Part::Load, (round, rounds), contenders.len(), place);
            progress.note(contender.name());
            let sample = measure_one(&stage, contender).await;
            samples[index].push(sample.with_context(|| contender.name())?);
        }
    }
    LoadReport::of(options.guest_iops, &samples).context("a measurement has no figures")
}

async fn measure_one(stage: &Stage<'_>, contender: Contender) -> anyhow::Result<LoadSample> {
    match contender.copy_mode() {
        None => {
            let server = Sterna::start(&stage.options.bench.program, stage.folder, &stage.source).await?;
            drop_caches(&[&stage.source]).await?;
            let (uri, process) = (server.volume.uri.clone(), server.daemon.process_id());
            let (requests, (course, target)) = under_guest(stage, &uri, process, migrate(&server)).await?;
            let sample = sample(stage, &requests, course)?;
            let except = requests.written_since(course.switched_ms);
            let finished = stage.finish_sterna(server, target.as_ref(), except).await?;
            Ok(LoadSample { compared_bytes: finished.compared_bytes, ..sample })
        }
        Some(mode) => {
            stage.make_target()?;
            let images = [("source", stage.source.as_path()), ("target", stage.target.as_path())];
            let mut server = StorageDaemon::start(stage.folder, &images).await?;
            drop_caches(&[&stage.source, &stage.target]).await?;
            let (uri, process) = (server.uri().to_owned(), server.process_id()?);
            let mirror = async {
                let cpu = server.cpu_time()?;
                let (begun_ms, mut switched_ms) = (now_ms(), None);
                server.mirror("source", "target", mode, || switched_ms = Some(now_ms())).await?;
                let ended_ms = now_ms();
                let switched_ms = switched_ms.context("the mirror ended before it was ready")?;
                let server_cpu_seconds = cpu_seconds(cpu, server.cpu_time()?);
                let switched_ms = switched_ms.saturating_sub(SWITCH_SLACK_MS);
                Ok(Course { begun_ms, switched_ms, ended_ms, server_cpu_seconds })
            };
            let (requests, course) = under_guest(stage, &uri, process, mirror).await?;
            let sample = sample(stage, &requests, course)?;
            let except = requests.written_since(course.switched_ms);
            let finished = stage.finish_storage_daemon(server, except).await?;
            Ok(LoadSample { compared_bytes: finished.compared_bytes, ..sample })
        }
    }
}

async fn migrate(server: &Sterna) -> anyhow::Result<(Course, String)> {
    let cpu = server.cpu_time()?;
    let begun_ms = now_ms();
    let mut copying_ms = begun_ms;
    let seen = |migration: &api::Migration| {
        if migration.phase == Phase::Copying {
            copying_ms = now_ms();
        }
    };
    let migration = server.daemon.migrate(&server.volume.name, &MigrateVolume::to(STORES[1]), seen).await?;
    let ended_ms = now_ms();
    let server_cpu_seconds = cpu_seconds(cpu, server.cpu_time()?);
    let switched_ms = copying_ms.saturating_sub(SWITCH_SLACK_MS);
    Ok((Course { begun_ms, switched_ms, ended_ms, server_cpu_seconds }, migration.target.image))
}

async fn under_guest<T>(
    stage: &Stage<'_>,
    uri: &str,
    process: u32,
    migration: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<(Requests, T)> {
    let MirrorOptions { bench, seconds, guest_iops, .. } = stage.options;
    let margin = Duration::from_secs((*seconds).into());
    let guest = Guest::start(uri, bench.size_bytes, Load::database(*guest_iops), stage.folder)?;
    wait_for_guest(process).await?;
    sleep(margin).await;
    let migrated = migration.await?;
    sleep(margin).await;
    Ok((guest.stop().await?, migrated))
}

fn sample(stage: &Stage<'_>, requests: &Requests, course: Course) -> anyhow::Result<LoadSample> {
    let margin_ms = u64::from(stage.options.seconds) * 1000;
    let Course { begun_ms, ended_ms, server_cpu_seconds, .. } = course;
    let before = requests.felt(begun_ms - margin_ms..begun_ms).context("before the migration")?;
    let during = requests.felt(begun_ms..ended_ms).context("during the migration")?;
    let after = requests.felt(ended_ms..ended_ms + margin_ms).context("after the migration")?;
    ensure!(before.iops > 0.0, "the guest did nothing before the migration: measure for longer");
    let seconds = ended_ms.saturating_sub(begun_ms) as f64 / 1e3;
    let lost = 1.0 - during.iops / before.iops;
    Ok(LoadSample {
        seconds,
        iops_before: before.iops,
        iops_during: during.iops,
        iops_after: after.iops,
        iops_lost: lost,
        seconds_times_lost: seconds * lost,
        worst_latency_ms: during.worst_latency_ms,
        p99_latency_ms: during.p99_latency_ms,
        worst_latency_before_ms: before.worst_latency_ms,
        server_cpu_seconds,
        compared_bytes: 0,
        moments: requests.moments(begun_ms - margin_ms..ended_ms + margin_ms, begun_ms),
    })
}
