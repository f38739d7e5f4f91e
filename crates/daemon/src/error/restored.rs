//! What is refused because a journal was put back from a backup.

use api::ErrorCode;
use migration::restoration::{Refused, SizeUnknown};

/// Why a volume of a journal that was put back is not taken by somebody's order.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoredError {
    /// It is no such volume.
    #[error(
        "volume \"{0}\" does not wait for that: only one that is unconfirmed is taken so (sterna volume list)"
    )]
    NotWaiting(String),
    /// It is one, and something else was ordered.
    #[error("volume \"{volume}\" is not served: {standing}")]
    Unconfirmed {
        volume: String,
        /// What it waits for, and what can be done.
        standing: String,
    },
    /// Something speaks against it.
    #[error("volume \"{volume}\" is not taken: {reason}; {standing}")]
    Refused {
        volume: String,
        reason: Refused,
        /// What it waits for, and what can be done.
        standing: String,
    },
    /// How large it is, is not known.
    #[error(
        "volume \"{volume}\" is not taken: {reason}; say how large it is: sterna volume promote {volume} --restored --size SIZE"
    )]
    Size { volume: String, reason: SizeUnknown },
}

impl RestoredError {
    /// What programs are told.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NotWaiting(_) | Self::Refused { .. } | Self::Size { .. } => ErrorCode::NotPrepared,
            Self::Unconfirmed { .. } => ErrorCode::VolumeUnavailable,
        }
    }
}
