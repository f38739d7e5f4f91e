//! Decides what a filling makes durable, and in which order: first the bytes, then their presence, then the answer to a guest's
//! flush.
//!
//! ```text
//!   flushes that have arrived ─┐
//!   enough has become present ─┴─► flush of the store ──► record ──► flushes are answered
//!        meanwhile: the next round gathers
//! ```
//! There is one round at a time: units that become present during a round belong to the next.

use std::time::Duration;

use chronicle::{BlockCount, BlockRange, LayeredBitmap};

use super::units::UNIT_BYTES;
use super::{Filling, FillingAction, OnBehalf, RecordingId, RequestId, StoreFault};
use crate::planted::{Bug, broken};

/// How long a restart may be unaware of present units; it would fetch them again.
const RECORD_EVERY: Duration = Duration::from_secs(1);
/// The number of units that triggers an earlier round.
const RECORD_UNITS: u64 = (64 << 20) / UNIT_BYTES;
/// The pause before a failed recording is tried again without a guest's flush.
const RETRY: Duration = Duration::from_millis(500);

/// The units that are present, but not known to be durable.
#[derive(Debug)]
pub(super) struct Recording {
    unrecorded: LayeredBitmap,
    /// The filled units among them that no guest has written since: they can be fetched again.
    filled: LayeredBitmap,
    flushes: Vec<RequestId>,
    round: Option<Round>,
    next: u64,
    /// When a round begins without a flush.
    due_at: Option<Duration>,
    /// After a failed round: when the next one may begin without a flush.
    retry_at: Option<Duration>,
}

#[derive(Debug)]
struct Round {
    id: RecordingId,
    units: LayeredBitmap,
    filled: LayeredBitmap,
    flushes: Vec<RequestId>,
    is_flushed: bool,
}

impl Recording {
    pub(super) fn new(units: BlockCount) -> Self {
        Self {
            unrecorded: LayeredBitmap::new(units),
            filled: LayeredBitmap::new(units),
            flushes: Vec::new(),
            round: None,
            next: 0,
            due_at: None,
            retry_at: None,
        }
    }

    pub(super) fn present(&mut self, units: BlockRange) {
        self.unrecorded.insert(units);
    }

    pub(super) fn filled(&mut self, units: BlockRange) {
        self.filled.insert(units);
    }

    /// Notes that the guest has written these units, or is about to.
    pub(super) fn overwritten(&mut self, units: BlockRange) {
        self.filled.remove(units);
        if let Some(round) = &mut self.round {
            round.filled.remove(units);
        }
    }

    /// Notes that units may be lost: the next round does not record them.
    pub(super) fn doubted(&mut self, units: BlockRange) {
        self.unrecorded.remove(units);
    }

    pub(super) fn note(&mut self, now: Duration) {
        if !self.unrecorded.is_empty() {
            self.due_at.get_or_insert(now + RECORD_EVERY);
        }
    }

    fn retry(&mut self, now: Duration) {
        (self.due_at, self.retry_at) = (Some(now + RETRY), Some(now + RETRY));
    }

    pub(super) fn flush_arrived(&mut self, request: RequestId) {
        self.flushes.push(request);
    }

    pub(super) fn withdrawn(&mut self, request: RequestId) {
        self.flushes.retain(|flush| *flush != request);
        if let Some(round) = &mut self.round {
            round.flushes.retain(|flush| *flush != request);
        }
    }

    pub(super) fn touches(&self, units: BlockRange) -> bool {
        let in_round = self.round.as_ref().is_some_and(|round| round.units.contains_any(units));
        in_round || self.unrecorded.contains_any(units)
    }

    pub(super) fn deadline(&self) -> Option<(Duration, &'static str)> {
        let due = self.due_at.filter(|_| self.round.is_none());
        due.map(|at| (at, "arrived blocks to be recorded"))
    }

    pub(super) fn is_over(&self) -> bool {
        self.round.is_none() && self.unrecorded.is_empty() && self.flushes.is_empty()
    }

    /// Begins a round if one is due. If flushes may not be answered, they wait, and the round is not theirs.
    pub(super) fn begin_if_due(
        &mut self,
        now: Duration,
        is_filled: bool,
        may_flush: bool,
    ) -> Option<FillingAction> {
        if self.round.is_some() {
            return None;
        }
        // Once everything has arrived, there is nothing more to gather, and the former host waits.
        let is_last = is_filled && self.retry_at.is_none_or(|at| now >= at);
        let is_due = self.due_at.is_some_and(|at| now >= at)
            || self.unrecorded.count() >= RECORD_UNITS
            || is_last && !self.unrecorded.is_empty();
        let is_asked = may_flush && !self.flushes.is_empty();
        if !is_asked && (!is_due || self.unrecorded.is_empty()) {
            self.due_at = self.due_at.filter(|_| !self.unrecorded.is_empty());
            return None;
        }
        self.next += 1;
        let (recording, blocks) = (RecordingId(self.next), self.unrecorded.blocks());
        let empty = || LayeredBitmap::new(blocks);
        let flushes = if may_flush { std::mem::take(&mut self.flushes) } else { Vec::new() };
        let units = std::mem::replace(&mut self.unrecorded, empty());
        let filled = std::mem::replace(&mut self.filled, empty());
        (self.due_at, self.retry_at) = (None, None);
        // The planted bug records units that no flush has made durable.
        let is_flushed = broken(Bug::PresentBeforeDurable) && !units.is_empty();
        let action = match is_flushed {
            false => FillingAction::FlushStore { recording, on_behalf: on_behalf(&flushes) },
            true => FillingAction::Record { recording, units: units.runs().collect() },
        };
        self.round = Some(Round { id: recording, units, filled, flushes, is_flushed });
        Some(action)
    }

    fn round(&mut self, id: RecordingId, is_flushed: bool) -> Option<Round> {
        self.round.take_if(|round| round.id == id && round.is_flushed == is_flushed)
    }
}

impl Filling {
    pub(super) fn store_flushed(&mut self, now: Duration, id: RecordingId, result: Result<(), StoreFault>) {
        let Some(mut round) = self.recording.round(id, false) else { return };
        if result.is_err() {
            self.lost(now, round);
            return;
        }
        if round.units.is_empty() {
            self.answer(round.flushes, Ok(()));
            return;
        }
        round.is_flushed = true;
        let units = round.units.runs().collect();
        self.recording.round = Some(round);
        self.actions.push_back(FillingAction::Record { recording: id, units });
    }

    /// Handles a failed flush: the store may have lost bytes that were not durable. Filled units are missing again; the guests'
    /// flush fails, and units that guests have written are doubted.
    fn lost(&mut self, now: Duration, round: Round) {
        let mut lost = round.filled;
        lost.union_with(&self.recording.filled);
        self.recording.filled.clear();
        self.recording.unrecorded.union_with(&round.units);
        let runs: Vec<_> = lost.runs().collect();
        runs.iter().for_each(|run| self.recording.doubted(*run));
        if !broken(Bug::LostWriteRecorded) {
            let empty = LayeredBitmap::new(lost.blocks());
            let written = std::mem::replace(&mut self.recording.unrecorded, empty);
            self.doubt(&written);
        }
        for run in runs {
            self.noting.settled(run);
            self.missing.insert(run);
            self.missing_again(run);
            self.want(run);
        }
        self.recording.retry(now);
        self.answer(round.flushes, Err(StoreFault));
    }

    pub(super) fn recorded(&mut self, now: Duration, id: RecordingId, result: Result<(), StoreFault>) {
        let Some(round) = self.recording.round(id, true) else { return };
        if result.is_err() {
            // The bytes are durable, but their presence is not.
            self.recording.unrecorded.union_with(&round.units);
            self.recording.filled.union_with(&round.filled);
            self.recording.retry(now);
        } else {
            let runs: Vec<_> = round.units.runs().collect();
            runs.into_iter().for_each(|run| self.noting.settled(run));
        }
        self.answer(round.flushes, result);
    }

    /// Fails the flushes that wait. Returns whether there was one.
    pub(super) fn fail_waiting_flushes(&mut self) -> bool {
        let flushes = std::mem::take(&mut self.recording.flushes);
        let has_failed = !flushes.is_empty();
        self.answer(flushes, Err(StoreFault));
        has_failed
    }

    fn answer(&mut self, flushes: Vec<RequestId>, result: Result<(), StoreFault>) {
        let answers = flushes.into_iter().map(|request| FillingAction::Flushed { request, result });
        self.actions.extend(answers);
    }
}

fn on_behalf(flushes: &[RequestId]) -> OnBehalf {
    if flushes.is_empty() { OnBehalf::Filling } else { OnBehalf::Guests }
}
