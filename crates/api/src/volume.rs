//! Volumes: what they are, how they are made and removed.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// A volume of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Its name, and that of its export.
    pub name: String,
    /// Its identity, 32 hexadecimal digits: the same wherever it moves. Empty while it is being created.
    pub id: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Bytes that its image takes in the store; `None` if the store does not say.
    pub allocated_bytes: Option<u64>,
    /// Bytes per block of its chronicle and of migrations.
    pub block_size_bytes: u32,
    /// The store that holds its image; `None` for an image that is served in place.
    pub store: Option<String>,
    /// Absolute path of its image.
    pub image: String,
    /// How often it has changed hands, counted from 0.
    pub generation: u64,
    /// What NBD clients connect to.
    pub uri: String,
    /// Absolute path of the unix socket in `uri`; it stays the same across moves and restarts.
    pub socket: String,
    /// Whether it is being served.
    pub state: VolumeState,
    /// Why it is not being served; `None` while it is.
    pub message: Option<String>,
    /// How far its creation has come; `None` once it exists.
    pub creation: Option<VolumeCreation>,
    /// The migration under way.
    pub migration: Option<String>,
    /// When it was added to the host, in milliseconds since 1970.
    pub added_unix_ms: u64,
    /// What its guest does; `None` while it is not being served.
    pub statistics: Option<VolumeStatistics>,
}

/// Whether a volume is being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeState {
    /// Its image is being made.
    Creating,
    /// Somebody holds a lock on its image; it is served as soon as the lock is free.
    Waiting,
    /// Guests can use it.
    Serving,
    /// It cannot be served; the message says why.
    Failed,
    /// It is being removed.
    Removing,
}

/// How far a volume's creation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeCreation {
    /// Bytes of the given image that have been looked at, holes included.
    pub bytes_done: u64,
    /// Size of the given image in bytes.
    pub bytes_total: u64,
}

/// What a volume's guest has done since the daemon began to serve it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeStatistics {
    /// Name of the I/O engine: `io_uring` or `threads`.
    pub engine: String,
    /// NBD connections at this moment.
    pub connections: usize,
    /// Requests in flight at this moment.
    pub requests_in_flight: usize,
    /// Number of reads.
    pub reads: u64,
    /// Number of writes, discards and zeroing.
    pub writes: u64,
    /// Number of flushes.
    pub flushes: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Requests that failed.
    pub errors: u64,
}

/// Makes a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewVolume {
    /// Its name: 1 to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
    pub name: String,
    /// Where its bytes come from.
    pub source: VolumeSource,
}

/// Where a new volume's bytes come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum VolumeSource {
    /// A new image in a store; removing the volume deletes it.
    Create {
        /// Size in bytes, a multiple of 4,096; `None`: that of `image`, rounded up.
        #[serde(default)]
        size_bytes: Option<u64>,
        /// The store; `None`: the only one there is.
        #[serde(default)]
        store: Option<String>,
        /// Absolute path of a raw image that is copied in; `None`: the volume reads as zeroes.
        #[serde(default)]
        image: Option<String>,
    },
    /// A raw image that is served where it is; removing the volume leaves it.
    Add {
        /// Absolute path of the image.
        image: String,
    },
}

/// Removes a volume; sent as the query of a DELETE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct RemoveVolume {
    /// Also when clients are connected; they are cut off.
    #[serde(default)]
    pub force: bool,
    /// Leaves the image where it is, also one that a `create` or a migration made.
    #[serde(default)]
    pub keep_image: bool,
}

/// What has become of a removed volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemovedVolume {
    /// Its name.
    pub name: String,
    /// Absolute path of its image.
    pub image: String,
    /// What was done with the image.
    pub image_fate: ImageFate,
}

/// What was done with the image of a removed volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageFate {
    /// It is gone.
    Deleted,
    /// It is where it was.
    Kept,
}
