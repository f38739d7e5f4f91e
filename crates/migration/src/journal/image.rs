//! Where a volume's bytes are, and in which format: what the journal remembers of an image.

use serde::{Deserialize, Serialize};

/// An image: a file in a store, a block device, or the export of another server.
///
/// What is written here is believed ever after. A guest can write whatever it likes into the first bytes of a raw
/// image, so a format is recognised once, when an image is added, and never again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageLocation {
    /// Name of the store in the configuration; empty for an image that is served in place, outside any store.
    pub store: String,
    /// Where it is.
    pub place: Place,
    /// How the volume's bytes lie in it.
    pub format: ImageFormat,
}

/// Where an image is. The order is that of the variants, then of their texts.
///
/// **N.B.** a new variant comes last: journals have their numbers. An image at another host will be one variant more: what this
/// host knows of it is a name there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Place {
    /// A file of this host, by its absolute path.
    File(String),
    /// A block device of this host, by the absolute path that people gave: numbers of devices change.
    Device(String),
    /// An export of an NBD server, by its URI.
    Nbd(String),
}

/// How a volume's bytes lie in its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ImageFormat {
    /// One after the other.
    Raw,
    /// In clusters, by tables; there may be a backing file below.
    Qcow2,
}

impl ImageLocation {
    /// A raw image file.
    pub fn raw_file(store: impl Into<String>, path: impl Into<String>) -> Self {
        Self { store: store.into(), place: Place::File(path.into()), format: ImageFormat::Raw }
    }

    /// Tells whether the image was somebody's before it was served (`volume add`): such an image is never deleted.
    pub fn is_adopted(&self) -> bool {
        self.store.is_empty()
    }
}

impl Place {
    /// The path or URI.
    pub fn name(&self) -> &str {
        match self {
            Self::File(name) | Self::Device(name) | Self::Nbd(name) => name,
        }
    }

    /// The path, if it is a file.
    pub fn file(&self) -> Option<&str> {
        match self {
            Self::File(path) => Some(path),
            Self::Device(_) | Self::Nbd(_) => None,
        }
    }

    /// Tells whether its content cannot be taken away: a device and a server's export stay where they are, with
    /// whatever was in them last.
    pub fn outlasts_its_volume(&self) -> bool {
        match self {
            Self::File(_) => false,
            Self::Device(_) | Self::Nbd(_) => true,
        }
    }
}

impl ImageFormat {
    /// The word that people use.
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

/// Why a place must not be taken for a volume of its own.
///
/// A device or an export that a migration has left, or has not reached, still looks like a disk: whoever served it by
/// mistake would serve an old state, or half of one (design §5.17).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// Name of the volume whose bytes are there.
    pub volume: String,
    /// The migration that left them there.
    pub migration: crate::identity::MigrationId,
    /// What they are.
    pub content: ReservedContent,
}

/// What lies in a fenced place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReservedContent {
    /// The volume as it was when it moved away; nobody asked to keep it.
    Left,
    /// The volume as it was when it moved away, kept because somebody asked for it.
    Kept,
    /// A part of the volume: the migration did not get as far as its commit point, or was handed back.
    HalfMade,
}
