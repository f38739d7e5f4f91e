//! Rounds: each copies the blocks that guests wrote in the epoch before.
//!
//! ```text
//!   round 1: all that is allocated      round 2            round 3                   last round
//!   ├───────────────────────────────────┼──────────────────┼───────── … ─────┤gate├────────────┤
//!        writes of epoch 1 ────────────────► copied   epoch 2 ──► copied        │ closed: no more of them
//! ```
//! An epoch is advanced at once. Its blocks are read one by one, each only after the writes to it that were submitted by then. A
//! claimed chunk waits for these (design §5.1).

use chronicle::BlockRange;

use super::{Engine, Mover, Terms, Written};
use crate::journal::FailureCode;
use crate::planted::{Bug, broken};

impl Engine {
    pub(super) fn copies_in_rounds(&self) -> bool {
        self.terms.written != Written::AnyTime
    }

    /// Returns whether every block of this round has landed, so that the next one could begin.
    pub(in crate::strategy) fn is_round_over(&self) -> bool {
        self.is_pass_over()
            && self.replica.is_epoch_copied()
            && self.chunks.is_empty()
            && self.is_mirroring()
            && self.mover == Mover::Works
    }

    /// Returns the blocks written since the epoch began, which are for the next round.
    pub(in crate::strategy) fn blocks_dirty(&self) -> u64 {
        self.replica.blocks_dirty()
    }

    /// Returns the blocks copied so far, each time counted, and the bytes written for them.
    pub(in crate::strategy) fn copied_so_far(&self) -> (u64, u64) {
        (self.meter.blocks(), self.costs.bytes_copied)
    }

    pub(in crate::strategy) fn suspensions(&self) -> u64 {
        self.costs.tally.suspensions
    }

    /// Begins a round with the blocks written so far.
    pub(in crate::strategy) fn advance_epoch(&mut self) {
        self.replica.advance_epoch();
    }

    /// Ends the rounds: what guests wrote since the last one began, and what was put off, is missing like any other block. Later
    /// writes follow the terms of another strategy.
    pub(in crate::strategy) fn end_rounds(&mut self, terms: Terms) {
        if !broken(Bug::OpenEpochForgotten) {
            self.advance_epoch();
        }
        if !broken(Bug::PutOffForgotten) {
            self.take_up();
        }
        self.terms = terms;
        self.costs.tally.rounds_given_up += 1;
    }

    /// Fails the migration, because the policy sees no way to the target.
    pub(in crate::strategy) fn give_up(&mut self, detail: String) {
        self.fail(FailureCode::NotConverging, detail);
    }

    /// Notes a guest's write to these blocks that was submitted to the source only.
    pub(super) fn wrote(&mut self, blocks: BlockRange) {
        self.tellings.missing(blocks);
        match self.terms.written {
            Written::AnyTime => self.replica.mark_written(blocks),
            // The planted bug takes blocks being copied for blocks still to be copied.
            Written::NextRound if broken(Bug::EpochNotRecorded) && self.chunks.touch(blocks) => {}
            Written::NextRound => {
                // Ahead of the cursor holes are still to be copied, too.
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
