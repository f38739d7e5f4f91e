//! Errors of a VM's move, and of its start at the target, by cause.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hypervisor::{HypervisorError, RunState};
use tokio::task::JoinError;

use crate::error::RequestError;
use crate::hooks::HookFault;
use crate::vms::VmError;

/// Why a VM does not move, or does not run at its target.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MoveFault {
    #[error("no VM is known to move along")]
    NoVm,
    /// Its migration was abandoned while its memory was copied.
    #[error("it was given up")]
    GivenUp,
    #[error("its migration has ended")]
    MigrationEnded,
    /// An earlier daemon had received it.
    #[error("the VM was lost when this daemon was started again")]
    LostInRestart,
    #[error(transparent)]
    Task(#[from] JoinError),
    /// The other host failed.
    #[error(transparent)]
    Peer(#[from] PeerFault),
    #[error("{} s were not enough for {what}", limit.as_secs())]
    Overdue { what: &'static str, limit: Duration },
    /// It was not loaded at the target in time after its pause.
    #[error(
        "{} s were not enough for the VM to be loaded at the target: QEMU here {here}, and the target {target} that the \
         VM is loaded",
        limit.as_secs()
    )]
    LoadOverdue {
        limit: Duration,
        here: String,
        /// Whether the target has confirmed it, as part of the message.
        target: &'static str,
    },
    #[error(transparent)]
    Hook(#[from] HookFault),
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    #[error(transparent)]
    Vm(#[from] VmError),
    /// This host cannot take it for a reason outside of the VM: a name, space in a store.
    #[error("{}", .0.message())]
    Host(#[from] RequestError),
    /// This host lacks what the VM needs; the sentences say what to do.
    #[error("{0}")]
    Unfit(String),
    #[error("the VM \"{name}\" with the volumes {} is not the one that was offered", volumes.join(", "))]
    NotOffered { name: String, volumes: Vec<String> },
    #[error(
        "its QEMU has ended: sterna vm show {vm} says how, and sterna vm start {vm} starts it again here"
    )]
    QemuEnded { vm: String },
    /// The socket for its memory could not be opened.
    #[error("cannot listen on {}: {source}", path.display())]
    Listen { path: PathBuf, source: io::Error },
    /// A socket cannot be moved out of QEMU's folder.
    #[error("{}: {source}", path.display())]
    Socket { path: PathBuf, source: io::Error },
    /// Its hypervisor does not connect to the socket for its memory.
    #[error("the hypervisor cannot send the memory: {0}")]
    NotSent(#[source] io::Error),
    #[error("the stream of the VM's memory broke: {0}")]
    StreamBroke(#[source] io::Error),
    /// It writes memory faster than the memory is sent; with the figures.
    #[error("{0}")]
    DoesNotConverge(String),
    /// The target asks to run it, and its volumes are not released.
    #[error("the volumes are not the target's yet")]
    NotReleased,
    /// It is to run, and is incomplete.
    #[error("the VM is not loaded")]
    NotLoaded,
    /// It is to run, and its hypervisor's state does not allow it.
    #[error("the VM is not loaded: it is {0}")]
    NotPaused(RunState),
    #[error(transparent)]
    LoadFailed(#[from] Arc<MoveFault>),
    #[error("{0}")]
    MemoryLost(String),
    /// It has changed, or cannot move in its present state; the sentences say what to do.
    #[error("{0}")]
    Changed(String),
}

/// Why the other host failed, in its own words if it sent any.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PeerFault(pub(crate) String);

impl PeerFault {
    /// Returns the error for a lost connection to the other host.
    pub(crate) fn silent() -> Self {
        Self("the other host has stopped responding".to_owned())
    }
}
