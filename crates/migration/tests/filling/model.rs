//! The store and the promises of the model of a volume that is being filled.

use std::collections::BTreeSet;

use chronicle::BlockRange;

pub(crate) const UNITS: u64 = 48;

/// A small generator, so that a seed reproduces a failure.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn percent(&mut self, share: u64) -> bool {
        self.below(100) < share
    }

    pub(crate) fn range(&mut self) -> BlockRange {
        let start = self.below(UNITS);
        BlockRange::new(start, (start + 1 + self.below(6)).min(UNITS))
    }
}

/// A unit in the store. Versions are numbers; 0 is the content before the first arrival.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cell {
    pub(crate) volatile: u64,
    pub(crate) durable: u64,
    /// Whether a failed flush has lost the volatile version: no later flush makes it durable.
    pub(crate) is_lost: bool,
}

impl Cell {
    pub(crate) fn write(&mut self, version: u64) {
        *self = Self { volatile: version, is_lost: false, ..*self };
    }

    pub(crate) fn flush(&mut self) {
        if !self.is_lost {
            self.durable = self.volatile;
        }
    }
}

#[derive(Clone)]
pub(crate) struct Promise {
    /// The version answered last; after a power cut, any of these.
    pub(crate) answered: BTreeSet<u64>,
    /// The versions that survive a power cut: one of these, or a later one.
    pub(crate) flushed: BTreeSet<u64>,
    /// The versions written since that flush was requested.
    pub(crate) since: BTreeSet<u64>,
    /// The versions before a failed flush: later ones promise nothing about these.
    pub(crate) doubted: BTreeSet<u64>,
}
