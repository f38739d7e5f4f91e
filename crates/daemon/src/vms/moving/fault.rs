//! Why a VM does not move, or does not run where it came to, by cause.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hypervisor::{HypervisorError, RunState};
use tokio::task::JoinError;

use crate::error::RequestError;
use crate::hooks::HookFault;
use crate::vms::VmError;

/// Why a VM does not move, or does not run where it came to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MoveFault {
    /// No VM goes along with the migration.
    #[error("nothing is known of a VM that goes along")]
    NoVm,
    /// Its migration was given up while its memory was copied.
    #[error("it was given up")]
    GivenUp,
    /// Its migration has ended while it came.
    #[error("its migration has ended")]
    MigrationEnded,
    /// It came to an earlier daemon.
    #[error("the VM was lost when this daemon was started again")]
    LostInRestart,
    /// What was done for it has panicked.
    #[error(transparent)]
    Task(#[from] JoinError),
    /// The other host does not do its part.
    #[error(transparent)]
    Peer(#[from] PeerFault),
    /// Something took too long.
    #[error("{} s were not enough for {what}", limit.as_secs())]
    Overdue {
        what: &'static str,
        /// How long it might take.
        limit: Duration,
    },
    /// It was not loaded at the target in time after its pause.
    #[error(
        "{} s were not enough for the VM to be loaded at the target: QEMU here {here}, and the target {target} that the \
         VM is loaded",
        limit.as_secs()
    )]
    LoadOverdue {
        /// How long it might take.
        limit: Duration,
        /// What is known of its QEMU here.
        here: String,
        /// Whether the target has said that it is, in words for people.
        target: &'static str,
    },
    /// A hook of this host failed.
    #[error(transparent)]
    Hook(#[from] HookFault),
    /// Its hypervisor here did not do something.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// This host did not do something with the VM.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// This host cannot take it, for what it is not of the VM itself: a name, space in a store.
    #[error("{}", .0.message())]
    Host(#[from] RequestError),
    /// This host lacks what the VM needs: sentences that say what to do.
    #[error("{0}")]
    Unfit(String),
    /// The manifest is of another VM than the offer.
    #[error("the VM \"{name}\" with the volumes {} is not the one that was offered", volumes.join(", "))]
    NotOffered { name: String, volumes: Vec<String> },
    /// Its QEMU has ended.
    #[error(
        "its QEMU has ended: sterna vm show {vm} says how, and sterna vm start {vm} starts it again here"
    )]
    QemuEnded { vm: String },
    /// A socket for its memory cannot be listened on.
    #[error("cannot listen on {}: {source}", path.display())]
    Listen {
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// A socket cannot be taken out of QEMU's folder.
    #[error("{}: {source}", path.display())]
    Socket {
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// Its hypervisor does not connect to where the memory goes.
    #[error("the hypervisor cannot send the memory: {0}")]
    NotSent(#[source] io::Error),
    /// A stream of its memory broke.
    #[error("the stream of the VM's memory broke: {0}")]
    StreamBroke(#[source] io::Error),
    /// It writes memory faster than that is sent; with the figures.
    #[error("{0}")]
    DoesNotConverge(String),
    /// The target wants it to run there, and its volumes are not released.
    #[error("the volumes are not the target's yet")]
    NotReleased,
    /// It is to run, and does not have all that it needs.
    #[error("the VM is not loaded")]
    NotLoaded,
    /// It is to run, and its hypervisor is in a state in which it cannot.
    #[error("the VM is not loaded: it is {0}")]
    NotPaused(RunState),
    /// It is to run, and was not loaded, for this reason.
    #[error(transparent)]
    LoadFailed(#[from] Arc<MoveFault>),
    /// Its memory is lost, for this reason.
    #[error("{0}")]
    MemoryLost(String),
    /// It is not what is known of it any more, or cannot move as it is: sentences that say what to do.
    #[error("{0}")]
    Changed(String),
}

/// Why the other host does not do its part: in its own words, if it is heard.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PeerFault(pub(crate) String);

impl PeerFault {
    /// Nothing more comes from the other host.
    pub(crate) fn silent() -> Self {
        Self("the other host is not heard any more".to_owned())
    }
}
