//! The control of VMs' hypervisors. This crate knows no volumes and decides nothing about migrations.
//!
//! ```text
//!   Hypervisor   what a migration needs of one running VM: checks, memory out, memory in, pause and resume
//!      ├── qemu::Qemu   one QEMU process, over its machine protocol (QMP), with QEMU's own operations
//!      └── fake::FakeVm no process at all: what a test needs of a VM
//!   libvirt::Libvirt  domains of libvirt, whose disks libvirt itself moves to other places
//! ```
//! A migration uses only the trait. Code that starts a VM, adopts one or reads its command knows the hypervisor.
//! `tests/qemu/contract.rs` runs the same tests for all implementations.

mod error;
pub mod fake;
pub mod libvirt;
mod memory;
pub mod qemu;
mod state;

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

pub use error::HypervisorError;
pub use memory::{MemoryMode, MemoryOptions, MemoryProgress, MemoryTransfer, PostCopyStart};
pub use state::{MigrationStatus, RunState};

/// The future of a hypervisor's answer.
pub type HypervisorFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, HypervisorError>> + Send + 'a>>;

/// One running VM, with the hypervisor's operations for a migration.
///
/// Dropping it leaves the VM as it is. Several tasks may call the methods at the same time; a dropped request may or may not be
/// carried out. Every method fails with [`HypervisorError::Gone`] if the VM's process has ended, and with
/// [`HypervisorError::Silent`] if it does not answer in time. Other errors are listed at the methods.
///
/// A transfer of memory passes through [`MigrationStatus`]es on both sides:
///
/// ```text
///   source                                               target, started so that it waits for memory
///   offer_memory ─► setup ─► active (rounds)   ═══════►  expect_memory
///                              │ the rest is small enough
///                       pre-switchover: paused
///   switch_over   ─► device ─► completed       ═══════►  await_loaded: paused, its disks not touched
///                       │          └ resume: runs here,       resume: runs there
///                       │            if it never runs there
///                       └ failed: continues by itself
/// ```
/// The code that hands the disks over decides which side runs.
pub trait Hypervisor: RecoverMemory + std::fmt::Debug + Send + Sync {
    /// Returns name and version of the hypervisor, such as `QEMU 10.0.2`.
    fn product(&self) -> String;

    /// Returns the VM's process; `None` if the kernel does not report it.
    fn process(&self) -> Option<i32>;

    /// Returns a path for sockets of this VM's memory: beside the hypervisor's own, and different for each VM.
    fn memory_socket(&self) -> PathBuf;

    /// Resolves with the reason when the connection to the hypervisor has ended; the VM's process may end a little later.
    fn closed(&self) -> Pin<Box<dyn Future<Output = String> + Send + '_>>;

    /// Returns the present state of the VM.
    fn run_state(&self) -> HypervisorFuture<'_, RunState>;

    /// Begins to report when the VM's processors stop and run.
    fn run_changes(&self) -> Box<dyn RunChanges>;

    /// Lets the processors run: of a VM that was paused, has loaded its memory, or has sent it away. The hypervisor first takes
    /// its disks back, if another process had them.
    ///
    /// **N.B.** Resume a VM whose memory was sent away only if it never runs at the target.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]: it is still loading, or a disk is unavailable. The VM then does not run.
    fn resume(&self) -> HypervisorFuture<'_, ()>;

    /// Lets a VM that has loaded its memory take its disks, without running it. `socket`: a path where the hypervisor may
    /// listen for a moment.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]: a disk is unavailable.
    fn take_disks<'a>(&'a self, socket: &'a Path) -> HypervisorFuture<'a, ()>;

    /// Lets the VM's network cards announce their place in the network.
    fn announce(&self) -> HypervisorFuture<'_, ()>;

    /// Returns whether a disk of the VM was detached from its data and has none, as during an adoption: the guest
    /// must not run then.
    fn has_disk_over_nothing(&self) -> HypervisorFuture<'_, bool>;

    /// Returns the present size of the guest's memory in bytes.
    fn memory_bytes(&self) -> HypervisorFuture<'_, u64>;

    /// Returns why this VM cannot be migrated at present, for the administrator; empty if it can. Changes nothing.
    fn migration_blockers(&self) -> HypervisorFuture<'_, Vec<String>>;

    /// Returns why this VM cannot run at a target before all of its memory has arrived, as far as the source can tell; `None`: it
    /// can. Call it only while no transfer is in progress.
    fn post_copy_blocker(&self) -> HypervisorFuture<'_, Option<String>>;

    /// Returns whether memory can use further streams beside the main one.
    fn knows_side_streams(&self) -> HypervisorFuture<'_, bool>;

    /// Begins to send the memory to `stream`, a listening unix socket. Of several streams the main one is connected first.
    ///
    /// The VM continues to run. The hypervisor pauses it at [`MigrationStatus::PreSwitchover`], and waits there for
    /// [`Self::switch_over`] or [`Self::abandon`].
    ///
    /// # Errors
    /// [`HypervisorError::Blocked`], [`HypervisorError::Refused`]. No transfer is then in progress.
    fn offer_memory<'a>(&'a self, stream: &'a Path, options: MemoryOptions) -> HypervisorFuture<'a, ()>;

    /// Returns the progress of the transfer. Works at the target too, where most figures are zero.
    fn memory_progress(&self) -> HypervisorFuture<'_, MemoryProgress>;

    /// Waits until the transfer has, or has had, one of the statuses, and returns it. Keeps waiting for a
    /// silent hypervisor until `deadline`.
    ///
    /// # Errors
    /// [`HypervisorError::MigrationEnded`]: it ended with another status.
    /// [`HypervisorError::Deadline`].
    fn await_status<'a>(
        &'a self,
        wanted: &'a [MigrationStatus],
        deadline: Duration,
    ) -> HypervisorFuture<'a, MigrationStatus>;

    /// Changes how long the VM may be paused in the transfer in progress.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]; the transfer continues as before.
    fn set_downtime_target(&self, downtime: Duration) -> HypervisorFuture<'_, ()>;

    /// Limits the bytes a second of the transfer in progress, also of what follows in the background after the VM runs at the
    /// target; `None`: no limit. Memory that the VM waits for, and what is sent while it stands still, is not limited.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]; the transfer continues as before.
    fn limit_memory(&self, bytes_per_s: Option<NonZeroU64>) -> HypervisorFuture<'_, ()>;

    /// Lets the hypervisor slow the guest's processors down by up to `percent` of their time, so that the guest dirties less
    /// memory. `percent` is limited to 1 to 99.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]; the transfer continues as before.
    fn raise_throttle(&self, percent: u8) -> HypervisorFuture<'_, ()>;

    /// Pauses the VM of a transfer in progress, so that the rest of its memory follows later. Both sides must
    /// have agreed on [`MemoryMode::PostCopy`].
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]. The VM may be paused.
    fn begin_post_copy(&self) -> HypervisorFuture<'_, PostCopyStart>;

    /// Lets a VM that waits at [`MigrationStatus::PreSwitchover`] send the last of its memory and its devices' states.
    ///
    /// Without post-copy, wait for [`MigrationStatus::Completed`] here and for [`Self::await_loaded`] at the target before
    /// anything is handed over. Until then a failure lets the VM continue here by itself; afterwards only [`Self::resume`] does.
    ///
    /// **N.B.** After [`Self::begin_post_copy`] the VM never runs here again.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]: it does not wait there.
    fn switch_over(&self) -> HypervisorFuture<'_, ()>;

    /// Lets a source whose stream broke after the switch-over send the rest of the memory to `stream`, a listening socket.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]: it does not wait for that.
    fn resend_memory<'a>(&'a self, stream: &'a Path) -> HypervisorFuture<'a, ()>;

    /// Abandons the transfer: the VM continues here. Returns when the hypervisor has accepted that; wait for
    /// [`MigrationStatus::Cancelled`] or [`MigrationStatus::Failed`] to know that it is over. Has no effect on a
    /// transfer that is over.
    ///
    /// **N.B.** A hypervisor whose stream hangs may not receive this: the caller breaks the stream instead.
    fn abandon(&self) -> HypervisorFuture<'_, ()>;

    /// Lets a VM that was started to wait for memory listen for it on the unix socket `socket`. The VM is paused once it has the
    /// memory. Connect the main stream before any other, and no other before its first bytes have arrived.
    ///
    /// # Errors
    /// [`HypervisorError::State`]: it does not wait for memory. [`HypervisorError::Refused`]: it cannot listen there.
    fn expect_memory<'a>(&'a self, socket: &'a Path, transfer: MemoryTransfer) -> HypervisorFuture<'a, ()>;

    /// Waits until the VM is paused and ready to be resumed: with all of its memory, or with post-copy its devices.
    ///
    /// # Errors
    /// [`HypervisorError::MigrationEnded`], [`HypervisorError::Gone`]: the stream broke, or does not fit this VM.
    /// [`HypervisorError::State`]: it is in a state other than paused. [`HypervisorError::Deadline`].
    fn await_loaded(&self, deadline: Duration) -> HypervisorFuture<'_, ()>;
}

/// Lets the target of a broken transfer receive the rest of its memory.
///
/// It is a separate trait because a hypervisor may need a second connection for this one request: the first one may answer only
/// once that memory has arrived.
pub trait RecoverMemory: Send + Sync {
    /// Lets a target whose stream broke after the switch-over listen on `socket` for the rest of its memory. The VM continues
    /// meanwhile, with the memory that it has.
    ///
    /// # Errors
    /// [`HypervisorError::Refused`]: it does not wait for that; it takes a moment to notice that a stream has broken.
    fn recover_memory<'a>(&'a self, socket: &'a Path) -> HypervisorFuture<'a, ()>;
}

/// Reports when a VM's processors stop and run, from the moment at which it was made.
pub trait RunChanges: Send {
    /// Waits for the next change; `None`: the connection to the hypervisor has ended. A slow listener may miss some.
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Option<RunChange>> + Send + '_>>;
}

/// A change of a VM's processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunChange {
    /// The processors have stopped.
    Stopped,
    /// The processors are running.
    Runs,
}
