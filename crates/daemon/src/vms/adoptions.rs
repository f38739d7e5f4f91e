//! VMs that were started without Sterna and have disks that it serves: which, and what it takes to give them back.
//!
//! Their QEMU is somebody else's: Sterna connects to its monitor when it has something to say, and leaves it to others
//! otherwise. Of a domain of libvirt the monitor is libvirt's, and libvirt is asked instead.

use std::path::PathBuf;

use hypervisor::qemu::{BlockNode, DiskOptions, ImageFile, LocalDisk};
use serde::{Deserialize, Serialize};

use crate::files::listing::{Listed, Listing};

/// The VMs whose disks were adopted.
pub(crate) type Adoptions = Listing<Adopted>;

/// A VM whose disks were adopted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Adopted {
    pub(crate) name: String,
    /// Absolute path of its monitor's socket; of a domain of libvirt that of libvirt's.
    pub(crate) monitor: PathBuf,
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
    /// The disks' files were not there when they were to be made: what is there is a copy.
    pub(crate) owns_files: bool,
}

/// Where the disks of a domain are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Wanted {
    /// Over their volumes.
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
}

impl Adopted {
    /// Whether a volume is one of its disks.
    pub(crate) fn uses(&self, volume: &str) -> bool {
        self.disks.iter().any(|disk| disk.volume == volume)
    }
}

impl AdoptedDisk {
    /// Remembers a disk.
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
