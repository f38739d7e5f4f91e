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
    /// The store that holds its image; `None` for an image that is served in place, or if another host has it.
    pub store: Option<String>,
    /// The other host that has it, of a volume that is only forwarded here.
    #[serde(default)]
    pub host: Option<String>,
    /// Absolute path of its image, or the URI of the export that holds it.
    pub image: String,
    /// What its image is.
    pub kind: ImageKind,
    /// How its bytes lie in its image.
    pub format: ImageFormat,
    /// Whether clients may only read.
    pub read_only: bool,
    /// How often it has changed hands, counted from 0.
    pub generation: u64,
    /// What NBD clients connect to.
    pub uri: String,
    /// Absolute path of the unix socket in `uri`; it stays the same across moves and restarts.
    pub socket: String,
    /// What NBD clients of other hosts connect to; `None`: the volume has no port.
    #[serde(default)]
    pub tcp_uri: Option<String>,
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
    /// Clients that are connected at other hosts, which lead them here.
    #[serde(default)]
    pub clients_elsewhere: Vec<ClientsElsewhere>,
    /// What it lacks; `None` if that is nothing, and while it is not being served.
    #[serde(default)]
    pub filling: Option<VolumeFilling>,
    /// What its guest does; `None` while it is not being served.
    pub statistics: Option<VolumeStatistics>,
}

/// How far a volume is that works here, and has not come as a whole (`post-copy`, `three-phase`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeFilling {
    /// The host that has the rest, by name. Without it, and its image, that is lost.
    pub host: String,
    /// Bytes that have not come.
    pub bytes_missing: u64,
    /// Bytes that were missing when it was handed over.
    pub bytes_at_handover: u64,
    /// Bytes that have come because a client waited for them.
    pub bytes_pulled: u64,
    /// Bytes that have come in the background.
    pub bytes_pushed: u64,
    /// Bytes that need not come any more: a client has written others.
    pub bytes_overwritten: u64,
    /// Missing bytes that the other host cannot read: clients that do get I/O errors. They are tried again.
    pub bytes_unreadable: u64,
    /// Requests of clients that wait for what is missing.
    pub requests_waiting: u64,
    /// Reads of a VM that got an I/O error because the other host did not answer in time: it is stopped by that, and goes on by itself.
    #[serde(default)]
    pub reads_refused: u64,
    /// Why nothing comes; `None` if something does.
    pub waits_for: Option<String>,
    /// Whether what is missing was given up (`volume promote --without-missing`).
    pub is_given_up: bool,
    /// Where it is missing, in order; the first 256 places.
    pub ranges: Vec<MissingRange>,
}

/// A part of a volume that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MissingRange {
    /// Where it begins.
    pub offset_bytes: u64,
    /// How long it is.
    pub length_bytes: u64,
}

/// Clients of a volume that are connected at another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClientsElsewhere {
    /// The host that they are at, by name.
    pub host: String,
    /// How many there are.
    pub clients: u32,
}

/// What an image is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageKind {
    /// A file.
    #[default]
    File,
    /// A block device.
    Device,
    /// The export of another NBD server.
    Nbd,
}

/// How the bytes of a volume lie in its image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageFormat {
    /// One after the other.
    #[default]
    Raw,
    /// In clusters, as QEMU's qcow2.
    Qcow2,
}

/// How a volume is offered to its clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ExportSettings {
    /// Clients may only read.
    pub read_only: bool,
    /// Address and port where the volume is served over TCP besides its unix socket, for example `192.0.2.1:10809`;
    /// `None`: nowhere.
    pub listen: Option<String>,
    /// Connections at a time; `None`: what the configuration says.
    pub connections_max: Option<u32>,
    /// Mode of its unix socket in octal, for example `0660`; `None`: that of the configuration.
    pub socket_mode: Option<String>,
    /// Owner of its unix socket, `USER:GROUP`; `None`: that of the configuration.
    pub socket_owner: Option<String>,
}

/// Whether a volume is being served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeState {
    /// Its image is being made.
    Creating,
    /// Somebody holds a lock on its image; it is served as soon as the lock is free.
    Waiting,
    /// It comes from another host; guests wait until it is here.
    Arriving,
    /// Another host has it; guests that stayed are served from there.
    Forwarding,
    /// Guests can use it.
    Serving,
    /// It cannot be served; the message says why.
    Failed,
    /// The journal was put back from a backup, and it is not known whose the volume is; the message says who has to say so.
    Unconfirmed,
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
    /// What the latest of them failed by; `None`: none has.
    #[serde(default)]
    pub last_error: Option<String>,
}

/// Takes over a volume that another host has prepared here, without hearing from that host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PromoteVolume {
    /// What the other host prints once it has released the volume: nobody else has it then.
    pub ticket: Option<String>,
    /// Without a ticket. **N.B.** If the other host goes on with the volume, there are two of it from then on. With
    /// `without_missing`: although what is missing still comes.
    pub force: bool,
    /// Of a volume that works here and whose former host, which has the rest of it, is lost: clients that read what is missing get
    /// I/O errors from now on, and wait for it no longer. **N.B.** For good: it is not fetched any more.
    pub without_missing: bool,
    /// Of a volume that is `unconfirmed`, for the journal was put back from a backup: it is this host's. **N.B.** If another host has
    /// it, there are two of it from then on. With `force`: although another host, or an image, says otherwise.
    pub restored: bool,
    /// With `restored`, of a volume on a device or an export: how many bytes it has. It may have grown since the backup, and the
    /// device has room for more.
    pub size_bytes: Option<u64>,
}

/// Makes a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewVolume {
    /// Its name: 1 to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub name: String,
    /// Where its bytes come from.
    pub source: VolumeSource,
    /// How it is offered to its clients.
    #[serde(default)]
    pub export: ExportSettings,
}

/// Where a new volume's bytes come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum VolumeSource {
    /// A new image in a store. Removing the volume deletes it; what is on a device or a server stays there.
    Create {
        /// Size in bytes, a multiple of 512; `None`: that of `image`, rounded up to 4,096.
        #[serde(default)]
        #[schema(multiple_of = 512, minimum = 512)]
        size_bytes: Option<u64>,
        /// The store; `None`: the only one there is.
        #[serde(default)]
        store: Option<String>,
        /// Absolute path of an image that is copied in, in any format; `None`: the volume reads as zeroes.
        #[serde(default)]
        image: Option<String>,
        /// Format of the new image; `None`: that of the store, or raw.
        #[serde(default)]
        format: Option<ImageFormat>,
    },
    /// An image that is served where it is; removing the volume leaves it. One of `image`, `device` and `nbd` is given.
    Add {
        /// Absolute path of a file.
        #[serde(default)]
        image: Option<String>,
        /// Absolute path of a block device.
        #[serde(default)]
        device: Option<String>,
        /// URI of the export of another NBD server.
        #[serde(default)]
        nbd: Option<String>,
        /// Its format; `None`: what its first bytes say, once and for all.
        #[serde(default)]
        format: Option<ImageFormat>,
        /// Also from a device or an export that holds what a migration left there.
        #[serde(default)]
        fenced: bool,
    },
    /// An image that lies in a store and belongs to nothing. It is the volume's from then on, and its file gets the volume's
    /// name; nothing is copied. Removing the volume leaves it.
    Import {
        /// Name of the store, a folder.
        store: String,
        /// Name of the file in it.
        file: String,
        /// Its format; `None`: what its first bytes say, once and for all.
        #[serde(default)]
        format: Option<ImageFormat>,
    },
}

impl VolumeSource {
    /// A file that is served where it is, in the format that it begins with.
    pub fn file(path: impl Into<String>) -> Self {
        Self::Add { image: Some(path.into()), device: None, nbd: None, format: None, fenced: false }
    }
}

impl VolumeState {
    /// The word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Creating => "creating",
            Self::Waiting => "waiting",
            Self::Arriving => "arriving",
            Self::Forwarding => "forwarding",
            Self::Serving => "serving",
            Self::Failed => "failed",
            Self::Unconfirmed => "unconfirmed",
            Self::Removing => "removing",
        }
    }
}

impl ImageKind {
    /// The word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Device => "device",
            Self::Nbd => "nbd",
        }
    }
}

impl ImageFormat {
    /// The word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// Makes a volume larger; it never becomes smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeVolume {
    /// Its new size in bytes, a multiple of 4096. What is new reads as zeroes. The size that it has is a success.
    #[schema(multiple_of = 4096, minimum = 4096)]
    pub size_bytes: u64,
}

/// Removes a volume; sent as the query of a DELETE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct RemoveVolume {
    /// Also when clients are connected; they are cut off.
    #[serde(default)]
    pub force: bool,
    /// Leaves the image where it is, also one that Sterna made.
    #[serde(default)]
    pub keep_image: bool,
    /// Deletes the image from its store, also if its content was somebody's before Sterna served it.
    #[serde(default)]
    pub delete_image: bool,
}

/// What has become of a removed volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemovedVolume {
    /// Its name.
    pub name: String,
    /// Absolute path of its image, or the URI of the export that holds it; empty if that is at another host.
    pub image: String,
    /// What was done with the image.
    pub image_fate: ImageFate,
    /// Why it was kept although nobody asked for that; `null` otherwise.
    #[serde(default)]
    pub kept_because: Option<KeptBecause>,
    /// The host that has the volume: only clients were forwarded from here.
    #[serde(default)]
    pub host: Option<String>,
}

/// Why the image of a removed volume was kept although nobody asked for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KeptBecause {
    /// What is in it was somebody's before Sterna served it, and this is its only current copy.
    Given,
    /// Nobody knows whose it was: the volume came from a version that does not say.
    Unknown,
}

/// What was done with the image of a removed volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageFate {
    /// It is gone.
    Deleted,
    /// It is where it was.
    Kept,
    /// It is at the host that has the volume.
    Elsewhere,
}
