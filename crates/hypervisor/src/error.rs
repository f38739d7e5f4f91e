//! Why a hypervisor did not do what it was asked, by what a caller can do about it.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::state::{MigrationStatus, RunState};

/// What a hypervisor says itself, or its protocol: text for people.
type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why something was not done with a VM.
#[derive(Debug, thiserror::Error)]
pub enum HypervisorError {
    /// Nobody listens where the hypervisor should.
    #[error("no {product} can be reached at {}: {source}; is the VM running?", socket.display())]
    Unreachable {
        /// The hypervisor's name.
        product: &'static str,
        /// Where.
        socket: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// The connection has ended, and the VM's process with it most likely. Whether the request was carried out is not known.
    #[error(transparent)]
    Gone(Source),
    /// The hypervisor did not answer in time. Whether it carries the request out is not known.
    #[error(transparent)]
    Silent(Source),
    /// The hypervisor has answered that it does not do it.
    #[error(transparent)]
    Refused(Source),
    /// What was waited for took too long.
    #[error("waited {} ms for {what}, and it is still {still}", waited.as_millis())]
    Deadline {
        /// What was waited for.
        what: String,
        /// What was seen last.
        still: String,
        /// For how long.
        waited: Duration,
    },
    /// The hypervisor gave up the move of the memory, or was told to.
    #[error("{product}'s migration is {status}{}", because(.detail))]
    MigrationEnded {
        /// The hypervisor's name.
        product: &'static str,
        /// How it ended.
        status: MigrationStatus,
        /// In the hypervisor's words, if it has any.
        detail: Option<String>,
    },
    /// The VM is in a state in which this cannot be.
    #[error("the VM is {found}, and should be {expected}")]
    State {
        /// What it should be.
        expected: RunState,
        /// What it is.
        found: RunState,
    },
    /// The VM cannot be migrated.
    #[error("{product} cannot migrate this VM: {}", reasons.join("; "))]
    Blocked {
        /// The hypervisor's name.
        product: &'static str,
        /// In the hypervisor's words.
        reasons: Vec<String>,
    },
    /// Anything else: the answer is none, or the request cannot be put.
    #[error(transparent)]
    Other(Source),
}

impl HypervisorError {
    /// Whether there is no connection to the hypervisor, and the VM's process has ended most likely.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone(_) | Self::Unreachable { .. })
    }

    /// Whether nobody listens where the hypervisor should: it has ended, or does not listen yet. A socket that may not be connected
    /// to is none of these.
    pub fn nobody_listens(&self) -> bool {
        let Self::Unreachable { source, .. } = self else { return false };
        matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
    }
}

fn because(detail: &Option<String>) -> String {
    detail.as_ref().map_or_else(String::new, |detail| format!(": {detail}"))
}
