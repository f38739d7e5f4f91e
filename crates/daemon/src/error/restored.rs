//! Refusals after the journal was restored from a backup.

use api::ErrorCode;
use migration::restoration::{Refused, SizeUnknown};

/// Why a volume of a restored journal is not taken by an order.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoredError {
    /// The volume is not waiting.
    #[error("cannot promote volume \"{0}\" with --restored: it is not unconfirmed (sterna volume list)")]
    NotWaiting(String),
    /// The volume waits, and something else was ordered.
    #[error("volume \"{volume}\" is not served: {standing}")]
    Unconfirmed { volume: String, standing: String },
    /// A host or the image contradicts the order.
    #[error("cannot promote volume \"{volume}\": {reason}; {standing}")]
    Refused { volume: String, reason: Refused, standing: String },
    #[error(
        "cannot promote volume \"{volume}\": {reason}; give its size: sterna volume promote {volume} --restored --size SIZE"
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
