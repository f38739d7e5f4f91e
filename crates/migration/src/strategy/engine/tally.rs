//! Counts a strategy's decisions, for reports only.

use std::time::Duration;

/// The counts of a strategy's decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Guest writes that went to both stores in full.
    pub writes_mirrored: u64,
    /// Guest writes of which some blocks went to both stores, the others to the source only.
    pub writes_in_part: u64,
    /// Guest writes that went to the source only; their blocks are copied later.
    pub writes_source_only: u64,
    /// Those of all these writes that were held before submission.
    pub writes_held: u64,
    /// The longest time that one of them was held.
    pub held_longest: Duration,
    /// Mirrored writes whose guest was answered before the target had answered.
    pub writes_answered_late: u64,
    /// The number of chunks copied.
    pub chunks_copied: u64,
    /// Those copied again because guests wrote to them during their copy.
    pub chunks_copied_again: u64,
    /// The flushes of the target before the handover.
    pub target_flushes: u64,
    /// The answers of the target that were errors.
    pub target_faults: u64,
    /// The chunks for which the source could not be read.
    pub source_faults: u64,
    /// The number of suspensions of mirroring.
    pub suspensions: u64,
    /// Writes that made synchronised blocks missing at the limit of bytes in flight. Asynchronous mirror only.
    pub writes_as_bits: u64,
    /// Writes to hot synchronised blocks that were merged instead of sent singly. Asynchronous mirror only.
    pub writes_merged: u64,
    /// Writes that were held because guests wrote faster than the target could take.
    pub writes_throttled: u64,
    /// The total time that these were held.
    pub throttled: Duration,
    /// How often throttling of guests began.
    pub throttles: u64,
    /// How often rounds did not converge, and a mirror went on instead.
    pub rounds_given_up: u64,
    /// The bytes that followed a volume after its handover.
    pub bytes_followed: u64,
    /// Those of them that guests waited for.
    pub bytes_pulled: u64,
}

impl Tally {
    /// Returns the sum of both, for several volumes of a migration.
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
            rounds_given_up: self.rounds_given_up + other.rounds_given_up,
            bytes_followed: self.bytes_followed + other.bytes_followed,
            bytes_pulled: self.bytes_pulled + other.bytes_pulled,
        }
    }

    /// Notes how long a write was held; zero if it was not.
    pub(super) fn note_held(&mut self, held_for: Duration) {
        if held_for > Duration::ZERO {
            self.writes_held += 1;
            self.held_longest = self.held_longest.max(held_for);
        }
    }
}
