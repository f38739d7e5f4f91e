//! What speaks for an image: who uses it, or counts on it.

use std::fmt;

use super::book::Found;
use crate::identity::{MigrationId, VolumeId};
use crate::journal::Place;

/// A claim on an image or device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// What for.
    pub kind: Kind,
    /// Under which name.
    pub place: Place,
    /// What is there under that name.
    pub found: Found,
}

/// What an image is claimed for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A volume is served from it.
    Served {
        /// The volume.
        volume: VolumeId,
        /// Its name.
        name: String,
    },
    /// The image of a served volume stands on it, directly or not.
    BelowServed {
        /// The volume.
        volume: VolumeId,
        /// Its name.
        name: String,
    },
    /// Another image stands on it that no volume is served from.
    BelowImage {
        /// Where the other image is.
        top: String,
    },
    /// A migration fills it.
    Target {
        /// The migration.
        migration: MigrationId,
    },
    /// A volume has left it by a migration that is not over: it may be the only copy.
    Left {
        /// The migration.
        migration: MigrationId,
    },
    /// Another host reads in it what it lacks of a volume.
    Reservoir {
        /// The migration by which the volume has left.
        migration: MigrationId,
        /// The name of the other host.
        host: String,
    },
    /// A migration left it, and it was kept.
    Kept {
        /// Name of the volume.
        volume: String,
        /// The migration.
        migration: MigrationId,
    },
    /// It is an old copy that a migration left on a device or export; nobody asked to keep it.
    Stale {
        /// Name of the volume.
        volume: String,
        /// The migration.
        migration: MigrationId,
    },
    /// A mark, or the journal, says that parts of the disk are missing in it.
    HalfMade,
    /// A volume of a journal that was put back may be served from it: nobody has said whose that is.
    Restored {
        /// The volume.
        volume: VolumeId,
        /// Its name.
        name: String,
    },
    /// A program that is not Sterna has locked it or has it open.
    Foreign {
        /// Which program.
        holder: String,
    },
    /// Something could not be looked at, so nobody knows who uses the image.
    Unknown {
        /// What, and why not.
        why: String,
    },
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Served { name, .. } => write!(f, "the volume \"{name}\" is served from it"),
            Self::BelowServed { name, .. } => write!(f, "the image of volume \"{name}\" stands on it"),
            Self::BelowImage { top } => write!(f, "the image {top} stands on it"),
            Self::Target { migration } => {
                write!(f, "migration {migration} fills it (sterna migration show {migration})")
            }
            Self::Left { migration } => write!(
                f,
                "a volume has left it by migration {migration}, which is not over (sterna migration show {migration})"
            ),
            Self::Reservoir { migration, host } => write!(
                f,
                "host \"{host}\" reads in it what it lacks of a volume that has left by {migration} (sterna migration show {migration})"
            ),
            Self::Kept { volume, migration } => {
                write!(f, "migration {migration} kept it of volume \"{volume}\" (sterna replica list)")
            }
            Self::Stale { volume, migration } => {
                write!(f, "it is an old copy of volume \"{volume}\" that migration {migration} left")
            }
            Self::HalfMade => write!(f, "it is a half-made target: parts of the disk are missing"),
            Self::Restored { name, .. } => write!(
                f,
                "volume \"{name}\" of the restored journal waits for it (sterna volume show {name})"
            ),
            Self::Foreign { holder } => write!(f, "{holder} uses it"),
            Self::Unknown { why } => write!(f, "it is not known who uses it: {why}"),
        }
    }
}
