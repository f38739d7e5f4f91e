//! Refusals to repeat a migration.

use migration::MigrationId;

/// Why a migration is not repeated, and what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RetryObstacle {
    #[error("it waits for its turn; see: sterna migration show {0}")]
    Queued(MigrationId),
    #[error(
        "it is under way; wait for it (sterna migration watch {0}) or cancel it (sterna migration cancel {0})"
    )]
    UnderWay(MigrationId),
    #[error("it has succeeded; see: sterna migration show {0}")]
    EndedWell(MigrationId),
    #[error("it came from host \"{peer}\": retry it there")]
    Incoming { peer: String },
    /// Its volume or VM has moved to another host since.
    #[error("\"{name}\" is at host \"{host}\": order its next move there")]
    Away { name: String, host: String },
    /// Its volume or VM has been removed here.
    #[error("\"{0}\" is not here now; see: sterna volume list")]
    Gone(String),
    #[error("its order is not recorded; order it again: sterna migrate {volume} --to {target}")]
    Unrecorded { volume: String, target: String },
}
