//! The location and the format of a volume's image, as recorded in the journal.

use serde::{Deserialize, Serialize};

/// An image: a file in a store, a block device, or the export of another server.
///
/// The recorded format is trusted from then on. A guest controls the first bytes of a raw image, so a format is detected only
/// once, when an image is added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageLocation {
    /// The name of the store in the configuration; empty for an image served in place, outside any store.
    pub store: String,
    /// The file, device or export of the image.
    pub place: Place,
    /// The layout of the volume's bytes in the image.
    pub format: ImageFormat,
}

/// The location of an image. Places are ordered by variant, then by text.
///
/// **N.B.** A new variant must come last, because journals store the variants' numbers. An image at another host will be one
/// more variant: this host knows only its name there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Place {
    /// A file of this host, by its absolute path.
    File(String),
    /// A block device of this host, by the absolute path from the administrator, because device numbers change.
    Device(String),
    /// An export of an NBD server, by its URI.
    Nbd(String),
}

/// The layout of a volume's bytes in its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ImageFormat {
    /// The volume's bytes in order.
    Raw,
    /// Clusters with tables, perhaps above a backing file.
    Qcow2,
}

impl ImageLocation {
    /// Returns the location of a raw image file.
    pub fn raw_file(store: impl Into<String>, path: impl Into<String>) -> Self {
        Self { store: store.into(), place: Place::File(path.into()), format: ImageFormat::Raw }
    }

    /// Returns whether the image existed before it was served (`volume add`). Such an image is never deleted.
    pub fn is_adopted(&self) -> bool {
        self.store.is_empty()
    }
}

impl Place {
    /// Returns the path or URI.
    pub fn name(&self) -> &str {
        match self {
            Self::File(name) | Self::Device(name) | Self::Nbd(name) => name,
        }
    }

    /// Returns the path, if the place is a file.
    pub fn file(&self) -> Option<&str> {
        match self {
            Self::File(path) => Some(path),
            Self::Device(_) | Self::Nbd(_) => None,
        }
    }

    /// Returns whether the content outlasts its volume: a device or an export cannot be deleted, and keeps its last content.
    pub fn outlasts_its_volume(&self) -> bool {
        match self {
            Self::File(_) => false,
            Self::Device(_) | Self::Nbd(_) => true,
        }
    }
}

impl ImageFormat {
    /// Returns the name of the format for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The reason why a place must not be used for a volume of its own.
///
/// A device or an export that a migration has left, or has not completed, still looks like a disk. Serving it by mistake would
/// serve an old state, or a partial one (design §5.17).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// The name of the volume whose bytes are there.
    pub volume: String,
    /// The migration that left them there.
    pub migration: crate::identity::MigrationId,
    /// The state of these bytes.
    pub content: ReservedContent,
}

/// The content of a fenced place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReservedContent {
    /// The volume as of its departure; it was not requested to keep this copy.
    Left,
    /// The volume as of its departure, kept on request.
    Kept,
    /// A part of the volume: the migration did not reach its commit point, or was handed back.
    HalfMade,
}
