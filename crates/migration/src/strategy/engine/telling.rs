//! What the target is told to lack, before the volume is handed over to it all the same (\[TPM\] §IV-A-3).
//!
//! ```text
//!   Untold ──everything──► Telling ──durable there──► Told ──what has become missing since──► Telling ──► …
//!     ▲                                                 │ something is copied, or the target has restarted
//!     └─────────────────────────────────────────────────┘
//! ```
//! What is told is what the target does not have durably. What becomes durable after that stays told: it is fetched once more,
//! which does no harm. What becomes missing after that is told in the next telling; behind a closed gate nothing does, so the
//! last one is exact.

use std::time::Duration;

use chronicle::{BlockRange, LayeredBitmap};

use super::Engine;
use crate::filling::Manifest;
use crate::planted::{Bug, broken};
use crate::strategy::{TargetFault, TellingId, VolumeAction};

/// Blocks that may have become missing while guests work before they are told: behind the gate little is left to be told.
const UNTOLD_MAX: u64 = 4096;

/// What was told, and what was not.
#[derive(Debug)]
pub(super) struct Tellings {
    state: State,
    /// Everything that was told since the last base.
    told: LayeredBitmap,
    /// What has become missing since the latest telling began.
    untold: LayeredBitmap,
    next: u64,
}

#[derive(Debug)]
enum State {
    Untold,
    /// `is_void`: it counts for nothing any more, and may still be on its way.
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
            state: State::Untold,
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

    /// What was told does not count any more.
    ///
    /// **N.B.** a telling under way is waited for all the same: it could reach the target when that has promised, and be taken for
    /// the word of a source that goes on.
    pub(super) fn forget(&mut self) {
        match &mut self.state {
            State::Untold => return,
            State::Telling { is_void, .. } => *is_void = true,
            State::Told => self.state = State::Untold,
        }
        self.told.clear();
        self.untold.clear();
    }

    /// Since when the target has owed an answer to a telling.
    pub(super) fn telling_since(&self) -> Option<Duration> {
        match &self.state {
            State::Telling { since, .. } => Some(*since),
            State::Untold | State::Told => None,
        }
    }

    /// Blocks have become missing.
    pub(super) fn missing(&mut self, blocks: BlockRange) {
        if !matches!(self.state, State::Untold) {
            self.untold.insert(blocks);
        }
    }
}

impl Engine {
    /// Tells whether everything was told that the target lacked when the last telling began.
    pub(in crate::strategy) fn is_told(&self) -> bool {
        matches!(self.tellings.state, State::Told)
    }

    /// Tells whether the target knows exactly what it lacks.
    pub(in crate::strategy) fn is_all_told(&self) -> bool {
        self.is_told() && (self.tellings.untold.is_empty() || broken(Bug::ManifestOlderThanGate))
    }

    /// Tells whether nothing is on its way to the target, and what it has is durable.
    pub(in crate::strategy) fn is_at_rest(&self) -> bool {
        self.chunks.is_empty()
            && self.values.is_empty()
            && !self.writes.has_late()
            && !self.replica.is_flushing()
            && !self.awaits_flush()
            && self.replica.blocks_unconfirmed() == 0
    }

    /// Tells the target what it lacks, as far as that was not told.
    pub(in crate::strategy) fn tell_if_due(&mut self, now: Duration) {
        // N.B. whatever is heard of a target that is about to promise, or may have: it would take its promise back.
        if self.gate.is_frozen() {
            return;
        }
        let is_base = match self.tellings.state {
            State::Untold => true,
            State::Telling { .. } => return,
            State::Told if self.gate.is_open() && self.tellings.untold.count() < UNTOLD_MAX => return,
            State::Told if self.is_all_told() => return,
            State::Told => false,
        };
        let blocks = match is_base {
            true => self.replica.lacking(),
            false => self.tellings.untold.clone(),
        };
        self.tellings.untold.clear();
        self.tellings.next += 1;
        let id = TellingId(self.tellings.next);
        self.tellings.state = State::Telling { id, is_base, blocks, is_void: false, since: now };
        self.actions.push_back(VolumeAction::TellMissing { telling: id });
    }

    /// What a telling under way says, and whether it is all that the target lacks.
    pub(in crate::strategy) fn telling(&self, telling: TellingId) -> Option<(&LayeredBitmap, bool)> {
        match &self.tellings.state {
            State::Telling { id, is_base, blocks, is_void: false, .. } if *id == telling => {
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
        if !matches!(self.tellings.state, State::Telling { id, .. } if id == telling) {
            return;
        }
        let said = std::mem::replace(&mut self.tellings.state, State::Untold);
        let State::Telling { blocks, is_base, is_void: false, .. } = said else { return };
        match result {
            Ok(()) => {
                self.tellings.state = State::Told;
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

    /// What the target lacks by all that it was told.
    pub(in crate::strategy) fn manifest(&self) -> Manifest {
        let (block_bytes, size_bytes) = (self.block_bytes(), self.settings.size_bytes);
        Manifest::of(&crate::filling::to_units(&self.tellings.told, block_bytes, size_bytes))
    }
}
