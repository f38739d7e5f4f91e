//! What a failure says.

use crate::journal::{FailureCode, Outcome};

/// Why something could not be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The cause, for programs.
    pub code: FailureCode,
    /// The cause, for people: a fragment that follows "failed:".
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
    /// Nothing was written; the records are as if they had never been.
    #[error("the journal took nothing")]
    NotWritten,
    /// The records may be found at the next start, or not.
    #[error("the journal may have taken it, or not")]
    Unknown,
}
