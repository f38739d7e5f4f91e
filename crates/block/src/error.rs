//! The errors of a device's requests.

use rustix::io::Errno;

/// A failed request, cheap to copy: the same failure goes to the guest and to the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoError {
    /// The operating system refused the operation.
    #[error("{operation}: {}", std::io::Error::from_raw_os_error(.errno.raw_os_error()))]
    Os {
        /// The operation, as a verb: `read`, `write`, `flush`, `discard`.
        operation: &'static str,
        /// The error of the system.
        errno: Errno,
    },
    /// The range does not lie within the device.
    #[error("range {offset}+{length} lies outside a device of {size} bytes")]
    OutOfRange {
        /// First byte of the request.
        offset: u64,
        /// Length of the request in bytes.
        length: u64,
        /// Size of the device in bytes.
        size: u64,
    },
    /// Offset or length is no multiple of the device's alignment.
    #[error("range {offset}+{length} is not aligned to {alignment} bytes")]
    Misaligned {
        /// First byte of the request.
        offset: u64,
        /// Length of the request in bytes.
        length: u64,
        /// The device's alignment in bytes.
        alignment: u32,
    },
    /// A change was sent to a read-only device.
    #[error("the device is read-only")]
    ReadOnly,
    /// The device has no such operation.
    #[error("the device does not support this operation")]
    Unsupported,
    /// The device, or the engine below it, is being shut down.
    #[error("the device is closed")]
    Closed,
}

impl IoError {
    /// Makes the error of a system call in `operation`.
    pub fn os(operation: &'static str, errno: Errno) -> Self {
        Self::Os { operation, errno }
    }

    /// Makes an error of a failed `std` call; errors without an OS code become EIO.
    pub fn from_std(operation: &'static str, error: &std::io::Error) -> Self {
        Self::Os { operation, errno: Errno::from_io_error(error).unwrap_or(Errno::IO) }
    }

    /// Returns whether the store has run out of space or quota.
    pub fn is_no_space(&self) -> bool {
        matches!(self, Self::Os { errno: Errno::NOSPC | Errno::DQUOT | Errno::FBIG, .. })
    }

    /// Returns the code by which an operating system would report this failure.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Os { errno, .. } => *errno,
            Self::OutOfRange { .. } | Self::Misaligned { .. } => Errno::INVAL,
            Self::ReadOnly => Errno::PERM,
            Self::Unsupported => Errno::OPNOTSUPP,
            Self::Closed => Errno::SHUTDOWN,
        }
    }
}
