//! Copies of an unused image: how much of the link they use.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::{MigrateVolume, Migration};
use tokio::time::sleep;

use super::figures::{CopyReport, CopySample};
use super::stage::{Stage, StorageDaemons, Way};
use super::{Contender, show_turn, turns};
use crate::bench::image::{Blocks, drop_caches};
use crate::bench::server::CopyMode;
use crate::demo::Progress;
use crate::network::measure::Flow;

/// Pause between checks whether TCP is done: a ten-thousandth of the time it takes.
const PAUSE: Duration = Duration::from_millis(2);

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
            Contender::Sterna => sterna(stage, Way::Host).await,
            Contender::SternaNbd => sterna(stage, Way::NbdStore).await,
            Contender::Background => storage_daemon(stage, CopyMode::Background).await,
            Contender::WriteBlocking => storage_daemon(stage, CopyMode::WriteBlocking).await,
        };
        samples[index].push(sample.with_context(|| contender.name())?);
    }
    let size_bytes = stage.options.bench.size_bytes;
    CopyReport::of(stage.part, round_trip, size_bytes, contenders, &samples)
        .context("a measurement has no figures")
}

/// Sends as many bytes as the image has from memory to memory. Each link carries its share; the time ends with the last.
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
    let mut pace = Pace::default();
    while !flows.iter().all(Flow::has_ended) {
        pace.note(flows.iter().map(Flow::received_bytes).sum());
        sleep(PAUSE).await;
    }
    let seconds = begun.elapsed().as_secs_f64();
    pace.note(flows.iter().map(Flow::received_bytes).sum());
    let received = flows.into_iter().map(Flow::wait).sum::<Result<u64, _>>()?;
    // Shares are rounded down to whole bytes.
    ensure!(received + 2 >= size_bytes, "TCP has brought {received} bytes of {size_bytes}");
    Ok(CopySample { seconds, second_half: pace.of_second_half(size_bytes) })
}

/// Measures from the order to the answer that the volume is at the target: with checks, journal and switch.
async fn sterna(stage: &Stage<'_>, way: Way) -> anyhow::Result<CopySample> {
    let servers = stage.sternas(way).await?;
    drop_caches(&[stage.source]).await?;
    let begun = Instant::now();
    let mut pace = Pace::default();
    let seen = |migration: &Migration| pace.note(migration.bytes_copied);
    servers.source.migrate(&servers.volume.name, &MigrateVolume::to(servers.store()), seen).await?;
    let seconds = begun.elapsed().as_secs_f64();
    stage.finish_sternas(servers, Blocks::default()).await?;
    Ok(CopySample { seconds, second_half: pace.of_second_half(stage.options.bench.size_bytes) })
}

/// Measures from the order to the end of the job and a flush: QEMU's mirror does not wait for the disk.
async fn storage_daemon(stage: &Stage<'_>, mode: CopyMode) -> anyhow::Result<CopySample> {
    let mut servers = stage.storage_daemons().await?;
    drop_caches(&[stage.source]).await?;
    let begun = Instant::now();
    let (source, target) = StorageDaemons::NODES;
    servers.source.mirror(source, target, mode, || {}).await?;
    stage.flush().await?;
    let seconds = begun.elapsed().as_secs_f64();
    servers.stop().await?;
    stage.verify([stage.source, &stage.target], Blocks::default()).await?;
    Ok(CopySample { seconds, second_half: None })
}

/// The progress of a copy over time, for its speed after the beginning.
#[derive(Debug, Default)]
struct Pace {
    seen: Vec<(Instant, u64)>,
}

impl Pace {
    fn note(&mut self, bytes: u64) {
        if self.seen.last().is_none_or(|(_, before)| *before < bytes) {
            self.seen.push((Instant::now(), bytes));
        }
    }

    /// Returns bytes per second from the middle of `all` bytes to their end; `None` if there are too few readings.
    fn of_second_half(&self, all: u64) -> Option<f64> {
        let (began, before) = self.seen.iter().find(|(_, bytes)| *bytes >= all / 2)?;
        let (ended, after) = self.seen.last()?;
        let seconds = ended.duration_since(*began).as_secs_f64();
        (seconds > 0.0).then(|| (after - before) as f64 / seconds)
    }
}
