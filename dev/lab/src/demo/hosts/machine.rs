//! The demo with two hosts and a whole VM. It moves to the other host and back, with its disk, its memory and its
//! connection to a client outside.
//!
//! ```text
//!     host a: daemon, QEMU ◄────── link ──────► host b: daemon, QEMU         the hosts are paired
//!                 └────── switch ──── client ─────┘                          a network of its own, where there are namespaces
//!
//!     VM boots ─► works ─┬─ before ─┬─ there ─┬─ at b ─┬─ home ─┬─ after ─┐   client asks all the while
//!     report ◄─ compare the image file ◄─ daemons end ◄─ compare memory and disk ◄─┘
//! ```
//!
//! The demo always cleans up, as the other demos do: QEMU outlives daemons, so the demo ends it.

mod client;
mod report;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use api::{MigrateVolume, Strategy, Volume};
use testbed::Daemon;
use testbed::vm::NetworkCard;
use tokio::task::spawn_blocking;

use self::client::{Outcome, OutsideClient};
use super::link::{Link, LinkKind};
use super::pair::{Folders, Pair};
use super::travel::{Way, travel};
use super::{NAMES, STORE, in_folders, work};
use crate::demo::{
    DemoGuest as _, Felt, Interrupted, MARGIN, Progress, Signals, StoppedDemoGuest as _, Timeline, VOLUME,
};
use crate::network::{BitRate, Lan};
use crate::vm::{GuestImage, StoppedVm, Vm, VmOptions};
use crate::workload::{Baseline, Window};

pub use self::report::{Connection, DowntimeParts, MachineFigures, MachineReport, MachineWay};

const MACHINE: &str = "web";
const PORT: u16 = 80;
/// Bytes of memory that the VM checks: with kernel and programs about a third of its memory.
const MEMORY_CHECKED_BYTES: u64 = 64 << 20;
/// The options of the demo with a whole VM.
#[derive(Clone, Debug)]
pub struct MovedVmOptions {
    /// The program whose `serve` is the daemons: normally the running one.
    pub program: PathBuf,
    /// Where the temporary folders are made; `None`: the default place for temporary files, if it is on a disk.
    pub parent: Option<PathBuf>,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// The VM's image and workload.
    pub machine: VmOptions,
    /// How long the VM works before, between and after the migrations.
    pub margin: Duration,
    /// Number of migrations to the other host and back.
    pub round_trips: NonZeroU32,
    /// The kind of the hosts; `None`: namespaces if they can be made.
    pub kind: Option<LinkKind>,
    /// The link's rate in each direction.
    pub rate: BitRate,
    /// The strategy of all migrations.
    pub strategy: Strategy,
}

impl MovedVmOptions {
    /// Returns the demo with its default options and a disk of `disk_bytes`, half of which the VM fills at first. Fails if the
    /// VM's image is missing, in `image` or in its default folder.
    pub fn new(program: PathBuf, image: Option<&Path>, disk_bytes: u64) -> anyhow::Result<Self> {
        Ok(Self::with_image(program, GuestImage::find(image)?, disk_bytes))
    }

    /// Returns the same demo with a VM that boots from `image`.
    pub fn with_image(program: PathBuf, image: GuestImage, disk_bytes: u64) -> Self {
        let machine = VmOptions {
            fill_bytes: disk_bytes / 2,
            memory_bytes: MEMORY_CHECKED_BYTES,
            // The emulated processor needs some time for the client.
            workers: 4,
            ..VmOptions::new(image)
        };
        let rate = BitRate::megabits(1000);
        Self {
            program,
            parent: None,
            disk_bytes,
            machine,
            margin: MARGIN,
            round_trips: NonZeroU32::MIN,
            kind: None,
            rate,
            strategy: Strategy::Mirror,
        }
    }
}

/// Runs the demo with a whole VM. Fails with the daemons' logs, or with [`Interrupted`] after a signal. Wrong content and a lost
/// connection are not errors: the figures report them.
pub async fn run_vm(options: MovedVmOptions, progress: &mut Progress) -> anyhow::Result<MachineReport> {
    let disks = (options.parent.as_deref(), options.disk_bytes);
    in_folders(disks, progress, async |folders, signals, progress| {
        play(&options, folders, signals, progress).await
    })
    .await
}

struct Travelled {
    stopped: StoppedVm,
    machine: String,
    volume: Volume,
    before: Felt,
    /// The migrations, alternately to the other host and back.
    legs: Vec<Leg>,
    whole: Felt,
    timeline: Timeline,
    /// Total time in which the client, or the VM without one, was served worse than before; `None` if it did nothing before.
    disruption: Option<Duration>,
    /// `None` without a client.
    seen: Option<Seen>,
}

struct Leg {
    way: Way,
    /// The disk's figures afterwards, as a whole and in windows.
    after: (Felt, Vec<Window>),
    /// The longest time without an answer to the client; `None` without a client.
    gap: Option<Duration>,
}

struct Seen {
    outcome: Outcome,
    /// The longest time without an answer before the VM moved.
    gap_before: Duration,
}

async fn play(
    options: &MovedVmOptions,
    folders: &Folders,
    signals: &mut Signals,
    progress: &mut Progress,
) -> anyhow::Result<MachineReport> {
    progress.begin("starting the hosts");
    let (mut link, lan) = networks(options).await?;
    let console = folders[0].path("console");
    let machine =
        Vm::expect(&console, VmOptions { card: lan.as_ref().map(card), ..options.machine.clone() })?;
    let pair = signals.unless(Pair::start(&options.program, folders, &link)).await?;
    let journey = there_and_home(options, &pair, machine, (&mut link, lan.as_ref()), progress);
    let travelled = signals.unless(journey).await.map_err(|error| match error.is::<Interrupted>() {
        true => error,
        false => pair.with_logs(error),
    });
    let ended = pair.stop().await;
    let mut travelled = travelled?;
    ended?;
    let image = Path::new(&travelled.volume.image);
    signals.unless(travelled.stopped.verify_image(image, progress)).await?;
    report::report(travelled, options, link.description())
}

async fn networks(options: &MovedVmOptions) -> anyhow::Result<(Link, Option<Lan>)> {
    let link = Link::create(options.kind, options.rate)?;
    match link.lan() {
        Ok(lan) => Ok((link, lan)),
        Err(why) if options.kind.is_none() => {
            tracing::warn!(%why, "the VM is on no network");
            Ok((Link::create(Some(LinkKind::Loopback), options.rate)?, None))
        }
        Err(why) => Err(why).context("make a network for the VM"),
    }
}

fn card(lan: &Lan) -> NetworkCard {
    NetworkCard { tap: lan.tap().to_owned(), address: lan.guest(), port: PORT }
}

/// Starts the VM at the first host, moves it to the second and back, and lets it compare memory and disk.
async fn there_and_home(
    options: &MovedVmOptions,
    pair: &Pair,
    machine: Vm,
    (link, lan): (&mut Link, Option<&Lan>),
    progress: &mut Progress,
) -> anyhow::Result<Travelled> {
    let Pair { near, far } = pair;
    near.create_volume(VOLUME, options.disk_bytes, STORE).await?;
    progress.begin("booting a VM");
    let definition = machine.definition(&[VOLUME], &[])?;
    near.start_vm(MACHINE, definition).await?;
    machine.begins_to_work().await?;
    let client = match lan {
        Some(lan) => Some(connect(lan).await?),
        None => None,
    };
    let measured = async {
        let (start, client_start) = (machine.mark(), client.as_ref().map(OutsideClient::mark));
        let before = work("measuring the VM before", &machine, options.margin, progress).await;
        let leaves = client.as_ref().map(OutsideClient::mark);
        let mut legs = Vec::new();
        for _ in 0..options.round_trips.get() {
            for (hosts, name) in [((near, far), NAMES[1]), ((far, near), NAMES[0])] {
                legs.push(go(hosts, name, (&machine, client.as_ref()), link, options, progress).await?);
            }
        }
        let whole = machine.between(&start, &machine.mark());
        let (gap_before, disruption) = match (&client, client_start, leaves) {
            (Some(client), Some(start), Some(leaves)) => {
                let baseline = Baseline::of(&client.windows(&start, &leaves));
                let since = client.windows(&leaves, &client.mark());
                let disruption = baseline.map(|baseline| baseline.disruption(&since));
                (Some(client.longest_gap(&start, &leaves)), disruption)
            }
            _ => (None, Baseline::of(&before.1).map(|baseline| baseline.disruption(&windows(&legs)))),
        };
        anyhow::Ok((before, legs, whole, gap_before, disruption))
    };
    let (before, legs, whole, gap_before, disruption) = tokio::select! {
        measured = measured => measured?,
        failure = machine.failure() => return Err(failure),
    };
    let seen = match (client, gap_before) {
        (Some(client), Some(gap_before)) => {
            progress.begin("waiting for the last answers");
            let outcome = spawn_blocking(|| client.stop()).await.context("the client's thread panicked")?;
            Some(Seen { outcome, gap_before })
        }
        _ => None,
    };
    let timeline = timeline(&before.1, &legs);
    let description = machine.description();
    let stopped = machine.stop_and_verify(progress).await?;
    let volume = near.serves(VOLUME).await?;
    Ok(Travelled {
        stopped,
        machine: description,
        volume,
        before: before.0,
        legs,
        whole,
        timeline,
        disruption,
        seen,
    })
}

/// Moves the VM to the other host, which is called `name`, and lets it work there.
async fn go(
    (from, to): (&Daemon, &Daemon),
    name: &str,
    (machine, client): (&Vm, Option<&OutsideClient>),
    link: &mut Link,
    options: &MovedVmOptions,
    progress: &mut Progress,
) -> anyhow::Result<Leg> {
    progress.begin(&format!("moving the VM to host {name}"));
    let leaves = client.map(|client| (client, client.mark()));
    let to_store = format!("{name}:{STORE}");
    let order = MigrateVolume { strategy: options.strategy, ..MigrateVolume::to(to_store) };
    let way = travel((from, MACHINE, &order), machine, link, None, progress).await?;
    to.serves(VOLUME).await?;
    to.runs(MACHINE).await?;
    let after = work(&format!("measuring the VM at host {name}"), machine, options.margin, progress).await;
    let gap = leaves.map(|(client, leaves)| client.longest_gap(&leaves, &client.mark()));
    Ok(Leg { way, after, gap })
}

/// Returns the disk's windows since the first migration began. Each downtime is added, because the VM's clock stops during it.
fn windows(legs: &[Leg]) -> Vec<Window> {
    let of = |leg: &Leg| {
        let mut windows = leg.way.windows.clone();
        windows.push(Window::standstill(leg.way.downtime()));
        windows.extend_from_slice(&leg.after.1);
        windows
    };
    legs.iter().flat_map(of).collect()
}

fn timeline(before: &[Window], legs: &[Leg]) -> Timeline {
    let mut parts = vec![(None, before)];
    for (number, Leg { way, after, .. }) in legs.iter().enumerate() {
        let name = if number % 2 == 0 { "there" } else { "home" };
        // The marks of many migrations would not fit.
        let name = (legs.len() == 2).then_some(name);
        parts.extend([(name, way.windows.as_slice()), (None, after.1.as_slice())]);
    }
    Timeline::of_parts(&parts)
}

async fn connect(lan: &Lan) -> anyhow::Result<OutsideClient> {
    let (outside, (address, _)) = (lan.outside().clone(), lan.guest());
    let connected =
        spawn_blocking(move || OutsideClient::connect(&outside, SocketAddr::from((address, PORT))));
    connected.await.context("the client's thread panicked")?
}

impl Way {
    /// Returns the downtime; zero if the daemon does not report it.
    fn downtime(&self) -> Duration {
        let downtime = self.migration.machine.as_ref().and_then(|machine| machine.downtime.as_ref());
        downtime.map_or(Duration::ZERO, |parts| Duration::from_secs_f64(parts.total_ms.max(0.0) / 1000.0))
    }
}
