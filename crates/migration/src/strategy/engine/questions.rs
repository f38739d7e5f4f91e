//! The queries of a policy: the state of the volume, its replica, its guests and the target.

use std::time::Duration;

use chronicle::BlockRange;

use super::{Engine, Mover, Stage, Standing, Write};
use crate::planted::{Bug, broken};
use crate::strategy::WriteId;

/// A rest of this size is always near enough: it is a few requests, to which no measured rate applies.
const NEAR_BYTES_MIN: u64 = 64 << 10;

// The state of the copying.
impl Engine {
    pub(in crate::strategy) fn block_bytes(&self) -> u64 {
        self.settings.block_size.bytes()
    }

    pub(in crate::strategy) fn size_bytes(&self) -> u64 {
        self.settings.size_bytes
    }

    /// Returns the rest that is always near enough, whatever the target's rate: at least one block.
    pub(in crate::strategy) fn near_bytes_min(&self) -> u64 {
        self.block_bytes().max(NEAR_BYTES_MIN)
    }

    /// Returns whether each block has been visited once.
    pub(in crate::strategy) fn is_pass_over(&self) -> bool {
        self.cursor == self.end()
    }

    pub(in crate::strategy) fn blocks_remaining(&self) -> u64 {
        self.replica.blocks_missing() + self.chunks.blocks()
    }

    pub(in crate::strategy) fn bytes_remaining(&self) -> u64 {
        self.blocks_remaining() * self.block_bytes()
    }

    /// Returns the bytes applied at the target for which no flush has been requested.
    pub(in crate::strategy) fn bytes_unconfirmed(&self) -> u64 {
        self.replica.blocks_unconfirmed() * self.block_bytes()
    }

    pub(in crate::strategy) fn value_bytes(&self) -> u64 {
        self.values.bytes()
    }

    pub(in crate::strategy) fn is_copied(&self) -> bool {
        self.replica.is_complete() && self.chunks.is_empty()
    }

    /// Returns whether the replica equals the volume, apart from writes under way to both stores.
    pub(in crate::strategy) fn is_equal(&self) -> bool {
        let arrived = self.values.is_empty() || broken(Bug::ValuesInFlight);
        self.is_copied() && arrived && !self.writes.has_late() && !self.awaits_flush()
    }

    /// Returns whether missing blocks are the only obstacle to a handover.
    pub(in crate::strategy) fn may_hand_over(&self) -> bool {
        !self.is_growing && self.is_mirroring() && self.mover == Mover::Works && self.is_pass_over()
    }

    /// Returns whether a handover of an incomplete volume is possible.
    pub(in crate::strategy) fn may_be_left(&self) -> bool {
        !self.is_growing && self.is_mirroring() && self.mover == Mover::Works
    }

    pub(in crate::strategy) fn said(&self) -> Standing {
        self.said
    }

    pub(in crate::strategy) fn is_stopped(&self) -> bool {
        self.stage == Stage::Stopped
    }

    pub(in crate::strategy) fn is_mirroring(&self) -> bool {
        self.stage == Stage::Copying && self.suspension.is_none()
    }

    pub(in crate::strategy) fn is_paused(&self) -> bool {
        self.mover == Mover::Rests
    }
}

// The state of guests and their writes.
impl Engine {
    /// Returns whether guests' requests arrive: the gate is neither closed nor closing.
    pub(in crate::strategy) fn is_gate_open(&self) -> bool {
        self.gate.is_open()
    }

    pub(in crate::strategy) fn write(&self, id: WriteId) -> Option<Write> {
        self.writes.get(id).copied()
    }

    pub(in crate::strategy) fn has_writes(&self) -> bool {
        !self.writes.is_empty()
    }

    pub(in crate::strategy) fn bytes_held(&self) -> u64 {
        self.writes.bytes_held()
    }

    /// Returns whether an earlier write to some of the same bytes is held, or mirrored and unanswered. If this write is to be
    /// mirrored, it must wait for that one.
    pub(in crate::strategy) fn follows_another(&self, write: &Write) -> bool {
        self.writes.must_follow(write.id, write.range)
    }

    /// Returns whether `blocks` are in a second pass, which holds writes.
    pub(in crate::strategy) fn is_being_copied_again(&self, blocks: BlockRange) -> bool {
        self.stage == Stage::Copying && self.chunks.second_pass_touches(blocks)
    }
}

// The rate of the target.
impl Engine {
    pub(in crate::strategy) fn drain_rate(&self) -> Option<f64> {
        self.drain.rate()
    }

    pub(in crate::strategy) fn is_throttled(&self) -> bool {
        self.admission.is_throttled()
    }

    /// Returns the earliest time of the next throttled write; `None`: at once.
    pub(in crate::strategy) fn throttle_opens_at(&self) -> Option<Duration> {
        self.admission.opens_at()
    }
}
