//! The daemon and its stores.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The daemon that answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// When it began to serve, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Absolute path of the folder that holds its journal.
    pub data_dir: String,
    /// Absolute path of the folder that holds the sockets of its volumes.
    pub runtime_dir: String,
    /// The I/O engine that was asked for: `auto`, `io_uring` or `threads`. `auto` is decided for each volume.
    pub engine: String,
    /// Number of volumes.
    pub volumes: usize,
    /// Number of migrations under way.
    pub migrations_running: usize,
}

/// A place that holds images.
///
/// A folder holds any number of them; a device, and the export of another NBD server, one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Store {
    /// Name in the configuration.
    pub name: String,
    /// What it is.
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
    /// Bytes that its volumes have together as their clients see them. More than `bytes_total`: there is not room for all of
    /// them at once.
    #[serde(default)]
    pub bytes_provisioned: u64,
    /// What keeps a device or an export from taking a volume; `None`: nothing, or it is a folder.
    #[serde(default)]
    pub occupied: Option<String>,
    /// Why the store cannot be used; `None` if it can.
    pub problem: Option<String>,
    /// How the configuration slows the store down, or has it fail, on purpose, for people; `None`: it does not.
    #[serde(default)]
    pub impairment: Option<String>,
    /// Names of images in the folder that belong to no volume, migration or kept copy that the daemon knows: its data folder was
    /// lost, or somebody put or left them there.
    #[serde(default)]
    pub unknown_images: Vec<String>,
    /// What would serve guests better there, for people; `None`: nothing is known.
    #[serde(default)]
    pub advice: Option<String>,
}

/// What a store is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StoreKind {
    /// A folder.
    #[default]
    Folder,
    /// A block device.
    Device,
    /// The export of another NBD server.
    Nbd,
}

impl StoreKind {
    /// The word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Folder => "folder",
            Self::Device => "device",
            Self::Nbd => "nbd",
        }
    }
}
