//! Copies of an unused image, a quarter of which is holes.

use std::ffi::OsStr;
use std::time::Instant;

use anyhow::Context as _;
use api::MigrateVolume;

use super::figures::{IdleReport, IdleSample};
use super::{
    BenchFolder, Blocks, Contender, CopyMode, Holes, MirrorOptions, Part, Progress, Stage, Sterna,
    StorageDaemon, cpu_seconds, drop_caches, show_turn,
};
use crate::bench::tools::{CP, QEMU_IMG};
use crate::demo::STORES;

pub(super) async fn measure(
    options: &MirrorOptions,
    folder: &BenchFolder,
    progress: &mut Progress,
) -> anyhow::Result<IdleReport> {
    let stage = Stage::set(options, folder, Holes::Quarter, progress).await?;
    let rounds = options.bench.rounds;
    let contenders = Contender::IDLE;
    let mut samples: [Vec<IdleSample>; 5] = Default::default();
    for round in 0..rounds as usize {
        for place in 0..contenders.len() {
            let index = (place + round) % contenders.len();
            show_turn(progress, Part::Idle, (round, rounds), contenders.len(), place);
            progress.note(contenders[index].name());
            let sample = measure_one(&stage, contenders[index]).await;
            samples[index].push(sample.with_context(|| contenders[index].name())?);
        }
    }
    let data_bytes = Holes::Quarter.data_bytes_of(options.bench.size_bytes);
    IdleReport::of(data_bytes, &samples).context("a measurement has no figures")
}

async fn measure_one(stage: &Stage<'_>, contender: Contender) -> anyhow::Result<IdleSample> {
    match contender {
        Contender::Sterna => sterna(stage).await,
        Contender::Cp => cp(stage).await,
        Contender::Convert => convert(stage).await,
        Contender::Background => storage_daemon(stage, CopyMode::Background).await,
        Contender::WriteBlocking => storage_daemon(stage, CopyMode::WriteBlocking).await,
    }
}

/// Measures from the order to the answer that the volume is at the target: with checks, journal and switch.
async fn sterna(stage: &Stage<'_>) -> anyhow::Result<IdleSample> {
    let server = Sterna::start(&stage.options.bench.program, stage.folder, &stage.source).await?;
    drop_caches(&[&stage.source]).await?;
    let cpu = server.cpu_time()?;
    let begun = Instant::now();
    let migration = server.daemon.migrate(&server.volume.name, &MigrateVolume::to(STORES[1]), |_| {}).await?;
    let seconds = begun.elapsed().as_secs_f64();
    let server_cpu_seconds = Some(cpu_seconds(cpu, server.cpu_time()?));
    let finished = stage.finish_sterna(server, migration.target.image.as_ref(), Blocks::default()).await?;
    Ok(IdleSample { seconds, server_cpu_seconds, allocated_bytes: finished.allocated_bytes })
}

/// Preserves holes, as the other contenders do. Cloned extents would copy nothing, and are switched off.
async fn cp(stage: &Stage<'_>) -> anyhow::Result<IdleSample> {
    let arguments = ["--reflink=never", "--sparse=auto"].map(OsStr::new);
    let arguments = [&arguments[..], &[stage.source.as_os_str(), stage.target.as_os_str()]].concat();
    off_line(stage, CP.run(&arguments)).await
}

/// Copies past the page cache on both sides, with eight requests in flight that may end in any order.
async fn convert(stage: &Stage<'_>) -> anyhow::Result<IdleSample> {
    let arguments = ["convert", "-f", "raw", "-O", "raw", "-T", "none", "-t", "none", "-W", "-m", "8"];
    let arguments = arguments.map(OsStr::new);
    let arguments = [&arguments[..], &[stage.source.as_os_str(), stage.target.as_os_str()]].concat();
    off_line(stage, QEMU_IMG.run(&arguments)).await
}

async fn off_line(
    stage: &Stage<'_>,
    copy: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<IdleSample> {
    drop_caches(&[&stage.source]).await?;
    let begun = Instant::now();
    copy.await?;
    Stage::flush(&stage.target).await?;
    let seconds = begun.elapsed().as_secs_f64();
    let finished = stage.finish_copy(Blocks::default()).await?;
    Ok(IdleSample { seconds, server_cpu_seconds: None, allocated_bytes: finished.allocated_bytes })
}

/// Measures from the order to the end of the job and a flush: QEMU's mirror does not wait for the disk.
async fn storage_daemon(stage: &Stage<'_>, mode: CopyMode) -> anyhow::Result<IdleSample> {
    stage.make_target()?;
    let images = [("source", stage.source.as_path()), ("target", stage.target.as_path())];
    let mut server = StorageDaemon::start(stage.folder, &images).await?;
    drop_caches(&[&stage.source, &stage.target]).await?;
    let cpu = server.cpu_time()?;
    let begun = Instant::now();
    server.mirror("source", "target", mode, || {}).await?;
    Stage::flush(&stage.target).await?;
    let seconds = begun.elapsed().as_secs_f64();
    let server_cpu_seconds = Some(cpu_seconds(cpu, server.cpu_time()?));
    let finished = stage.finish_storage_daemon(server, Blocks::default()).await?;
    Ok(IdleSample { seconds, server_cpu_seconds, allocated_bytes: finished.allocated_bytes })
}
