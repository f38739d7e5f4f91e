//! Refusals about evacuations, and of what a drained host does not take.

use api::ErrorCode;

/// Why an order about an evacuation is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EvacuationError {
    /// Said at this host and to other hosts.
    #[error(
        "the host is drained, and takes no new volumes and VMs; to end that, run there: sterna host undrain"
    )]
    Drained,
    /// Said at this host and to other hosts.
    #[error(
        "the host is being evacuated, and takes no new volumes and VMs; to end that, run there: sterna evacuate --abort"
    )]
    Evacuating,
    #[error("an evacuation runs already; see: sterna evacuate --status; to end it: sterna evacuate --abort")]
    Runs,
    #[error("no evacuation was ordered at this host; to begin one: sterna evacuate")]
    None,
    #[error("the evacuation has ended; see: sterna evacuate --status")]
    Over,
    #[error("no other host is connected; see: sterna host list")]
    NoTarget,
    #[error("the deadline has passed; give a later one")]
    DeadlinePassed,
    #[error("what is stopped before a deadline needs one: --deadline 15m")]
    NoDeadline,
    #[error("{0} is no HOST or HOST:STORE of another host; see: sterna host list")]
    NotAHost(String),
    #[error("name at most {0} targets")]
    TooManyTargets(usize),
    /// The file of the last evacuation cannot be read.
    #[error(
        "the record of the evacuation cannot be read ({0}); remove evacuation.json from the data folder, and restart the daemon"
    )]
    Unreadable(String),
}

impl EvacuationError {
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::Drained | Self::Evacuating => ErrorCode::HostDrained,
            Self::Runs => ErrorCode::EvacuationRuns,
            Self::None | Self::Over => ErrorCode::EvacuationNotFound,
            Self::NoTarget => ErrorCode::HostUnreachable,
            Self::DeadlinePassed | Self::NoDeadline | Self::NotAHost(_) | Self::TooManyTargets(_) => {
                ErrorCode::InvalidRequest
            }
            Self::Unreadable(_) => ErrorCode::StorageFailed,
        }
    }
}
