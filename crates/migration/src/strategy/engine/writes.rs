//! Guest writes in flight, and the order of overlapping ones.
//!
//! ```text
//!            ┌────────────► at the source only ──────────────────────► gone
//!   held ────┤
//!            └────────────► mirrored ──► answered late ──► landed ───► gone
//!                              └───── both have answered ────────────► gone
//! ```
//! While a volume is mirrored, a write that overlaps a mirrored one waits for it, so that both copies see one order (design
//! §5.4). A write to the source only needs no order: its blocks are copied later.

use std::time::Duration;

use crate::planted::{Bug, broken};
use chronicle::{BlockRange, ByteRange};

use crate::strategy::WriteId;

/// A guest write, from its arrival until it is over.
#[derive(Clone, Copy, Debug)]
pub(in crate::strategy) struct Write {
    pub(super) id: WriteId,
    pub(in crate::strategy) range: ByteRange,
    pub(in crate::strategy) blocks: BlockRange,
    pub(super) arrived: Duration,
    /// Until when the guest may be kept waiting for the migration.
    pub(in crate::strategy) patience_ends: Duration,
    /// The bytes that go to the target by value; 0 while it is held.
    pub(super) mirrored_bytes: u64,
    pub(super) state: WriteState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteState {
    Held,
    SourceOnly,
    Mirrored {
        /// The state of the source's part; once it has ended, the limit of the wait for the target.
        source: SourceSide,
        /// The number of target restarts at its submission.
        restarts: u32,
    },
    /// The guest is answered; the target has not answered yet.
    Late {
        /// The number of target restarts at its submission.
        restarts: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SourceSide {
    /// Under way; the target's part may have ended.
    UnderWay { target_answered: TargetSide, patience: Duration },
    /// Ended; the guest waits for the target until `patience_ends`.
    Answered { patience_ends: Duration },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TargetSide {
    UnderWay,
    Answered,
}

/// The guest writes in order of arrival. A guest has only a few dozen outstanding, so a scan is cheaper than an index.
#[derive(Debug, Default)]
pub(super) struct Writes {
    writes: Vec<Write>,
    held: usize,
    late: usize,
}

impl Writes {
    pub(super) fn arrive(
        &mut self,
        id: WriteId,
        range: ByteRange,
        blocks: BlockRange,
        arrived: Duration,
        patience_ends: Duration,
    ) {
        let state = WriteState::Held;
        self.writes.push(Write { id, range, blocks, arrived, patience_ends, mirrored_bytes: 0, state });
        self.held += 1;
    }

    pub(super) fn get(&self, id: WriteId) -> Option<&Write> {
        self.writes.iter().find(|write| write.id == id)
    }

    pub(super) fn submit(&mut self, id: WriteId, state: WriteState, mirrored_bytes: u64) {
        if let Some(write) = self.writes.iter_mut().find(|write| write.id == id) {
            write.mirrored_bytes = mirrored_bytes;
        }
        self.set_state(id, state);
    }

    pub(super) fn set_state(&mut self, id: WriteId, state: WriteState) {
        let Some(write) = self.writes.iter_mut().find(|write| write.id == id) else { return };
        self.held -= usize::from(write.state == WriteState::Held);
        self.late -= usize::from(matches!(write.state, WriteState::Late { .. }));
        write.state = state;
        self.held += usize::from(write.state == WriteState::Held);
        self.late += usize::from(matches!(write.state, WriteState::Late { .. }));
    }

    pub(super) fn remove(&mut self, id: WriteId) {
        let Some(index) = self.writes.iter().position(|write| write.id == id) else { return };
        let write = self.writes.remove(index);
        self.held -= usize::from(write.state == WriteState::Held);
        self.late -= usize::from(matches!(write.state, WriteState::Late { .. }));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    pub(super) fn has_held(&self) -> bool {
        self.held > 0
    }

    pub(super) fn has_late(&self) -> bool {
        self.late > 0
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Write> {
        self.writes.iter()
    }

    pub(super) fn bytes_held(&self) -> u64 {
        let held = self.writes.iter().filter(|write| write.state == WriteState::Held);
        held.map(|write| write.range.length).sum()
    }

    pub(super) fn held(&self) -> Vec<WriteId> {
        self.writes.iter().filter(|write| write.state == WriteState::Held).map(|write| write.id).collect()
    }

    /// Returns whether an earlier write to some of the same bytes is held, or mirrored and unanswered. A write that is to be
    /// mirrored waits for it.
    pub(super) fn must_follow(&self, id: WriteId, range: ByteRange) -> bool {
        let earlier = self.writes.iter().take_while(|write| write.id != id);
        let orders = |write: &Write| matches!(write.state, WriteState::Held | WriteState::Mirrored { .. });
        let waits = earlier.filter(|write| orders(write)).any(|write| write.range.overlaps(&range));
        waits && !broken(Bug::OverlapsUnordered)
    }

    /// Returns the first blocks within `within` of a write that its guest does not wait for, but the target has still to answer.
    pub(super) fn first_late_within(&self, within: BlockRange) -> Option<BlockRange> {
        if self.late == 0 {
            return None;
        }
        let late = self.writes.iter().filter(|write| matches!(write.state, WriteState::Late { .. }));
        let touched = late.map(|write| write.blocks.intersect(&within)).filter(|blocks| !blocks.is_empty());
        touched.min_by_key(|blocks| blocks.start)
    }

    pub(super) fn submitted_to(&self, blocks: BlockRange) -> Vec<WriteId> {
        let submitted = self.writes.iter().filter(|write| write.state != WriteState::Held);
        submitted.filter(|write| write.blocks.overlaps(&blocks)).map(|write| write.id).collect()
    }
}
