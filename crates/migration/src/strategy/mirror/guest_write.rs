//! Guest writes: where each goes, which wait, and when the guest has its answer.

use std::time::Duration;

use chronicle::{BlockRange, ByteRange};

use super::{GateTimes, Link, Mirror, Stage};
use crate::planted::{Bug, broken};
use crate::strategy::writes::{SourceSide, TargetSide, WriteState};
use crate::strategy::{Route, SourceFault, TargetFault, VolumeAction, WriteId};

/// How long the requests that waited at a gate take to arrive here once it is open.
const GATE_EMPTIES_WITHIN: Duration = Duration::from_millis(5);

impl Mirror {
    /// How much longer the guest of a write that arrives now may be kept waiting: one that may have waited at a gate has
    /// waited for the migration already.
    pub(super) fn patience_left(&self, now: Duration) -> Duration {
        let GateTimes { closed, opened } = self.gate_times;
        let was_held = opened.is_some_and(|opened| now <= opened + GATE_EMPTIES_WITHIN);
        let waited = if was_held { now.saturating_sub(closed) } else { Duration::ZERO };
        self.settings.wait_max.saturating_sub(waited)
    }

    /// Submits a held write if it need not wait.
    pub(super) fn admit(&mut self, now: Duration, id: WriteId) {
        if self.is_asynchronous() {
            self.admit_asynchronously(now, id);
            return;
        }
        let Some(write) = self.writes.get(id) else { return };
        let route = self.route(write.range, write.blocks);
        let patient = now < write.patience_ends;
        let follows = || self.writes.must_follow(id, write.range);
        let second_pass = || self.stage == Stage::Copying && self.chunks.second_pass_touches(write.blocks);
        let waits = match route {
            Route::Both => follows(),
            Route::BothInPart(_) => follows() || second_pass(),
            Route::SourceOnly => second_pass(),
        };
        if !patient {
            // It has waited enough, and waits for no target. Its blocks are copied again after everything that is
            // under way there.
            self.submit(now, id, Route::SourceOnly);
        } else if !waits {
            self.submit(now, id, route);
        }
    }

    pub(super) fn submit(&mut self, now: Duration, id: WriteId, route: Route) {
        let Some(write) = self.writes.get(id) else { return };
        let (blocks, range, patience) = (write.blocks, write.range, write.patience_ends.saturating_sub(now));
        self.tally.note_held(now.saturating_sub(write.arrived));
        let (parts, count) = match &route {
            Route::SourceOnly => (&[][..], &mut self.tally.writes_source_only),
            Route::Both => (std::slice::from_ref(&range), &mut self.tally.writes_mirrored),
            Route::BothInPart(parts) => (parts.as_slice(), &mut self.tally.writes_in_part),
        };
        *count += 1;
        let mut rest = blocks;
        for part in parts {
            let mirrored = self.covering(*part);
            self.becomes_missing(BlockRange { end: mirrored.start, ..rest });
            rest.start = mirrored.end;
        }
        self.becomes_missing(rest);
        let by_value = self.is_asynchronous() && !parts.is_empty();
        if by_value {
            self.send_values(now, id, parts);
        }
        let state = if parts.is_empty() || by_value {
            WriteState::SourceOnly
        } else {
            let source = SourceSide::UnderWay { target_answered: TargetSide::UnderWay, patience };
            WriteState::Mirrored { source, restarts: self.restarts }
        };
        self.writes.submit(id, state, parts.iter().map(|part| part.length).sum());
        self.actions.push_back(VolumeAction::Admit { write: id, route });
    }

    /// Only synchronised blocks are mirrored by value (design §5.2): each by itself, because a write that carried its
    /// synchronised blocks back to missing would let large writes undo what the mover does, for ever (design §5.18).
    pub(super) fn route(&self, range: ByteRange, blocks: BlockRange) -> Route {
        if self.stage != Stage::Copying || self.suspension.is_some() {
            return Route::SourceOnly;
        }
        if self.takes_values(range, blocks) {
            return Route::Both;
        }
        let mut parts: Vec<ByteRange> = Vec::new();
        for block in blocks.iter() {
            let block = BlockRange::new(block.0, block.0 + 1);
            let part = overlap(self.byte_range(block), range);
            if !self.takes_values(part, block) {
                continue;
            }
            match parts.last_mut() {
                Some(last) if last.end() == part.offset => last.length += part.length,
                _ => parts.push(part),
            }
        }
        if parts.is_empty() { Route::SourceOnly } else { Route::BothInPart(parts) }
    }

    /// Tells whether all of `blocks` are synchronised, and nothing else is on its way to `range` in them that could land
    /// later.
    fn takes_values(&self, range: ByteRange, blocks: BlockRange) -> bool {
        blocks.end <= self.cursor
            && !self.replica.misses_any(blocks)
            && (!self.chunks.touch(blocks) || broken(Bug::TwoCopiesInFlight))
            && !self.writes.late_touches(blocks)
            && (!self.values.overlap(range, blocks) || broken(Bug::TwoValuesInFlight))
    }

    fn becomes_missing(&mut self, blocks: BlockRange) {
        if blocks.is_empty() {
            return;
        }
        let hole_ahead = blocks.start >= self.cursor && !self.replica.misses_any(blocks);
        if hole_ahead && self.stage == Stage::Copying && broken(Bug::HoleAhead) {
            return;
        }
        self.replica.mark_missing(blocks);
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
                self.bytes_mirrored += mirrored_bytes;
                self.target_faults = 0;
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

    /// The guest gets its answer without the target's.
    pub(super) fn answer_late(&mut self, id: WriteId) {
        let Some(write) = self.writes.get(id) else { return };
        let WriteState::Mirrored { restarts, .. } = write.state else { return };
        self.tally.writes_answered_late += 1;
        self.replica.mark_missing(write.blocks);
        self.writes.set_state(id, WriteState::Late { restarts });
        self.actions.push_back(VolumeAction::Complete { write: id });
    }

    pub(super) fn write_ended(&mut self, id: WriteId) {
        self.writes.remove(id);
        self.chunks.write_ended(id);
    }

    /// Ends the patience of writes whose time has come.
    pub(super) fn give_up_waiting(&mut self, now: Duration) {
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

/// The bytes that both ranges have in common, if they have any.
fn overlap(one: ByteRange, other: ByteRange) -> ByteRange {
    let start = one.offset.max(other.offset);
    ByteRange::new(start, one.end().min(other.end()).saturating_sub(start))
}
