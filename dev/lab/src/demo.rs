//! The demo: the disk of a working guest moves from one store to another.
//!
//! ```text
//!   folder ─► daemon ─► volume ─► guest fills ─► works ─┬─ before ─┬─ migrate ─┬─ after ─┐
//!                                                       mark       mark        mark      mark
//!   report ◄─ compare the image file ◄─ daemon ends ◄─ compare the whole disk ◄─ guest stops
//! ```
//!
//! The demo always cleans up: the daemon is a child that ends with the demo, and everything else is in one temporary folder.

mod daemon;
mod folder;
mod guest;
mod hosts;
mod progress;
mod report;
mod signals;
mod sparkline;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use api::{MigrateVolume, Migration, MigrationHistory, Strategy, Volume};
use testbed::nbd_client::StopFlag;
use testbed::{Daemon, Folder};
use tokio::time::sleep;

use self::report::{grouped, milliseconds};
use crate::vm::{GuestImage, VmOptions, start_vm};
use crate::workload::{Baseline, GuestOptions};

pub(crate) use self::daemon::start_daemon;
pub(crate) use self::folder::{STORES, check_free_space, create_folder, usual_parent};
pub(crate) use self::guest::with_progress;
pub use self::guest::{DemoGuest, Felt, StoppedDemoGuest, StoppedThreadGuest, ThreadGuest};
pub use self::hosts::{
    Connection, Copied, Cut, CutPlan, DowntimeParts, Followed, HostsFigures, HostsOptions, HostsReport,
    LinkKind, MachineFigures, MachineReport, MachineWay, MovedVmOptions, WayFigures, run_hosts, run_vm,
};
pub(crate) use self::hosts::{Link as HostsLink, Pair as HostsPair};
pub use self::progress::Progress;
pub(crate) use self::report::Bytes;
pub use self::report::{Figures, Report, Wrong};
pub use self::signals::Interrupted;
pub(crate) use self::signals::Signals;
pub use self::sparkline::{Span, Timeline};

/// The options of the demo.
#[derive(Clone, Debug)]
pub struct DemoOptions {
    /// The program whose `serve` is the daemon: normally the running one.
    pub program: PathBuf,
    /// Where the temporary folder is made; `None`: the default place for temporary files, if it is on a disk.
    pub parent: Option<PathBuf>,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// How long the guest works before and after the migration.
    pub margin: Duration,
    /// The guest that works on the disk.
    pub guest: GuestKind,
    /// The strategy of the migration.
    pub strategy: Strategy,
}

/// The kinds of guests on the demo's disk.
#[derive(Clone, Debug)]
pub enum GuestKind {
    /// A thread of this process, over the volume's NBD socket.
    Thread {
        /// Size of a request in bytes.
        block_bytes: u32,
        /// Bytes of the disk that the guest fills at first.
        fill_bytes: u64,
        /// The mix and number of its requests.
        options: GuestOptions,
    },
    /// A VM in QEMU.
    Machine(VmOptions),
}

impl DemoOptions {
    /// Returns the demo with a thread as guest, and a disk of `disk_bytes`.
    pub fn with_thread(program: PathBuf, disk_bytes: u64) -> Self {
        let options = GuestOptions::default();
        let guest = GuestKind::Thread { block_bytes: 8192, fill_bytes: filled(disk_bytes), options };
        Self { program, parent: None, disk_bytes, margin: MARGIN, guest, strategy: Strategy::Mirror }
    }

    /// Returns the demo with a VM in QEMU as guest, and a disk of `disk_bytes`. Fails if the VM's image is missing, in `image`
    /// or in its default folder.
    pub fn with_vm(program: PathBuf, image: Option<&Path>, disk_bytes: u64) -> anyhow::Result<Self> {
        let fill_bytes = disk_bytes / 2;
        let machine = VmOptions { fill_bytes, ..VmOptions::new(GuestImage::find(image)?) };
        let guest = GuestKind::Machine(machine);
        let strategy = Strategy::Mirror;
        Ok(Self { program, parent: None, disk_bytes, margin: MARGIN, guest, strategy })
    }
}

fn filled(disk_bytes: u64) -> u64 {
    disk_bytes / 4 * 3
}

/// Default time of the guest before and after the migration: long enough for a rate.
const MARGIN: Duration = Duration::from_secs(3);

/// Runs the demo. Fails with the log of the daemon or of the VM, or with [`Interrupted`] after a signal. Wrong content is not an
/// error: then [`Figures::verified`] is false.
pub async fn run(options: DemoOptions, progress: &mut Progress) -> anyhow::Result<Report> {
    let folder = create_folder(options.parent.as_deref(), options.disk_bytes)?;
    let mut stage =
        Stage { options: &options, folder: &folder, signals: Signals::listen()?, stop: StopFlag::default() };
    let result = match options.guest.clone() {
        GuestKind::Thread { block_bytes, fill_bytes, options: guest } => {
            let stop = stage.stop.clone();
            let start = async |volume: &Volume, progress: &mut Progress| {
                let address = volume.uri.parse()?;
                ThreadGuest::start(address, fill_bytes, block_bytes, guest, stop, progress).await
            };
            stage.run(start, progress).await
        }
        GuestKind::Machine(machine) => {
            let start = async |volume: &Volume, progress: &mut Progress| {
                start_vm(&volume.uri.parse()?, machine, progress).await
            };
            stage.run(start, progress).await
        }
    };
    progress.end();
    let removed = folder.remove();
    let report = result?;
    removed.map(|()| report)
}

const VOLUME: &str = "demo";

struct Stage<'a> {
    options: &'a DemoOptions,
    folder: &'a Folder,
    signals: Signals,
    /// Ends the guest's waits for a daemon that will not return.
    stop: StopFlag,
}

struct Moved<S> {
    stopped: S,
    guest: String,
    migration: Migration,
    volume: Volume,
    before: Felt,
    during: Felt,
    after: Felt,
    whole: Felt,
    timeline: Timeline,
    /// Total time in which the guest was served worse than before; `None` if it did nothing before.
    disruption: Option<Duration>,
    history: Option<MigrationHistory>,
}

impl Stage<'_> {
    /// Runs the demo with the guest that `start` starts, and stops the daemon.
    async fn run<G: DemoGuest>(
        &mut self,
        start: impl AsyncFnOnce(&Volume, &mut Progress) -> anyhow::Result<G>,
        progress: &mut Progress,
    ) -> anyhow::Result<Report> {
        progress.begin("starting the daemon");
        let daemon =
            self.signals.unless(start_daemon(Command::new(&self.options.program), self.folder)).await?;
        let moved = self.signals.unless(move_under(start, &daemon, self.options, progress)).await;
        self.stop.raise();
        let ended = daemon.stop().await;
        let mut moved = moved?;
        ended?;
        let image = Path::new(&moved.volume.image);
        self.signals.unless(moved.stopped.verify_image(image, progress)).await?;
        Ok(self.report(moved))
    }

    fn report<S: StoppedDemoGuest>(&self, moved: Moved<S>) -> Report {
        let wrong = moved.stopped.wrong();
        let figures = Figures {
            bytes_moved: moved.migration.bytes_moved,
            migration_seconds: moved.migration.seconds,
            longest_stall_ms: moved.during.longest_stall.as_secs_f64() * 1000.0,
            iops_before: moved.before.iops,
            iops_during: moved.during.iops,
            iops_after: moved.after.iops,
            verified: wrong.count == 0,
            disruption_ms: moved.disruption.map(|disruption| disruption.as_secs_f64() * 1000.0),
        };
        let [source, target] = STORES;
        Report {
            figures,
            disk_bytes: self.options.disk_bytes,
            guest: moved.guest,
            stores: (source.to_owned(), target.to_owned()),
            gate_closed_ms: moved.migration.switch_over.map(|parts| parts.gate_closed_ms),
            requests: moved.whole.requests,
            reconnects: moved.stopped.reconnects(),
            timeline: moved.timeline,
            wrong,
            history: moved.history,
        }
    }
}

/// Creates the volume, starts a guest on it, moves it under the guest, and lets the guest compare its disk.
async fn move_under<G: DemoGuest>(
    start: impl AsyncFnOnce(&Volume, &mut Progress) -> anyhow::Result<G>,
    daemon: &Daemon,
    options: &DemoOptions,
    progress: &mut Progress,
) -> anyhow::Result<Moved<G::Stopped>> {
    let [source, target] = STORES;
    let volume = daemon.create_volume(VOLUME, options.disk_bytes, source).await?;
    let guest = start(&volume, progress).await?;
    let description = guest.description();
    let measured = async {
        progress.begin("measuring the guest before");
        let before = guest.mark();
        wait(options.margin, progress).await;

        progress.begin("migrating");
        let during = guest.mark();
        let mut live = Live::new(&guest);
        let order = MigrateVolume { strategy: options.strategy, ..MigrateVolume::to(target) };
        let migration = daemon.migrate(VOLUME, &order, |migration| live.show(migration, progress)).await?;
        let after = guest.mark();

        progress.begin("measuring the guest after");
        wait(options.margin, progress).await;
        let end = guest.mark();
        let felt = [(&before, &during), (&during, &after), (&after, &end), (&before, &end)];
        let parts = [(&before, &during), (&during, &after), (&after, &end)];
        let [quiet, busy, later] = parts.map(|(first, last)| guest.windows(first, last));
        let timeline = Timeline::of(&quiet, &busy, &later);
        let disruption = Baseline::of(&quiet).map(|baseline| baseline.disruption(busy.iter().chain(&later)));
        let history = daemon.history(&migration.id).await;
        let felt = felt.map(|(first, last)| guest.between(first, last));
        anyhow::Ok((migration, felt, timeline, disruption, history))
    };
    let (migration, [before, during, after, whole], timeline, disruption, history) = tokio::select! {
        measured = measured => measured?,
        failure = guest.failure() => return Err(failure),
    };
    let stopped = guest.stop_and_verify(progress).await?;
    let volume = daemon.volume(VOLUME).await?;
    ensure!(
        volume.store.as_deref() == Some(target),
        "the volume says that it is in store {:?}",
        volume.store
    );
    let guest = description;
    Ok(Moved {
        stopped,
        guest,
        migration,
        volume,
        before,
        during,
        after,
        whole,
        timeline,
        disruption,
        history,
    })
}

/// Shows the guest's figures while the migration runs.
struct Live<'a, G: DemoGuest> {
    guest: &'a G,
    first: G::Mark,
    last: G::Mark,
    shown: Instant,
}

impl<'a, G: DemoGuest> Live<'a, G> {
    /// Short enough to look alive, and long enough to be read and to cost the guest nothing.
    const INTERVAL: Duration = Duration::from_millis(250);

    fn new(guest: &'a G) -> Self {
        Self { guest, first: guest.mark(), last: guest.mark(), shown: Instant::now() }
    }

    fn show(&mut self, migration: &Migration, progress: &mut Progress) {
        progress.advance(migration.fraction);
        if self.shown.elapsed() < Self::INTERVAL {
            return;
        }
        let now = self.guest.mark();
        let iops = self.guest.between(&self.last, &now).iops;
        let stall_ms = self.guest.between(&self.first, &now).longest_stall.as_secs_f64() * 1000.0;
        progress.note(&format!("{} IOPS, longest stall {}", grouped(iops), milliseconds(stall_ms)));
        self.last = now;
        self.shown = Instant::now();
    }
}

async fn wait(duration: Duration, progress: &mut Progress) {
    const STEPS: u32 = 20;
    for step in 1..=STEPS {
        sleep(duration / STEPS).await;
        progress.advance(f64::from(step) / f64::from(STEPS));
    }
}
