//! What runs VMs, as Sterna steers it. It knows no volumes and decides nothing about migrations.
//!
//! ```text
//!   Hypervisor   what a migration needs of one running VM: checks, memory out, memory in, pause and resume
//!      ├── qemu::Qemu   one QEMU process, over its machine protocol (QMP); what only QEMU has is there as well
//!      └── fake::FakeVm no process at all: what a test needs of a VM
//!   libvirt::Libvirt  domains of libvirt, whose disks it leads elsewhere itself
//! ```
//! A migration uses the trait alone. What starts a VM, adopts one or reads its command knows which hypervisor it is.
//! `tests/qemu/contract.rs` asks the same of all implementations.

mod error;
pub mod fake;
pub mod libvirt;
mod memory;
pub mod qemu;
mod state;

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

pub use error::HypervisorError;
pub use memory::{MemoryMode, MemoryOptions, MemoryProgress, MemoryTransfer, PostCopyStart};
pub use state::{MigrationStatus, RunState};

/// What a hypervisor answers, later.
pub type HypervisorFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, HypervisorError>> + Send + 'a>>;

/// One running VM, as its hypervisor lets a migration steer it.
///
/// Dropping it leaves the VM as it is. All methods may be called at the same time from several tasks, and a future that is
/// dropped may or may not have been carried out. Every method fails with [`HypervisorError::Gone`] if the VM's process has
/// ended, and with [`HypervisorError::Silent`] if it does not answer in time; other errors are named at the methods.
///
/// A move of memory goes through [`MigrationStatus`]es on both sides:
///
/// ```text
///   source                                               target, started so that it waits for memory
///   offer_memory ─► setup ─► active (rounds)   ═══════►  expect_memory
///                              │ the rest is small enough
///                       pre-switchover: paused
///   switch_over   ─► device ─► completed       ═══════►  await_loaded: paused, its disks not touched
///                       │          └ resume: goes on here,   resume: runs there
///                       │            if it does not there
///                       └ failed: runs on by itself
/// ```
/// Which side runs then is decided by whoever hands the disks over, never here.
pub trait Hypervisor: RecoverMemory + std::fmt::Debug + Send + Sync {
    /// Name and version of the hypervisor, such as `QEMU 10.0.2`.
    fn product(&self) -> String;

    /// The VM's process; `None` if the kernel does not tell.
    fn process(&self) -> Option<i32>;

    /// Where sockets for the memory of this VM are made: beside the hypervisor's own, and of no other VM.
    fn memory_socket(&self) -> PathBuf;

    /// Resolves with the reason when the connection to the hypervisor has ended; the VM's process may end a little later.
    fn closed(&self) -> Pin<Box<dyn Future<Output = String> + Send + '_>>;

    /// What the VM does.
    fn run_state(&self) -> HypervisorFuture<'_, RunState>;

    /// Begins to tell when the VM's processors stop and run.
    fn run_changes(&self) -> Box<dyn RunChanges>;

    /// Lets the processors run: of a VM that was paused, has loaded its memory, or has sent it elsewhere. The hypervisor takes
    /// its disks back before, if they were given to another process.
    ///
    /// **N.B.** A VM whose memory has gone elsewhere must be resumed only if it never runs there.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]: it is still loading, or a disk cannot be had. The VM does not run then.
    fn resume(&self) -> HypervisorFuture<'_, ()>;

    /// Has a VM take its disks that has loaded its memory and stays paused, as [`Self::resume`] does for one that runs. `socket`: where
    /// the hypervisor may listen for a moment.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]: a disk cannot be had.
    fn take_disks<'a>(&'a self, socket: &'a Path) -> HypervisorFuture<'a, ()>;

    /// Has the VM's network cards tell the network where they are.
    fn announce(&self) -> HypervisorFuture<'_, ()>;

    /// Whether a disk of the VM has been led away from its data and is over nothing, as in the middle of an adoption: the
    /// guest must not run then.
    fn has_disk_over_nothing(&self) -> HypervisorFuture<'_, bool>;

    /// Bytes of the guest's memory, as it is now.
    fn memory_bytes(&self) -> HypervisorFuture<'_, u64>;

    /// Why this VM cannot be migrated as it is now, for people; empty if it can. Nothing is changed by it.
    fn migration_blockers(&self) -> HypervisorFuture<'_, Vec<String>>;

    /// Why this VM cannot run at a target before all of its memory is there, as far as the source can tell; `None`: it can.
    /// To be asked only while no move is under way.
    fn post_copy_blocker(&self) -> HypervisorFuture<'_, Option<String>>;

    /// Whether memory can go over streams beside the main one.
    fn knows_side_streams(&self) -> HypervisorFuture<'_, bool>;

    /// Begins to send the memory to `stream`, a unix socket on which somebody listens: of several streams the main one is
    /// connected first.
    ///
    /// The VM works on. It is paused by the hypervisor at [`MigrationStatus::PreSwitchover`], and waits there for
    /// [`Self::switch_over`] or [`Self::abandon`].
    ///
    /// # Errors
    /// [`HypervisorError::Blocked`], [`HypervisorError::Refused`]. Nothing is under way then.
    fn offer_memory<'a>(&'a self, stream: &'a Path, options: MemoryOptions) -> HypervisorFuture<'a, ()>;

    /// How far the move is. Works on the target's side too, where most figures are zero.
    fn memory_progress(&self) -> HypervisorFuture<'_, MemoryProgress>;

    /// Waits until the move has, or has had, one of the statuses, and returns it. That the hypervisor is silent is no reason
    /// to give up before `deadline` is over.
    ///
    /// # Errors
    /// [`HypervisorError::MigrationEnded`]: it ended with another status, and nothing more will come.
    /// [`HypervisorError::Deadline`].
    fn await_status<'a>(
        &'a self,
        wanted: &'a [MigrationStatus],
        deadline: Duration,
    ) -> HypervisorFuture<'a, MigrationStatus>;

    /// Changes for how long the VM may be paused, in a move that is under way.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]; the move goes on as before.
    fn set_downtime_target(&self, downtime: Duration) -> HypervisorFuture<'_, ()>;

    /// Lets the hypervisor take up to so much of their time from the guest's processors, so that it makes less memory dirty.
    /// `percent` is brought between 1 and 99.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]; the move goes on as before.
    fn raise_throttle(&self, percent: u8) -> HypervisorFuture<'_, ()>;

    /// Pauses the VM of a move that is under way, so that the rest of its memory follows later. Both sides must have agreed
    /// on [`MemoryMode::PostCopy`].
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]. The VM may be paused.
    fn begin_post_copy(&self) -> HypervisorFuture<'_, PostCopyStart>;

    /// Lets a VM that waits at [`MigrationStatus::PreSwitchover`] send the last of its memory and its devices' states.
    ///
    /// Without post-copy, wait for [`MigrationStatus::Completed`] here and for [`Self::await_loaded`] there before anything
    /// is handed over: until then a failure lets the VM run on here by itself, afterwards only [`Self::resume`] does.
    ///
    /// **N.B.** After [`Self::begin_post_copy`] the VM never runs here again.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]: it does not wait there.
    fn switch_over(&self) -> HypervisorFuture<'_, ()>;

    /// Has a source whose stream broke after the switch-over send the rest of the memory to `stream`, on which somebody
    /// listens.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]: it does not wait for that.
    fn resend_memory<'a>(&'a self, stream: &'a Path) -> HypervisorFuture<'a, ()>;

    /// Gives the move up: the VM runs on here. It returns when the hypervisor has taken note; wait for
    /// [`MigrationStatus::Cancelled`] or [`MigrationStatus::Failed`] to know that it is over. A move that is over is left as
    /// it is.
    ///
    /// **N.B.** A hypervisor whose stream hangs may not hear this: the caller breaks the stream instead.
    fn abandon(&self) -> HypervisorFuture<'_, ()>;

    /// Makes a VM that was started to wait for memory listen for it on the unix socket `socket`. It will be paused when it
    /// has it. Connect the main stream before any other, and none before its first bytes are there.
    ///
    /// # Errors
    /// [`HypervisorError::State`]: it does not wait for memory. [`HypervisorError::Refused`]: it cannot listen there.
    fn expect_memory<'a>(&'a self, socket: &'a Path, transfer: MemoryTransfer) -> HypervisorFuture<'a, ()>;

    /// Waits until the VM has what it needs to run and is paused, ready to be resumed: all of its memory, or with post-copy
    /// its devices.
    ///
    /// # Errors
    /// [`HypervisorError::MigrationEnded`], [`HypervisorError::Gone`]: the stream broke, or does not fit this VM.
    /// [`HypervisorError::State`]: it does anything else than being paused. [`HypervisorError::Deadline`].
    fn await_loaded(&self, deadline: Duration) -> HypervisorFuture<'_, ()>;
}

/// What has the target of a broken move take the rest of its memory.
///
/// It is a trait of its own because a hypervisor may have a second way in for this one request: the first one may answer only
/// when that memory has come.
pub trait RecoverMemory: Send + Sync {
    /// Makes a target whose stream broke after the switch-over listen on `socket` for the rest of its memory. It runs on
    /// meanwhile, on what it has.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]: it does not wait for that; it takes a moment to notice that a stream has broken.
    fn recover_memory<'a>(&'a self, socket: &'a Path) -> HypervisorFuture<'a, ()>;
}

/// When a VM's processors stop and run, from the moment on at which this was made.
pub trait RunChanges: Send {
    /// Waits for the next change; `None`: the connection to the hypervisor has ended. Some may be missed by a slow listener.
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Option<RunChange>> + Send + '_>>;
}

/// A change of what a VM's processors do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunChange {
    /// They have stopped.
    Stopped,
    /// They run.
    Runs,
}
