//! What is refused because a volume was handed over before all of it had come.

use api::ErrorCode;

/// Why something is not done with a volume that lacks blocks.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LackingError {
    /// Another host still has them.
    #[error(
        "volume \"{volume}\" is still being filled from host \"{host}\": it can be moved, resized and removed when nothing is missing any \
         more (sterna volume show {volume})"
    )]
    BeingFilled {
        volume: String,
        /// The host that has what is missing.
        host: String,
    },
    #[error(
        "volume \"{volume}\" lacks what was given up of it when host \"{host}\" was lost: it can be moved and resized when all of that was \
         overwritten or discarded, by fstrim in the guest for example (where it is: sterna volume show {volume} --json)"
    )]
    ForGood {
        volume: String,
        /// The host that had what is missing.
        host: String,
    },
    /// Nothing is missing, or it still comes.
    #[error("volume \"{volume}\" is not taken without what is missing of it: {reason}")]
    NotGivenUp { volume: String, reason: String },
}

impl LackingError {
    /// What programs are told.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::BeingFilled { .. } => ErrorCode::VolumeBusy,
            Self::ForGood { .. } => ErrorCode::VolumeUnavailable,
            Self::NotGivenUp { .. } => ErrorCode::NotPrepared,
        }
    }
}
