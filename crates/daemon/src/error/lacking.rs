//! Refusals for volumes that were handed over while they were incomplete.

use api::ErrorCode;
use migration::promotion::NotRemovable;

/// Why an operation on an incomplete volume is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LackingError {
    /// Another host still has the missing blocks.
    #[error(
        "volume \"{volume}\" is still being filled from host \"{host}\": it can be moved, resized and removed when it is \
         complete (sterna volume show {volume})"
    )]
    BeingFilled {
        volume: String,
        /// The host that has the missing blocks.
        host: String,
    },
    #[error(
        "volume \"{volume}\" lacks blocks that were given up when host \"{host}\" was lost: it can be moved and resized when all \
         of them were overwritten or discarded, for example by fstrim in the guest (where they are: sterna volume show {volume} \
         --json)"
    )]
    ForGood {
        volume: String,
        /// The host that had the missing blocks.
        host: String,
    },
    /// It is unknown which blocks are missing, or another obstacle keeps it from being served.
    #[error(
        "volume \"{volume}\" is not removed: it lacks blocks that host \"{host}\" has, and {reason}; to continue with what \
         that host had when the volume moved: there sterna volume promote {volume} --force, then here sterna volume remove \
         {volume} --force"
    )]
    Unserved {
        volume: String,
        /// The host that has the missing blocks.
        host: String,
        reason: NotRemovable,
    },
    /// Nothing is missing, or the missing blocks are still coming.
    #[error("cannot promote volume \"{volume}\" without its missing blocks: {reason}")]
    NotGivenUp { volume: String, reason: String },
}

impl LackingError {
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::BeingFilled { .. } => ErrorCode::VolumeBusy,
            Self::ForGood { .. } => ErrorCode::VolumeUnavailable,
            Self::NotGivenUp { .. } => ErrorCode::NotPrepared,
            Self::Unserved { .. } => ErrorCode::VolumeUnavailable,
        }
    }
}
