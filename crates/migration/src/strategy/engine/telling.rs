//! The missing-set updates to the target, before a handover of an incomplete volume (\[TPM\] §IV-A-3).
//!
//! ```text
//!   Untold ──everything──► Telling ──durable there──► Told ──newly missing blocks──► Telling ──► …
//!     ▲                                                 │ something is copied, or the target has restarted
//!     └─────────────────────────────────────────────────┘
//! ```
//! An update holds the blocks that the target does not have durably. Blocks that become durable later stay in it: they are
//! fetched again, which is harmless. Blocks that become missing later are in the next update. Behind a closed gate none do, so
//! the last update is exact.

use std::time::Duration;

use chronicle::{BlockRange, LayeredBitmap};

use super::Engine;
use crate::filling::Manifest;
use crate::planted::{Bug, broken};
use crate::strategy::{TargetFault, TellingId, VolumeAction};

/// The most blocks that may become missing while guests work before the next update, so that little is left behind the gate.
const UNTOLD_MAX: u64 = 4096;

#[derive(Debug)]
pub(super) struct Tellings {
    state: UpdateState,
    /// All blocks sent since the last complete set.
    told: LayeredBitmap,
    /// The blocks that have become missing since the latest update began.
    untold: LayeredBitmap,
    next: u64,
}

#[derive(Debug)]
enum UpdateState {
    Untold,
    /// `is_void`: the update does not count, but may still be under way.
    Telling {
        id: TellingId,
        is_base: bool,
        blocks: LayeredBitmap,
        is_void: bool,
        since: Duration,
    },
    Told,
}

impl Tellings {
    pub(super) fn new(blocks: chronicle::BlockCount) -> Self {
        Self {
            state: UpdateState::Untold,
            told: LayeredBitmap::new(blocks),
            untold: LayeredBitmap::new(blocks),
            next: 0,
        }
    }

    pub(super) fn grow(&mut self, blocks: chronicle::BlockCount) {
        self.forget();
        self.told.grow(blocks);
        self.untold.grow(blocks);
    }

    /// Invalidates the updates so far.
    ///
    /// **N.B.** An update under way is still awaited. It could reach the target after its promise, and be taken for a message
    /// of a source that has given the attempt up.
    pub(super) fn forget(&mut self) {
        match &mut self.state {
            UpdateState::Untold => return,
            UpdateState::Telling { is_void, .. } => *is_void = true,
            UpdateState::Told => self.state = UpdateState::Untold,
        }
        self.told.clear();
        self.untold.clear();
    }

    /// Returns since when the target has owed an answer to an update.
    pub(super) fn telling_since(&self) -> Option<Duration> {
        match &self.state {
            UpdateState::Telling { since, .. } => Some(*since),
            UpdateState::Untold | UpdateState::Told => None,
        }
    }

    pub(super) fn missing(&mut self, blocks: BlockRange) {
        if !matches!(self.state, UpdateState::Untold) {
            self.untold.insert(blocks);
        }
    }
}

impl Engine {
    /// Returns whether the target knows the missing set as of the last update.
    pub(in crate::strategy) fn is_told(&self) -> bool {
        matches!(self.tellings.state, UpdateState::Told)
    }

    /// Returns whether the target knows its missing set exactly.
    pub(in crate::strategy) fn is_all_told(&self) -> bool {
        self.is_told() && (self.tellings.untold.is_empty() || broken(Bug::ManifestOlderThanGate))
    }

    /// Returns whether nothing is in flight to the target, and its data is durable.
    pub(in crate::strategy) fn is_at_rest(&self) -> bool {
        self.chunks.is_empty()
            && self.values.is_empty()
            && !self.writes.has_late()
            && !self.replica.is_flushing()
            && !self.awaits_flush()
            && self.replica.blocks_unconfirmed() == 0
    }

    /// Sends an update if blocks are not known to the target.
    pub(in crate::strategy) fn tell_if_due(&mut self, now: Duration) {
        // **N.B.** Never to a target that is about to promise, or may have: it would withdraw its promise.
        if self.gate.is_frozen() {
            return;
        }
        let is_base = match self.tellings.state {
            UpdateState::Untold => true,
            UpdateState::Telling { .. } => return,
            UpdateState::Told if self.gate.is_open() && self.tellings.untold.count() < UNTOLD_MAX => return,
            UpdateState::Told if self.is_all_told() => return,
            UpdateState::Told => false,
        };
        let blocks = match is_base {
            true => self.replica.lacking(),
            false => self.tellings.untold.clone(),
        };
        self.tellings.untold.clear();
        self.tellings.next += 1;
        let id = TellingId(self.tellings.next);
        self.tellings.state = UpdateState::Telling { id, is_base, blocks, is_void: false, since: now };
        self.actions.push_back(VolumeAction::TellMissing { telling: id });
    }

    /// Returns the content of an update under way, and whether it is a complete set.
    pub(in crate::strategy) fn telling(&self, telling: TellingId) -> Option<(&LayeredBitmap, bool)> {
        match &self.tellings.state {
            UpdateState::Telling { id, is_base, blocks, is_void: false, .. } if *id == telling => {
                Some((blocks, *is_base))
            }
            _ => None,
        }
    }

    pub(super) fn missing_told(
        &mut self,
        now: Duration,
        telling: TellingId,
        result: Result<(), TargetFault>,
    ) {
        if !matches!(self.tellings.state, UpdateState::Telling { id, .. } if id == telling) {
            return;
        }
        let said = std::mem::replace(&mut self.tellings.state, UpdateState::Untold);
        let UpdateState::Telling { blocks, is_base, is_void: false, .. } = said else { return };
        match result {
            Ok(()) => {
                self.tellings.state = UpdateState::Told;
                if is_base {
                    self.tellings.told.clear();
                }
                self.tellings.told.union_with(&blocks);
                self.faults.target_works();
            }
            Err(fault) => {
                self.tellings.told.clear();
                self.tellings.untold.clear();
                self.target_failed(now, fault);
            }
        }
    }

    pub(in crate::strategy) fn manifest(&self) -> Manifest {
        let (block_bytes, size_bytes) = (self.block_bytes(), self.settings.size_bytes);
        Manifest::of(&crate::filling::to_units(&self.tellings.told, block_bytes, size_bytes))
    }
}
