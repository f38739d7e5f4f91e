//! The demo with two hosts: the disk of a working guest moves to the other host and back, over a link that is cut once.
//!
//! ```text
//!     host a: folder, daemon ◄────── link ──────► host b: folder, daemon          the hosts are paired
//!               ▲ NBD
//!     guest fills ─► works ─┬─ before ─┬─ there ──┬─ forwarded ─┬─ home ─┬─ after ─┐
//!                           mark       │ ╳ cut    │             │        │         mark
//!     report ◄─ compare the image file ◄─ daemons end ◄─ compare the whole disk ◄─ guest stops
//! ```
//!
//! The guest stays connected to host *a*. The demo always cleans up, as the plain demo does; namespaces have no names, and end
//! with the daemons in them.

mod followed;
mod link;
mod machine;
mod pair;
mod report;
mod travel;

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::{MigrateVolume, Strategy, Volume};
use testbed::nbd_client::StopFlag;
use testbed::{Daemon, Folder};
use tokio::time::sleep;

use self::pair::Folders;
use self::travel::{Way, travel};
use super::{
    Bytes, DemoGuest, Felt, MARGIN, Progress, STORES, Signals, StoppedDemoGuest as _, StoppedThreadGuest,
    ThreadGuest, Timeline, VOLUME, check_free_space, filled, usual_parent, wait,
};
use crate::network::BitRate;
use crate::workload::{Baseline, GuestOptions, Window};

pub use self::followed::Followed;
pub(crate) use self::link::Link;
pub use self::link::LinkKind;
pub use self::machine::{
    Connection, DowntimeParts, MachineFigures, MachineReport, MachineWay, MovedVmOptions, run_vm,
};
pub(crate) use self::pair::Pair;
pub use self::report::{Copied, HostsFigures, HostsReport, WayFigures};
pub use self::travel::{Cut, CutPlan};

const NAMES: [&str; 2] = ["a", "b"];
const STORE: &str = STORES[0];
/// Limit of the time without any request; after it the guest's rate counts as zero.
const IDLE_MAX: Duration = Duration::from_secs(10);
/// Addition to the measured time, again and again, until the guest does something.
const IDLE_MORE: Duration = Duration::from_millis(100);

/// The options of the demo with two hosts.
#[derive(Clone, Debug)]
pub struct HostsOptions {
    /// The program whose `serve` is the daemons: normally the running one.
    pub program: PathBuf,
    /// Where the temporary folders are made; `None`: the default place for temporary files, if it is on a disk.
    pub parent: Option<PathBuf>,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// Bytes of the disk that the guest fills at first.
    pub fill_bytes: u64,
    /// Size of a request in bytes.
    pub block_bytes: u32,
    /// The mix and number of the guest's requests.
    pub guest: GuestOptions,
    /// How long the guest works before, between and after the migrations.
    pub margin: Duration,
    /// The kind of the hosts; `None`: namespaces if they can be made.
    pub kind: Option<LinkKind>,
    /// The link's rate in each direction.
    pub rate: BitRate,
    /// The strategy of both migrations.
    pub strategy: Strategy,
    /// The cut of the link during the first migration.
    pub cut: CutPlan,
}

impl HostsOptions {
    /// Returns the demo with its default options and a disk of `disk_bytes`.
    pub fn new(program: PathBuf, disk_bytes: u64) -> Self {
        // Without locality, two seconds of writes would touch most of the disk. A resumed copy would then copy as
        // much as a new one.
        const WORKING_SET: NonZeroU64 = NonZeroU64::new(64 << 20).unwrap();
        Self {
            program,
            parent: None,
            disk_bytes,
            fill_bytes: filled(disk_bytes),
            block_bytes: 8192,
            guest: GuestOptions { working_set_bytes: Some(WORKING_SET), ..GuestOptions::default() },
            margin: MARGIN,
            kind: None,
            rate: BitRate::megabits(1000),
            strategy: Strategy::Mirror,
            cut: CutPlan { fraction: 0.45, length: Duration::from_secs(2) },
        }
    }
}

/// Runs the demo with two hosts. Fails with the daemons' logs, or with [`super::Interrupted`] after a signal. Wrong content and a
/// restarted copy are not errors: then [`super::Figures::verified`] or [`HostsFigures::resumed`] is false.
pub async fn run_hosts(options: HostsOptions, progress: &mut Progress) -> anyhow::Result<HostsReport> {
    let disks = (options.parent.as_deref(), options.disk_bytes);
    in_folders(disks, progress, async |folders, signals, progress| {
        play(&options, folders, signals, progress).await
    })
    .await
}

/// Runs `play` in the temporary folders of two hosts, each with room for a disk of `disk_bytes`, and removes them.
async fn in_folders<R>(
    (parent, disk_bytes): (Option<&Path>, u64),
    progress: &mut Progress,
    play: impl AsyncFnOnce(&Folders, &mut Signals, &mut Progress) -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    let parent = parent.map_or_else(usual_parent, Path::to_owned);
    let copies = format!("two copies of a {} disk", Bytes(disk_bytes));
    check_free_space(&parent, disk_bytes.saturating_mul(2), "the demo", &copies)?;
    let folders = [Folder::create(&parent, STORES)?, Folder::create(&parent, STORES)?];
    let mut signals = Signals::listen()?;
    let result = play(&folders, &mut signals, progress).await;
    progress.end();
    let [near, far] = folders.map(Folder::remove);
    let report = result?;
    near.and(far).map(|()| report)
}

struct Travelled {
    stopped: StoppedThreadGuest,
    guest: String,
    volume: Volume,
    ways: [Way; 2],
    copied: Copied,
    before: Felt,
    forwarded: Felt,
    after: Felt,
    whole: Felt,
    timeline: Timeline,
    /// Total time in which the guest was served worse than before, during both migrations and after them; `None`
    /// if it did nothing before.
    disruption: Option<Duration>,
}

async fn play(
    options: &HostsOptions,
    folders: &Folders,
    signals: &mut Signals,
    progress: &mut Progress,
) -> anyhow::Result<HostsReport> {
    progress.begin("starting the hosts");
    let mut link = Link::create(options.kind, options.rate)?;
    let pair = signals.unless(Pair::start(&options.program, folders, &link)).await?;
    let stop = StopFlag::default();
    let travelled = signals.unless(there_and_home(options, &pair, &mut link, &stop, progress)).await;
    stop.raise();
    let travelled = travelled.map_err(|error| match error.is::<super::Interrupted>() {
        true => error,
        false => pair.with_logs(error),
    });
    let ended = pair.stop().await;
    let mut travelled = travelled?;
    ended?;
    let image = Path::new(&travelled.volume.image);
    signals.unless(travelled.stopped.verify_image(image, progress)).await?;
    Ok(report::report(travelled, options, link.description()))
}

/// Creates the volume at the first host, moves it to the second and back under a guest, and lets the guest compare its disk.
async fn there_and_home(
    options: &HostsOptions,
    pair: &Pair,
    link: &mut Link,
    stop: &StopFlag,
    progress: &mut Progress,
) -> anyhow::Result<Travelled> {
    let Pair { near, far } = pair;
    let volume = near.create_volume(VOLUME, options.disk_bytes, STORE).await?;
    let HostsOptions { fill_bytes, block_bytes, guest, .. } = *options;
    let guest =
        ThreadGuest::start(volume.uri.parse()?, fill_bytes, block_bytes, guest, stop.clone(), progress)
            .await?;
    let description = guest.description();
    let margin = options.margin;
    let measured = async {
        let start = guest.mark();
        let before = work("measuring the guest before", &guest, margin, progress).await;

        progress.begin("migrating to the other host");
        let wrote = Wrote::ask(near).await?;
        let to_far = format!("{}:{STORE}", NAMES[1]);
        let order = MigrateVolume { strategy: options.strategy, ..MigrateVolume::to(to_far) };
        let there = travel((near, VOLUME, &order), &guest, link, Some(options.cut), progress).await?;
        let copied = wrote.copied(near, &there).await?;
        far.serves(VOLUME).await?;
        let forwarded = work("measuring the guest, forwarded", &guest, margin, progress).await;

        progress.begin("migrating home");
        let to_near = format!("{}:{STORE}", NAMES[0]);
        let order = MigrateVolume { strategy: options.strategy, ..MigrateVolume::to(to_near) };
        let home = travel((far, VOLUME, &order), &guest, link, None, progress).await?;
        near.serves(VOLUME).await?;
        let after = work("measuring the guest after", &guest, margin, progress).await;

        let whole = guest.between(&start, &guest.mark());
        let timeline = Timeline::of_parts(&[
            (None, &before.1),
            (Some("there"), &there.windows),
            (None, &forwarded.1),
            (Some("home"), &home.windows),
            (None, &after.1),
        ]);
        // N.B. without the time at the other host, which is another way of working, and may last.
        let disturbed = there.windows.iter().chain(&home.windows).chain(&after.1);
        let disruption = Baseline::of(&before.1).map(|baseline| baseline.disruption(disturbed));
        let felt = [before.0, forwarded.0, after.0, whole];
        anyhow::Ok(([there, home], copied, felt, timeline, disruption))
    };
    let (ways, copied, [before, forwarded, after, whole], timeline, disruption) = tokio::select! {
        measured = measured => measured?,
        failure = guest.failure() => return Err(failure),
    };
    let stopped = guest.stop_and_verify(progress).await?;
    let volume = near.serves(VOLUME).await?;
    ensure!(volume.store.as_deref() == Some(STORE), "the volume says that it is in {:?}", volume.store);
    let guest = description;
    Ok(Travelled {
        stopped,
        guest,
        volume,
        ways,
        copied,
        before,
        forwarded,
        after,
        whole,
        timeline,
        disruption,
    })
}

/// Lets a guest work for a while, and until it has done something; returns its figures, as a whole and in windows.
async fn work(
    step: &str,
    guest: &impl DemoGuest,
    duration: Duration,
    progress: &mut Progress,
) -> (Felt, Vec<Window>) {
    progress.begin(step);
    let first = guest.mark();
    wait(duration, progress).await;
    let began = Instant::now();
    // On a busy machine, an emulated guest may have done nothing yet that could be measured.
    while guest.between(&first, &guest.mark()).iops == 0.0 && began.elapsed() < IDLE_MAX {
        sleep(IDLE_MORE).await;
    }
    let last = guest.mark();
    (guest.between(&first, &last), guest.windows(&first, &last))
}

/// The volume's allocation in its store, and the guest's writes so far, at one moment.
struct Wrote {
    allocated_bytes: u64,
    bytes_written: u64,
}

impl Wrote {
    async fn ask(daemon: &Daemon) -> anyhow::Result<Self> {
        let volume = daemon.volume(VOLUME).await?;
        let allocated_bytes = volume.allocated_bytes.unwrap_or(volume.size_bytes);
        let statistics = volume.statistics.context("the volume has no statistics")?;
        Ok(Self { allocated_bytes, bytes_written: statistics.bytes_written })
    }

    /// Returns what was copied since then, and how much of it was necessary.
    async fn copied(self, daemon: &Daemon, way: &Way) -> anyhow::Result<Copied> {
        let now = Self::ask(daemon).await?;
        Ok(Copied {
            allocated_bytes: self.allocated_bytes,
            written_bytes: now.bytes_written.saturating_sub(self.bytes_written),
            mirrored_bytes: way.migration.bytes_mirrored,
            copied_bytes: way.migration.bytes_copied,
        })
    }
}
