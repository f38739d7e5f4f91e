//! What a failure says: the cause, and where the guest runs.

use crate::journal::FailureCode;

/// A failed migration. One failure has one owner: the machine that ends the migration with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The cause, for programs.
    pub code: FailureCode,
    /// The cause, for people: a fragment that follows "failed:".
    pub detail: String,
    /// Where the guest runs after it.
    pub guest: GuestLocation,
}

/// Where the guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestLocation {
    /// At the source.
    RunsHere,
    /// At the target.
    RunsThere,
    /// The journal could not be written at the commit point: only a restart will tell.
    Unknown,
}

/// A commit to the journal that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitFault {
    /// Nothing was written; the records are as if they had never been.
    #[error("the journal took nothing")]
    NotWritten,
    /// The records may be found at the next start, or not.
    #[error("the journal may have taken it, or not")]
    Unknown,
}
