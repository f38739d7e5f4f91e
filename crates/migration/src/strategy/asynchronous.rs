//! Mirroring without guests waiting for the target (\[VM51\]): towards another host.
//!
//! ```text
//!   a write to synchronised blocks ──► by value, while the buffer has room ──► answered when the source has it
//!                                  └─► otherwise a bit: its blocks are missing ──► answered likewise
//!   either, when the copying does not converge: at the rate at which the target takes, held for `wait_max` at most
//! ```
//! During the pass, a write to hot synchronised blocks is merged with later ones. Its blocks become missing, and are put off
//! until the pass is over. Their number is finite, and they are copied then like all missing blocks. After that nothing is
//! merged, and the mirror converges as it does without merging.
//!
//! Bytes with a value or a chunk in flight take no further value: a write only makes their block missing. With a busy guest
//! there is always something in flight, so the replica is never equal while the gate is open. It is *near enough* when the rest
//! will arrive within [`Strategy::AsynchronousMirror`](super::Strategy::AsynchronousMirror)'s `drain_max`. Then the gates
//! close, and it is *synchronised* once everything has arrived.

use std::time::Duration;

use chronicle::{BlockRange, ByteRange};

use super::engine::{Engine, InFlight, Rewritten, Standing, Terms, Toll, Verdict, Write, Written};
use super::policy::{Course, Policy};
use super::{HotBlocks, Route};
use crate::planted::{Bug, broken};

/// The most unflushed bytes at the target with which a replica is near enough: the flush behind closed gates does no more.
const UNCONFIRMED_MAX: u64 = 32 << 20;
/// A replica reported as near enough stays so until it is this many times further off: a busy guest varies the distance.
const SLACK: u64 = 2;

/// The number of writes to a block, the current one included, from which on its writes are merged. A later copy costs no more
/// than the write itself would, so a block that was hardly hot is no loss.
const AGAIN: u32 = 2;

/// The divisors of the permitted rest, which are aimed at one after the other.
const AIMS: [u64; 4] = [8, 4, 2, 1];
const AIM_LASTS: Duration = Duration::from_secs(1);

pub(super) struct AsynchronousMirror {
    buffer_bytes_max: u64,
    drain_max: Duration,
    hot: HotBlocks,
    aim: Aim,
}

impl AsynchronousMirror {
    pub(super) fn new(buffer_bytes_max: u64, drain_max: Duration, hot: HotBlocks) -> Self {
        Self { buffer_bytes_max, drain_max, hot, aim: Aim::default() }
    }

    /// Returns the bytes that the target can take while gates are closed.
    fn bytes_within_drain(&self, engine: &Engine) -> u64 {
        let bytes = engine.drain_rate().unwrap_or_default() * self.drain_max.as_secs_f64();
        // The rate is finite and not negative.
        (bytes as u64).max(engine.near_bytes_min())
    }
}

impl Policy for AsynchronousMirror {
    fn terms(&self) -> Terms {
        // Guests do not wait for a link: blocks written during their copy are copied later.
        Terms {
            in_flight: InFlight::Bytes { values_max: self.buffer_bytes_max },
            rewritten: Rewritten::Later,
            written: Written::AnyTime,
            hot: self.hot,
        }
    }

    fn course(&mut self, engine: &Engine, now: Duration, write: &Write) -> Course {
        let hurries = !engine.is_gate_open() || now >= write.patience_ends;
        let route = engine.route(write.range, write.blocks);
        let merges =
            route == Route::Both && !engine.is_pass_over() && engine.were_written(write.blocks, AGAIN);
        let route = if merges { Route::SourceOnly } else { route };
        let by_value = bytes_by_value(&route, write.range);
        let is_full = by_value > 0 && !engine.has_room_for(by_value);
        let overflows = is_full && (hurries || !engine.is_throttled());
        let (route, by_value) = if overflows { (Route::SourceOnly, 0) } else { (route, by_value) };
        let toll = Toll { by_value, undone: engine.bytes_undone(&route, write.range, write.blocks) };
        let is_free = toll.bytes() == 0 || !engine.is_mirroring();
        let opens_at = engine.throttle_opens_at().filter(|at| *at > now);
        // A throttled write waits for room instead of becoming missing blocks, which would cost the link more.
        let waits = opens_at.is_some() || by_value > 0 && is_full;
        if !is_free && !hurries && waits {
            return Course::Queue { until: opens_at };
        }
        let toll = (!is_free).then_some(toll);
        match (merges, overflows) {
            (true, _) => Course::Merge { toll },
            (false, true) => Course::Overflow { toll },
            (false, false) => Course::Send { route, toll },
        }
    }

    /// Throttles guests while the mover gets too little of the target's rate, because they do not wait for the target.
    fn judge_convergence(&mut self, engine: &mut Engine, now: Duration) {
        engine.judge_throttle(now);
    }

    fn next_run(&mut self, engine: &mut Engine) -> Option<BlockRange> {
        let run = engine.next_of_pass().or_else(|| engine.next_missing());
        if run.is_some() || engine.blocks_put_off() == 0 {
            return run;
        }
        engine.take_up();
        engine.next_missing()
    }

    fn judge_pass(&self, engine: &Engine) -> Verdict {
        let is_nearly_over = engine.is_pass_over()
            && engine.bytes_unconfirmed() > UNCONFIRMED_MAX / 2
            && engine.bytes_remaining() <= SLACK * self.bytes_within_drain(engine);
        if is_nearly_over { Verdict::Confirm } else { Verdict::GoOn }
    }

    fn standing(&mut self, engine: &Engine, now: Duration) -> Standing {
        if !engine.may_hand_over() {
            self.aim = Aim::default();
            return Standing::Behind;
        }
        let is_equal = engine.is_equal() || broken(Bug::MissingHandedOver);
        if is_equal && !engine.has_writes() && !engine.is_gate_open() {
            return Standing::Synchronised;
        }
        let said = engine.said();
        let slack = if said == Standing::Behind { 1 } else { SLACK };
        let left = engine.bytes_remaining() + engine.value_bytes();
        let loosest = self.bytes_within_drain(engine);
        let divisor = self.aim.divisor(now, said, left <= SLACK * loosest);
        // Throttled guests must not wait for more than is needed.
        let divisor = if engine.is_throttled() { 1 } else { divisor };
        let limit = (loosest / divisor).max(engine.near_bytes_min());
        // Held writes are submitted when the gate closes.
        let is_near = left <= slack * limit && left + engine.bytes_held() <= SLACK * limit;
        let is_confirmed = engine.bytes_unconfirmed() <= slack * UNCONFIRMED_MAX;
        if is_near && is_confirmed { Standing::Converged } else { Standing::Behind }
    }

    /// Returns when a larger rest will count as near enough, if the replica is not near enough yet.
    fn deadline(&self, engine: &Engine) -> Option<(Duration, &'static str)> {
        let is_last = self.aim.step + 1 == AIMS.len();
        let missed_since = self.aim.missed_since.filter(|_| engine.said() == Standing::Behind && !is_last);
        missed_since.map(|since| (since + AIM_LASTS, "guests to write less for a moment, or for that long"))
    }
}

/// The rest that counts as near enough. At first it is much smaller than necessary, because guests wait for the rest. If a
/// guest never lets it become that small, a larger one is aimed at after a while. Once it is near enough, it has to stay so.
#[derive(Debug, Default)]
struct Aim {
    step: usize,
    /// Since when this step has been missed; `None` while even the last step would be.
    missed_since: Option<Duration>,
}

impl Aim {
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
