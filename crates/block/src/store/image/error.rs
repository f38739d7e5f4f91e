//! Why an image cannot be used.

use std::path::{Path, PathBuf};

use super::device_kind::DeviceUser;
use crate::device::ALIGNMENT;
use crate::store::lock::Holder;

/// The reason why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// There is no such file.
    #[error("{path} does not exist")]
    NotFound {
        /// The path of the image.
        path: PathBuf,
    },
    /// There is such a file, and none was expected.
    #[error("{path} exists already")]
    Exists {
        /// The path of the image.
        path: PathBuf,
    },
    /// It is a folder, a pipe, or another file without bytes at offsets.
    #[error("{path} is neither a regular file nor a block device")]
    NotRegular {
        /// The path of the image.
        path: PathBuf,
    },
    /// Another process uses the image.
    #[error("{path} is in use by {holder}")]
    Locked {
        /// The path of the image.
        path: PathBuf,
        /// The other process, as far as it is known.
        holder: Holder,
    },
    /// It is a block device that the system itself uses.
    #[error("{path} {user}: free it first, or name another device")]
    DeviceInUse {
        /// The path of the device.
        path: PathBuf,
        /// The part of the system that uses it.
        user: DeviceUser,
    },
    /// It is a block device that cannot be written.
    #[error("{path} is a read-only device")]
    ReadOnlyDevice {
        /// The path of the device.
        path: PathBuf,
    },
    /// Its sectors are larger than the blocks of volumes.
    #[error("{path} has sectors of {sector_bytes} bytes; at most {ALIGNMENT} can be served")]
    SectorTooLarge {
        /// The path of the device.
        path: PathBuf,
        /// Its logical block size in bytes.
        sector_bytes: u32,
    },
    /// It is too small for its volume.
    #[error("{path} has {size} bytes and needs {needed}")]
    TooSmall {
        /// The path of the image.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The size that is needed, in bytes.
        needed: u64,
    },
    /// No file of this size fits into the file system.
    #[error("{path}: no file can have {size} bytes here")]
    TooLarge {
        /// The path of the image.
        path: PathBuf,
        /// The requested size, in bytes.
        size: u64,
    },
    /// The file system, or the owner's quota, is full.
    #[error("no space for {path}")]
    NoSpace {
        /// The path of the image.
        path: PathBuf,
    },
    /// The daemon's user may not open it.
    #[error(
        "no permission to use {path}: the user that the daemon runs as must be able to read and write it"
    )]
    NotPermitted {
        /// The path of the image.
        path: PathBuf,
    },
    /// Another error of the system.
    #[error("{operation} {path}")]
    Os {
        /// The operation, as a verb.
        operation: &'static str,
        /// The path of the image.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
}

impl ImageError {
    pub(in crate::store) fn of(operation: &'static str, path: &Path, source: std::io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            std::io::ErrorKind::NotFound => Self::NotFound { path },
            std::io::ErrorKind::AlreadyExists => Self::Exists { path },
            std::io::ErrorKind::PermissionDenied => Self::NotPermitted { path },
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Self::NoSpace { path },
            _ => Self::Os { operation, path, source },
        }
    }
}
