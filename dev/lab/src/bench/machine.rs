//! `bench machine`: the downtime of a VM that moves, beside QEMU's own migration of the same VM.
//!
//! ```text
//!   Sterna:  daemon a ──► daemon b, and back in the next round     memory and disk move, one commit point
//!   QEMU:    process  ──► process, and on to the next one          memory moves; both sides are clients of one volume
//!
//!   load ─ round ─ Sterna │ QEMU       idle: nothing but ticks; busy: the disk is worked on
//! ```
//!
//! Both VMs boot from the same image with the same devices. Both run all the time, so that each moves beside the same neighbour.
//! Loopback is the only link between the hosts: the difference is the handover of the disk, without a network.

mod figures;
mod peer;
mod table;

use anyhow::{Context as _, ensure};
use api::MigrateVolume;
use testbed::Folder;
use tokio::time::{Duration, sleep};

pub use self::figures::{LoadFigures, MachineReport};
use self::peer::Peer;
use super::folder::BenchFolder;
use super::{BenchOptions, Environment, Summary, Versions, in_folder};
use crate::bench::tools::SYSTEM_EMULATOR;
use crate::demo::{DemoGuest as _, HostsLink, HostsPair, Progress, STORES, StoppedDemoGuest as _};
use crate::vm::{GuestImage, StoppedVm, Vm, VmOptions};

/// The options of `bench machine`.
#[derive(Clone, Debug)]
pub struct MachineBenchOptions {
    /// The options that all benchmarks share; the size is that of each VM's disk.
    pub bench: BenchOptions,
    /// The image from which the VMs boot.
    pub image: GuestImage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    Idle,
    Busy,
}

impl Load {
    const ALL: [Self; 2] = [Self::Idle, Self::Busy];

    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Busy => "busy",
        }
    }

    fn workers(self) -> u32 {
        match self {
            Self::Idle => 0,
            Self::Busy => 4,
        }
    }
}

const MOVED: &str = "moved";
/// Memory of either VM, but for 8 KiB.
const RAM_BYTES: u64 = 256 << 20;
const SHARED: &str = "shared";
const REST: Duration = Duration::from_secs(1);

/// Runs the benchmark. Fails if something is missing, or if a VM's memory or disk has changed; the error ends with the daemons'
/// logs. A signal ends it in order, with [`crate::demo::Interrupted`].
pub async fn run(options: &MachineBenchOptions, progress: &mut Progress) -> anyhow::Result<MachineReport> {
    let mut versions = Versions::new();
    versions.insert("sterna".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    versions.insert(SYSTEM_EMULATOR.program.to_owned(), SYSTEM_EMULATOR.version().await?);
    let bench = &options.bench;
    // The third image: while one disk moves, both hosts hold it.
    let folder = BenchFolder::create(bench.parent.as_deref(), 3, bench.size_bytes)?;
    let environment = Environment::of(folder.root(), versions).await?;
    in_folder(folder, progress, async |folder, progress| {
        let mut loads = Vec::new();
        for load in Load::ALL {
            loads.push(measure(options, load, folder, progress).await?);
        }
        let (size_bytes, rounds) = (bench.size_bytes, bench.rounds);
        Ok(MachineReport { environment, size_bytes, memory_bytes: RAM_BYTES, rounds, loads })
    })
    .await
}

async fn measure(
    options: &MachineBenchOptions,
    load: Load,
    folder: &BenchFolder,
    progress: &mut Progress,
) -> anyhow::Result<LoadFigures> {
    progress.begin(&format!("{}: starting two hosts and two VMs", load.name()));
    let hosts = || Folder::create(folder.root(), STORES);
    let folders = [hosts()?, hosts()?];
    let pair = HostsPair::start(&options.bench.program, &folders, &HostsLink::direct()).await?;
    let measured = match Stage::set(options, load, &folders, &pair).await {
        Ok(stage) => stage.measure(options.bench.rounds, progress).await,
        Err(error) => Err(error),
    };
    let measured = measured.map_err(|error| pair.with_logs(error));
    let stopped = pair.stop().await;
    let figures = measured?;
    stopped?;
    folders.into_iter().try_for_each(Folder::remove)?;
    Ok(figures)
}

struct Stage<'a> {
    load: Load,
    pair: &'a HostsPair,
    moved: Vm,
    peer: Peer,
}

impl<'a> Stage<'a> {
    async fn set(
        options: &MachineBenchOptions,
        load: Load,
        folders: &[Folder; 2],
        pair: &'a HostsPair,
    ) -> anyhow::Result<Self> {
        let MachineBenchOptions { bench, image } = options;
        let store = STORES[0];
        let machine = VmOptions {
            workers: load.workers(),
            fill_bytes: bench.size_bytes / 2,
            ..VmOptions::new(image.clone())
        };
        let path = |name: &str| folders[0].path(name);
        pair.near.create_volume(MOVED, bench.size_bytes, store).await?;
        let moved = Vm::expect(&path("moved.console"), machine.clone())?;
        let definition = moved.definition(&[MOVED], &[])?;
        pair.near.start_vm(MOVED, definition).await?;
        let shared = pair.near.create_volume(SHARED, bench.size_bytes, store).await?;
        let peer = Peer::start(&folders[0], &shared.uri.parse()?, machine).await?;
        moved.begins_to_work().await?;
        peer.machine.begins_to_work().await?;
        Ok(Self { load, pair, moved, peer })
    }

    async fn measure(mut self, rounds: u32, progress: &mut Progress) -> anyhow::Result<LoadFigures> {
        let (mut sterna, mut memory, mut qemu) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..rounds {
            // The contender that begins changes from round to round.
            for turn in 0..2 {
                let mine = (round + turn) % 2 == 0;
                let who = if mine { "sterna" } else { "qemu" };
                progress.begin(&format!("{}: round {} of {rounds}: {who}", self.load.name(), round + 1));
                sleep(REST).await;
                if mine {
                    let downtime = self.migrate(round).await?;
                    sterna.push(downtime.total_ms);
                    memory.push(downtime.memory_ms);
                } else {
                    qemu.push(self.peer.migrate().await?);
                }
            }
        }
        let name = self.load.name();
        for stopped in
            [self.moved.stop_and_verify(progress).await?, self.peer.machine.stop_and_verify(progress).await?]
        {
            check(&stopped)?;
        }
        let summary = |samples| Summary::of(samples).context("nothing was measured");
        LoadFigures::of(name, summary(sterna)?, summary(memory)?, summary(qemu)?)
    }

    async fn migrate(&self, round: u32) -> anyhow::Result<api::MachineDowntime> {
        let (from, to, name) = match round % 2 {
            0 => (&self.pair.near, &self.pair.far, "b"),
            _ => (&self.pair.far, &self.pair.near, "a"),
        };
        let store = format!("{name}:{}", STORES[0]);
        let migration = from.migrate(MOVED, &MigrateVolume::to(store), |_| {}).await?;
        to.runs(MOVED).await?;
        let machine = migration.machine.context("the daemon does not tell of the VM")?;
        machine.downtime.context("the daemon does not tell how long the VM stood")
    }
}

fn check(stopped: &StoppedVm) -> anyhow::Result<()> {
    let wrong = stopped.wrong();
    ensure!(wrong.count == 0, "a VM has found {} wrong: {:?}", wrong.count, wrong.first);
    Ok(())
}
