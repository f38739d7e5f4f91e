//! The claims on an image: who uses it, or relies on it.

use std::fmt;

use super::book::Found;
use crate::identity::{MigrationId, VolumeId};
use crate::journal::Place;

/// A claim on an image or device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The reason of the claim.
    pub kind: Kind,
    /// The name under which the image is claimed.
    pub place: Place,
    /// The image found under that name.
    pub found: Found,
}

/// The reason why an image is claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A volume is served from it.
    Served {
        /// The volume that is served.
        volume: VolumeId,
        /// The name of the volume.
        name: String,
    },
    /// The image of a served volume has this one in its backing chain.
    BelowServed {
        /// The volume that is served.
        volume: VolumeId,
        /// The name of the volume.
        name: String,
    },
    /// Another image, from which no volume is served, has this one in its backing chain.
    BelowImage {
        /// The path of the other image.
        top: String,
    },
    /// Another image has the export of the served volume in its backing chain.
    BelowExport {
        /// The path of the other image.
        top: String,
    },
    /// A migration copies into it.
    Target {
        /// The migration that copies into it.
        migration: MigrationId,
    },
    /// A volume left this image by a migration that is not over: the image may be the only copy.
    Left {
        /// The migration by which the volume left.
        migration: MigrationId,
    },
    /// Another host reads the missing blocks of a volume from it.
    Reservoir {
        /// The migration by which the volume has left.
        migration: MigrationId,
        /// The name of the other host.
        host: String,
    },
    /// A migration left this image behind, and it was kept.
    Kept {
        /// The name of the volume.
        volume: String,
        /// The migration that left it behind.
        migration: MigrationId,
    },
    /// An old copy that a migration left on a device or export, which nobody asked to keep.
    Stale {
        /// The name of the volume.
        volume: String,
        /// The migration that left it behind.
        migration: MigrationId,
    },
    /// The volume was given up here, because another host has promoted its standby and has it since.
    GivenUp {
        /// The name that the volume had.
        volume: String,
        /// The name of the other host.
        host: String,
    },
    /// A mark, or the journal, says that the image lacks parts of the disk.
    HalfMade,
    /// A volume of a restored journal may be served from it; its owner is not decided yet.
    Restored {
        /// The volume of the restored journal.
        volume: VolumeId,
        /// The name of the volume.
        name: String,
    },
    /// A program other than Sterna has locked it or has it open.
    Foreign {
        /// The program that holds it.
        holder: String,
    },
    /// The journal knows its name, and means another image by it.
    Exchanged,
    /// Its name is a link to the image that the journal means.
    Linked {
        /// The path of the image.
        to: String,
    },
    /// It existed before Sterna served it.
    Given,
    /// The journal does not record that Sterna gave this image its name.
    Unrecorded,
    /// A lookup failed, so the users of the image are not known.
    Unknown {
        /// The lookup that failed, and the reason.
        why: String,
    },
    /// A file that is no volume's may stand on any image: its header or its folder cannot be read, or is not understood.
    UnknownAbove {
        /// The file, and the reason.
        why: String,
    },
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Served { name, .. } => write!(f, "the volume \"{name}\" is served from it"),
            Self::BelowServed { name, .. } => write!(f, "the image of volume \"{name}\" stands on it"),
            Self::BelowImage { top } => write!(f, "the image {top} stands on it"),
            Self::BelowExport { top } => write!(f, "the image {top} stands on the export of its volume"),
            Self::Target { migration } => {
                write!(f, "migration {migration} fills it (sterna migration show {migration})")
            }
            Self::Left { migration } => write!(
                f,
                "a volume has left it by migration {migration}, which has not ended (sterna migration show {migration})"
            ),
            Self::Reservoir { migration, host } => write!(
                f,
                "host \"{host}\" reads missing blocks from it for a volume that left by {migration} (sterna migration show \
                 {migration})"
            ),
            Self::Kept { volume, migration } => {
                write!(
                    f,
                    "migration {migration} kept it as the old image of volume \"{volume}\" (sterna replica list)"
                )
            }
            Self::Stale { volume, migration } => {
                write!(f, "it is an old copy of volume \"{volume}\" that migration {migration} left")
            }
            Self::GivenUp { volume, host } => write!(
                f,
                "volume \"{volume}\" was given up here, and host \"{host}\" has it: to make this image its standby, there: sterna standby \
                 reprotect; to use the image for something else, release what only it has: sterna volume divergence drop {volume}"
            ),
            Self::HalfMade => write!(f, "it is a half-made target: parts of the disk are missing"),
            Self::Restored { name, .. } => write!(
                f,
                "volume \"{name}\" of the restored journal waits for it (sterna volume show {name})"
            ),
            Self::Foreign { holder } => write!(f, "{holder} uses it"),
            Self::Exchanged => write!(
                f,
                "another file or device has its name than the one that Sterna used; put that back, or, if this one is to be the volume's \
                 (a backup that was put back): sterna volume promote NAME --exchanged"
            ),
            Self::Linked { to } => write!(
                f,
                "its name is a link to it, {to}; give the image its name again in place of the link, or, if it is not needed, delete \
                 both by hand"
            ),
            Self::Given => write!(f, "it existed before Sterna served it, so it is not deleted"),
            Self::Unrecorded => write!(
                f,
                "the journal does not say that it is the file which Sterna gave this name; look what it is, and delete it by hand"
            ),
            Self::Unknown { why } | Self::UnknownAbove { why } => write!(f, "its users are unknown: {why}"),
        }
    }
}
