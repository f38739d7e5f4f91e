//! Blocks that guests write again and again, and that are copied once rather than again and again.
//!
//! ```text
//!                    hot, and the policy puts them off              the policy takes them up
//!   missing ────────────────────────────────────────────► put off ───────────────────────────► missing
//!   synchronised ── a write that is merged ──────────────────▲
//! ```
//! What is put off is missing, whatever is asked: nothing is handed over before it is taken up and copied.

use std::time::Duration;

use chronicle::BlockRange;

use super::{Engine, Toll, Write};
use crate::strategy::heat::{Heat, THRESHOLD};
use crate::strategy::{HotBlocks, Route};

impl Engine {
    /// Takes note that guests write these blocks.
    pub(super) fn note_heat(&mut self, blocks: BlockRange) {
        if self.terms.hot == HotBlocks::PutOff {
            self.heat.note(blocks);
        }
    }

    /// The next run of missing blocks, round and round, that are not hot; those that are, and were looked at for it, are put
    /// off.
    pub(in crate::strategy) fn next_cold(&mut self) -> Option<BlockRange> {
        loop {
            let run = self.next_missing()?;
            let cold = self.first_cold(run, THRESHOLD);
            self.scan = cold.map_or(run.end, |cold| cold.end);
            if cold.is_some() {
                return cold;
            }
        }
    }

    /// The first part of a run of missing blocks that were not written so many times of late; what is before it is put off.
    pub(super) fn first_cold(&mut self, run: BlockRange, times: u32) -> Option<BlockRange> {
        let mut rest = run;
        while !rest.is_empty() {
            let (alike, heat) = self.heat.alike(rest, times);
            match heat {
                Heat::Cold => return Some(alike),
                Heat::Hot => self.replica.put_off(alike),
            }
            rest.start = alike.end;
        }
        None
    }

    /// What was put off is to be copied.
    pub(in crate::strategy) fn take_up(&mut self) {
        self.replica.take_up();
    }

    /// Blocks that were put off.
    pub(in crate::strategy) fn blocks_put_off(&self) -> u64 {
        self.replica.blocks_put_off()
    }

    /// Tells whether guests have written each of these blocks so often of late, and it is to be made something of that.
    pub(in crate::strategy) fn were_written(&self, blocks: BlockRange, times: u32) -> bool {
        self.terms.hot == HotBlocks::PutOff && self.heat.were_written(blocks, times)
    }

    /// Submits a held write to synchronised blocks to the source only: they are put off, and what else is written to them
    /// until they are taken up costs the target nothing.
    pub(in crate::strategy) fn merge(&mut self, now: Duration, write: &Write, toll: Option<Toll>) {
        self.costs.tally.writes_merged += 1;
        self.replica.put_off(write.blocks);
        self.send(now, write, Route::SourceOnly, toll);
    }
}
