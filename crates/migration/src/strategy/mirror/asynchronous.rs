//! Mirroring that guests do not wait for (\[VM51\]): towards another host.
//!
//! ```text
//!   a write to synchronised blocks ──► by value, while the buffer has room ──► answered when the source has it
//!                                  └─► otherwise a bit: its blocks are missing ──► answered likewise
//!   either, when the copying does not converge: at the rate at which the target takes, held for `wait_max` at most
//! ```
//! Bytes with something in flight, a value or a chunk, take no value: a write only makes their block missing. With a busy
//! guest something is always in flight, so the replica is never equal while the gate is open. It is *near enough* when
//! what is left will have arrived within [`Acknowledgement::Source`]'s `drain_max`; then the gates close, and it is
//! *synchronised* once everything has.

use std::time::Duration;

use chronicle::{BlockRange, ByteRange};

use super::{Acknowledgement, Gate, Mirror, Mover, Stage, Standing};
use crate::planted::{Bug, broken};
use crate::strategy::drain::{Judged, Load, Situation};
use crate::strategy::values::{Part, Value};
use crate::strategy::{Route, TargetFault, VolumeAction, WriteId};

/// Bytes at the target that no flush has confirmed, up to which a replica is near enough: the flush behind the closed
/// gates has no more to do.
const UNCONFIRMED_MAX: u64 = 32 << 20;
/// A replica that was said to be near enough is so until it is this many times further off: a busy guest makes it
/// nearer and further all the time.
const SLACK: u64 = 2;

/// Parts of what may be left that are aimed at, one after the other.
const AIMS: [u64; 4] = [8, 4, 2, 1];
/// How long each of them is aimed at.
const AIM_LASTS: Duration = Duration::from_secs(1);

impl Mirror {
    /// The bound of the buffer, and the time within which what is left has to arrive; `None`: both stores acknowledge.
    fn asynchronous(&self) -> Option<(u64, Duration)> {
        match self.settings.acknowledgement {
            Acknowledgement::BothStores => None,
            Acknowledgement::Source { buffer_bytes_max, drain_max } => Some((buffer_bytes_max, drain_max)),
        }
    }

    pub(super) fn is_asynchronous(&self) -> bool {
        self.asynchronous().is_some()
    }

    /// Submits a held write if it need not wait for the link.
    pub(super) fn admit_asynchronously(&mut self, now: Duration, id: WriteId) {
        let Some(write) = self.writes.get(id) else { return };
        let (range, blocks, arrived) = (write.range, write.blocks, write.arrived);
        let hurries = self.gate != Gate::Open || now >= write.patience_ends;
        let mut route = self.route(range, blocks);
        let mut value_bytes = bytes_by_value(&route, range);
        let is_full = value_bytes > 0 && !self.has_room_for(value_bytes);
        if is_full && (hurries || !self.admission.is_throttled()) {
            route = Route::SourceOnly;
            value_bytes = 0;
            self.tally.writes_as_bits += 1;
        }
        let undone = self.bytes_undone(&route, range, blocks);
        let cost = value_bytes + undone;
        let is_free = cost == 0 || self.stage != Stage::Copying || self.suspension.is_some();
        let opens_at = self.admission.opens_at().filter(|at| *at > now);
        // A throttled write waits for room rather than become a bit: it costs the link less so.
        let waits = opens_at.is_some() || value_bytes > 0 && is_full;
        if !is_free && !hurries && waits {
            self.admission.note_waits(now);
            self.admits_at = opens_at;
            return;
        }
        if !is_free {
            self.admission.spend(now, cost, self.settings.wait_max);
            self.admission.note_undone(undone);
        }
        if self.admission.is_throttled() && now > arrived {
            self.tally.writes_throttled += 1;
            self.tally.throttled += now.saturating_sub(arrived);
        }
        self.submit(now, id, route);
    }

    fn has_room_for(&self, bytes: u64) -> bool {
        let bytes_max = self.asynchronous().map_or(0, |(bytes_max, _)| bytes_max);
        // A write that is larger than the buffer goes alone.
        self.values.is_empty() || self.values.bytes() + bytes <= bytes_max
    }

    /// Bytes of blocks that the mover has brought, or is bringing, and will have to bring again.
    fn bytes_undone(&self, route: &Route, range: ByteRange, blocks: BlockRange) -> u64 {
        let by_value = |block: BlockRange| match route {
            Route::Both => true,
            Route::SourceOnly => false,
            Route::BothInPart(parts) => parts.iter().any(|part| self.covering(*part).overlaps(&block)),
        };
        if range.length == 0 || *route == Route::Both {
            return 0;
        }
        let single = blocks.iter().map(|block| BlockRange::new(block.0, block.0 + 1));
        let undone = single.filter(|block| !by_value(*block) && !self.replica.misses_any(*block));
        undone.count() as u64 * self.settings.block_size.bytes()
    }

    /// Keeps the books of a write that goes by value, whole or in part.
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

    /// The source has a write that also goes by value: its guest waits for nothing more.
    pub(super) fn source_has_value(&mut self, id: WriteId) {
        self.actions.push_back(VolumeAction::Complete { write: id });
        self.writes.remove(id);
        if self.values.source_ended(id) {
            self.chunks.write_ended(id);
        }
    }

    /// The target has answered for a value.
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
                self.bytes_mirrored += bytes;
                self.target_faults = 0;
                self.admission.note_by_value(bytes);
                self.drain.note(now, bytes, self.load());
            }
            Err(fault) => self.target_failed(now, fault),
        }
    }

    /// How much is in flight.
    pub(super) fn load(&self) -> Load {
        let (buffer_bytes_max, _) = self.asynchronous().unwrap_or_default();
        let enough = self.is_mover_full() || self.values.bytes() >= (buffer_bytes_max / 4).max(1);
        if enough {
            Load::Enough
        } else if self.chunks.is_empty() && self.values.is_empty() {
            Load::Nothing
        } else {
            Load::Little
        }
    }

    /// Judges whether the copying converges, and throttles guest writes while it does not.
    pub(super) fn judge_convergence(&mut self, now: Duration) {
        if !self.is_asynchronous() {
            return;
        }
        if self.suspension.is_some() || self.stage != Stage::Copying || self.mover == Mover::Rests {
            self.admission.free();
            return;
        }
        let done = self.said != Standing::Behind || self.tokens_at.is_some();
        let situation = if done { Situation::Other } else { Situation::Copying };
        match self.admission.judge(now, self.drain.rate(), situation) {
            Judged::Throttled => self.tally.throttles += 1,
            Judged::Nothing | Judged::Freed => {}
        }
    }

    /// How near the replica is to the volume.
    pub(super) fn standing(&mut self, now: Duration) -> Standing {
        if !self.is_asynchronous() {
            let is_synchronised = !self.is_growing && self.is_synchronised();
            return if is_synchronised { Standing::Synchronised } else { Standing::Behind };
        }
        if self.is_growing
            || self.stage != Stage::Copying
            || self.suspension.is_some()
            || self.mover == Mover::Rests
            || self.cursor != self.end()
        {
            self.aim = Aim::default();
            return Standing::Behind;
        }
        let arrived = self.values.is_empty() || broken(Bug::ValuesInFlight);
        let complete = self.replica.is_complete() && self.chunks.is_empty() && arrived;
        if complete && self.writes.is_empty() && self.gate != Gate::Open && !self.awaits_flush() {
            return Standing::Synchronised;
        }
        let slack = if self.said == Standing::Behind { 1 } else { SLACK };
        let block_bytes = self.settings.block_size.bytes();
        let left = self.blocks_remaining() * block_bytes + self.values.bytes();
        let unconfirmed = self.replica.blocks_unconfirmed() * block_bytes;
        let loosest = self.bytes_within_drain();
        let divisor = self.aim.divisor(now, self.said, left <= SLACK * loosest);
        // Guests that are slowed down for it are not made to wait for more than is needed.
        let divisor = if self.admission.is_throttled() { 1 } else { divisor };
        let limit = (loosest / divisor).max(block_bytes);
        // Writes that are held are let go when the gate closes.
        let is_near = left <= slack * limit && left + self.writes.bytes_held() <= SLACK * limit;
        if is_near && unconfirmed <= slack * UNCONFIRMED_MAX { Standing::Converged } else { Standing::Behind }
    }

    /// When it will be near enough with more left than now, if it is not yet.
    pub(super) fn aims_lower_at(&self) -> Option<Duration> {
        let is_last = self.aim.step + 1 == AIMS.len();
        let missed_since = self.aim.missed_since.filter(|_| self.said == Standing::Behind && !is_last);
        missed_since.map(|since| since + AIM_LASTS)
    }

    /// Bytes that the target takes while gates are closed: one block at least.
    fn bytes_within_drain(&self) -> u64 {
        let within = self.asynchronous().map_or(Duration::ZERO, |(_, within)| within);
        let bytes = self.drain.rate().unwrap_or_default() * within.as_secs_f64();
        // A rate is finite and not negative.
        (bytes as u64).max(self.settings.block_size.bytes())
    }

    /// Tells whether nearly everything is there and only has to be confirmed.
    pub(super) fn wants_confirmation(&self) -> bool {
        let block_bytes = self.settings.block_size.bytes();
        self.is_asynchronous()
            && self.cursor == self.end()
            && self.replica.blocks_unconfirmed() * block_bytes > UNCONFIRMED_MAX / 2
            && self.blocks_remaining() * block_bytes <= SLACK * self.bytes_within_drain()
    }
}

/// How near is near enough: at first much nearer than it must be, because what is left arrives while guests wait. A guest that
/// never lets it come so near is waited for only so long; once it is near enough it has to stay so.
#[derive(Debug, Default)]
pub(super) struct Aim {
    step: usize,
    /// Since when this step has not been near enough; `None`: not even the last one would be.
    missed_since: Option<Duration>,
}

impl Aim {
    /// What the time within which what is left must arrive is divided by.
    fn divisor(&mut self, now: Duration, said: Standing, is_as_near_as_it_must_be: bool) -> u64 {
        match self.missed_since {
            _ if !is_as_near_as_it_must_be => *self = Self::default(),
            Some(since) if said == Standing::Behind => {
                if now.saturating_sub(since) >= AIM_LASTS {
                    self.step = (self.step + 1).min(AIMS.len() - 1);
                    self.missed_since = Some(now);
                }
            }
            _ => self.missed_since = Some(now),
        }
        AIMS[self.step]
    }
}

fn bytes_by_value(route: &Route, range: ByteRange) -> u64 {
    match route {
        Route::SourceOnly => 0,
        Route::Both => range.length,
        Route::BothInPart(parts) => parts.iter().map(|part| part.length).sum(),
    }
}
