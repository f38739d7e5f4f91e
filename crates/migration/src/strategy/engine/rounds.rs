//! Rounds: what guests write in one epoch is copied in the next.
//!
//! ```text
//!   round 1: all that is allocated      round 2            round 3                   last round
//!   ├───────────────────────────────────┼──────────────────┼───────── … ─────┤gate├────────────┤
//!        writes of epoch 1 ────────────────► copied   epoch 2 ──► copied        │ closed: no more of them
//! ```
//! An epoch is advanced at once. What it froze is read block by block, and none before all writes to it have ended that were
//! submitted by then: a claimed chunk waits for them (design §5.1).

use chronicle::BlockRange;

use super::{Engine, Mover, Written};
use crate::journal::FailureCode;
use crate::planted::{Bug, broken};

impl Engine {
    /// Tells whether what guests write waits for a round of its own.
    pub(super) fn copies_in_rounds(&self) -> bool {
        self.terms.written != Written::AnyTime
    }

    /// Tells whether everything that this round was to copy has landed, and the next one could begin.
    pub(in crate::strategy) fn is_round_over(&self) -> bool {
        self.is_pass_over()
            && self.replica.is_epoch_copied()
            && self.chunks.is_empty()
            && self.is_mirroring()
            && self.mover == Mover::Works
    }

    /// Blocks that guests have written since the epoch began, as far as they are the next round's.
    pub(in crate::strategy) fn blocks_dirty(&self) -> u64 {
        self.replica.blocks_dirty()
    }

    /// Blocks that have been copied so far, each time counted, and the bytes that were written for them.
    pub(in crate::strategy) fn copied_so_far(&self) -> (u64, u64) {
        (self.meter.blocks(), self.costs.bytes_copied)
    }

    /// How often the copying was suspended so far.
    pub(in crate::strategy) fn suspensions(&self) -> u64 {
        self.costs.tally.suspensions
    }

    /// Begins a round: with what guests have written until here.
    pub(in crate::strategy) fn advance_epoch(&mut self) {
        self.replica.advance_epoch();
    }

    /// The policy sees no way that ends at the target.
    pub(in crate::strategy) fn give_up(&mut self, detail: String) {
        self.fail(FailureCode::NotConverging, detail);
    }

    /// A guest's write to these blocks has been submitted to the source only.
    pub(super) fn wrote(&mut self, blocks: BlockRange) {
        self.tellings.missing(blocks);
        match self.terms.written {
            Written::AnyTime => self.replica.mark_written(blocks),
            // What is being copied is taken for what is still to be copied.
            Written::NextRound if broken(Bug::EpochNotRecorded) && self.chunks.touch(blocks) => {}
            Written::NextRound => {
                // Ahead of the cursor also holes are still to be copied.
                let ahead = BlockRange { start: blocks.start.max(self.cursor), ..blocks };
                if !ahead.is_empty() {
                    self.replica.mark_missing(ahead);
                }
                self.replica.mark_dirty_unless_missing(blocks);
            }
            Written::NextRoundToo => self.replica.mark_dirty(blocks),
        }
    }
}
