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

/// A folder that holds images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Store {
    /// Name in the configuration.
    pub name: String,
    /// Absolute path of the folder.
    pub path: String,
    /// Size of the file system in bytes; 0 while the store has a problem.
    pub bytes_total: u64,
    /// Bytes of the file system that the daemon may still use; 0 while the store has a problem.
    pub bytes_free: u64,
    /// Number of volumes whose image is here.
    pub volumes: usize,
    /// Why the store cannot be used; `None` if it can.
    pub problem: Option<String>,
}
