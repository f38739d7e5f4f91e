//! Identities and numbers, each a type of its own.

use serde::{Deserialize, Serialize};

/// The identity of a volume: the root of its lineage, the same on every host with a replica.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VolumeId(pub [u8; 16]);

/// The identity of a host, proved by its certificate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HostId(pub [u8; 32]);

/// The identity of a migration on the host that started it; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MigrationId(pub u64);

/// The number of one attempt to hand a migration's volumes over; the first is 1. Every handover message and record carries it, so
/// that answers to different attempts are never confused (hard case 2).
///
/// A number contains the run of the source that assigned it: each restart of the source continues in the next block of numbers.
/// The journal knows the bound of an interrupted run ([`Attempt::last_of_run`]) before the next run uses a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attempt(pub u32);

/// The position of a volume among the volumes of one migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VolumeIndex(pub u32);

/// The number of a commit to the journal, chosen by the machine that requests it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CommitId(pub u64);

/// The bits that count the attempts of one run.
const RUN_BITS: u32 = 20;
const RUN_MASK: u32 = (1 << RUN_BITS) - 1;

impl Attempt {
    /// The number before the first attempt.
    pub const NONE: Self = Self(0);

    /// Every possible attempt: a target whose images are deleted promises none of them.
    pub const ALL: Self = Self(u32::MAX);

    /// Returns the attempt after this one.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Returns the last number of this attempt's run. No run reaches it, because it makes at most
    /// [`crate::handover::source::ATTEMPTS_MAX`] attempts.
    pub fn last_of_run(self) -> Self {
        Self(self.0 | RUN_MASK)
    }

    /// Returns the run of the source to which this attempt belongs; the first is 0.
    pub fn run(self) -> u32 {
        self.0 >> RUN_BITS
    }

    /// Returns the number of this attempt within its run.
    pub fn in_run(self) -> u32 {
        self.0 & RUN_MASK
    }
}

impl VolumeIndex {
    /// Returns the position as an index into a slice.
    pub fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// Returns the positions of the first `count` volumes.
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
