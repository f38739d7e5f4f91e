//! Branches of a volume's history.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The identity of a branch. A forced promotion begins one, because the former owner may have writes that the new owner
/// has never seen. The number is random, so that two hosts can promote independently without a collision.
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
