//! Volumes: their state, and the orders that make, resize, promote and remove them.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::SnapshotOf;

/// A volume of the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Its name, which is also the name of its export.
    pub name: String,
    /// Its identity, 32 hexadecimal digits, the same at every host. Empty while the volume is being created.
    pub id: String,
    /// Its size in bytes, as clients see it.
    pub size_bytes: u64,
    /// Bytes that its image takes in the store; `None` if the store does not report it.
    pub allocated_bytes: Option<u64>,
    /// Block size of its chronicle and its migrations, in bytes.
    pub block_size_bytes: u32,
    /// The store that holds its image; `None` for an image that is served in place, or if another host has it.
    pub store: Option<String>,
    /// The other host that has the volume, if it is only forwarded here.
    #[serde(default)]
    pub host: Option<String>,
    /// Absolute path of its image, or the URI of the export that holds it.
    pub image: String,
    /// Whether its image is a file, a device or an export.
    pub kind: ImageKind,
    /// The format of its image.
    pub format: ImageFormat,
    /// Whether clients may only read.
    pub read_only: bool,
    /// Number of handovers of the volume, counted from 0.
    pub generation: u64,
    /// The URI that NBD clients connect to.
    pub uri: String,
    /// Absolute path of the unix socket in `uri`; it stays the same across moves and restarts.
    pub socket: String,
    /// The URI for NBD clients of other machines; `None`: the volume has no port.
    #[serde(default)]
    pub tcp_uri: Option<String>,
    /// Whether it is served, or why not.
    pub state: VolumeState,
    /// Why it is not served; `None` while it is.
    pub message: Option<String>,
    /// Progress of its creation; `None` once it exists.
    pub creation: Option<VolumeCreation>,
    /// Identity of its migration under way.
    pub migration: Option<String>,
    /// When it was added to the host, in milliseconds since 1970.
    pub added_unix_ms: u64,
    /// Clients that are connected at other hosts, which forward them here.
    #[serde(default)]
    pub clients_elsewhere: Vec<ClientsElsewhere>,
    /// The other hosts at which it is attached: they offer it to their clients.
    #[serde(default)]
    pub attachments: Vec<Attachment>,
    /// The host by which it is attached here; `None`: it is not.
    #[serde(default)]
    pub attached_by: Option<String>,
    /// What it is a snapshot of; `None`: it is none.
    #[serde(default)]
    pub snapshot_of: Option<SnapshotOf>,
    /// The blocks that it lacks; `None` if it is complete, or is not served.
    #[serde(default)]
    pub filling: Option<VolumeFilling>,
    /// Requests of its guests; `None` while it is not served.
    pub statistics: Option<VolumeStatistics>,
}

/// An incomplete volume that is served here, after `post-copy` or `three-phase`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeFilling {
    /// Name of the host that has the missing blocks. If that host or its image is lost, they are lost.
    pub host: String,
    /// Bytes that are still missing.
    pub bytes_missing: u64,
    /// Bytes that were missing when it was handed over.
    pub bytes_at_handover: u64,
    /// Bytes that were fetched because a client waited for them.
    pub bytes_pulled: u64,
    /// Bytes that were fetched in the background.
    pub bytes_pushed: u64,
    /// Bytes that need not be fetched, because clients have overwritten them.
    pub bytes_overwritten: u64,
    /// Missing bytes that the other host cannot read. Clients that read them get I/O errors. They are tried again.
    pub bytes_unreadable: u64,
    /// Requests of clients that wait for missing blocks.
    pub requests_waiting: u64,
    /// Reads that got an I/O error because the other host did not answer in time. QEMU stops the VM on such errors, and Sterna
    /// resumes it by itself.
    #[serde(default)]
    pub reads_refused: u64,
    /// Why nothing is fetched at present; `None` while blocks arrive.
    pub waits_for: Option<String>,
    /// Whether the missing blocks were given up (`volume promote --without-missing`).
    pub is_given_up: bool,
    /// The first 256 missing ranges, in order.
    pub ranges: Vec<MissingRange>,
}

/// A missing range of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MissingRange {
    /// Begin of the range, in bytes.
    pub offset_bytes: u64,
    /// Length of the range, in bytes.
    pub length_bytes: u64,
}

/// Clients of a volume that are connected at another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClientsElsewhere {
    /// Name of the host that forwards them.
    pub host: String,
    /// Number of clients at this host.
    pub clients: u32,
}

/// A host at which a volume is attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attachment {
    /// Name of the host, which offers the volume to its clients.
    pub host: String,
    /// Whether its clients may only read.
    pub read_only: bool,
    /// Whether the host has confirmed it. If not, the order was interrupted: give it again, or detach.
    pub is_confirmed: bool,
}

/// Lets another host offer a volume of this host to its clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachVolume {
    /// Name of a paired host.
    pub host: String,
    /// Clients there may only read.
    #[serde(default)]
    pub read_only: bool,
}

/// Ends the attachment of a volume at a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DetachVolume {
    /// Name of the host at which it is attached; `None`: this host.
    pub host: Option<String>,
    /// Also while clients are connected there; they are disconnected. Also if that host does not answer.
    pub force: bool,
}

/// An attachment that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DetachedVolume {
    /// Name of the volume.
    pub name: String,
    /// Name of the host that offered it.
    pub host: String,
}

/// The kind of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageKind {
    /// A file in a folder.
    #[default]
    File,
    /// A block device of the host.
    Device,
    /// The export of another NBD server.
    Nbd,
}

/// The format of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageFormat {
    /// The bytes of the volume, without any metadata.
    #[default]
    Raw,
    /// QEMU's qcow2 format, in clusters.
    Qcow2,
}

/// How a volume is offered to its clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ExportSettings {
    /// Whether clients may only read.
    pub read_only: bool,
    /// Address and port of the volume over TCP, for example `192.0.2.1:10809`; `None`: only the unix socket.
    pub listen: Option<String>,
    /// Largest number of connections at a time; `None`: that of the configuration.
    pub connections_max: Option<u32>,
    /// Mode of its unix socket in octal, for example `0660`; `None`: that of the configuration.
    pub socket_mode: Option<String>,
    /// Owner of its unix socket, `USER:GROUP`; `None`: that of the configuration.
    pub socket_owner: Option<String>,
}

/// Whether a volume is served, or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeState {
    /// Its image is being made.
    Creating,
    /// Another process has locked its image, or the host of a standby has to say first that it has not promoted it; `message` says what
    /// it waits for.
    Waiting,
    /// It is arriving from another host; guests wait.
    Arriving,
    /// Another host has it; guests that are connected here are forwarded.
    Forwarding,
    /// Guests can use it.
    Serving,
    /// It cannot be served; `message` has the reason.
    Failed,
    /// The journal was restored from a backup, and the owner of the volume is not known; `message` says what decides it.
    Unconfirmed,
    /// It is being removed.
    Removing,
}

/// Progress of the creation of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeCreation {
    /// Bytes of the given image that were read so far, holes included.
    pub bytes_done: u64,
    /// Size of the given image in bytes.
    pub bytes_total: u64,
}

/// Requests of a volume's guests since the daemon began to serve it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeStatistics {
    /// Name of the I/O engine: `io_uring` or `threads`.
    pub engine: String,
    /// NBD connections at this moment.
    pub connections: usize,
    /// Requests in flight at this moment.
    pub requests_in_flight: usize,
    /// Number of read requests.
    pub reads: u64,
    /// Number of writes, discards and zeroing.
    pub writes: u64,
    /// Number of flush requests.
    pub flushes: u64,
    /// Bytes that guests have read.
    pub bytes_read: u64,
    /// Bytes that guests have written.
    pub bytes_written: u64,
    /// Number of requests that failed.
    pub errors: u64,
    /// The latest error of a request; `None`: no request has failed.
    #[serde(default)]
    pub last_error: Option<String>,
}

/// Makes this host the owner of a volume whose source or former owner does not answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PromoteVolume {
    /// The ticket that the other host prints once it has released the volume. It proves that no other host has the volume.
    pub ticket: Option<String>,
    /// Promotes without a ticket. **N.B.** If the other host keeps serving the volume, there are two copies of it. With
    /// `without_missing`: even while missing blocks still arrive.
    pub force: bool,
    /// For an incomplete volume whose former host is lost: reads of missing blocks become I/O errors instead of waiting. **N.B.**
    /// This is final: the blocks are never fetched.
    pub without_missing: bool,
    /// For an `unconfirmed` volume of a restored journal: it belongs to this host. **N.B.** If another host has it, there are two
    /// copies of it. With `force`: even if another host or the image contradicts.
    pub restored: bool,
    /// Of a volume that is not served because another file or device has the name of its image: that is the volume's image from now on
    /// (a backup that was put back, a store that was copied to another disk). Also of a complete copy that waits for its source, and
    /// of a volume that has left and whose new host has not ended its migration; with `force` it is promoted or taken back as well.
    /// **N.B.** What the volume had before is not looked for.
    pub exchanged: bool,
    /// Of a volume that waits for the host of its standby to say that it has not promoted it: serve it. With `force`: although that host
    /// says that it has. **N.B.** Then both hosts have the volume.
    #[serde(default)]
    pub unasked: bool,
    /// With `restored`, for a volume on a device or an export: its size in bytes. It may have grown since the backup, and the
    /// device may be larger.
    pub size_bytes: Option<u64>,
}

/// Makes a volume, and serves it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewVolume {
    /// Its name: 1 to 64 letters, digits, `.`, `_` and `-`; the first is a letter or digit.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub name: String,
    /// Where its content comes from.
    pub source: VolumeSource,
    /// How it is offered to its clients.
    #[serde(default)]
    pub export: ExportSettings,
}

/// Where the content of a new volume comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum VolumeSource {
    /// A new image in a store. Removing the volume deletes the image, but not the content of a device or an export.
    Create {
        /// Size in bytes, a multiple of 512; `None`: that of `image`, rounded up to 4,096.
        #[serde(default)]
        #[schema(multiple_of = 512, minimum = 512)]
        size_bytes: Option<u64>,
        /// Name of the store; `None`: the only one.
        #[serde(default)]
        store: Option<String>,
        /// Absolute path of an image that is copied in, in any format; `None`: the volume reads as zeroes.
        #[serde(default)]
        image: Option<String>,
        /// Format of the new image; `None`: the store's format, or raw.
        #[serde(default)]
        format: Option<ImageFormat>,
    },
    /// A copy of another volume of this host as it is at one instant, also while it is used: with every write that was acknowledged
    /// before the order, as after a power cut at that instant. Removing the volume deletes the image.
    Clone {
        /// Name of the volume to copy.
        volume: String,
        /// Name of the store, a folder; `None`: that of the other volume.
        #[serde(default)]
        store: Option<String>,
        /// Format of the new image; `None`: that of the other volume, or the store's.
        #[serde(default)]
        format: Option<ImageFormat>,
    },
    /// An existing image that is served in place. Removing the volume leaves the image. Exactly one of `image`,
    /// `device` and `nbd` is given.
    Add {
        /// Absolute path of an image file.
        #[serde(default)]
        image: Option<String>,
        /// Absolute path of a block device.
        #[serde(default)]
        device: Option<String>,
        /// URI of the export of another NBD server.
        #[serde(default)]
        nbd: Option<String>,
        /// Its format; `None`: recognised by its first bytes, once.
        #[serde(default)]
        format: Option<ImageFormat>,
        /// Allow a device or an export that holds an old copy which a migration has left.
        #[serde(default)]
        fenced: bool,
    },
    /// An unclaimed image in a store. It becomes the volume's image, and its file gets the volume's name; nothing is copied.
    /// Removing the volume leaves it.
    Import {
        /// Name of the store, a folder.
        store: String,
        /// Name of the file in it.
        file: String,
        /// Its format; `None`: recognised by its first bytes, once.
        #[serde(default)]
        format: Option<ImageFormat>,
    },
}

impl VolumeSource {
    /// Returns the source for a file that is served in place, with the recognised format.
    pub fn file(path: impl Into<String>) -> Self {
        Self::Add { image: Some(path.into()), device: None, nbd: None, format: None, fenced: false }
    }
}

impl VolumeState {
    /// Returns the state's word in JSON.
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
    /// Returns the kind's word in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Device => "device",
            Self::Nbd => "nbd",
        }
    }
}

impl ImageFormat {
    /// Returns the format's word in JSON.
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
    /// The new size in bytes, a multiple of 4096. The new part reads as zeroes. An order for the present size succeeds.
    #[schema(multiple_of = 4096, minimum = 4096)]
    pub size_bytes: u64,
    /// Accepts a size that is larger than the whole store; without it, such a size is taken for a slip of the pen.
    #[serde(default)]
    pub beyond_store: bool,
}

/// Removes a volume; sent as the query of a DELETE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct RemoveVolume {
    /// Remove it even while clients are connected; they are disconnected.
    #[serde(default)]
    pub force: bool,
    /// Keep the image, even if Sterna has made it.
    #[serde(default)]
    pub keep_image: bool,
    /// Delete the image from its store, even if a user had it before Sterna.
    #[serde(default)]
    pub delete_image: bool,
    /// Only end the forwarding of a volume that another host has. It is refused if this host has the volume.
    #[serde(default)]
    pub only_forwarding: bool,
}

/// A removed volume, and what was done with its image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemovedVolume {
    /// Name of the removed volume.
    pub name: String,
    /// Absolute path of its image, or the URI of the export that holds it; empty if that is at another host.
    pub image: String,
    /// The fate of its image.
    pub image_fate: ImageFate,
    /// Why the image was kept without an order to keep it; `null` otherwise.
    #[serde(default)]
    pub kept_because: Option<KeptBecause>,
    /// The host that has the volume, if this host only forwarded clients.
    #[serde(default)]
    pub host: Option<String>,
    /// Names of its snapshots, which stay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<String>,
}

/// Why the image of a removed volume was kept without an order to keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum KeptBecause {
    /// A user had the content before Sterna, and this is its only current copy.
    Given,
    /// The first owner is unknown, because the volume came from a version that does not record it.
    Unknown,
}

/// The fate of the image of a removed volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ImageFate {
    /// The image was deleted here.
    Deleted,
    /// The image is where it was.
    Kept,
    /// The image is at the host that has the volume.
    Elsewhere,
}
