//! Hot blocks, which guests write again and again: they are copied once instead of each time.
//!
//! ```text
//!                    hot, and the policy puts them off              the policy takes them up
//!   missing ────────────────────────────────────────────► put off ───────────────────────────► missing
//!   synchronised ── a write that is merged ──────────────────▲
//! ```
//! Blocks that are put off count as missing: nothing is handed over before they are taken up and copied.

use std::time::Duration;

use chronicle::BlockRange;

use super::{Engine, Toll, Write};
use crate::strategy::heat::{Heat, THRESHOLD};
use crate::strategy::{HotBlocks, Route};

impl Engine {
    pub(super) fn note_heat(&mut self, blocks: BlockRange) {
        if self.terms.hot == HotBlocks::PutOff {
            self.heat.note(blocks);
        }
    }

    /// Returns the next run of cold missing blocks, in a cycle; hot ones on the way are put off.
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

    /// Returns the first cold part of a run of missing blocks; hot blocks before it are put off.
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

    pub(in crate::strategy) fn take_up(&mut self) {
        self.replica.take_up();
    }

    pub(in crate::strategy) fn blocks_put_off(&self) -> u64 {
        self.replica.blocks_put_off()
    }

    /// Returns whether hot blocks are put off, and each of these was written `times` times recently.
    pub(in crate::strategy) fn were_written(&self, blocks: BlockRange, times: u32) -> bool {
        self.terms.hot == HotBlocks::PutOff && self.heat.were_written(blocks, times)
    }

    /// Submits a held write to synchronised blocks to the source only. The blocks are put off, so that further writes to them
    /// cost the target nothing until they are taken up.
    pub(in crate::strategy) fn merge(&mut self, now: Duration, write: &Write, toll: Option<Toll>) {
        self.costs.tally.writes_merged += 1;
        self.replica.put_off(write.blocks);
        self.send(now, write, Route::SourceOnly, toll);
    }
}
