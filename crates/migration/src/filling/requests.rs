//! Handles guests' requests on a volume that is being filled, and the results of fetches for them.

use std::time::Duration;

use chronicle::BlockRange;

use super::units::{UNIT_BYTES, within};
use super::{Fetch, FetchFault, FetchId, Filling, FillingAction, Refusal, RequestId, StoreFault, Urgency};
use crate::planted::{Bug, broken};

/// The most bytes that are fetched ahead of a sequential read.
const AHEAD_BYTES_MAX: u64 = 1 << 20;
/// The most units fetched for one guest at once: one read of the largest size that clients send.
const URGENT_UNITS_MAX: u64 = (4 << 20) / UNIT_BYTES;
/// The most sequential reads that are followed at a time.
const STREAMS_MAX: usize = 8;

#[derive(Clone, Copy, Debug)]
pub(super) enum Waiting {
    /// Waits since `since` for its units to be present, or for the reservoir's answer to it alone.
    Read { request: RequestId, units: BlockRange, since: Duration, way: Way },
    /// Waits for a store write to the same units.
    Write { request: RequestId, units: BlockRange },
}

/// How the bytes reach a read that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// They are stored first.
    ThroughStore,
    /// This fetch brings them for it alone.
    PastStore(FetchId),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    /// Where the next read of the sequence would begin.
    end: u64,
    ahead: u64,
}

impl Waiting {
    pub(super) fn request(&self) -> RequestId {
        match self {
            Self::Read { request, .. } | Self::Write { request, .. } => *request,
        }
    }

    pub(super) fn read_of(&self, touched: BlockRange) -> Option<RequestId> {
        match self {
            Self::Read { request, units, .. } if units.overlaps(&touched) => Some(*request),
            _ => None,
        }
    }
}

impl Filling {
    pub(super) fn read_arrived(&mut self, now: Duration, request: RequestId, units: BlockRange) {
        if !self.is_read_held(units) {
            self.follow(units);
            self.actions.push_back(FillingAction::Admit { request });
        } else if self.unreadable.contains_any(units) {
            self.actions.push_back(FillingAction::Refuse { request, why: Refusal::Unreadable });
        } else {
            let ahead = self.follow(units);
            self.waiting.push_back(Waiting::Read { request, units, since: now, way: Way::ThroughStore });
            self.pull(units, ahead);
        }
    }

    /// Returns whether a read must wait: for missing units, and for a write to them that has not completed, or is not noted. Until
    /// then the store has neither the old bytes nor the new ones, or a kill would take the new ones back.
    fn is_read_held(&self, units: BlockRange) -> bool {
        if self.noting.is_pending(units) {
            return true;
        }
        if !self.missing.contains_any(units) {
            return false;
        }
        let overwritten = || self.overwrites.values().any(|busy| busy.overlaps(&units));
        !(broken(Bug::ReadPassesOverwriting) && overwritten())
    }

    /// Notes where a guest reads; returns the number of following units that are worth fetching with it.
    fn follow(&mut self, units: BlockRange) -> u64 {
        let known = self.streams.iter().position(|stream| stream.end == units.start.0);
        let ahead = known.and_then(|at| self.streams.remove(at)).map_or(0, |stream| {
            stream.ahead.max(units.len()).saturating_mul(2).min(AHEAD_BYTES_MAX / UNIT_BYTES)
        });
        if self.streams.len() >= STREAMS_MAX {
            self.streams.pop_front();
        }
        self.streams.push_back(Stream { end: units.end.0, ahead });
        ahead
    }

    /// Fetches the units that a guest waits for, and `ahead` units behind them.
    fn pull(&mut self, units: BlockRange, ahead: u64) {
        // A store that takes nothing is tried by background fetches alone.
        if self.background.is_pausing() || self.background.store_is_failing() {
            return;
        }
        let end = units.end.0.saturating_add(ahead);
        let wished = BlockRange::new(units.start.0, end);
        for run in within(&self.wanted, wished) {
            for piece in self.pieces(run, URGENT_UNITS_MAX) {
                // Units ahead are fetched only in one request with units that a guest waits for.
                if piece.start < units.end || ahead > 0 {
                    self.ask(piece, Urgency::Urgent);
                }
            }
        }
        // A background fetch may wait for a limit or a pause. A guest must wait for neither.
        for run in self.pushed(units) {
            self.pieces(run, URGENT_UNITS_MAX).into_iter().for_each(|piece| self.ask(piece, Urgency::Urgent));
        }
    }

    /// Returns the units that only background fetches are bringing.
    fn pushed(&self, units: BlockRange) -> Vec<BlockRange> {
        let is_pushed = |fetch: &&Fetch| fetch.urgency == Urgency::Background && fetch.storing.is_none();
        let pushed = self.fetches.values().filter(is_pushed).map(|fetch| fetch.units.intersect(&units));
        let mut pushed: Vec<_> = pushed.flat_map(|run| within(&self.missing, run)).collect();
        let pulled = self.fetches.values().filter(|fetch| fetch.urgency == Urgency::Urgent);
        for busy in pulled.map(|fetch| &fetch.units).chain(self.overwrites.values()) {
            pushed = pushed.into_iter().flat_map(|run| super::units::without(run, *busy)).collect();
        }
        pushed
    }

    /// Splits a run into pieces of at most `units_max` units. Possibly unreadable units are pieces of their own.
    pub(super) fn pieces(&self, run: BlockRange, units_max: u64) -> Vec<BlockRange> {
        let mut pieces = Vec::new();
        let mut start = run.start.0;
        while start < run.end.0 {
            let suspect = self.suspect.next_run(chronicle::BlockIndex(start), 1);
            let end = match suspect {
                Some(alone) if alone.start.0 == start => start + 1,
                Some(alone) => run.end.0.min(start + units_max).min(alone.start.0),
                None => run.end.0.min(start + units_max),
            };
            pieces.push(BlockRange::new(start, end));
            start = end;
        }
        pieces
    }

    pub(super) fn write_arrived(&mut self, request: RequestId, units: BlockRange) {
        if self.is_write_held(units) {
            self.waiting.push_back(Waiting::Write { request, units });
        } else {
            self.admit_write(request, units);
        }
    }

    /// Returns whether a write must wait for our own write to the same units: their order must not be left to the store.
    fn is_write_held(&self, units: BlockRange) -> bool {
        let mut stored = self.fetches.values().flat_map(|fetch| fetch.storing.iter().flatten());
        self.rewriting.holds(units)
            || self.missing.contains_any(units) && stored.any(|stored| stored.overlaps(&units))
    }

    fn admit_write(&mut self, request: RequestId, units: BlockRange) {
        let is_unrecorded = self.recording.touches(units) || self.rewriting.doubts(units);
        if self.missing.contains_any(units) || self.noting.would_be_forgotten(units) || is_unrecorded {
            self.wanted.remove(units);
            self.overwrites.insert(request, units);
        }
        // The units are the guest's from here on: they cannot be fetched again.
        self.recording.overwritten(units);
        self.actions.push_back(FillingAction::Admit { request });
    }

    pub(super) fn write_ended(&mut self, now: Duration, request: RequestId, result: Result<(), StoreFault>) {
        let Some(units) = self.overwrites.remove(&request) else {
            self.actions.push_back(FillingAction::Written { request });
            return;
        };
        match result {
            Ok(()) => {
                let count = self.become_present(units);
                self.progress.units_overwritten += count;
                self.recording.overwritten(units);
                self.changed(request, units);
                self.recording.note(now);
                self.answer_when_noted(request, units);
            }
            // The units are as missing as before. **N.B.** The reservoir has their former content.
            Err(StoreFault) => {
                self.change_failed(request);
                self.want(units);
                self.actions.push_back(FillingAction::Written { request });
            }
        }
    }

    pub(super) fn withdrawn(&mut self, request: RequestId) {
        self.waiting.retain(|waiting| waiting.request() != request);
        // A write that was made is noted nevertheless: others may wait to read it.
        self.recording.withdrawn(request);
    }

    /// Admits the requests that need not wait, and fetches units that no other request brings.
    pub(super) fn serve_waiting(&mut self) {
        for owed in self.lateness.owed().runs().collect::<Vec<_>>() {
            self.pull(owed, 0);
        }
        for waiting in std::mem::take(&mut self.waiting) {
            match waiting {
                Waiting::Read { request, units, .. } if !self.is_read_held(units) => {
                    self.actions.push_back(FillingAction::Admit { request });
                }
                Waiting::Read { units, .. } => {
                    let waiting = self.pass_by(waiting);
                    self.waiting.push_back(waiting);
                    self.pull(units, 0);
                }
                Waiting::Write { request, units } if !self.is_write_held(units) => {
                    self.admit_write(request, units);
                }
                Waiting::Write { .. } => self.waiting.push_back(waiting),
            }
        }
    }

    pub(super) fn fetched(&mut self, now: Duration, id: FetchId, result: Result<(), FetchFault>) {
        let Some(fetch) = self.fetches.get(&id).filter(|fetch| fetch.storing.is_none()) else { return };
        let units = fetch.units;
        match result {
            Ok(()) => {
                self.background.reservoir_answers();
                self.lateness.reservoir_answers(now);
                let parts = self.still_wanted(units);
                let count: u64 = parts.iter().map(BlockRange::len).sum();
                self.progress.units_dropped += units.len() - count;
                if parts.is_empty() {
                    self.forget_fetch(now, id);
                    return;
                }
                let bytes = parts.iter().map(|part| self.bytes(*part)).collect();
                if let Some(fetch) = self.fetches.get_mut(&id) {
                    fetch.storing = Some(parts);
                }
                self.actions.push_back(FillingAction::Store { fetch: id, parts: bytes });
            }
            Err(fault) => {
                self.forget_fetch(now, id);
                match fault {
                    FetchFault::Away => self.background.reservoir_is_away(now),
                    FetchFault::Unreadable => {
                        self.lateness.reservoir_answers(now);
                        match units.len() {
                            1 => self.unreadable_now(now, units),
                            // Single fetches will show which of the units is unreadable.
                            _ => drop(self.suspect.insert(units)),
                        }
                    }
                }
                self.want(units);
            }
        }
    }

    /// Returns the parts of a fetch to store: missing units that no guest is about to write and no other fetch is writing.
    fn still_wanted(&self, units: BlockRange) -> Vec<BlockRange> {
        if broken(Bug::FillOverNewerWrite) {
            return vec![units];
        }
        let mut parts = within(&self.missing, units);
        let stored = self.fetches.values().flat_map(|fetch| fetch.storing.iter().flatten());
        for busy in self.overwrites.values().chain(stored) {
            parts = parts.into_iter().flat_map(|part| super::units::without(part, *busy)).collect();
        }
        parts
    }

    pub(super) fn stored(&mut self, now: Duration, id: FetchId, result: Result<(), StoreFault>) {
        let Some(Fetched { parts, urgency, units, is_overtaken }) = self.take_stored(now, id) else { return };
        match result {
            Ok(()) if is_overtaken => self.background.store_takes(),
            Ok(()) => {
                for part in parts {
                    let count = self.become_present(part);
                    self.recording.filled(part);
                    match urgency {
                        Urgency::Urgent => self.progress.units_pulled += count,
                        Urgency::Background => self.progress.units_pushed += count,
                    }
                }
                self.background.store_takes();
                self.recording.note(now);
            }
            Err(StoreFault) => {
                self.background.store_fails(now);
                // From now on the reads that waited for the store wait for the reservoir.
                self.lateness.reservoir_answers(now);
            }
        }
        self.want(units);
    }

    fn take_stored(&mut self, now: Duration, id: FetchId) -> Option<Fetched> {
        self.fetches.get(&id)?.storing.as_ref()?;
        let fetch = self.forget_fetch(now, id)?;
        let Fetch { units, urgency, storing, is_overtaken } = fetch;
        Some(Fetched { parts: storing?, urgency, units, is_overtaken })
    }
}

struct Fetched {
    parts: Vec<BlockRange>,
    urgency: Urgency,
    units: BlockRange,
    is_overtaken: bool,
}
