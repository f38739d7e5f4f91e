//! What a lane needs from the control plane, and what it tells it.
//!
//! A lane makes no call that may sleep; whatever does is asked for here, and is done on another thread. The daemon
//! implements [`Control`] with channels to its journal and its helper threads, the simulator with virtual ones.

use std::future::{Future, ready};
use std::pin::Pin;
use std::rc::Rc;

use chronicle::StayId;
use futures_channel::oneshot;
use migration::journal::{ImageLocation, Outcome, Record, Summary};
use migration::recovery::Retirement;
use migration::strategy::{Round, Tally};
use migration::{CommitFault, MigrationId, Phase, Progress, VolumeIndex};

use crate::chronicler::Keeper;
use crate::pulse::Window;
use crate::shared_storage::DataPath;

/// A future that stays on the lane's thread.
pub type LaneFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// What a lane asks of the control plane.
///
/// A thing is asked for when the method is called, not when its future is polled: commits are applied in the order of
/// the calls. Futures may be dropped; what was asked for is done all the same.
pub trait Control {
    /// Makes the records durable, all or none, in one commit; commits of one lane are applied in order.
    fn commit(&self, records: Vec<Record>) -> LaneFuture<Result<(), CommitFault>>;

    /// Deals with a source image whose volume has moved away. It can be repeated: an image that is gone is a success.
    fn retire(&self, image: ImageLocation, retirement: Retirement) -> LaneFuture<Result<(), ControlFault>>;

    /// Copies the memory of the VM that goes along with its volumes, and brings it to a stand: when this resolves,
    /// it stands still here and is loaded at the target, or the fault says why not (design §5.15). One whose memory may
    /// follow it only stands still here: [`Control::run_vm`] has the rest sent. `paused` is told when it
    /// does nothing any more, and only its hypervisor still may; whoever cannot say that drops it.
    ///
    /// What [`Control::entered`] tells afterwards decides: [`Phase::Discarding`] lets it go on here.
    fn stop_vm(
        &self,
        migration: MigrationId,
        paused: oneshot::Sender<()>,
    ) -> LaneFuture<Result<(), VmFault>> {
        let _ = (migration, paused);
        Box::pin(ready(Err(VmFault::new("there are no VMs here"))))
    }

    /// Does what is to be done at both hosts before volumes change hands: when this resolves it is done, or the fault says why
    /// they are to stay. [`Control::entered`] with [`Phase::Discarding`] ends it.
    fn run_hooks(&self, migration: MigrationId) -> LaneFuture<Result<(), HooksFault>> {
        let _ = migration;
        Box::pin(ready(Err(HooksFault::new("nothing is run here before volumes change hands"))))
    }

    /// Lets the VM run that came along; its volumes are this host's, and open. The fault says why it does not run.
    fn run_vm(&self, migration: MigrationId) -> LaneFuture<Result<(), VmFault>> {
        let _ = migration;
        Box::pin(ready(Err(VmFault::new("there are no VMs here"))))
    }

    /// Deletes a half-made or given-up target image. It can be repeated.
    fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>>;

    /// Tells what happened; never waits.
    fn report(&self, report: Report);

    /// Tells that a migration has entered a phase: each of them, also while the gates are closed. So it takes no time.
    fn entered(&self, migration: MigrationId, phase: Phase) {
        let _ = (migration, phase);
    }

    /// Who keeps what has to outlast the daemon of volumes' chronicles; `None`: nobody.
    fn keeper(&self) -> Option<Rc<dyn Keeper>> {
        None
    }

    /// Tells whether the volume's store may lose what was written and not flushed while this host runs: another machine keeps it.
    fn store_starts_alone(&self) -> bool {
        false
    }

    /// The volume's store has been closed in order, at the end of this stay's lane: nothing is written to it any more. May
    /// sleep.
    fn store_closed(&self, stay: StayId) {
        let _ = stay;
    }

    /// Carries a message between the two sides of a migration; `None`: it is there at once, as on one host.
    ///
    /// It arrives at the end of each journey: a message without one is lost, one with two comes twice.
    fn carry(&self) -> Option<Vec<LaneFuture<()>>> {
        None
    }
}

/// Something that the control plane could not do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {operation} {path}: {detail}")]
pub struct ControlFault {
    /// What was tried, as a verb: `delete`, `rename`.
    pub operation: &'static str,
    /// The file.
    pub path: String,
    /// What the system answered.
    pub detail: String,
}

/// Why a VM was not brought to a stand, or does not run where it came to.
///
/// A lane tells no causes apart: what its hypervisor, a hook or the other host has said is for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct VmFault {
    /// In words for people.
    pub detail: String,
}

impl VmFault {
    /// It is this.
    pub fn new(detail: impl Into<String>) -> Self {
        Self { detail: detail.into() }
    }
}

/// Why not all was done that is to be done before volumes change hands: a hook that failed, or a host that did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct HooksFault {
    /// In words for people.
    pub detail: String,
}

impl HooksFault {
    /// It is this.
    pub fn new(detail: impl Into<String>) -> Self {
        Self { detail: detail.into() }
    }
}

/// What a lane tells about a migration.
#[derive(Clone, Debug)]
pub enum Report {
    /// How far it is: at each change of phase, and every [`crate::REPORT_INTERVAL`] in between.
    Progress {
        /// Which.
        migration: MigrationId,
        /// How far.
        progress: Progress,
    },
    /// What was recorded since the last time, for its history: the first time what was before it began, the last
    /// times what came after its end.
    Recorded {
        /// Which.
        migration: MigrationId,
        /// What.
        recorded: Recorded,
    },
    /// Nothing more will be recorded. This is the last report about it.
    RecordingEnded {
        /// Which.
        migration: MigrationId,
    },
    /// The way that a volume's blocks take to another host: when that is known, and when it changes.
    DataPath {
        /// Of which migration.
        migration: MigrationId,
        /// Which of its volumes.
        volume: VolumeIndex,
        /// Which way.
        way: DataPath,
    },
    /// It has ended. Nothing but recordings is reported of it any more.
    Ended {
        /// Which.
        migration: MigrationId,
        /// How; the same as in the journal.
        outcome: Outcome,
        /// What it cost; the same as in the journal.
        summary: Summary,
    },
}

/// A piece of a migration's history.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// In order, without gaps.
    pub samples: Vec<Sample>,
    /// Phases that were entered, and when, in microseconds since the migration began.
    pub phases: Vec<(i64, Phase)>,
    /// What the strategies have decided since it began.
    pub tally: Tally,
    /// The rounds that have ended, of each volume; empty unless it is copied in rounds.
    pub rounds: Vec<(VolumeIndex, Round)>,
}

/// One stretch of a migration's history.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When it began, in microseconds since the migration began; negative before.
    pub began_us: i64,
    /// What the volume's guests did in it.
    pub guest: Window,
    /// Bytes that the mover wrote to the target in it.
    pub bytes_copied: u64,
    /// Bytes of guest writes that the target took in it.
    pub bytes_mirrored: u64,
    /// Bytes that were found to be zero in it.
    pub bytes_zero: u64,
    /// Bytes that the target still missed at its end; `None` before the migration began and after it.
    pub bytes_missing: Option<u64>,
    /// What the migration was waiting for at its end.
    pub waits_for: Option<&'static str>,
    /// Why mirroring was suspended at its end; `None` if it was not.
    pub suspended: Option<&'static str>,
}
