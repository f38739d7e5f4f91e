//! Copies of an image that nobody uses: what of the link is used.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tokio::time::sleep;

use super::figures::{CopyReport, CopySample};
use super::stage::{Stage, Sternas, StorageDaemons};
use super::{Contender, show_turn, turns};
use crate::bench::image::{Blocks, drop_caches};
use crate::bench::server::CopyMode;
use crate::demo::Progress;
use crate::network::measure::Flow;

/// How often it is looked whether TCP is done: a ten-thousandth of what it takes.
const PAUSE: Duration = Duration::from_millis(2);

/// Copies round after round.
pub(super) async fn measure(stage: &Stage<'_>, progress: &mut Progress) -> anyhow::Result<CopyReport> {
    let contenders = Contender::COPY;
    let rounds = stage.options.bench.rounds;
    let round_trip = stage.round_trip().await?;
    let mut samples = vec![Vec::new(); contenders.len()];
    for (round, index) in turns(rounds, contenders) {
        let contender = contenders[index];
        show_turn(progress, stage.part, (round, rounds), contender);
        let sample = match contender {
            Contender::Tcp => tcp(stage).await,
            Contender::SternaNbd => sterna(stage).await,
            Contender::Background => storage_daemon(stage, CopyMode::Background).await,
            Contender::WriteBlocking => storage_daemon(stage, CopyMode::WriteBlocking).await,
        };
        samples[index].push(sample.with_context(|| contender.name())?);
    }
    let size_bytes = stage.options.bench.size_bytes;
    CopyReport::of(stage.part, round_trip, size_bytes, contenders, &samples)
        .context("a measurement has no figures")
}

/// As many bytes as the image has, from memory to memory: each link gets its share, and the last to end counts.
async fn tcp(stage: &Stage<'_>) -> anyhow::Result<CopySample> {
    let all: u64 = stage.links().map(|(rate, _)| rate.bits_per_second()).sum();
    let size_bytes = stage.options.bench.size_bytes;
    let begun = Instant::now();
    let mut flows = Vec::new();
    for (rate, address) in stage.links() {
        let share = size_bytes as f64 * (rate.bits_per_second() as f64 / all as f64);
        let (source, target) = (stage.source_host().clone(), stage.target_host().clone());
        let start = move || Flow::start(&source, &target, address, Some(share as u64));
        flows.push(tokio::task::spawn_blocking(start).await??);
    }
    while !flows.iter().all(Flow::has_ended) {
        sleep(PAUSE).await;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let received = flows.into_iter().map(Flow::wait).sum::<Result<u64, _>>()?;
    // A share is cut to whole bytes.
    ensure!(received + 2 >= size_bytes, "TCP has brought {received} bytes of {size_bytes}");
    Ok(CopySample { seconds })
}

/// From the order to the answer that the volume is at the target: checks, journal and switch-over are part of it.
async fn sterna(stage: &Stage<'_>) -> anyhow::Result<CopySample> {
    let servers = stage.sternas().await?;
    drop_caches(&[stage.source]).await?;
    let begun = Instant::now();
    servers.source.migrate(&servers.volume.name, Sternas::STORE, |_| {}).await?;
    let seconds = begun.elapsed().as_secs_f64();
    servers.stop().await?;
    let source = stage.fenced_source()?;
    stage.verify(&source, Blocks::default()).await?;
    std::fs::rename(&source, stage.source).context("put the source's image back")?;
    Ok(CopySample { seconds })
}

/// From the order to the end of the job, and a flush: QEMU's mirror does not wait for the disk.
async fn storage_daemon(stage: &Stage<'_>, mode: CopyMode) -> anyhow::Result<CopySample> {
    let mut servers = stage.storage_daemons().await?;
    drop_caches(&[stage.source]).await?;
    let begun = Instant::now();
    let (source, target) = StorageDaemons::NODES;
    servers.source.mirror(source, target, mode, || {}).await?;
    stage.flush().await?;
    let seconds = begun.elapsed().as_secs_f64();
    servers.stop().await?;
    stage.verify(stage.source, Blocks::default()).await?;
    Ok(CopySample { seconds })
}
