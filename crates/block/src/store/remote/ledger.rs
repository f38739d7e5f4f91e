//! What the server has answered and may still lose: every change since the last flush, in the order of the answers.
//!
//! ```text
//!   answered ──► entries … entries ──► made again when the server has restarted
//!                   └── up to a mark ──► gone, once a flush that was sent at that mark is answered
//! ```
//!
//! Also durable writes are in it: an older write that is made again must not come to rest on top of them. Only the
//! order of overlapping changes matters, and those are never in flight together.

use std::collections::VecDeque;

use super::request::weight;
use crate::change::Change;

/// Memory from which on no further change is begun, in bytes: so much may a guest write between two flushes of its
/// own without being held up, and so much is lost to other uses per volume at most.
const BYTES_MAX: usize = 64 << 20;
/// Memory from which on the store flushes by itself, in bytes.
const BYTES_COMFORTABLE: usize = BYTES_MAX / 2;
/// The same in entries: zeroes keep no memory, but are made again one by one.
const ENTRIES_MAX: usize = 65_536;
const ENTRIES_COMFORTABLE: usize = ENTRIES_MAX / 2;

/// A place between two entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark(u64);

/// Changes that are not known durable.
#[derive(Default)]
pub(super) struct Ledger {
    entries: VecDeque<Change>,
    /// Number of the first entry; entries that are gone keep their numbers.
    first: u64,
    bytes: usize,
}

impl Ledger {
    /// Notes a change that was answered just now.
    pub(super) fn record(&mut self, change: Change) {
        self.bytes += weight(&change);
        self.entries.push_back(change);
    }

    /// The place behind all entries that there are.
    pub(super) fn mark(&self) -> Mark {
        Mark(self.first + self.entries.len() as u64)
    }

    /// Forgets what is before `mark`: it is durable.
    pub(super) fn forget(&mut self, mark: Mark) {
        while self.first < mark.0 {
            let Some(change) = self.entries.pop_front() else { return };
            self.bytes -= weight(&change);
            self.first += 1;
        }
    }

    /// All changes, in order.
    pub(super) fn changes(&self) -> Vec<Change> {
        self.entries.iter().cloned().collect()
    }

    /// Tells whether a further change may be begun.
    pub(super) fn has_room(&self) -> bool {
        self.bytes < BYTES_MAX && self.entries.len() < ENTRIES_MAX
    }

    /// Tells whether a flush is due.
    pub(super) fn is_pressed(&self) -> bool {
        self.bytes >= BYTES_COMFORTABLE || self.entries.len() >= ENTRIES_COMFORTABLE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Buffer;
    use crate::device::{ByteRange, Durability, ZeroMode};

    fn write(offset: u64) -> Change {
        Change::Write(offset, Buffer::zeroed(1 << 20), Durability::Volatile)
    }

    fn offsets(ledger: &Ledger) -> Vec<u64> {
        ledger.changes().iter().map(|change| change.range().offset).collect()
    }

    #[test]
    fn a_flush_covers_what_was_answered_before_it_was_sent_and_no_more() {
        let mut ledger = Ledger::default();
        ledger.record(write(1));
        ledger.record(write(2));
        let mark = ledger.mark();
        ledger.record(write(3));
        assert_eq!(offsets(&ledger), [1, 2, 3]);
        ledger.forget(mark);
        assert_eq!(offsets(&ledger), [3]);
        ledger.forget(mark);
        assert_eq!(offsets(&ledger), [3], "the answer to a flush counts once");
        let mark = ledger.mark();
        ledger.forget(mark);
        ledger.record(write(4));
        ledger.forget(mark);
        assert_eq!((offsets(&ledger), ledger.bytes), (vec![4], 1 << 20));
    }

    #[test]
    fn it_asks_for_a_flush_before_it_is_full() {
        let mut ledger = Ledger::default();
        while !ledger.is_pressed() {
            assert!(ledger.has_room());
            ledger.record(write(0));
        }
        assert!(ledger.has_room());
        while ledger.has_room() {
            ledger.record(write(0));
        }
        assert_eq!(ledger.bytes, BYTES_MAX);
        ledger.forget(ledger.mark());
        assert!(ledger.has_room() && !ledger.is_pressed() && ledger.bytes == 0);
        while !ledger.is_pressed() {
            ledger.record(Change::Zero(ByteRange::new(0, 4096), ZeroMode::MayUnmap, Durability::Volatile));
        }
        assert_eq!((ledger.entries.len(), ledger.bytes), (ENTRIES_COMFORTABLE, 0));
    }
}
