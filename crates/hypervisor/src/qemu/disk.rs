//! Switches the disks of a running QEMU from plain files to NBD exports and back, without a restart.
//!
//! ```text
//!   before            between                         switched
//!   device            device                          device
//!     │                 │                               │
//!   format            format        nbd ─► export     format
//!     │                 │                               │
//!   file ─► image     file ─► image                   nbd ─► export ─► image
//!
//!   -blockdev   the format node stays, and gets another child: blockdev-reopen
//!   -drive      QEMU's own names cannot be reopened: the device gets another format node, qom-set drive
//!   qcow2       the export has the guest's view: the device gets a raw node, and at the end a qcow2 one again
//! ```
//!
//! Reopening resets every missing option to its default, so all of them are given, and QEMU's result is read back. The server of
//! the export must not hold QEMU's locks on the image during a command: QEMU holds them until the disk is switched away, and
//! takes them when it is switched back.

mod errors;
mod lead;
mod prove;
mod survey;

use std::path::PathBuf;

/// How long requests of a disk wait for a restarting daemon, in seconds (`reconnect-delay`).
///
/// QEMU tries to connect again 1, 3, 7, 15, 31 and 47 s after the loss (its pauses are 1, 2, 4, 8, 16 and 16 s), and gives up
/// after this time. So a daemon that is away for up to 45 s causes no I/O error. With 30 it would be 15 s.
pub const RECONNECT_SECONDS: u32 = 60;

/// A disk of a VM whose bytes are in a local file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalDisk {
    /// The guest's device: its identity, or its path among QEMU's objects.
    pub device: String,
    /// The node that the device reads and writes.
    pub node: String,
    /// Whether that node was given a name. Only such a node can be reopened.
    pub is_named: bool,
    /// The driver of that node: `raw` or `qcow2`; also `nbd` for a disk over an export without a format node.
    pub format: String,
    /// The name from `-drive`; empty with `-blockdev`.
    pub drive: String,
    /// The node below it; `None` if it is not known.
    pub file_node: Option<String>,
    /// The file as given to QEMU: it may be relative to the folder where QEMU was started.
    pub file: PathBuf,
    /// Its backing files, from the upper to the lower.
    pub backing: Vec<PathBuf>,
    /// Bytes that the guest sees.
    pub size_bytes: u64,
    /// The options of its use.
    pub options: DiskOptions,
}

/// A file for a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFile {
    /// The path of the file.
    pub path: PathBuf,
    /// Its format: `raw` or `qcow2`.
    pub format: String,
    /// The name of a new format node, if that is free; `None`: a name of Sterna's own.
    pub node: Option<String>,
}

impl LocalDisk {
    /// Returns whether it is the VM's firmware or its variables, which the guest does not see as a disk.
    pub fn is_firmware(&self) -> bool {
        is_firmware(&self.device)
    }

    /// Returns the number with which it was switched, if the node below shows it.
    pub fn number(&self) -> Option<u32> {
        let node = self.file_node.as_deref()?;
        let number =
            node.strip_prefix(lead::EXPORT_NODE).or_else(|| node.strip_prefix(lead::OTHER_EXPORT_NODE))?;
        number.parse().ok()
    }
}

impl StayingDisk {
    /// Returns whether it is firmware, as [`LocalDisk::is_firmware`].
    pub fn is_firmware(&self) -> bool {
        is_firmware(&self.device)
    }
}

fn is_firmware(device: &str) -> bool {
    device.contains(".flash")
}

/// The options of a disk's file, as far as QEMU reports them.
///
/// QEMU does not report `discard`, which is assumed to be `unmap`, nor `aio`, which stays at its default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// Whether the guest cannot write to it.
    pub is_read_only: bool,
    /// Whether the host's page cache is bypassed.
    pub cache_direct: bool,
    /// Whether flushes are ignored.
    pub cache_no_flush: bool,
    /// The treatment of written zeroes: `off`, `on` or `unmap`.
    pub detect_zeroes: String,
}

/// A disk that cannot be switched, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{device}{}: {reason}", of_file(.file))]
pub struct StayingDisk {
    /// The device of the disk.
    pub device: String,
    /// Its image, as QEMU writes it; empty if not reported.
    pub file: String,
    /// The reason why it stays.
    pub reason: StayReason,
}

fn of_file(file: &str) -> String {
    if file.is_empty() { String::new() } else { format!(" ({file})") }
}

/// Why a disk cannot be switched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StayReason {
    /// A job of QEMU works on it.
    #[error("QEMU's job \"{0}\" works on it; wait for it, or cancel it")]
    Job(String),
    /// Bitmaps of a backup tool would be lost.
    #[error("it has bitmaps of a backup tool ({}), which would be lost; remove them first", .0.join(", "))]
    Bitmaps(Vec<String>),
    /// A filter, or an unknown format.
    #[error("the driver of its uppermost node is {0}; only raw and qcow2 over a file can be exchanged")]
    Driver(String),
    /// It has backing files, but its headers do not name them.
    #[error(
        "its header does not name its backing file, of format raw or qcow2, as QEMU has it, so other programs would not find \
         that file; make the image independent while the VM works (QMP: block-stream), or write the header with the VM off \
         (qemu-img rebase -u -b FILE -F FORMAT)"
    )]
    Backing,
    /// Switching back would need the key.
    #[error(
        "it is encrypted by QEMU, which does not give the key; only images without encryption can be exchanged"
    )]
    Encrypted,
    /// It is over the network, or consists of several files.
    #[error("it is no plain file, but {0}")]
    NotAFile(String),
    /// It has no device that could be given another node.
    #[error("QEMU does not report which device it is")]
    NoDevice,
}

/// The address of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportAddress {
    /// The path of the unix socket.
    pub socket: PathBuf,
    /// The name of the export.
    pub export: String,
    /// How long requests wait for a lost server, in seconds, before they fail.
    ///
    /// **N.B.** For that long QEMU does not answer a command that waits for its requests, such as `stop`.
    pub reconnect_s: u32,
}
