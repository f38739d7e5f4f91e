//! Copies of an image that nobody uses: what of the link is used.

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
    let mut pace = Pace::default();
    while !flows.iter().all(Flow::has_ended) {
        pace.note(flows.iter().map(Flow::received_bytes).sum());
        sleep(PAUSE).await;
    }
    let seconds = begun.elapsed().as_secs_f64();
    pace.note(flows.iter().map(Flow::received_bytes).sum());
    let received = flows.into_iter().map(Flow::wait).sum::<Result<u64, _>>()?;
    // A share is cut to whole bytes.
    ensure!(received + 2 >= size_bytes, "TCP has brought {received} bytes of {size_bytes}");
    Ok(CopySample { seconds, second_half: pace.of_second_half(size_bytes) })
}

/// From the order to the answer that the volume is at the target: checks, journal and switch-over are part of it.
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
    stage.verify([stage.source, &stage.target], Blocks::default()).await?;
    Ok(CopySample { seconds, second_half: None })
}

/// How many bytes had been brought when: what a copy does once it has found out what the link carries.
#[derive(Debug, Default)]
struct Pace {
    /// When a number of bytes was first seen, in order.
    seen: Vec<(Instant, u64)>,
}

impl Pace {
    fn note(&mut self, bytes: u64) {
        if self.seen.last().is_none_or(|(_, before)| *before < bytes) {
            self.seen.push((Instant::now(), bytes));
        }
    }

    /// Bytes a second from the middle of so many to their end; `None` if too few were seen on the way.
    fn of_second_half(&self, all: u64) -> Option<f64> {
        let (began, before) = self.seen.iter().find(|(_, bytes)| *bytes >= all / 2)?;
        let (ended, after) = self.seen.last()?;
        let seconds = ended.duration_since(*began).as_secs_f64();
        (seconds > 0.0).then(|| (after - before) as f64 / seconds)
    }
}
