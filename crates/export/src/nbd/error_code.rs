//! The closed set of NBD errors, and the mapping of a device's failures to them.

use block::IoError;
use rustix::io::Errno;

use crate::nbd::protocol::error;

/// An error as the client sees it. The number is that of the protocol, whatever the system's own numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ErrorCode {
    /// EPERM: a write to an export that is read-only.
    NotPermitted = error::EPERM,
    /// EIO: the device failed.
    Io = error::EIO,
    /// ENOMEM: the system has no memory.
    NoMemory = error::ENOMEM,
    /// EINVAL: unknown command or flag, out of range, misaligned.
    Invalid = error::EINVAL,
    /// ENOSPC: the store is full, or a write lies beyond the end.
    NoSpace = error::ENOSPC,
    /// EOVERFLOW: a read too large for one piece; the protocol has no other use for it.
    Overflow = error::EOVERFLOW,
    /// ENOTSUP: zeroing would not be fast; the protocol has no other use for it.
    Unsupported = error::ENOTSUP,
    /// ESHUTDOWN: the device is being closed.
    Shutdown = error::ESHUTDOWN,
}

impl ErrorCode {
    /// Returns the number in the protocol.
    pub const fn wire(self) -> u32 {
        self as u32
    }

    /// Returns the text for clients that read messages.
    pub const fn message(self) -> &'static str {
        match self {
            Self::NotPermitted => "the export is read-only",
            Self::Io => "the device failed",
            Self::NoMemory => "out of memory",
            Self::Invalid => "invalid request",
            Self::NoSpace => "no space left",
            Self::Overflow => "too large",
            Self::Unsupported => "not supported",
            Self::Shutdown => "the device is being closed",
        }
    }
}

impl From<IoError> for ErrorCode {
    fn from(error: IoError) -> Self {
        match error {
            IoError::ReadOnly => Self::NotPermitted,
            IoError::OutOfRange { .. } | IoError::Misaligned { .. } => Self::Invalid,
            IoError::Unsupported => Self::Unsupported,
            IoError::Closed => Self::Shutdown,
            error if error.is_no_space() => Self::NoSpace,
            IoError::Os { errno, .. } => match errno {
                Errno::PERM | Errno::ACCESS | Errno::ROFS => Self::NotPermitted,
                Errno::NOMEM => Self::NoMemory,
                Errno::INVAL => Self::Invalid,
                Errno::OPNOTSUPP => Self::Unsupported,
                Errno::SHUTDOWN => Self::Shutdown,
                _ => Self::Io,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_of_a_full_store_is_no_space_and_the_unknown_is_io() {
        for errno in [Errno::NOSPC, Errno::DQUOT, Errno::FBIG] {
            assert_eq!(ErrorCode::from(IoError::os("write", errno)), ErrorCode::NoSpace);
        }
        assert_eq!(ErrorCode::from(IoError::os("read", Errno::TIMEDOUT)), ErrorCode::Io);
        assert_eq!(ErrorCode::from(IoError::ReadOnly).wire(), 1);
        assert_eq!(ErrorCode::from(IoError::Closed).wire(), 108);
        assert_eq!(ErrorCode::from(IoError::Unsupported).wire(), 95);
    }
}
