//! Machines that were started without Sterna and have disks that it serves: which, and what it takes to give them back.
//!
//! Their QEMU is somebody else's: Sterna connects to its monitor when it has something to say, and leaves it to others
//! otherwise. The list is a file of its own, replaced as a whole.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hypervisor::qemu::{BlockNode, DiskOptions, ImageFile, LocalDisk};
use serde::{Deserialize, Serialize};

use super::catalogue::CatalogueError;
use crate::whole_file;

/// Name of the file in the data folder.
const FILE: &str = "adopted.json";
/// Version of its format.
const VERSION: u32 = 1;
/// Its largest size: thousands of machines.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The machines whose disks were adopted.
pub(crate) struct Adoptions {
    path: PathBuf,
    /// By name.
    machines: Mutex<BTreeMap<String, Adopted>>,
}

/// A machine whose disks were adopted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Adopted {
    pub(crate) name: String,
    /// Absolute path of its monitor's socket.
    pub(crate) monitor: PathBuf,
    pub(crate) disks: Vec<AdoptedDisk>,
    pub(crate) added_unix_ms: u64,
}

/// A disk that was adopted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AdoptedDisk {
    /// The volume that it is.
    pub(crate) volume: String,
    /// Tells its nodes in QEMU from those of the machine's other disks.
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

/// Of machines that were adopted before there was another one.
fn raw() -> String {
    "raw".to_owned()
}

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    machines: Vec<Adopted>,
}

impl Adoptions {
    /// Reads the file, if there is one.
    pub(crate) fn open(data_dir: &Path) -> Result<Self, CatalogueError> {
        let path = data_dir.join(FILE);
        let failed = |source| CatalogueError::Io { path: path.clone(), done: "read", source };
        let machines = match whole_file::read(&path, FILE_BYTES_MAX).map_err(failed)? {
            None => BTreeMap::new(),
            Some(text) => {
                let content: Content = serde_json::from_slice(&text)
                    .map_err(|source| CatalogueError::Malformed { path: path.clone(), source })?;
                if content.version != VERSION {
                    return Err(CatalogueError::Version { path, version: content.version });
                }
                content.machines.into_iter().map(|machine| (machine.name.clone(), machine)).collect()
            }
        };
        Ok(Self { path, machines: Mutex::new(machines) })
    }

    /// All machines, by name.
    pub(crate) fn list(&self) -> Vec<Adopted> {
        self.lock().values().cloned().collect()
    }

    /// The machine of that name.
    pub(crate) fn get(&self, name: &str) -> Option<Adopted> {
        self.lock().get(name).cloned()
    }

    /// The machine that has a volume among its disks.
    pub(crate) fn user_of(&self, volume: &str) -> Option<String> {
        let machines = self.lock();
        let user = machines.values().find(|machine| machine.disks.iter().any(|disk| disk.volume == volume));
        user.map(|machine| machine.name.clone())
    }

    /// Remembers a machine durably. It may sleep.
    pub(crate) fn put(&self, machine: &Adopted) -> Result<(), CatalogueError> {
        self.change(|machines| drop(machines.insert(machine.name.clone(), machine.clone())))
    }

    /// Forgets a machine durably. It may sleep.
    pub(crate) fn delete(&self, name: &str) -> Result<(), CatalogueError> {
        self.change(|machines| drop(machines.remove(name)))
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<String, Adopted>)) -> Result<(), CatalogueError> {
        let mut machines = self.lock();
        let mut changed = machines.clone();
        change(&mut changed);
        let failed = |source| CatalogueError::Io { path: self.path.clone(), done: "written", source };
        let content = Content { version: VERSION, machines: changed.values().cloned().collect() };
        let text = serde_json::to_vec_pretty(&content).map_err(|error| failed(error.into()))?;
        whole_file::replace(&self.path, &text).map_err(failed)?;
        *machines = changed;
        Ok(())
    }

    /// A panic elsewhere does not make the map wrong.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Adopted>> {
        self.machines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
