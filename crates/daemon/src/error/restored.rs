//! Refusals after the journal was restored from a backup.

use api::ErrorCode;
use migration::restoration::{Refused, SizeUnknown};

/// Why a volume of a restored journal is not taken by an order.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoredError {
    /// The volume is not waiting.
    #[error(
        "volume \"{0}\" does not wait for that: only one that is unconfirmed is taken so (sterna volume list)"
    )]
    NotWaiting(String),
    /// The volume waits, and something else was ordered.
    #[error("volume \"{volume}\" is not served: {standing}")]
    Unconfirmed { volume: String, standing: String },
    /// A host or the image contradicts the order.
    #[error("volume \"{volume}\" is not taken: {reason}; {standing}")]
    Refused { volume: String, reason: Refused, standing: String },
    #[error(
        "volume \"{volume}\" is not taken: {reason}; say how large it is: sterna volume promote {volume} --restored --size SIZE"
    )]
    Size { volume: String, reason: SizeUnknown },
}

impl RestoredError {
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NotWaiting(_) | Self::Refused { .. } | Self::Size { .. } => ErrorCode::NotPrepared,
            Self::Unconfirmed { .. } => ErrorCode::VolumeUnavailable,
        }
    }
}
