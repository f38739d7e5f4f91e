//! Answered changes that the server may still lose: all since the last flush, in the order of the answers.
//!
//! ```text
//!   answered ──► entries … entries ──► repeated when the server has restarted
//!                   └── up to a mark ──► gone, once a flush that was sent at that mark is answered
//! ```
//!
//! It includes durable writes: an older repeated write must not land on top of them. Only the order of overlapping changes
//! matters, and those are never in flight together.

use std::collections::VecDeque;

use super::request::weight;
use crate::change::Change;

/// Memory in bytes above which no further change begins. It bounds a guest's writes between two flushes, and
/// the memory per volume.
const BYTES_MAX: usize = 64 << 20;
/// Memory in bytes above which the store flushes by itself.
const BYTES_COMFORTABLE: usize = BYTES_MAX / 2;
/// The same limits in entries: zeroes take no memory, but are repeated one by one.
const ENTRIES_MAX: usize = 65_536;
const ENTRIES_COMFORTABLE: usize = ENTRIES_MAX / 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark(u64);

#[derive(Default)]
pub(super) struct Ledger {
    entries: VecDeque<Change>,
    /// Number of the first entry; numbers are never reused.
    first: u64,
    bytes: usize,
}

impl Ledger {
    pub(super) fn record(&mut self, change: Change) {
        self.bytes += weight(&change);
        self.entries.push_back(change);
    }

    pub(super) fn mark(&self) -> Mark {
        Mark(self.first + self.entries.len() as u64)
    }

    /// Forgets the changes before `mark`, which are durable.
    pub(super) fn forget(&mut self, mark: Mark) {
        while self.first < mark.0 {
            let Some(change) = self.entries.pop_front() else { return };
            self.bytes -= weight(&change);
            self.first += 1;
        }
    }

    pub(super) fn changes(&self) -> Vec<Change> {
        self.entries.iter().cloned().collect()
    }

    pub(super) fn has_room(&self) -> bool {
        self.bytes < BYTES_MAX && self.entries.len() < ENTRIES_MAX
    }

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
