//! Why something was not done with a QEMU, by cause.

use std::path::PathBuf;
use std::time::Duration;

use super::state::{MigrationStatus, RunState};

/// Why a command was not carried out, as far as the protocol goes.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// Nobody listens.
    #[error("no QEMU can be reached at {}: {source}; is the VM running?", socket.display())]
    Connect {
        /// Where.
        socket: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// Somebody listens and does not greet in time.
    ///
    /// A monitor serves one client at a time; the next is accepted by the kernel, and waits.
    #[error(
        "what listens at {} did not greet within {} s; another program, such as libvirt, may be connected to this \
         monitor: give the VM a monitor of its own for Sterna",
        socket.display(), waited.as_secs()
    )]
    NoGreeting {
        /// Where.
        socket: PathBuf,
        /// For how long.
        waited: Duration,
    },
    /// It is not QEMU's machine protocol.
    #[error("what listens at {} does not speak QEMU's machine protocol (QMP)", socket.display())]
    NotAMonitor {
        /// Where.
        socket: PathBuf,
    },
    /// No answer came in time. Whether the command is carried out is not known.
    #[error("QEMU did not answer {command} within {} ms", waited.as_millis())]
    Silent {
        /// The command.
        command: String,
        /// For how long.
        waited: Duration,
    },
    /// The connection has ended: QEMU has, or it was cut off. Whether the command was carried out is not known.
    #[error("QEMU's monitor went away during {command}: {reason}")]
    Gone {
        /// The command.
        command: String,
        /// How it ended.
        reason: String,
    },
    /// QEMU says no.
    #[error("QEMU refuses {command}: {description}")]
    Refused {
        /// The command.
        command: String,
        /// What kind of error.
        class: ErrorClass,
        /// In QEMU's words.
        description: String,
    },
    /// The answer is not what the command is answered with.
    #[error("QEMU answered {command} with something else than {expected}")]
    Unexpected {
        /// The command.
        command: String,
        /// What it should have been.
        expected: &'static str,
    },
}

/// QEMU's classes of errors. Everything that has no class of its own is generic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// Anything.
    Generic,
    /// This QEMU has no such command.
    CommandNotFound,
    /// The device is not in use.
    DeviceNotActive,
    /// There is no such device.
    DeviceNotFound,
    /// The kernel cannot do what is asked for.
    KvmMissingCapability,
    /// One that this program does not know.
    Other(String),
}

/// Why something was not done with a machine.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The protocol's reason.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// It took too long.
    #[error("waited {} ms for {what}, and it is still {still}", waited.as_millis())]
    Deadline {
        /// What was waited for.
        what: String,
        /// What was seen last.
        still: String,
        /// For how long.
        waited: Duration,
    },
    /// QEMU gave up the move of the memory, or was told to.
    #[error("QEMU's migration is {status}{}", because(.detail))]
    MigrationEnded {
        /// How it ended.
        status: MigrationStatus,
        /// In QEMU's words, if it has any.
        detail: Option<String>,
    },
    /// The machine is in a state in which this cannot be.
    #[error("the VM is {found}, and should be {expected}")]
    State {
        /// What it should be.
        expected: RunState,
        /// What it is.
        found: RunState,
    },
    /// QEMU cannot migrate this machine.
    #[error("QEMU cannot migrate this VM: {}", reasons.join("; "))]
    Blocked {
        /// In QEMU's words.
        reasons: Vec<String>,
    },
    /// QEMU would read something else from the path than is meant.
    #[error("{} cannot be given to QEMU: {reason}", path.display())]
    Path {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
}

impl MachineError {
    /// Whether the machine's monitor is gone, and QEMU most likely with it.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Qmp(QmpError::Gone { .. } | QmpError::Connect { .. }))
    }

    /// Whether QEMU has answered that it does not do it.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Qmp(QmpError::Refused { .. }))
    }
}

fn because(detail: &Option<String>) -> String {
    detail.as_ref().map_or_else(String::new, |detail| format!(": {detail}"))
}
