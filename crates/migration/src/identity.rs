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
///
/// A number bears the run of the source that gave it: every restart of the source goes on in the next block of numbers. The
/// journal knows the bound of a run that ended without a word ([`Attempt::last_of_run`]) before the run uses a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attempt(pub u32);

/// Position of a volume among the volumes of one migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VolumeIndex(pub u32);

/// A commit to the journal, named by the machine that asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CommitId(pub u64);

/// Bits of a try's number that count the tries of one run. Version 0.1 counted tries without bound, a few in a second, and
/// had one run only: what it counted in hours fits.
const RUN_BITS: u32 = 20;
const RUN_MASK: u32 = (1 << RUN_BITS) - 1;

impl Attempt {
    /// Before the first try.
    pub const NONE: Self = Self(0);

    /// Every try that there will ever be: a target whose images go promises none any more.
    pub const ALL: Self = Self(u32::MAX);

    /// The try after this one.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The last number of the run of the source that this try belongs to. No run gets there: it makes
    /// [`crate::handover::source::ATTEMPTS_MAX`] tries.
    pub fn last_of_run(self) -> Self {
        Self(self.0 | RUN_MASK)
    }

    /// The run of the source that this try belongs to; the first is 0.
    pub fn run(self) -> u32 {
        self.0 >> RUN_BITS
    }

    /// The number of this try within its run.
    pub fn in_run(self) -> u32 {
        self.0 & RUN_MASK
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
        match self.run() {
            0 => write!(f, "{}", self.0),
            run => write!(f, "{} of run {}", self.in_run(), run + 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_one_run_are_none_of_another() {
        let first = Attempt::NONE.next();
        let next = first.last_of_run().next();
        assert_eq!((first.run(), next.run()), (0, 1));
        assert_eq!((first.in_run(), next.next().in_run()), (1, 1));
        assert!(first.last_of_run() < next && next.last_of_run() > next);
        assert_eq!(Attempt::ALL.next().last_of_run(), Attempt::ALL, "behind the last there is none");
        assert_eq!((first.to_string(), next.next().to_string()), ("1".to_owned(), "1 of run 2".to_owned()));
    }
}
