//! Why something was not done with a QEMU, by cause.

use std::path::PathBuf;
use std::time::Duration;

use crate::HypervisorError;

/// The hypervisor's name in messages.
pub(super) const PRODUCT: &str = "QEMU";

/// Why a command was not carried out, as far as the protocol goes.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// Nobody listens.
    #[error("nobody listens at {}", socket.display())]
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
    /// The connection was closed before anything was said: QEMU has ended, or not begun, or it is another program.
    #[error("what listens at {} closed the connection before it greeted", socket.display())]
    HungUp {
        /// Where.
        socket: PathBuf,
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
    /// A class that this program does not know.
    Other(String),
}

impl From<QmpError> for HypervisorError {
    fn from(error: QmpError) -> Self {
        match error {
            QmpError::Connect { socket, source } => Self::Unreachable { product: PRODUCT, socket, source },
            QmpError::Gone { .. } | QmpError::HungUp { .. } => Self::Gone(error.into()),
            QmpError::Silent { .. } => Self::Silent(error.into()),
            QmpError::Refused { .. } => Self::Refused(error.into()),
            QmpError::NoGreeting { .. } | QmpError::NotAMonitor { .. } | QmpError::Unexpected { .. } => {
                Self::Other(error.into())
            }
        }
    }
}
