//! A failure, for programs and for administrators.

use crate::journal::{FailureCode, Outcome};

/// The reason why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The cause, for programs.
    pub code: FailureCode,
    /// The cause, for the administrator: a fragment that follows "failed:".
    pub detail: String,
}

impl From<Failure> for Outcome {
    fn from(Failure { code, detail }: Failure) -> Self {
        Self::Failed { code, detail }
    }
}

/// A commit to the journal that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitFault {
    /// Nothing was written, and the journal is unchanged.
    #[error("the journal recorded nothing")]
    NotWritten,
    /// The next start may find the records, or not.
    #[error("it is unknown whether the journal recorded it")]
    Unknown,
}
