//! Numbers that name things, each a type of its own.

use serde::{Deserialize, Serialize};

/// Identity of a volume: the root of its lineage, the same on every host that has a replica of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VolumeId(pub [u8; 16]);

/// Identity of a host: what its certificate proves.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HostId(pub [u8; 32]);

/// Identity of a migration on the host that started it; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MigrationId(pub u64);

/// One try at handing a migration's volumes over; the first is 1. Every handover message and record carries it,
/// so that an answer to an earlier try is never taken for one to this (hard case 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attempt(pub u32);

/// Position of a volume among the volumes of one migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VolumeIndex(pub u32);

/// A commit to the journal, named by the machine that asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CommitId(pub u64);

impl Attempt {
    /// Before the first try.
    pub const NONE: Self = Self(0);

    /// Every try that there will ever be: a target whose images go promises none any more.
    pub const ALL: Self = Self(u32::MAX);

    /// The try after this one.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl VolumeIndex {
    /// As an index into a slice.
    pub fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// The positions of the first `count` volumes.
    pub fn all(count: usize) -> impl Iterator<Item = Self> {
        (0u32..).take(count).map(Self)
    }
}

impl std::fmt::Display for VolumeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "VolumeId({self})")
    }
}

impl std::fmt::Display for HostId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl std::fmt::Debug for HostId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostId({self})")
    }
}

impl std::fmt::Display for MigrationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "m{}", self.0)
    }
}

impl std::fmt::Display for Attempt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}
