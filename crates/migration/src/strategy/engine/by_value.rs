//! Guest writes that go to the target by value while their guests wait for the source only, and their cost.

use std::time::Duration;

use chronicle::{BlockRange, ByteRange};

use super::drain::{Judged, Load, Situation};
use super::values::{Part, Value};
use super::{Engine, InFlight, Mover, Standing};
use crate::strategy::{Route, TargetFault, VolumeAction, WriteId};

/// The cost of a guest's write for the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::strategy) struct Toll {
    pub(in crate::strategy) by_value: u64,
    /// The bytes of blocks that the mover has copied, or is copying, and must copy again.
    pub(in crate::strategy) undone: u64,
}

impl Toll {
    pub(in crate::strategy) fn bytes(self) -> u64 {
        self.by_value + self.undone
    }
}

impl Engine {
    /// Returns whether `bytes` more may be in flight by value.
    pub(in crate::strategy) fn has_room_for(&self, bytes: u64) -> bool {
        // A write that is larger than the buffer goes alone.
        self.values.is_empty() || self.values.bytes() + bytes <= self.values_max()
    }

    /// Returns the bytes of blocks that the mover must copy again after a write with this route.
    pub(in crate::strategy) fn bytes_undone(
        &self,
        route: &Route,
        range: ByteRange,
        blocks: BlockRange,
    ) -> u64 {
        let parts = match route {
            Route::Both => return 0,
            Route::SourceOnly => &[][..],
            Route::BothInPart(parts) => parts.as_slice(),
        };
        if range.length == 0 {
            return 0;
        }
        let (mut undone, mut from) = (0, blocks.start);
        for part in parts {
            let mirrored = self.covering(*part);
            undone += self.replica.blocks_there(BlockRange { start: from, end: mirrored.start });
            from = mirrored.end;
        }
        undone += self.replica.blocks_there(BlockRange { start: from, end: blocks.end });
        undone * self.block_bytes()
    }

    pub(super) fn send_values(&mut self, now: Duration, id: WriteId, parts: &[ByteRange]) {
        let value = Value {
            parts: parts.iter().map(|part| (*part, self.covering(*part))).collect(),
            since: now,
            restarts: self.restarts,
            source: Part::UnderWay,
            target: Part::UnderWay,
        };
        self.values.insert(id, value);
        self.drain.note(now, 0, self.load());
    }

    /// Handles the source's completion of a write that also goes by value: its guest is answered.
    pub(super) fn source_has_value(&mut self, id: WriteId) {
        self.actions.push_back(VolumeAction::Complete { write: id });
        self.writes.remove(id);
        if self.values.source_ended(id) {
            self.chunks.write_ended(id);
        }
    }

    pub(super) fn target_has_value(&mut self, now: Duration, id: WriteId, result: Result<(), TargetFault>) {
        let Some(value) = self.values.target_ended(id) else { return };
        let (restarts, bytes) = (value.restarts, value.bytes());
        let blocks: Vec<_> = value.parts.iter().map(|(_, blocks)| *blocks).collect();
        let result = self.under_present_incarnation(restarts, result);
        for blocks in blocks {
            match result {
                Ok(()) => self.replica.applied(blocks),
                Err(_) => self.replica.mark_missing(blocks),
            }
        }
        if self.values.remove_if_over(id) {
            self.chunks.write_ended(id);
        }
        match result {
            Ok(()) => {
                self.costs.bytes_mirrored += bytes;
                self.pacing.note_guest_write(bytes);
                self.faults.target_works();
                self.admission.note_by_value(bytes);
                self.drain.note(now, bytes, self.load());
            }
            Err(fault) => self.target_failed(now, fault),
        }
    }

    pub(super) fn load(&self) -> Load {
        let enough = self.is_mover_full() || self.values.bytes() >= (self.values_max() / 4).max(1);
        if enough {
            Load::Enough
        } else if self.chunks.is_empty() && self.values.is_empty() {
            Load::Nothing
        } else {
            Load::Little
        }
    }

    /// Throttles guest writes while the mover makes too little progress for the copying to converge.
    pub(in crate::strategy) fn judge_throttle(&mut self, now: Duration) {
        if !self.is_mirroring() || self.mover == Mover::Rests {
            self.admission.free();
            return;
        }
        let done = self.said != Standing::Behind || self.tokens_at.is_some();
        let situation = if done { Situation::Other } else { Situation::Copying };
        match self.admission.judge(now, self.drain.rate(), situation) {
            Judged::Throttled => self.costs.tally.throttles += 1,
            Judged::Nothing | Judged::Freed => {}
        }
    }

    fn values_max(&self) -> u64 {
        match self.terms.in_flight {
            InFlight::Chunks => 0,
            InFlight::Bytes { values_max } => values_max,
        }
    }
}
