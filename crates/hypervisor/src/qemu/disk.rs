//! The disks of a running QEMU that are plain files, and their being led over an NBD export and back, without a restart.
//!
//! ```text
//!   before            between                         while it is led
//!   device            device                          device
//!     │                 │                               │
//!   format            format        nbd ─► export     format
//!     │                 │                               │
//!   file ─► image     file ─► image                   nbd ─► export ─► image
//!
//!   -blockdev   the format node stays, and gets another child: blockdev-reopen
//!   -drive      QEMU's own names cannot be reopened: the device gets another format node, qom-set drive
//!   qcow2       the export is of what the guest sees: the device gets a raw node, and at the end a qcow2 one again
//! ```
//!
//! Reopening sets every option that is not said to its default, so all of them are said, and what QEMU made of them is read
//! back. Whoever serves the export does not hold QEMU's locks on the image when a command is given here: QEMU holds them until
//! it is led away, and takes them when it is led back.

mod errors;
mod lead;
mod prove;
mod survey;

use std::path::PathBuf;

/// How long requests of a disk wait for a daemon that is started again, in seconds (`reconnect-delay`).
///
/// QEMU tries to connect again 1, 3, 7, 15, 31 and 47 s after the loss (its pauses are 1, 2, 4, 8, 16 and 16 s), and gives
/// up when this time is over: a daemon that is away for up to 45 s costs no I/O error. With 30 it would be 15 s.
pub const RECONNECT_SECONDS: u32 = 60;

/// A disk of a VM whose bytes are in a local file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalDisk {
    /// The device that the guest sees: its identity, or its path among QEMU's objects.
    pub device: String,
    /// The node that the device reads and writes.
    pub node: String,
    /// Whether somebody gave that node its name. Only such a node can be reopened.
    pub is_named: bool,
    /// What drives that node: `raw` or `qcow2`; also `nbd` for a disk without a format node that is over an export.
    pub format: String,
    /// The name that `-drive` gave it; empty with `-blockdev`.
    pub drive: String,
    /// The node below it; `None` if it cannot be told.
    pub file_node: Option<String>,
    /// The file, as QEMU was told: it may be relative to where QEMU was started.
    pub file: PathBuf,
    /// The files that it stands on, from the upper to the lower.
    pub backing: Vec<PathBuf>,
    /// Bytes that the guest sees.
    pub size_bytes: u64,
    /// How it is used.
    pub options: DiskOptions,
}

/// A file that a disk is to be over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its format: `raw` or `qcow2`.
    pub format: String,
    /// What the node of the format is to be called if it is made anew, and the name is free; `None`: by a name of ours.
    pub node: Option<String>,
}

impl LocalDisk {
    /// Whether it is the VM's firmware or its variables, which the guest does not see as a disk.
    pub fn is_firmware(&self) -> bool {
        is_firmware(&self.device)
    }

    /// The number that it was led by, if the node below says so.
    pub fn number(&self) -> Option<u32> {
        self.file_node.as_deref()?.strip_prefix(lead::EXPORT_NODE)?.parse().ok()
    }
}

impl StayingDisk {
    /// As [`LocalDisk::is_firmware`].
    pub fn is_firmware(&self) -> bool {
        is_firmware(&self.device)
    }
}

fn is_firmware(device: &str) -> bool {
    device.contains(".flash")
}

/// How a disk's file is used, as far as QEMU tells.
///
/// It does not tell `discard`, which is taken to be `unmap`, nor `aio`, which is left to its default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// Nothing is written.
    pub is_read_only: bool,
    /// The host's page cache is not used.
    pub cache_direct: bool,
    /// Flushes are ignored.
    pub cache_no_flush: bool,
    /// What is done with zeroes that are written: `off`, `on` or `unmap`.
    pub detect_zeroes: String,
}

/// A disk that cannot be led anywhere, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{device}{}: {reason}", of_file(.file))]
pub struct StayingDisk {
    /// The device.
    pub device: String,
    /// Its image, as QEMU writes it; empty if that is not told.
    pub file: String,
    /// Why.
    pub reason: StayReason,
}

fn of_file(file: &str) -> String {
    if file.is_empty() { String::new() } else { format!(" ({file})") }
}

/// Why a disk cannot be led anywhere.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StayReason {
    /// A job of QEMU works on it.
    #[error("QEMU's job \"{0}\" works on it; wait for it, or cancel it")]
    Job(String),
    /// Bitmaps of a backup tool would be lost.
    #[error("it has bitmaps of a backup tool ({}), which would be lost; remove them first", .0.join(", "))]
    Bitmaps(Vec<String>),
    /// A filter, or a format that is not known.
    #[error("its uppermost node is driven by {0}; only raw and qcow2 over a file can be led elsewhere")]
    Driver(String),
    /// It stands on other files, and does not say on which.
    #[error(
        "it stands on a backing file that its header does not name as QEMU has it, with its format raw or qcow2, so that nobody \
         else would find it; make it stand alone while the VM works (QMP: block-stream), or write the header with the \
         VM off (qemu-img rebase -u -b FILE -F FORMAT)"
    )]
    Backing,
    /// Whoever leads it back would have to know the key.
    #[error(
        "it is encrypted by QEMU, which does not tell the key; only images without encryption can be led elsewhere"
    )]
    Encrypted,
    /// It is over the network, or is made of several files.
    #[error("it is no plain file, but {0}")]
    NotAFile(String),
    /// It has no device that could be given another node.
    #[error("QEMU does not tell which device it is")]
    NoDevice,
}

/// Where an export is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportAddress {
    /// The unix socket.
    pub socket: PathBuf,
    /// The name of the export.
    pub export: String,
    /// How long requests wait for a server that has gone, in seconds, before they fail.
    ///
    /// **N.B.** For as long QEMU does not answer a command that waits for its requests, such as `stop`.
    pub reconnect_s: u32,
}
