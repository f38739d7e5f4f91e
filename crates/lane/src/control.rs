//! The interface between a lane and the control plane.
//!
//! A lane makes no call that may sleep. It asks for such work here, and another thread does it. The daemon implements [`Control`]
//! with channels to its journal and its helper threads, the simulator with virtual ones.

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

/// A future that stays on the lane's own thread.
pub type LaneFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// The orders of a lane to the control plane.
///
/// Work begins when the method is called, not when its future is polled: commits are applied in the order of the calls. It is
/// completed even if the future is dropped.
pub trait Control {
    /// Makes the records durable in one commit, all or none. Commits of one lane are applied in order.
    fn commit(&self, records: Vec<Record>) -> LaneFuture<Result<(), CommitFault>>;

    /// Deletes or keeps a source image whose volume has moved away. May be repeated: an image that is gone is a success.
    fn retire(&self, image: ImageLocation, retirement: Retirement) -> LaneFuture<Result<(), ControlFault>>;

    /// Copies the memory of the VM that moves with its volumes, and stops the VM. On success the VM stands still here and
    /// is loaded at the target (design §5.15). With post-copy of memory it only stands still here, and
    /// [`Control::run_vm`] sends the rest.
    ///
    /// `paused` is sent when the VM is stopped but its hypervisor still works. A control plane that cannot say that drops it.
    /// [`Control::entered`] decides afterwards: with [`Phase::Discarding`] the VM continues here.
    fn stop_vm(
        &self,
        migration: MigrationId,
        paused: oneshot::Sender<()>,
    ) -> LaneFuture<Result<(), VmFault>> {
        let _ = (migration, paused);
        Box::pin(ready(Err(VmFault::new("there are no VMs here"))))
    }

    /// Runs the hooks of both hosts before volumes change hands. Resolves when they are done, or with the reason why the volumes
    /// have to stay. [`Control::entered`] with [`Phase::Discarding`] ends it.
    fn run_hooks(&self, migration: MigrationId) -> LaneFuture<Result<(), HooksFault>> {
        let _ = migration;
        Box::pin(ready(Err(HooksFault::new("nothing is run here before volumes change hands"))))
    }

    /// Lets the VM run that moved with its volumes, which this host owns and has opened. The fault holds why the VM does not run.
    fn run_vm(&self, migration: MigrationId) -> LaneFuture<Result<(), VmFault>> {
        let _ = migration;
        Box::pin(ready(Err(VmFault::new("there are no VMs here"))))
    }

    /// Checks that names of target images lead to what was filled, before it is promised and before guests use it. `None`: there is
    /// nothing to look at.
    fn confirm(&self, image: &ImageLocation) -> Option<LaneFuture<Result<(), ControlFault>>> {
        let _ = image;
        None
    }

    /// Deletes a half-made or abandoned target image. May be repeated.
    fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>>;

    /// Reports an event to the control plane; never waits.
    fn report(&self, report: Report);

    /// Reports that a migration has entered a phase. Has to return at once: it is also called while the gates are closed.
    fn entered(&self, migration: MigrationId, phase: Phase) {
        let _ = (migration, phase);
    }

    /// Returns what keeps the chronicles of volumes durably; `None` if they end with the daemon.
    fn keeper(&self) -> Option<Rc<dyn Keeper>> {
        None
    }

    /// Returns whether the volume's store may lose unflushed writes while this host runs, because another machine keeps it.
    fn store_starts_alone(&self) -> bool {
        false
    }

    /// Notes that the volume's store was closed in order, at the end of this residency's lane. No write follows. May sleep.
    fn store_closed(&self, stay: StayId) {
        let _ = stay;
    }

    /// Returns the journeys of a message between the two sides of a migration; `None` if it arrives at once, as on one host.
    ///
    /// The message arrives at the end of each journey: with none it is lost, with two it arrives twice.
    fn carry(&self) -> Option<Vec<LaneFuture<()>>> {
        None
    }
}

/// The error of an operation on a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {operation} {path}: {detail}")]
pub struct ControlFault {
    /// The operation, as a verb: `delete`, `rename`.
    pub operation: &'static str,
    /// The path of the file.
    pub path: String,
    /// The answer of the system.
    pub detail: String,
}

/// Why a VM was not stopped, or does not run at the target.
///
/// A lane does not distinguish causes: the text of the hypervisor, hook or remote host is for the administrator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct VmFault {
    /// The reason, in words for the administrator.
    pub detail: String,
}

impl VmFault {
    /// Makes the fault from its reason.
    pub fn new(detail: impl Into<String>) -> Self {
        Self { detail: detail.into() }
    }
}

/// Why the hooks before a handover did not all succeed: one failed, or a host did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct HooksFault {
    /// The reason, in words for the administrator.
    pub detail: String,
}

impl HooksFault {
    /// Makes the fault from its reason.
    pub fn new(detail: impl Into<String>) -> Self {
        Self { detail: detail.into() }
    }
}

/// A lane's report about a migration.
#[derive(Clone, Debug)]
pub enum Report {
    /// The progress: at each change of phase, and every [`crate::REPORT_INTERVAL`] in between.
    Progress {
        /// The migration that is reported.
        migration: MigrationId,
        /// How far the migration is.
        progress: Progress,
    },
    /// A new piece of the migration's history. The first one holds samples of before the migration, the last ones of after it.
    Recorded {
        /// The migration that was recorded.
        migration: MigrationId,
        /// The new piece of history.
        recorded: Recorded,
    },
    /// The recording has ended. This is the last report about the migration.
    RecordingEnded {
        /// The migration whose recording ended.
        migration: MigrationId,
    },
    /// The path of a volume's blocks to another host: when it is first known, and when it changes.
    DataPath {
        /// The migration of the volume.
        migration: MigrationId,
        /// The volume's position in its migration.
        volume: VolumeIndex,
        /// The path that blocks take.
        way: DataPath,
    },
    /// The migration has ended. Only recordings are reported after this.
    Ended {
        /// The migration that has ended.
        migration: MigrationId,
        /// The outcome, as in the journal.
        outcome: Outcome,
        /// The costs, as in the journal.
        summary: Summary,
    },
}

/// A piece of a migration's history.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The samples in order, without gaps.
    pub samples: Vec<Sample>,
    /// Phases that were entered, with the time in microseconds since the migration began.
    pub phases: Vec<(i64, Phase)>,
    /// Counts of the strategies' decisions since the migration began.
    pub tally: Tally,
    /// The completed rounds of each volume; empty unless the volume is copied in rounds.
    pub rounds: Vec<(VolumeIndex, Round)>,
}

/// One stretch of a migration's history.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The beginning, in microseconds since the migration began; negative before that.
    pub began_us: i64,
    /// The requests of the volume's guests in this stretch.
    pub guest: Window,
    /// Bytes that the mover wrote to the target.
    pub bytes_copied: u64,
    /// Bytes of guest writes that the target took.
    pub bytes_mirrored: u64,
    /// Bytes that were found to be zero.
    pub bytes_zero: u64,
    /// Bytes missing at the target at the end; `None` before and after the migration.
    pub bytes_missing: Option<u64>,
    /// What the migration was waiting for at the end.
    pub waits_for: Option<&'static str>,
    /// Why mirroring was suspended at the end; `None` if it was not.
    pub suspended: Option<&'static str>,
}
