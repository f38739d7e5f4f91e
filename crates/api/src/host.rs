//! The daemon and its stores.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The daemon that answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Version of the daemon's program.
    pub version: String,
    /// Number of the daemon's process.
    pub pid: u32,
    /// When it began to serve, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Absolute path of the folder that holds its journal.
    pub data_dir: String,
    /// Absolute path of the folder that holds the sockets of its volumes.
    pub runtime_dir: String,
    /// The configured I/O engine: `auto`, `io_uring` or `threads`. `auto` is decided for each volume.
    pub engine: String,
    /// Number of volumes at this host.
    pub volumes: usize,
    /// Number of migrations under way.
    pub migrations_running: usize,
    /// Whether it takes nothing new: no volumes and VMs, neither made here nor from other hosts.
    #[serde(default)]
    pub drained: bool,
    /// Whether everything is leaving it.
    #[serde(default)]
    pub evacuating: bool,
}

/// A place for images.
///
/// A folder holds any number of images; a device, and the export of another NBD server, one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Store {
    /// Its name in the configuration.
    pub name: String,
    /// Whether it is a folder, a device or an export.
    #[serde(default)]
    pub kind: StoreKind,
    /// Absolute path of the folder or device, or the URI of the export.
    pub path: String,
    /// Size of the file system or device in bytes; 0 while the store has a problem, and of an export.
    pub bytes_total: u64,
    /// Bytes that volumes may still use; 0 while the store has a problem, and of an export.
    pub bytes_free: u64,
    /// Number of volumes whose image is here.
    pub volumes: usize,
    /// Total size of its volumes, as their clients see it. If it exceeds `bytes_total`, the store cannot hold all of their data.
    #[serde(default)]
    pub bytes_provisioned: u64,
    /// Why a device or an export cannot take a volume; `None`: it can, or it is a folder.
    #[serde(default)]
    pub occupied: Option<String>,
    /// Why the store cannot be used; `None` if it can.
    pub problem: Option<String>,
    /// How the configuration slows the store down or makes it fail on purpose, as text; `None`: it does not.
    #[serde(default)]
    pub impairment: Option<String>,
    /// Names of images in the folder that belong to no known volume, migration or kept copy. Either the data folder was lost, or
    /// a user has put them there.
    #[serde(default)]
    pub unknown_images: Vec<String>,
    /// Images of the same kind that programs use without Sterna, such as a released VM: each with its users, as text.
    #[serde(default)]
    pub images_in_use: Vec<String>,
    /// Advice that would make guests faster there, as text; `None`: there is none.
    #[serde(default)]
    pub advice: Option<String>,
}

/// The kind of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StoreKind {
    /// A folder of images.
    #[default]
    Folder,
    /// A block device of the host.
    Device,
    /// The export of another NBD server.
    Nbd,
}

impl StoreKind {
    /// Returns the kind's word in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Folder => "folder",
            Self::Device => "device",
            Self::Nbd => "nbd",
        }
    }
}
