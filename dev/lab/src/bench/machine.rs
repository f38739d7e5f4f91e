//! `bench machine`: the downtime of a VM that moves, beside QEMU's own migration of the same VM.
//!
//! ```text
//!   Sterna:  daemon a ──► daemon b, and back in the next round     memory and disk move, one commit point
//!   QEMU:    process  ──► process, and on to the next one          memory moves; both sides are clients of one volume
//! ```
//!
//! Both VMs boot from the same image with the same devices. Both run all the time, so that each moves beside the same neighbour.
//! Loopback is the only link between the hosts: the difference is the handover of the disk, without a network.

mod peer;

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use api::{MigrateVolume, Strategy};
use serde_json::json;
use testbed::Folder;
use tokio::time::{Duration, sleep};

use self::peer::Peer;
use super::Common;
use super::metric::{Metric, Unit};
use super::migration::AT_FULL_SPEED;
use super::report::{Comparison, Sample, Section};
use super::runner::{About, Ground, Part, Scenario, Turn};
use super::tools::SYSTEM_EMULATOR;
use crate::demo::{Bytes, DemoGuest as _, HostsLink, HostsPair, Progress, STORES, StoppedDemoGuest as _};
use crate::vm::{GuestImage, Vm, VmOptions};

/// Measures the downtime of VMs that move, beside QEMU's own migration.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct MachineOptions {
    #[command(flatten)]
    common: Common,
    /// The folder that holds the VMs' kernel and initramfs; by default the one that `make demo` fills.
    #[arg(long, value_name = "DIR")]
    image: Option<PathBuf>,
}

const HELP: &str = "\
Examples:
  sterna bench machine
  sterna bench machine --rounds 9 --json > machine.json

Two machines in QEMU do the same beside each other, first nothing and then work on their disks. One is moved by temporary \
daemons, with its memory and its disk; the other by QEMU alone, from process to process, with its memory: both \
processes are clients of one volume. Each disk has 256 MiB, and there are 5 rounds, unless you say otherwise. It needs no root and \
leaves nothing behind; it needs QEMU and the guest image (scripts/install-packages demo, scripts/guest-image). Let the machine be \
idle meanwhile.";

/// What the VMs do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    name: &'static str,
    title: &'static str,
    workers: u32,
}

const LOADS: [Load; 2] = [
    Load { name: "idle", title: "How long a VM is paused that does nothing", workers: 0 },
    Load { name: "busy", title: "How long a VM is paused that works on its disk", workers: 4 },
];

#[derive(Clone, Copy, Debug)]
pub(super) enum Mover {
    Sterna,
    Qemu,
}

const DOWNTIME: Metric = Metric::less("downtime_ms", "DOWNTIME ms", Unit::Milliseconds);
const MEMORY: Metric = Metric::less("memory_ms", "OF WHICH MEMORY", Unit::Milliseconds);
const ADDED: Metric =
    Metric::less("added_ms", "moving the disk, too, adds (in milliseconds)", Unit::Milliseconds);

const MOVED: &str = "moved";
const SHARED: &str = "shared";
/// Memory of either VM, but for 8 KiB.
const RAM_BYTES: u64 = 256 << 20;
const REST: Duration = Duration::from_secs(1);

impl Scenario for MachineOptions {
    type Case = Load;
    type Stage = Stage;
    type Variant = Mover;

    fn about(&self) -> anyhow::Result<About> {
        GuestImage::find(self.image.as_deref())?;
        Ok(About {
            name: "machine",
            title: "VMs that move, beside QEMU's own migration",
            words: format!(
                "Half of the image is data; it is the disk of VMs of {}. Each VM's memory and disk were verified.",
                Bytes(RAM_BYTES)
            ),
            tools: &[SYSTEM_EMULATOR],
            // The third image: while one disk moves, both hosts hold it.
            images: 3,
            usual: (5, 256 << 20),
            settings: json!({ "memory_bytes": RAM_BYTES }),
        })
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn stages(&self, _: &Ground<'_>) -> Vec<Vec<Part<Load, Mover>>> {
        let part = |load: Load| {
            let added = Comparison { of: DOWNTIME, rows: &["sterna"], beside: &["qemu"], gives: ADDED };
            let section = Section {
                name: load.name.to_owned(),
                title: load.title.to_owned(),
                columns: vec![DOWNTIME, MEMORY],
                comparisons: vec![added],
                ..Section::default()
            };
            let variants = vec![("sterna", Mover::Sterna), ("qemu", Mover::Qemu)];
            vec![Part { section, points: vec![(None, load)], variants }]
        };
        LOADS.map(part).into()
    }

    async fn set(&self, ground: &Ground<'_>, load: Load, progress: &mut Progress) -> anyhow::Result<Stage> {
        progress.begin(&format!("{}: starting two hosts and two VMs", load.name));
        let hosts = || Folder::create(ground.folder.root(), STORES);
        let folders = [hosts()?, hosts()?];
        let pair = HostsPair::start(ground.program, &folders, &HostsLink::direct()).await?;
        let machine = VmOptions {
            workers: load.workers,
            fill_bytes: ground.size_bytes / 2,
            ..VmOptions::new(GuestImage::find(self.image.as_deref())?)
        };
        match start_vms(ground, machine, &folders, &pair).await {
            Ok((moved, peer)) => Ok(Stage { folders, pair, moved, peer }),
            Err(error) => {
                let error = pair.with_logs(error);
                pair.stop().await?;
                Err(error)
            }
        }
    }

    async fn play(
        &self,
        _: &Ground<'_>,
        stage: &mut Stage,
        turn: Turn<'_, Load, Mover>,
    ) -> anyhow::Result<Vec<Sample>> {
        sleep(REST).await;
        Ok(vec![match turn.variant {
            Mover::Sterna => {
                let downtime = stage.migrate(turn.round).await?;
                Sample::of([(DOWNTIME, downtime.total_ms), (MEMORY, downtime.memory_ms)])
            }
            Mover::Qemu => Sample::of([(DOWNTIME, stage.peer.migrate().await?)]),
        }])
    }

    async fn end(
        &self,
        stage: Stage,
        played: anyhow::Result<()>,
        progress: &mut Progress,
    ) -> anyhow::Result<()> {
        let Stage { folders, pair, moved, peer } = stage;
        let verified = match played {
            Ok(()) => verify([moved, peer.machine], progress).await,
            failed => failed,
        };
        let verified = verified.map_err(|error| pair.with_logs(error));
        let stopped = pair.stop().await;
        verified?;
        stopped?;
        folders.into_iter().try_for_each(Folder::remove)
    }
}

/// Two hosts and two VMs: one that Sterna moves, and one that QEMU moves.
pub(super) struct Stage {
    folders: [Folder; 2],
    pair: HostsPair,
    moved: Vm,
    peer: Peer,
}

async fn start_vms(
    ground: &Ground<'_>,
    machine: VmOptions,
    folders: &[Folder; 2],
    pair: &HostsPair,
) -> anyhow::Result<(Vm, Peer)> {
    let store = STORES[0];
    pair.near.create_volume(MOVED, ground.size_bytes, store).await?;
    let moved = Vm::expect(&folders[0].path("moved.console"), machine.clone())?;
    let definition = moved.definition(&[MOVED], &[])?;
    pair.near.start_vm(MOVED, definition).await?;
    let shared = pair.near.create_volume(SHARED, ground.size_bytes, store).await?;
    let peer = Peer::start(&folders[0], &shared.uri.parse()?, machine).await?;
    moved.begins_to_work().await?;
    peer.machine.begins_to_work().await?;
    Ok((moved, peer))
}

impl Stage {
    async fn migrate(&self, round: usize) -> anyhow::Result<api::MachineDowntime> {
        let (from, to, name) = match round % 2 {
            0 => (&self.pair.near, &self.pair.far, "b"),
            _ => (&self.pair.far, &self.pair.near, "a"),
        };
        let store = format!("{name}:{}", STORES[0]);
        let order = MigrateVolume {
            impact_percent: AT_FULL_SPEED,
            strategy: Strategy::Mirror,
            ..MigrateVolume::to(store)
        };
        let migration = from.migrate(MOVED, &order, |_| {}).await?;
        to.runs(MOVED).await?;
        let machine = migration.machine.context("the daemon does not tell of the VM")?;
        machine.downtime.context("the daemon does not tell how long the VM stood")
    }
}

async fn verify(vms: [Vm; 2], progress: &mut Progress) -> anyhow::Result<()> {
    for vm in vms {
        let wrong = vm.stop_and_verify(progress).await?.wrong();
        ensure!(wrong.count == 0, "a VM has found {} wrong: {:?}", wrong.count, wrong.first);
    }
    Ok(())
}
