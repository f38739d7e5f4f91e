//! VMs that were started without Sterna and have disks that it serves: which, and what it takes to give them back.
//!
//! Their QEMU is somebody else's: Sterna connects to its monitor when it has something to say, and leaves it to others
//! otherwise. Of a domain of libvirt the monitor is libvirt's, and libvirt is asked instead.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use hypervisor::qemu::{BlockNode, DiskOptions, ImageFile, LocalDisk, Use};
use serde::{Deserialize, Serialize};

use super::proved::ProvedFile;
use crate::files::listing::{Listed, Listing};

/// The VMs whose disks were adopted.
pub(crate) type Adoptions = Listing<Adopted>;

/// A VM whose disks were adopted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Adopted {
    pub(crate) name: String,
    /// Absolute path of its monitor's socket; of a domain of libvirt that of libvirt's.
    pub(crate) monitor: PathBuf,
    /// The user that listened at its monitor when it was adopted; `None`: an earlier version adopted it, or libvirt asks it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) monitor_user: Option<u32>,
    pub(crate) disks: Vec<AdoptedDisk>,
    pub(crate) added_unix_ms: u64,
    /// What it is to libvirt; `None`: somebody else has started its QEMU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) libvirt: Option<LibvirtDomain>,
    /// Whether its disks were volumes before: nothing was moved under it, and nothing is given back.
    #[serde(default)]
    pub(crate) is_bound: bool,
}

/// A domain of libvirt whose disks were, or are being, copied to volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LibvirtDomain {
    /// Its name when it was adopted, for people.
    pub(crate) name: String,
    pub(crate) uuid: String,
    /// Where volumes for its disks are made; `None`: in the only store.
    pub(crate) store: Option<String>,
    /// The user that its QEMU runs as, who may connect to its volumes; `None`: libvirt does not tell.
    pub(crate) user: Option<u32>,
    pub(crate) wanted: Wanted,
    /// Nothing is under way.
    pub(crate) is_settled: bool,
}

/// Where the disks of a domain are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Wanted {
    Volumes,
    /// In files, without Sterna.
    Files,
}

/// A disk that was adopted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AdoptedDisk {
    /// The volume that it is.
    pub(crate) volume: String,
    /// Tells its nodes in QEMU from those of the VM's other disks.
    pub(crate) number: u32,
    /// What the guest sees, by QEMU's name.
    pub(crate) device: String,
    /// The name that `-drive` gave it; empty with `-blockdev`.
    #[serde(default)]
    pub(crate) drive: String,
    pub(crate) node: String,
    /// The node below that one, where it is known.
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
    /// The files that it was in when it was adopted, the top first: what may be opened for it, and whose they were. Empty for a disk
    /// that an earlier version adopted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) proved: Vec<ProvedFile>,
    /// Which file is at `file`: what a domain had until it was adopted, or the copy that was made for it there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) found: Option<FileIdentity>,
    /// Whether that file is a copy that was made here.
    #[serde(default)]
    pub(crate) copy: CopyNote,
    /// The volume's image, which is to be the disk of a domain that is shut off; the volume is removed, or about to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) given_back: Option<GivenImage>,
}

/// Which file something is, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileIdentity {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    /// When it was made, where the file system keeps that: the number of a file that is gone is given again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) made_unix_ns: Option<u64>,
}

impl FileIdentity {
    pub(crate) fn of(metadata: &Metadata) -> Self {
        let made = metadata.created().ok().and_then(|made| made.duration_since(UNIX_EPOCH).ok());
        let made_unix_ns = made.and_then(|made| u64::try_from(made.as_nanos()).ok());
        Self { device: metadata.dev(), inode: metadata.ino(), made_unix_ns }
    }

    /// Tells which file has a name, without following a link.
    ///
    /// # Errors
    /// There is none, or the folder cannot be read.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        std::fs::symlink_metadata(path).map(|metadata| Self::of(&metadata))
    }
}

/// What is remembered of a copy that was made for a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CopyNote {
    #[default]
    None,
    /// No disk was ever over it.
    Unused,
    /// The disk was to be over it.
    Pivoted,
}

/// An image that is given back as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GivenImage {
    pub(crate) file: PathBuf,
    pub(crate) format: String,
}

impl Adopted {
    /// The files that the disk of a volume was in when it was adopted.
    pub(crate) fn proved(&self, volume: &str) -> Vec<ProvedFile> {
        let disk = self.disks.iter().find(|disk| disk.volume == volume);
        disk.map(|disk| disk.proved.clone()).unwrap_or_default()
    }

    /// Whether a volume is one of its disks.
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

    /// Remembers a disk of a domain, by what libvirt calls it, with the file that it is, or is to be, in.
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

    /// The disk as QEMU has it, whose uppermost node is `node` at present.
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

    /// What its QEMU does with its image.
    pub(crate) fn used(&self) -> Use {
        if self.is_read_only { Use::Read } else { Use::ReadWrite }
    }

    /// The image that it is to be over, at `path`.
    pub(crate) fn image(&self, path: PathBuf, format: String) -> ImageFile {
        ImageFile { path, format, node: Some(self.node.clone()).filter(|node| is_named(node)) }
    }
}

/// Whether somebody gave a node its name: those that QEMU makes up begin so.
fn is_named(node: &str) -> bool {
    !node.starts_with('#')
}

/// Of VMs that were adopted before there was another one.
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
