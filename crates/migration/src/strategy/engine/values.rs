//! Guest writes that are on their way to the target by value, while their guests have their answers or are about to.
//!
//! ```text
//!              ┌── the source has it ──┐
//!   admitted ──┤                       ├──► over: its blocks are synchronised, or missing
//!              └── the target has it ──┘
//! ```
//! No two values in flight have a byte in common: whatever is written over one meanwhile
//! makes its block missing, so it does not matter in which order frames of several connections arrive (hard case 4).
//! There may be as many as fit into the buffer, tens of thousands, so they are found by block.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use chronicle::{BlockIndex, BlockRange, ByteRange};

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
    by_block: BTreeSet<(BlockIndex, WriteId)>,
    /// In the order of their submission; those that the target has answered are dropped when they come first.
    order: VecDeque<WriteId>,
    bytes: u64,
    at_target: usize,
}

impl Values {
    pub(super) fn insert(&mut self, id: WriteId, value: Value) {
        self.by_block.extend(value.blocks().map(|block| (block, id)));
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

    /// Bytes in flight.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Tells whether the target owes answers.
    pub(super) fn await_target(&self) -> bool {
        self.at_target > 0
    }

    /// Tells whether a value in flight has a byte of `range`, which lies in `blocks`.
    pub(super) fn overlap(&self, range: ByteRange, blocks: BlockRange) -> bool {
        let has_byte = |value: &Value| value.parts.iter().any(|(part, _)| part.overlaps(&range));
        self.in_blocks(blocks).any(|id| self.by_id.get(&id).is_some_and(has_byte))
    }

    /// The values in flight to `blocks`; some may be named more than once.
    pub(super) fn in_blocks(&self, blocks: BlockRange) -> impl Iterator<Item = WriteId> {
        let end = blocks.end.max(blocks.start);
        self.by_block.range((blocks.start, WriteId(0))..(end, WriteId(0))).map(|(_, id)| *id)
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
            for block in value.blocks() {
                self.by_block.remove(&(block, id));
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

    fn blocks(&self) -> impl Iterator<Item = BlockIndex> {
        self.parts.iter().flat_map(|(_, blocks)| blocks.iter())
    }
}
