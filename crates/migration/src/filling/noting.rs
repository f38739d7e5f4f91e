//! Notes for the next daemon: guests' writes over units that are missing, or that a restart would take for missing. They are
//! stored before the guest is answered.
//!
//! ```text
//!   written ──► noted: outlasts the daemon, not the host ──► answered
//!                      … and is recorded, durably, by the next round (`recording.rs`)
//! ```
//! If the daemon is killed, its guests live on, so every answered write must be known to the next daemon. If the host loses
//! power, the guests die with it, and unflushed writes are lost anyway. Notes do not count then, because the bytes may be lost,
//! too.

use std::time::Duration;

use chronicle::{BlockCount, BlockRange, LayeredBitmap};

use super::units::within;
use super::{Filling, FillingAction, NoteId, RequestId, StoreFault};
use crate::planted::{Bug, broken};

const RETRY: Duration = Duration::from_millis(100);

/// The units that are present, but would be forgotten with this daemon.
#[derive(Debug)]
pub(super) struct Noting {
    unnoted: LayeredBitmap,
    /// Writes that wait for the next note, with their units still to be noted.
    waiting: Vec<(RequestId, BlockRange)>,
    under_way: Option<Note>,
    next: u64,
    retry_at: Option<Duration>,
}

#[derive(Debug)]
struct Note {
    id: NoteId,
    units: LayeredBitmap,
    requests: Vec<(RequestId, BlockRange)>,
}

impl Noting {
    pub(super) fn new(units: BlockCount) -> Self {
        let unnoted = LayeredBitmap::new(units);
        Self { unnoted, waiting: Vec::new(), under_way: None, next: 0, retry_at: None }
    }

    pub(super) fn present(&mut self, units: BlockRange) {
        self.unnoted.insert(units);
    }

    /// Notes that units are recorded, or missing again.
    pub(super) fn settled(&mut self, units: BlockRange) {
        self.unnoted.remove(units);
    }

    /// Returns whether a restart would take some of these present units for missing.
    pub(super) fn would_be_forgotten(&self, units: BlockRange) -> bool {
        self.unnoted.contains_any(units)
    }

    /// Returns whether these units have a write whose note is not stored yet. A read that saw it could not see it after a kill.
    pub(super) fn is_pending(&self, units: BlockRange) -> bool {
        let under_way = self.under_way.iter().flat_map(|note| &note.requests);
        self.waiting.iter().chain(under_way).any(|(_, written)| written.overlaps(&units))
    }

    pub(super) fn deadline(&self) -> Option<(Duration, &'static str)> {
        let retry = self.retry_at.filter(|_| self.under_way.is_none() && !self.waiting.is_empty());
        retry.map(|at| (at, "the data folder to record guest writes"))
    }

    /// Removes the writes that need no note because their units have been recorded meanwhile.
    pub(super) fn take_recorded(&mut self) -> Vec<RequestId> {
        let unnoted = &self.unnoted;
        let recorded = self.waiting.extract_if(.., |(_, units)| !unnoted.contains_any(*units));
        recorded.map(|(request, _)| request).collect()
    }

    pub(super) fn is_over(&self) -> bool {
        self.under_way.is_none() && self.waiting.is_empty()
    }

    pub(super) fn begin_if_due(&mut self, now: Duration) -> Option<FillingAction> {
        if self.under_way.is_some() || self.waiting.is_empty() || self.retry_at.is_some_and(|at| now < at) {
            return None;
        }
        self.retry_at = None;
        let requests = std::mem::take(&mut self.waiting);
        let mut units = LayeredBitmap::new(self.unnoted.blocks());
        for (_, written) in &requests {
            for run in within(&self.unnoted, *written) {
                units.insert(run);
            }
        }
        self.next += 1;
        let note = NoteId(self.next);
        let runs = units.runs().collect();
        self.under_way = Some(Note { id: note, units, requests });
        Some(FillingAction::Note { note, units: runs })
    }
}

impl Filling {
    /// Answers a guest's completed change once the note of its units is stored.
    pub(super) fn answer_when_noted(&mut self, request: RequestId, units: BlockRange) {
        if !self.noting.would_be_forgotten(units) || broken(Bug::WriteNotNoted) {
            self.actions.push_back(FillingAction::Written { request });
        } else {
            self.noting.waiting.push((request, units));
        }
    }

    pub(super) fn noted(&mut self, now: Duration, id: NoteId, result: Result<(), StoreFault>) {
        let Some(note) = self.noting.under_way.take_if(|note| note.id == id) else { return };
        match result {
            Ok(()) => {
                let runs: Vec<_> = note.units.runs().collect();
                runs.into_iter().for_each(|run| self.noting.settled(run));
                let answers =
                    note.requests.into_iter().map(|(request, _)| FillingAction::Written { request });
                self.actions.extend(answers);
            }
            Err(StoreFault) => {
                self.noting.waiting.splice(..0, note.requests);
                self.noting.retry_at = Some(now + RETRY);
            }
        }
    }
}
