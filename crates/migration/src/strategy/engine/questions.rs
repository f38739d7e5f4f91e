//! What a policy may ask: how the volume, its replica, its guests and the target stand.

use std::time::Duration;

use chronicle::BlockRange;

use super::{Engine, Mover, Stage, Standing, Write};
use crate::planted::{Bug, broken};
use crate::strategy::WriteId;

/// Bytes that are near enough at any rate: so little is a few requests, and no rate that was measured says anything of it.
const NEAR_BYTES_MIN: u64 = 64 << 10;

// How far the copying is.
impl Engine {
    /// Bytes of a block.
    pub(in crate::strategy) fn block_bytes(&self) -> u64 {
        self.settings.block_size.bytes()
    }

    /// Size of the volume in bytes.
    pub(in crate::strategy) fn size_bytes(&self) -> u64 {
        self.settings.size_bytes
    }

    /// Bytes that are so little that a replica which lacks them is near enough whatever is known of the target: one block at
    /// least.
    pub(in crate::strategy) fn near_bytes_min(&self) -> u64 {
        self.block_bytes().max(NEAR_BYTES_MIN)
    }

    /// Tells whether each block has been looked at once.
    pub(in crate::strategy) fn is_pass_over(&self) -> bool {
        self.cursor == self.end()
    }

    /// Blocks missing or in flight.
    pub(in crate::strategy) fn blocks_remaining(&self) -> u64 {
        self.replica.blocks_missing() + self.chunks.blocks()
    }

    /// Bytes of the blocks missing or in flight.
    pub(in crate::strategy) fn bytes_remaining(&self) -> u64 {
        self.blocks_remaining() * self.block_bytes()
    }

    /// Bytes of the blocks that the target has applied and no flush has been asked for.
    pub(in crate::strategy) fn bytes_unconfirmed(&self) -> u64 {
        self.replica.blocks_unconfirmed() * self.block_bytes()
    }

    /// Bytes of guest writes that are on their way by value.
    pub(in crate::strategy) fn value_bytes(&self) -> u64 {
        self.values.bytes()
    }

    /// Tells whether no block is missing, or being copied.
    pub(in crate::strategy) fn is_copied(&self) -> bool {
        self.replica.is_complete() && self.chunks.is_empty()
    }

    /// Tells whether the replica equals the volume, but for writes that are submitted to both stores and not answered.
    pub(in crate::strategy) fn is_equal(&self) -> bool {
        let arrived = self.values.is_empty() || broken(Bug::ValuesInFlight);
        self.is_copied() && arrived && !self.writes.has_late() && !self.awaits_flush()
    }

    /// Tells whether nothing but what is missing stands in the way of a handover.
    pub(in crate::strategy) fn may_hand_over(&self) -> bool {
        !self.is_growing && self.is_mirroring() && self.mover == Mover::Works && self.is_pass_over()
    }

    /// Tells whether nothing stands in the way of a handover that leaves blocks behind.
    pub(in crate::strategy) fn may_be_left(&self) -> bool {
        !self.is_growing && self.is_mirroring() && self.mover == Mover::Works
    }

    /// What was said last of how near the replica is.
    pub(in crate::strategy) fn said(&self) -> Standing {
        self.said
    }

    /// Tells whether the copying has failed, or was cancelled.
    pub(in crate::strategy) fn is_stopped(&self) -> bool {
        self.stage == Stage::Stopped
    }

    /// Tells whether something is sent to the target.
    pub(in crate::strategy) fn is_mirroring(&self) -> bool {
        self.stage == Stage::Copying && self.suspension.is_none()
    }

    /// Tells whether somebody has paused it.
    pub(in crate::strategy) fn is_paused(&self) -> bool {
        self.mover == Mover::Rests
    }
}

// How guests and their writes stand.
impl Engine {
    /// Tells whether guests' requests arrive: the gate neither is closed nor begins to be.
    pub(in crate::strategy) fn is_gate_open(&self) -> bool {
        self.gate.is_open()
    }

    /// A write that has arrived and is not gone.
    pub(in crate::strategy) fn write(&self, id: WriteId) -> Option<Write> {
        self.writes.get(id).copied()
    }

    /// Tells whether there are writes that have arrived and are not gone.
    pub(in crate::strategy) fn has_writes(&self) -> bool {
        !self.writes.is_empty()
    }

    /// Bytes of the writes that are held.
    pub(in crate::strategy) fn bytes_held(&self) -> u64 {
        self.writes.bytes_held()
    }

    /// Tells whether an earlier write to some of the same bytes is held, or mirrored and not answered: if this one is to
    /// be mirrored, it waits for that.
    pub(in crate::strategy) fn follows_another(&self, write: &Write) -> bool {
        self.writes.must_follow(write.id, write.range)
    }

    /// Tells whether `blocks` are being copied in a second pass, which holds writes.
    pub(in crate::strategy) fn is_being_copied_again(&self, blocks: BlockRange) -> bool {
        self.stage == Stage::Copying && self.chunks.second_pass_touches(blocks)
    }
}

// How fast the target takes what it is sent.
impl Engine {
    /// Bytes a second that the target takes; `None` while nothing is known.
    pub(in crate::strategy) fn drain_rate(&self) -> Option<f64> {
        self.drain.rate()
    }

    /// Tells whether guest writes are to be admitted no faster than the target takes them.
    pub(in crate::strategy) fn is_throttled(&self) -> bool {
        self.admission.is_throttled()
    }

    /// When the throttle lets the next write go, at the earliest; `None`: at any time.
    pub(in crate::strategy) fn throttle_opens_at(&self) -> Option<Duration> {
        self.admission.opens_at()
    }
}
