//! VMs that were started without Sterna and whose disks it serves: which they are, and what is needed to release them.
//! Sterna did not start their QEMU: it connects to the monitor for a command, and leaves it free otherwise. For a domain of
//! libvirt the monitor belongs to libvirt, and Sterna asks libvirt instead.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use hypervisor::qemu::{BlockNode, DiskOptions, ImageFile, LocalDisk, Use};
use serde::{Deserialize, Serialize};

use super::proved::ProvedFile;
use crate::files::listing::{Listed, Listing};

pub(crate) type Adoptions = Listing<Adopted>;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Adopted {
    pub(crate) name: String,
    /// The absolute path of its monitor's socket; for a domain of libvirt, the path of libvirt's socket.
    pub(crate) monitor: PathBuf,
    /// The user that listened at its monitor when it was adopted; `None`: libvirt is asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) monitor_user: Option<u32>,
    /// The user of its QEMU's process, which gets the sockets of its disks; `None`: the sockets stay as configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<u32>,
    pub(crate) disks: Vec<AdoptedDisk>,
    pub(crate) added_unix_ms: u64,
    /// Its libvirt domain; `None`: libvirt did not start its QEMU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) libvirt: Option<LibvirtDomain>,
    /// Whether its disks were volumes before, so that a release returns nothing.
    #[serde(default)]
    pub(crate) is_bound: bool,
}

/// A domain of libvirt whose disks are copied to volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LibvirtDomain {
    /// Its name when it was adopted, for messages.
    pub(crate) name: String,
    pub(crate) uuid: String,
    /// The store for the volumes of its disks; `None`: the only store.
    pub(crate) store: Option<String>,
    /// The user of its QEMU, which may connect to its volumes; `None`: libvirt does not say.
    pub(crate) user: Option<u32>,
    pub(crate) wanted: Wanted,
    /// No operation is under way.
    pub(crate) is_settled: bool,
}

/// The requested side of a domain's disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Wanted {
    Volumes,
    /// In files, without Sterna.
    Files,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AdoptedDisk {
    pub(crate) volume: String,
    /// Distinguishes its nodes in QEMU from those of the VM's other disks.
    pub(crate) number: u32,
    /// QEMU's name of the device that the guest sees.
    pub(crate) device: String,
    /// The name in its `-drive`; empty with `-blockdev`.
    #[serde(default)]
    pub(crate) drive: String,
    pub(crate) node: String,
    /// The node below that one, if known.
    #[serde(default)]
    pub(crate) child: Option<String>,
    #[serde(default = "raw")]
    pub(crate) format: String,
    pub(crate) file: PathBuf,
    pub(crate) size_bytes: u64,
    pub(crate) is_read_only: bool,
    pub(crate) cache_direct: bool,
    pub(crate) cache_no_flush: bool,
    pub(crate) detect_zeroes: String,
    /// The files of the disk when it was adopted, the top first: which may be opened for it, and their owners.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) proved: Vec<ProvedFile>,
    /// The identity of the file at `file`: the former disk of a domain, or the copy that was made there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) found: Option<FileIdentity>,
    /// Whether that file is a copy that Sterna made.
    #[serde(default)]
    pub(crate) copy: CopyNote,
    /// The volume's image that becomes the disk of a domain that is shut off. The volume is removed, or about to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) given_back: Option<GivenImage>,
}

/// The identity of a file, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileIdentity {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// When the file was made, if the file system keeps that: inode numbers are reused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) made_unix_ns: Option<u64>,
}

impl FileIdentity {
    pub(crate) fn of(metadata: &Metadata) -> Self {
        let made = metadata.created().ok().and_then(|made| made.duration_since(UNIX_EPOCH).ok());
        let made_unix_ns = made.and_then(|made| u64::try_from(made.as_nanos()).ok());
        Self { device: metadata.dev(), inode: metadata.ino(), made_unix_ns }
    }

    /// Returns the identity of the file with a name, and does not follow a link.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        std::fs::symlink_metadata(path).map(|metadata| Self::of(&metadata))
    }
}

/// The state of a copy that was made for a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CopyNote {
    #[default]
    None,
    /// The disk has never used it.
    Unused,
    /// The disk was ordered to use it.
    Pivoted,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GivenImage {
    pub(crate) file: PathBuf,
    pub(crate) format: String,
}

impl Adopted {
    pub(crate) fn proved(&self, volume: &str) -> Vec<ProvedFile> {
        let disk = self.disks.iter().find(|disk| disk.volume == volume);
        disk.map(|disk| disk.proved.clone()).unwrap_or_default()
    }

    /// Returns the user who gets the sockets of its disks.
    pub(crate) fn socket_user(&self) -> Option<u32> {
        self.user.or(self.libvirt.as_ref().and_then(|domain| domain.user))
    }

    pub(crate) fn uses(&self, volume: &str) -> bool {
        self.disks.iter().any(|disk| disk.volume == volume)
    }
}

impl AdoptedDisk {
    pub(crate) fn of(disk: &LocalDisk, volume: String, number: u32) -> Self {
        let DiskOptions { is_read_only, cache_direct, cache_no_flush, detect_zeroes } = disk.options.clone();
        Self {
            volume,
            number,
            device: disk.device.clone(),
            drive: disk.drive.clone(),
            node: disk.node.clone(),
            child: disk.file_node.clone(),
            format: disk.format.clone(),
            file: disk.file.clone(),
            size_bytes: disk.size_bytes,
            is_read_only,
            cache_direct,
            cache_no_flush,
            detect_zeroes,
            proved: Vec::new(),
            found: None,
            copy: CopyNote::None,
            given_back: None,
        }
    }

    /// Makes the record of a domain's disk, from libvirt's target name and the file that the disk is in, or will be in.
    pub(crate) fn of_domain(
        target: &str,
        volume: String,
        file: PathBuf,
        format: &str,
        size_bytes: u64,
    ) -> Self {
        Self {
            volume,
            number: 0,
            device: target.to_owned(),
            drive: String::new(),
            node: String::new(),
            child: None,
            format: format.to_owned(),
            file,
            size_bytes,
            is_read_only: false,
            cache_direct: false,
            cache_no_flush: false,
            detect_zeroes: "off".to_owned(),
            proved: Vec::new(),
            found: None,
            copy: CopyNote::None,
            given_back: None,
        }
    }

    /// Returns the disk as QEMU has it, with `node` as its present top node.
    pub(crate) fn disk(&self, node: &BlockNode) -> LocalDisk {
        LocalDisk {
            device: self.device.clone(),
            drive: self.drive.clone(),
            is_named: is_named(&node.name),
            node: node.name.clone(),
            format: node.driver.clone(),
            file_node: self.child.clone(),
            file: self.file.clone(),
            backing: Vec::new(),
            size_bytes: self.size_bytes,
            options: DiskOptions {
                is_read_only: self.is_read_only,
                cache_direct: self.cache_direct,
                cache_no_flush: self.cache_no_flush,
                detect_zeroes: self.detect_zeroes.clone(),
            },
        }
    }

    pub(crate) fn used(&self) -> Use {
        if self.is_read_only { Use::Read } else { Use::ReadWrite }
    }

    pub(crate) fn image(&self, path: PathBuf, format: String) -> ImageFile {
        ImageFile { path, format, node: Some(self.node.clone()).filter(|node| is_named(node)) }
    }
}

/// Returns whether a user named a node: QEMU's own names begin with `#`.
fn is_named(node: &str) -> bool {
    !node.starts_with('#')
}

/// The format of disks that were adopted before other formats were supported.
fn raw() -> String {
    "raw".to_owned()
}

impl Listed for Adopted {
    const FILE: &'static str = "adopted.json";
    const VERSION: u32 = 1;
    const KEY: &'static str = "machines";
    const OTHERWISE: &'static str = "no list of VMs: restore it, or remove it and adopt the VMs again";

    fn name(&self) -> &str {
        &self.name
    }
}
