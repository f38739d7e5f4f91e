//! The errors of a hypervisor, by what a caller can do about them.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::state::{MigrationStatus, RunState};

/// The text of the hypervisor or its protocol, for the administrator.
type Source = Box<dyn std::error::Error + Send + Sync>;

/// The reason why an operation on a VM failed.
#[derive(Debug, thiserror::Error)]
pub enum HypervisorError {
    /// No hypervisor listens at its socket.
    #[error("no {product} can be reached at {}: {source}; is the VM running?", socket.display())]
    Unreachable {
        /// The name of the hypervisor.
        product: &'static str,
        /// The path of the socket.
        socket: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The connection has ended, and probably the VM's process. The request may or may not have been carried out.
    #[error(transparent)]
    Gone(Source),
    /// The hypervisor did not answer in time. It may still carry the request out.
    #[error(transparent)]
    Silent(Source),
    /// The hypervisor has refused the request.
    #[error(transparent)]
    Refused(Source),
    /// A wait took too long.
    #[error("waited {} ms for {what}, and it is still {still}", waited.as_millis())]
    Deadline {
        /// The event that did not come.
        what: String,
        /// The last state that was seen.
        still: String,
        /// The duration of the wait.
        waited: Duration,
    },
    /// The hypervisor abandoned the transfer of the memory, perhaps on request.
    #[error("{product}'s migration is {status}{}", because(.detail))]
    MigrationEnded {
        /// The name of the hypervisor.
        product: &'static str,
        /// The final status of the transfer.
        status: MigrationStatus,
        /// The hypervisor's own reason, if it gives one.
        detail: Option<String>,
    },
    /// The VM's state does not allow the operation.
    #[error("the VM is {found}, and should be {expected}")]
    State {
        /// The state that is required.
        expected: RunState,
        /// The state that was found.
        found: RunState,
    },
    /// The VM cannot be migrated.
    #[error("{product} cannot migrate this VM: {}", reasons.join("; "))]
    Blocked {
        /// The name of the hypervisor.
        product: &'static str,
        /// The hypervisor's own reasons.
        reasons: Vec<String>,
    },
    /// Any other error: the answer is invalid, or the request cannot be expressed.
    #[error(transparent)]
    Other(Source),
}

impl HypervisorError {
    /// Returns whether there is no connection to the hypervisor, so that the VM's process has probably ended.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone(_) | Self::Unreachable { .. })
    }

    /// Returns whether no process listens at the hypervisor's socket: it has ended, or does not listen yet. A socket without
    /// permission does not count.
    pub fn nobody_listens(&self) -> bool {
        let Self::Unreachable { source, .. } = self else { return false };
        matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
    }
}

fn because(detail: &Option<String>) -> String {
    detail.as_ref().map_or_else(String::new, |detail| format!(": {detail}"))
}
