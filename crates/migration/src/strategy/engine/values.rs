//! Guest writes that are on their way to the target by value, while their guests have their answers or are about to.
//!
//! ```text
//!              ┌── the source has it ──┐
//!   admitted ──┤                       ├──► over: its blocks are synchronised, or missing
//!              └── the target has it ──┘
//! ```
//! No two values in flight have a byte in common: whatever is written over one meanwhile
//! makes its block missing, so it does not matter in which order frames of several connections arrive (hard case 4).
//! There may be as many as fit into the buffer, tens of thousands, so they are found by where they lie.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use chronicle::{BlockRange, ByteRange};

use crate::strategy::WriteId;

/// A write that is on its way by value.
#[derive(Debug)]
pub(super) struct Value {
    /// What goes by value, and the blocks that it touches; others of the write have become missing.
    pub(super) parts: Vec<(ByteRange, BlockRange)>,
    pub(super) since: Duration,
    /// How often the target had restarted when it was submitted.
    pub(super) restarts: u32,
    pub(super) source: Part,
    pub(super) target: Part,
}

/// How far one store is with a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    UnderWay,
    Ended,
}

/// All values in flight.
#[derive(Debug, Default)]
pub(super) struct Values {
    by_id: BTreeMap<WriteId, Value>,
    /// Where each part begins, of which write it is, and where it ends. Since no two have a byte in common, the one that
    /// begins later ends later.
    by_offset: BTreeMap<(u64, WriteId), u64>,
    /// In the order of their submission; those that the target has answered are dropped when they come first.
    order: VecDeque<WriteId>,
    bytes: u64,
    at_target: usize,
}

impl Values {
    pub(super) fn insert(&mut self, id: WriteId, value: Value) {
        self.by_offset.extend(value.parts.iter().map(|(part, _)| ((part.offset, id), part.end())));
        self.bytes += value.bytes();
        self.at_target += 1;
        self.order.push_back(id);
        self.by_id.insert(id, value);
    }

    /// The blocks that each part of a value touches.
    pub(super) fn ranges(&self) -> impl Iterator<Item = BlockRange> {
        self.by_id.values().flat_map(|value| value.parts.iter().map(|(_, blocks)| *blocks))
    }

    pub(super) fn contains(&self, id: WriteId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Tells whether the target owes answers.
    pub(super) fn await_target(&self) -> bool {
        self.at_target > 0
    }

    /// The values in flight that have a byte of `range`; those of several parts may be named more than once.
    pub(super) fn overlapping(&self, range: ByteRange) -> impl Iterator<Item = WriteId> {
        let before = self.by_offset.range(..(range.end(), WriteId(0))).rev();
        before.take_while(move |(_, end)| **end > range.offset).map(|((_, id), _)| *id)
    }

    /// The bytes of `range` that the first part in flight has of those that have some.
    pub(super) fn first_within(&self, range: ByteRange) -> Option<ByteRange> {
        let covering = self.by_offset.range(..=(range.offset, WriteId(u64::MAX))).next_back();
        let covering = covering.filter(|(_, end)| **end > range.offset);
        let within = || self.by_offset.range((range.offset, WriteId(0))..(range.end(), WriteId(0))).next();
        let ((offset, _), end) = covering.or_else(within)?;
        let start = range.offset.max(*offset);
        Some(ByteRange::new(start, range.end().min(*end).saturating_sub(start)))
    }

    /// Since when the target has owed its oldest answer.
    pub(super) fn oldest(&self) -> Option<Duration> {
        let owed = |id: &&WriteId| self.by_id.get(id).is_some_and(|value| value.target == Part::UnderWay);
        let oldest = self.order.iter().find(owed)?;
        self.by_id.get(oldest).map(|value| value.since)
    }

    /// The source has it; tells whether that was all.
    pub(super) fn source_ended(&mut self, id: WriteId) -> bool {
        if let Some(value) = self.by_id.get_mut(&id) {
            value.source = Part::Ended;
        }
        self.remove_if_over(id)
    }

    /// The target has answered for it; `None` if that is known already.
    pub(super) fn target_ended(&mut self, id: WriteId) -> Option<&Value> {
        let value = self.by_id.get_mut(&id).filter(|value| value.target == Part::UnderWay)?;
        value.target = Part::Ended;
        self.at_target -= 1;
        Some(value)
    }

    /// Forgets it if both stores have ended; tells whether they have.
    pub(super) fn remove_if_over(&mut self, id: WriteId) -> bool {
        let over = |value: &Value| (value.source, value.target) == (Part::Ended, Part::Ended);
        if !self.by_id.get(&id).is_some_and(over) {
            return false;
        }
        if let Some(value) = self.by_id.remove(&id) {
            for (part, _) in &value.parts {
                self.by_offset.remove(&(part.offset, id));
            }
            self.bytes -= value.bytes();
        }
        while self.order.front().is_some_and(|first| !self.by_id.contains_key(first)) {
            self.order.pop_front();
        }
        true
    }
}

impl Value {
    pub(super) fn bytes(&self) -> u64 {
        self.parts.iter().map(|(part, _)| part.length).sum()
    }
}
