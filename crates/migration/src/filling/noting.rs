//! What guests have written over missing units, or over units that a restart would take for missing: that has to be known to
//! a daemon that begins after this one was killed, before the guest is answered.
//!
//! ```text
//!   written ──► noted: outlasts the daemon, not the host ──► answered
//!                      … and is recorded, durably, by the next round (`recording.rs`)
//! ```
//! A killed daemon takes nothing with it that its guests were answered: they live on. If the host loses power its guests do as
//! well, and what they had not flushed is lost anyway; then what was noted does not count, for the bytes may be lost, too.

use std::time::Duration;

use chronicle::{BlockCount, BlockRange, LayeredBitmap};

use super::units::within;
use super::{Filling, FillingAction, NoteId, RequestId, StoreFault};
use crate::planted::{Bug, broken};

/// Pause before a note that could not be made is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// What is present, and would be forgotten with this daemon.
#[derive(Debug)]
pub(super) struct Noting {
    unnoted: LayeredBitmap,
    /// Writes that wait for the next note, with what is to be noted of them.
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

    /// Units have become present.
    pub(super) fn present(&mut self, units: BlockRange) {
        self.unnoted.insert(units);
    }

    /// Units are known, or missing again.
    pub(super) fn settled(&mut self, units: BlockRange) {
        self.unnoted.remove(units);
    }

    /// Tells whether a restart would take some of these units, which are present, for missing.
    pub(super) fn would_be_forgotten(&self, units: BlockRange) -> bool {
        self.unnoted.contains_any(units)
    }

    pub(super) fn deadline(&self) -> Option<(Duration, &'static str)> {
        let retry = self.retry_at.filter(|_| self.under_way.is_none() && !self.waiting.is_empty());
        retry.map(|at| (at, "the data folder to take what guests have written"))
    }

    pub(super) fn withdrawn(&mut self, request: RequestId) {
        self.waiting.retain(|(waiting, _)| *waiting != request);
        if let Some(note) = &mut self.under_way {
            note.requests.retain(|(waiting, _)| *waiting != request);
        }
    }

    /// The writes that need no note any more: what they wrote has been recorded meanwhile.
    pub(super) fn take_recorded(&mut self) -> Vec<RequestId> {
        let unnoted = &self.unnoted;
        let recorded = self.waiting.extract_if(.., |(_, units)| !unnoted.contains_any(*units));
        recorded.map(|(request, _)| request).collect()
    }

    pub(super) fn is_over(&self) -> bool {
        self.under_way.is_none() && self.waiting.is_empty()
    }

    /// Begins a note if something waits for one.
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
    /// A guest's change of these units has been made: it is answered when that is known.
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
