//! Why a migration is not done once more.

use migration::MigrationId;

/// Why a migration is not done once more, and what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RetryObstacle {
    /// It waits for its turn.
    #[error("it waits for its turn; see: sterna migration show {0}")]
    Queued(MigrationId),
    /// It has not ended.
    #[error(
        "it is under way; wait for it (sterna migration watch {0}) or cancel it (sterna migration cancel {0})"
    )]
    UnderWay(MigrationId),
    /// It has moved what it was to move.
    #[error("it has ended well; see: sterna migration show {0}")]
    EndedWell(MigrationId),
    /// It was ordered at another host.
    #[error("it came from the host \"{peer}\": retry it there")]
    Incoming { peer: String },
    /// What it was to move has gone to another host since.
    #[error("\"{name}\" is at the host \"{host}\" by now")]
    Away {
        /// What was to move.
        name: String,
        host: String,
    },
    /// What it was to move is not known here any more.
    #[error("\"{0}\" is no longer here; see: sterna volume list")]
    Gone(String),
    /// Nobody knows what was ordered.
    #[error("what was ordered is not recorded; order it anew: sterna migrate {volume} --to {target}")]
    Unrecorded {
        /// What was to move.
        volume: String,
        target: String,
    },
}
