//! Guest writes: how each is submitted, and when the guest is answered.

use std::time::Duration;

use chronicle::{BlockRange, ByteRange};

use super::by_value::Toll;
use super::writes::{SourceSide, TargetSide, Write, WriteState};
use super::{Engine, Link, Queue, Stage};
use crate::planted::{Bug, broken};
use crate::strategy::{Route, SourceFault, TargetFault, VolumeAction, WriteId};

impl Engine {
    /// Notes that a write has arrived. It is held until it is submitted, within its patience; time at the gate counts.
    pub(super) fn arrive(&mut self, now: Duration, id: WriteId, range: ByteRange) {
        let blocks = self.covering(range);
        self.note_heat(blocks);
        let patience_left = self.settings.wait_max.saturating_sub(self.gate.held_for(now));
        self.writes.arrive(id, range, blocks, now, now + patience_left);
    }

    /// Returns the held writes in order of arrival; each is to be decided again.
    pub(in crate::strategy) fn take_held(&mut self) -> Vec<WriteId> {
        self.queue = Queue::Empty;
        if self.writes.has_held() { self.writes.held() } else { Vec::new() }
    }

    /// Returns whether a slow target holds a write: later arrivals queue behind it.
    pub(in crate::strategy) fn is_queueing(&self) -> bool {
        self.queue != Queue::Empty
    }

    /// Notes that a slow target holds a write until `until`.
    pub(in crate::strategy) fn queue(&mut self, now: Duration, until: Option<Duration>) {
        self.admission.note_waits(now);
        self.queue = until.map_or(Queue::UntilTaken, Queue::Until);
    }

    /// Submits a held write whose guest waits for every store that it goes to.
    pub(in crate::strategy) fn mirror(&mut self, now: Duration, write: &Write, route: Route) {
        let state = match route {
            Route::SourceOnly => WriteState::SourceOnly,
            Route::Both | Route::BothInPart(_) => {
                let patience = write.patience_ends.saturating_sub(now);
                let source = SourceSide::UnderWay { target_answered: TargetSide::UnderWay, patience };
                WriteState::Mirrored { source, restarts: self.restarts }
            }
        };
        self.submit(now, write, route, state);
    }

    /// Submits a held write whose guest waits for the source only.
    pub(in crate::strategy) fn send(
        &mut self,
        now: Duration,
        write: &Write,
        route: Route,
        toll: Option<Toll>,
    ) {
        if let Some(toll) = toll {
            self.admission.spend(now, toll.bytes(), self.settings.wait_max);
            self.admission.note_undone(toll.undone);
        }
        if self.admission.is_throttled() && now > write.arrived {
            self.costs.tally.writes_throttled += 1;
            self.costs.tally.throttled += now.saturating_sub(write.arrived);
        }
        match &route {
            Route::SourceOnly => {}
            Route::Both => self.send_values(now, write.id, &[write.range]),
            Route::BothInPart(parts) => self.send_values(now, write.id, parts),
        }
        self.submit(now, write, route, WriteState::SourceOnly);
    }

    /// Submits a held write to the source only, because the limit of bytes in flight is reached.
    pub(in crate::strategy) fn overflow(&mut self, now: Duration, write: &Write, toll: Option<Toll>) {
        self.costs.tally.writes_as_bits += 1;
        self.send(now, write, Route::SourceOnly, toll);
    }

    fn submit(&mut self, now: Duration, write: &Write, route: Route, state: WriteState) {
        let tally = &mut self.costs.tally;
        tally.note_held(now.saturating_sub(write.arrived));
        let (parts, count) = match &route {
            Route::SourceOnly => (&[][..], &mut tally.writes_source_only),
            Route::Both => (std::slice::from_ref(&write.range), &mut tally.writes_mirrored),
            Route::BothInPart(parts) => (parts.as_slice(), &mut tally.writes_in_part),
        };
        *count += 1;
        let mut rest = write.blocks;
        for part in parts {
            let mirrored = self.covering(*part);
            self.becomes_missing(BlockRange { end: mirrored.start, ..rest });
            rest.start = mirrored.end;
        }
        self.becomes_missing(rest);
        self.writes.submit(write.id, state, parts.iter().map(|part| part.length).sum());
        self.actions.push_back(VolumeAction::Admit { write: write.id, route });
    }

    /// Returns the route of a write. Only synchronised blocks are mirrored by value (design §5.2), each on its own. If one
    /// missing block made the whole write missing, large writes would undo the mover's work for ever (design §5.18).
    pub(in crate::strategy) fn route(&self, range: ByteRange, blocks: BlockRange) -> Route {
        if !self.is_mirroring() {
            return Route::SourceOnly;
        }
        let mut obstacle = self.first_obstacle(range, blocks);
        if obstacle.is_none() {
            return Route::Both;
        }
        let mut parts: Vec<ByteRange> = Vec::new();
        let mut from = blocks.start;
        while from < blocks.end {
            let end = obstacle.map_or(blocks.end, |obstacle| obstacle.start);
            if from < end {
                parts.push(overlap(self.byte_range(BlockRange { start: from, end }), range));
            }
            from = obstacle.map_or(blocks.end, |obstacle| obstacle.end);
            obstacle = self.first_obstacle(range, BlockRange { start: from, ..blocks });
        }
        if parts.is_empty() { Route::SourceOnly } else { Route::BothInPart(parts) }
    }

    /// Returns the first of `blocks` that are not synchronised, or have other data in flight within `range` that may land later.
    fn first_obstacle(&self, range: ByteRange, blocks: BlockRange) -> Option<BlockRange> {
        if blocks.start >= self.cursor {
            return (!blocks.is_empty()).then_some(blocks);
        }
        let ahead = BlockRange { start: self.cursor.max(blocks.start), ..blocks };
        let chunk = if broken(Bug::TwoCopiesInFlight) { None } else { self.chunks.first_touching(blocks) };
        let value = match broken(Bug::TwoValuesInFlight) {
            true => None,
            false => self.values.first_within(overlap(self.byte_range(blocks), range)),
        };
        let obstacles = [
            Some(ahead),
            self.replica.first_missed_within(blocks),
            chunk,
            self.writes.first_late_within(blocks),
            value.map(|value| self.covering(value)),
        ];
        let within = obstacles.into_iter().flatten().map(|obstacle| obstacle.intersect(&blocks));
        within.filter(|obstacle| !obstacle.is_empty()).min_by_key(|obstacle| obstacle.start)
    }

    fn becomes_missing(&mut self, blocks: BlockRange) {
        if blocks.is_empty() {
            return;
        }
        let hole_ahead = blocks.start >= self.cursor && !self.replica.misses_any(blocks);
        if hole_ahead && self.stage == Stage::Copying && broken(Bug::HoleAhead) {
            return;
        }
        self.wrote(blocks);
    }

    pub(super) fn source_written(&mut self, now: Duration, id: WriteId, result: Result<(), SourceFault>) {
        let Some(write) = self.writes.get(id) else { return };
        let blocks = write.blocks;
        match write.state {
            WriteState::SourceOnly if self.values.contains(id) => {
                if result.is_err() {
                    self.replica.mark_missing(blocks);
                }
                self.source_has_value(id);
            }
            WriteState::SourceOnly => self.write_ended(id),
            WriteState::Mirrored { source: SourceSide::UnderWay { target_answered, patience }, restarts } => {
                if result.is_err() {
                    // The source may hold a part of it, the target all of it.
                    self.replica.mark_missing(blocks);
                }
                match target_answered {
                    TargetSide::Answered => {
                        self.actions.push_back(VolumeAction::Complete { write: id });
                        self.write_ended(id);
                    }
                    TargetSide::UnderWay => {
                        let source = SourceSide::Answered { patience_ends: now + patience };
                        self.writes.set_state(id, WriteState::Mirrored { source, restarts });
                        if self.stage == Stage::Stopped || self.link != Link::Up {
                            self.answer_late(id);
                        }
                    }
                }
            }
            _ => {}
        }
    }

    pub(super) fn target_written(&mut self, now: Duration, id: WriteId, result: Result<(), TargetFault>) {
        if self.values.contains(id) {
            self.target_has_value(now, id, result);
            return;
        }
        let Some(write) = self.writes.get(id) else { return };
        let (blocks, mirrored_bytes, state) = (write.blocks, write.mirrored_bytes, write.state);
        let submitted_under = match state {
            WriteState::Mirrored { restarts, .. } | WriteState::Late { restarts } => restarts,
            WriteState::Held | WriteState::SourceOnly => return,
        };
        let result = self.under_present_incarnation(submitted_under, result);
        match result {
            Ok(()) => {
                self.replica.applied(blocks);
                self.costs.bytes_mirrored += mirrored_bytes;
                self.pacing.note_guest_write(mirrored_bytes);
                self.faults.target_works();
            }
            Err(_) => self.replica.mark_missing(blocks),
        }
        match state {
            WriteState::Mirrored { source: SourceSide::UnderWay { patience, .. }, restarts } => {
                let source = SourceSide::UnderWay { target_answered: TargetSide::Answered, patience };
                self.writes.set_state(id, WriteState::Mirrored { source, restarts });
            }
            WriteState::Mirrored { source: SourceSide::Answered { .. }, .. } => {
                self.actions.push_back(VolumeAction::Complete { write: id });
                self.write_ended(id);
            }
            _ => self.write_ended(id),
        }
        if let Err(fault) = result {
            self.target_failed(now, fault);
        }
    }

    pub(super) fn answer_late(&mut self, id: WriteId) {
        let Some(write) = self.writes.get(id) else { return };
        let WriteState::Mirrored { restarts, .. } = write.state else { return };
        self.costs.tally.writes_answered_late += 1;
        self.replica.mark_missing(write.blocks);
        self.writes.set_state(id, WriteState::Late { restarts });
        self.actions.push_back(VolumeAction::Complete { write: id });
    }

    pub(super) fn write_ended(&mut self, id: WriteId) {
        self.writes.remove(id);
        self.chunks.write_ended(id);
    }

    pub(in crate::strategy) fn give_up_waiting(&mut self, now: Duration) {
        let impatient = |state| matches!(state, WriteState::Mirrored { source: SourceSide::Answered { patience_ends }, .. } if patience_ends <= now);
        let late: Vec<_> =
            self.writes.iter().filter(|write| impatient(write.state)).map(|write| write.id).collect();
        for id in &late {
            self.answer_late(*id);
        }
        if !late.is_empty() {
            self.suspend("the target has not taken a mirrored write in time", None);
        }
    }
}

fn overlap(one: ByteRange, other: ByteRange) -> ByteRange {
    let start = one.offset.max(other.offset);
    ByteRange::new(start, one.end().min(other.end()).saturating_sub(start))
}
