//! Branches of a volume's history.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The identity of a branch: who promotes a volume by force begins one, because its former owner may have written what
/// nobody has seen. It is random, and never given twice: two hosts may promote without knowing of each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BranchId(pub [u8; 16]);

impl fmt::Debug for BranchId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "BranchId({self})")
    }
}

impl fmt::Display for BranchId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}
