//! Guest writes in flight to the target by value, whose guests are answered or about to be.
//!
//! ```text
//!              ┌── the source has it ──┐
//!   admitted ──┤                       ├──► over: its blocks are synchronised, or missing
//!              └── the target has it ──┘
//! ```
//! No two values in flight share a byte: a write over a value in flight makes its block missing. So the order in which frames
//! of several connections arrive does not matter (hard case 4). Tens of thousands may fit into the buffer, so they are indexed
//! by position.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use chronicle::{BlockRange, ByteRange};

use crate::strategy::WriteId;

#[derive(Debug)]
pub(super) struct Value {
    /// The parts sent by value, with their blocks; other blocks of the write are missing.
    pub(super) parts: Vec<(ByteRange, BlockRange)>,
    pub(super) since: Duration,
    /// The number of target restarts at its submission.
    pub(super) restarts: u32,
    pub(super) source: Part,
    pub(super) target: Part,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    UnderWay,
    Ended,
}

#[derive(Debug, Default)]
pub(super) struct Values {
    by_id: BTreeMap<WriteId, Value>,
    /// The begin and write of each part, with its end. No two share a byte, so the part that begins later ends later.
    by_offset: BTreeMap<(u64, WriteId), u64>,
    /// In order of submission. Answered values are dropped when they come first.
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

    pub(super) fn await_target(&self) -> bool {
        self.at_target > 0
    }

    /// Returns the values in flight that overlap `range`; a value with several parts may appear repeatedly.
    pub(super) fn overlapping(&self, range: ByteRange) -> impl Iterator<Item = WriteId> {
        let before = self.by_offset.range(..(range.end(), WriteId(0))).rev();
        before.take_while(move |(_, end)| **end > range.offset).map(|((_, id), _)| *id)
    }

    /// Returns the bytes of `range` that the first overlapping part covers.
    pub(super) fn first_within(&self, range: ByteRange) -> Option<ByteRange> {
        let covering = self.by_offset.range(..=(range.offset, WriteId(u64::MAX))).next_back();
        let covering = covering.filter(|(_, end)| **end > range.offset);
        let within = || self.by_offset.range((range.offset, WriteId(0))..(range.end(), WriteId(0))).next();
        let ((offset, _), end) = covering.or_else(within)?;
        let start = range.offset.max(*offset);
        Some(ByteRange::new(start, range.end().min(*end).saturating_sub(start)))
    }

    pub(super) fn oldest(&self) -> Option<Duration> {
        let owed = |id: &&WriteId| self.by_id.get(id).is_some_and(|value| value.target == Part::UnderWay);
        let oldest = self.order.iter().find(owed)?;
        self.by_id.get(oldest).map(|value| value.since)
    }

    /// Notes the source's completion; returns whether the value is over.
    pub(super) fn source_ended(&mut self, id: WriteId) -> bool {
        if let Some(value) = self.by_id.get_mut(&id) {
            value.source = Part::Ended;
        }
        self.remove_if_over(id)
    }

    /// Notes the target's answer; `None` if it is known already.
    pub(super) fn target_ended(&mut self, id: WriteId) -> Option<&Value> {
        let value = self.by_id.get_mut(&id).filter(|value| value.target == Part::UnderWay)?;
        value.target = Part::Ended;
        self.at_target -= 1;
        Some(value)
    }

    /// Forgets a value if both stores have ended; returns whether they have.
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
