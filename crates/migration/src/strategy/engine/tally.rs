//! What a strategy has decided, counted: for reports, and for nobody else.

use std::time::Duration;

/// How often a strategy has decided what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Guest writes that went to both stores in whole.
    pub writes_mirrored: u64,
    /// Guest writes of which some blocks went to both stores, the others to the source only.
    pub writes_in_part: u64,
    /// Guest writes that went to the source only; their blocks are copied later.
    pub writes_source_only: u64,
    /// Of all these, those that were held before they were submitted.
    pub writes_held: u64,
    /// Longest that one of them was held.
    pub held_longest: Duration,
    /// Mirrored writes whose guest got its answer before the target had given one.
    pub writes_answered_late: u64,
    /// Chunks that were copied.
    pub chunks_copied: u64,
    /// Of these, those that were copied because guests had written to them while they were being copied.
    pub chunks_copied_again: u64,
    /// Flushes of the target before the handover.
    pub target_flushes: u64,
    /// Answers of the target that were errors.
    pub target_faults: u64,
    /// Chunks that the source could not be read for.
    pub source_faults: u64,
    /// How often mirroring was suspended.
    pub suspensions: u64,
    /// Of an asynchronous mirror: writes that became bits although their blocks were synchronised, because as much was
    /// on its way as may be.
    pub writes_as_bits: u64,
    /// Of an asynchronous mirror: writes to synchronised blocks that are written again and again, which were not sent one by
    /// one.
    pub writes_merged: u64,
    /// Writes that were held because the target did not take what guests wrote as fast as they did.
    pub writes_throttled: u64,
    /// How long these were held, all together.
    pub throttled: Duration,
    /// How often guests began to be throttled.
    pub throttles: u64,
    /// Bytes that followed a volume which had left before it was copied.
    pub bytes_followed: u64,
    /// Of these, those that guests waited for.
    pub bytes_pulled: u64,
}

impl Tally {
    /// Both together, as of several volumes of a migration.
    pub fn and(self, other: Self) -> Self {
        Self {
            writes_mirrored: self.writes_mirrored + other.writes_mirrored,
            writes_in_part: self.writes_in_part + other.writes_in_part,
            writes_source_only: self.writes_source_only + other.writes_source_only,
            writes_held: self.writes_held + other.writes_held,
            held_longest: self.held_longest.max(other.held_longest),
            writes_answered_late: self.writes_answered_late + other.writes_answered_late,
            chunks_copied: self.chunks_copied + other.chunks_copied,
            chunks_copied_again: self.chunks_copied_again + other.chunks_copied_again,
            target_flushes: self.target_flushes + other.target_flushes,
            target_faults: self.target_faults + other.target_faults,
            source_faults: self.source_faults + other.source_faults,
            suspensions: self.suspensions + other.suspensions,
            writes_as_bits: self.writes_as_bits + other.writes_as_bits,
            writes_merged: self.writes_merged + other.writes_merged,
            writes_throttled: self.writes_throttled + other.writes_throttled,
            throttled: self.throttled + other.throttled,
            throttles: self.throttles + other.throttles,
            bytes_followed: self.bytes_followed + other.bytes_followed,
            bytes_pulled: self.bytes_pulled + other.bytes_pulled,
        }
    }

    /// Notes that a write was held for so long; zero: it was not.
    pub(super) fn note_held(&mut self, held_for: Duration) {
        if held_for > Duration::ZERO {
            self.writes_held += 1;
            self.held_longest = self.held_longest.max(held_for);
        }
    }
}
