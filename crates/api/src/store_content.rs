//! What lies in a store: every file as it was found, and what Sterna knows of it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::host::StoreKind;
use crate::volume::ImageFormat;

/// What lies in a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreContent {
    /// Name of the store.
    pub store: String,
    /// What the store is.
    pub kind: StoreKind,
    /// Absolute path of the folder or device, or the URI of the export.
    pub path: String,
    /// Why nothing is known of what lies there; `None`: it was looked at.
    pub problem: Option<String>,
    /// What was found, by name; of a device or an export what is in it, as one file.
    pub files: Vec<StoreFile>,
    /// Files that were not looked at, because there are too many.
    pub files_left_out: u64,
}

/// A file in a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreFile {
    /// Its name in the folder; what is no UTF-8 is replaced. Of a device or an export its path or URI.
    pub name: String,
    /// What it is.
    pub role: FileRole,
    /// The volume that it is of, as far as that is known.
    pub volume: Option<String>,
    /// The migration that fills it, or that left it.
    pub migration: Option<String>,
    /// How the bytes of a disk lie in it; `None` if it is no image that can be served.
    pub format: Option<ImageFormat>,
    /// Size of the disk in bytes, as a guest would see it; `None` if that is not known.
    pub size_bytes: Option<u64>,
    /// Bytes that it takes in the store; `None` for what is no file.
    pub allocated_bytes: Option<u64>,
    /// When it was last written to, in milliseconds since 1970; `None` if that is not known.
    pub modified_unix_ms: Option<u64>,
    /// What else is to be known of it, for people.
    pub note: Option<String>,
}

/// What a file in a store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FileRole {
    /// The image of a volume of this host.
    Volume,
    /// What the image of a volume stands on.
    Backing,
    /// What a migration under way fills.
    Target,
    /// An image that a migration left, and that the volume's way home begins with.
    Replica,
    /// An image that a migration left, and that no way home begins with any more.
    StaleReplica,
    /// A part of a disk, which no migration fills any more and nobody claims.
    HalfMade,
    /// What is being made or deleted at this moment, or was when the daemon ended: the next start settles it.
    Unsettled,
    /// An image that belongs to nothing that is known here.
    Unclaimed,
    /// No image: a folder, a link, or a file that nothing is known of.
    Other,
}

impl FileRole {
    /// The word of the JSON.
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
