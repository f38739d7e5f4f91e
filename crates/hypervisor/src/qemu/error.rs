//! The errors of operations on a QEMU, by cause.

use std::path::PathBuf;
use std::time::Duration;

use crate::HypervisorError;

pub(super) const PRODUCT: &str = "QEMU";

/// Why a command was not carried out, as far as the protocol goes.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// No monitor listens at the socket.
    #[error("no program listens at {}", socket.display())]
    Connect {
        /// The path of the socket.
        socket: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The monitor does not greet in time.
    ///
    /// A monitor serves one client at a time; the kernel accepts the next one, which waits.
    #[error(
        "what listens at {} did not greet within {} s; another program, such as libvirt, may be connected to this \
         monitor: give the VM a monitor of its own for Sterna",
        socket.display(), waited.as_secs()
    )]
    NoGreeting {
        /// The path of the socket.
        socket: PathBuf,
        /// The duration of the wait.
        waited: Duration,
    },
    /// The connection was closed before the greeting: QEMU has ended, or not begun, or it is another program.
    #[error("what listens at {} closed the connection before it greeted", socket.display())]
    HungUp {
        /// The path of the socket.
        socket: PathBuf,
    },
    /// It is not QEMU's machine protocol.
    #[error("what listens at {} does not speak QEMU's machine protocol (QMP)", socket.display())]
    NotAMonitor {
        /// The path of the socket.
        socket: PathBuf,
    },
    /// No answer came in time. The command may still be carried out.
    #[error("QEMU did not answer {command} within {} ms", waited.as_millis())]
    Silent {
        /// The name of the command.
        command: String,
        /// The duration of the wait.
        waited: Duration,
    },
    /// The connection has ended, with QEMU or by itself. The command may or may not have been carried out.
    #[error("QEMU's monitor closed the connection during {command}: {reason}")]
    Gone {
        /// The name of the command.
        command: String,
        /// How the connection ended.
        reason: String,
    },
    /// QEMU refuses the command.
    #[error("QEMU refuses {command}: {description}")]
    Refused {
        /// The name of the command.
        command: String,
        /// The class of the error.
        class: ErrorClass,
        /// The text of QEMU's error.
        description: String,
    },
    /// The answer has another form than the command's answers.
    #[error("QEMU answered {command} with something other than {expected}")]
    Unexpected {
        /// The name of the command.
        command: String,
        /// The form that was expected.
        expected: &'static str,
    },
}

/// QEMU's classes of errors. Most errors are generic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// An error without a class.
    Generic,
    /// This QEMU has no such command.
    CommandNotFound,
    /// The device is not in use.
    DeviceNotActive,
    /// There is no such device.
    DeviceNotFound,
    /// The kernel lacks a required capability.
    KvmMissingCapability,
    /// A class that is not known here.
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
