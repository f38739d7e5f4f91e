//! The content of a store: every file, and what Sterna knows about it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::host::StoreKind;
use crate::volume::ImageFormat;

/// The content of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreContent {
    /// Its name in the configuration.
    pub store: String,
    /// Whether the store is a folder, a device or an export.
    pub kind: StoreKind,
    /// Absolute path of the folder or device, or the URI of the export.
    pub path: String,
    /// Why the store could not be read; `None`: it was read.
    pub problem: Option<String>,
    /// The files, by name. The content of a device or an export counts as one file.
    pub files: Vec<StoreFile>,
    /// Number of files that were left out, because there are too many.
    pub files_left_out: u64,
}

/// A file in a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreFile {
    /// Its name in the folder, with replacements for bytes that are not UTF-8. For a device or an export its path or URI.
    pub name: String,
    /// The role of the file.
    pub role: FileRole,
    /// Name of the volume that it belongs to, if that is known.
    pub volume: Option<String>,
    /// The migration that fills it, or that has left it.
    pub migration: Option<String>,
    /// Its image format; `None` if it cannot be served.
    pub format: Option<ImageFormat>,
    /// Size of the disk in bytes, as a guest would see it; `None` if that is not known.
    pub size_bytes: Option<u64>,
    /// Bytes that it takes in the store; `None` for devices and exports.
    pub allocated_bytes: Option<u64>,
    /// When it was last written to, in milliseconds since 1970; `None` if that is not known.
    pub modified_unix_ms: Option<u64>,
    /// Further information about it, as text.
    pub note: Option<String>,
}

/// The role of a file in a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FileRole {
    /// The image of a volume of this host.
    Volume,
    /// A backing file of a volume's image.
    Backing,
    /// The target of a migration under way.
    Target,
    /// A kept image that a return of its volume can reuse.
    Replica,
    /// A kept image that no return can reuse.
    StaleReplica,
    /// An incomplete target of an ended migration, without an owner.
    HalfMade,
    /// A file that is being made or deleted, or was when the daemon ended; the next start completes that.
    Unsettled,
    /// An image without a known owner.
    Unclaimed,
    /// Not an image: a folder, a link, or an unknown file.
    Other,
}

impl FileRole {
    /// Returns the role's word in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Volume => "volume",
            Self::Backing => "backing",
            Self::Target => "target",
            Self::Replica => "replica",
            Self::StaleReplica => "stale-replica",
            Self::HalfMade => "half-made",
            Self::Unsettled => "unsettled",
            Self::Unclaimed => "unclaimed",
            Self::Other => "other",
        }
    }
}
