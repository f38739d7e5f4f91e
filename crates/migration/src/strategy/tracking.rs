//! Dirty block tracking (\[ESX\] §2.3): each round copies the blocks that guests wrote during the one before.
//!
//! ```text
//!   every write ──► source only ──► its blocks are the next round's
//!                                   (unless this round has still to copy them: incremental)
//!   a round ends ──► nearly nothing written ─────────────► hand over: the last round, behind closed gates
//!              ├──► less written than a round or two ago ─► another round
//!              └──► not less: short enough? ──────────────► hand over, or mirror the rest, or give up
//! ```
//! Guests wait for nothing, and an unreachable target costs them nothing. But nothing throttles them either, so convergence is
//! not certain. Hot blocks would be copied again and again. From the first round on they are put off while there are others,
//! and copied once, in the last round but one (§2.3.4).
//!
//! ```text
//!   everything ─► cold ─► cold ─► … ─► everything, also the deferred blocks ─► few enough: the last round
//!                                               └─► not yet: cold ─► …
//! ```
//! The convergence check uses the last two rounds that copied everything, because a single one may have met a burst of writes
//! (\[ESX\] §2.5). The longer it all has taken, the less is expected of another round (§3.2).

use std::time::Duration;

use chronicle::BlockRange;

use super::engine::{Engine, InFlight, Rewritten, Standing, Terms, Verdict, Write, Written};
use super::policy::{Course, Policy, RoundVerdict};
use super::{Distance, HotBlocks, Recording, Round, Route, Strategy};
use crate::planted::{Bug, broken};

/// The divisor of the permitted rest that is aimed at while rounds become smaller.
const AIM: u64 = 4;
/// The factor by which the rest may exceed the limit before the replica is not near enough.
const SLACK: u64 = 2;
/// The most unflushed bytes at the target with which a replica is near enough.
const UNCONFIRMED_MAX: u64 = 32 << 20;
/// A round is smaller than an earlier one if it leaves at most this percentage of it.
const SHRINKS_TO_PERCENT: u64 = 90;
/// The rounds that are considered: two are compared with those before them.
const ROUNDS_JUDGED: usize = 3;
/// The factor by which everything may exceed the first round before a smaller last round is not expected.
const PATIENCE: u32 = 3;
/// Cold rounds end when they leave at most this part of the blocks put off: with less, the next round is hardly shorter.
const COLD_PART: u64 = 4;
/// A round counts as cold only if at least this part of the rest was put off; otherwise it has copied nearly everything.
const PUT_OFF_PART: u64 = 8;
/// The number of writes to a block ahead of the cursor for the first round to put it off. It is lower than for a hot block,
/// because putting off a cold block only lengthens the second round.
const AGAIN: u32 = 2;
/// The most rounds, even if one is sometimes smaller than another.
const ROUNDS_MAX: u64 = 50;
/// The most rounds that are reported singly; later ones are added to the last.
const ROUNDS_KEPT: usize = 100;

pub(super) struct Tracking {
    recording: Recording,
    hot: HotBlocks,
    distance: Distance,
    drain_max: Duration,
    /// The strategy that follows if the rounds do not converge.
    otherwise: Option<Strategy>,
    aim: Aim,
    /// What the current or last round copies.
    lap: Lap,
    /// The rest of the round before a cold one, apart from blocks put off; `None` if the round was not cold.
    before_cold: Option<u64>,
    under_way: Option<UnderWay>,
    rounds: Vec<Round>,
    /// The rests of the latest rounds, in order; at most [`ROUNDS_JUDGED`].
    left: Vec<u64>,
    ended: u64,
    first_took: Duration,
    took: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Lap {
    Everything,
    /// The blocks that are not hot.
    Cold,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Aim {
    Less,
    HandOver,
}

struct UnderWay {
    began: Duration,
    /// The blocks and bytes copied before this round.
    copied: (u64, u64),
    suspensions: u64,
}

enum Ended {
    Judged,
    /// The target failed meanwhile, or was unreachable.
    Disturbed,
}

impl Tracking {
    pub(super) fn new(
        recording: Recording,
        hot: HotBlocks,
        distance: Distance,
        drain_max: Duration,
        otherwise: Option<Strategy>,
    ) -> Self {
        Self {
            recording,
            hot,
            distance,
            drain_max,
            otherwise,
            aim: Aim::Less,
            lap: Lap::Everything,
            before_cold: None,
            under_way: None,
            rounds: Vec::new(),
            left: Vec::new(),
            ended: 0,
            first_took: Duration::ZERO,
            took: Duration::ZERO,
        }
    }

    fn begin_round(&mut self, engine: &Engine, now: Duration, lap: Lap) -> RoundVerdict {
        self.lap = lap;
        self.under_way =
            Some(UnderWay { began: now, copied: engine.copied_so_far(), suspensions: engine.suspensions() });
        match lap {
            Lap::Everything => RoundVerdict::NextOfAll,
            Lap::Cold => RoundVerdict::Next,
        }
    }

    fn end_round(&mut self, engine: &Engine, now: Duration) -> Option<Ended> {
        let under_way = self.under_way.take()?;
        let (blocks, bytes) = engine.copied_so_far();
        let dirtied = engine.blocks_dirty() * engine.block_bytes();
        let (blocks, bytes) = (blocks - under_way.copied.0, bytes - under_way.copied.1);
        let put_off = engine.blocks_put_off() * engine.block_bytes();
        let round = Round { blocks, bytes, took: now.saturating_sub(under_way.began), dirtied, put_off };
        if self.ended == 0 {
            self.first_took = round.took;
        }
        self.ended += 1;
        self.took += round.took;
        match self.rounds.last_mut() {
            Some(last) if self.ended > ROUNDS_KEPT as u64 => {
                last.blocks += round.blocks;
                last.bytes += round.bytes;
                last.took += round.took;
                last.dirtied = round.dirtied;
                last.put_off = round.put_off;
            }
            _ => self.rounds.push(round),
        }
        let disturbed = engine.suspensions() != under_way.suspensions;
        Some(if disturbed { Ended::Disturbed } else { Ended::Judged })
    }

    /// Returns the target's bytes a second, from all measurements.
    fn rate(&self, engine: &Engine) -> f64 {
        let last = self.rounds.last().filter(|round| !round.took.is_zero());
        // Zero blocks take no bytes, but were copied as well.
        let by_round =
            last.map(|round| (round.blocks * engine.block_bytes()) as f64 / round.took.as_secs_f64());
        engine.drain_rate().unwrap_or_default().max(by_round.unwrap_or_default())
    }

    /// Returns the bytes that can arrive while gates are closed.
    fn bytes_within_drain(&self, engine: &Engine) -> u64 {
        // The rate is finite and not negative.
        ((self.rate(engine) * self.drain_max.as_secs_f64()) as u64).max(engine.near_bytes_min())
    }

    /// Returns whether one of the last two rounds left less than the one before it. True while there are too few rounds.
    fn shrinks(&self) -> bool {
        let smaller =
            |pair: &[u64]| matches!(pair, [before, after] if after * 100 <= before * SHRINKS_TO_PERCENT);
        self.left.len() < ROUNDS_JUDGED || self.left.windows(2).any(smaller)
    }

    fn note_left(&mut self, left: u64) {
        if self.left.len() == ROUNDS_JUDGED {
            self.left.remove(0);
        }
        self.left.push(left);
    }

    /// Decides after a round whose rest exceeds the limit `within`.
    fn judge(&mut self, engine: &Engine, now: Duration, within: u64) -> RoundVerdict {
        let (dirty, put_off) = left_by(engine);
        let left = dirty + put_off;
        if self.lap == Lap::Cold && put_off * PUT_OFF_PART > left {
            let shrinks = self.before_cold.is_none_or(|before| dirty * 100 <= before * SHRINKS_TO_PERCENT);
            let is_much = dirty > (put_off / COLD_PART).max(within / AIM);
            let lap = if shrinks && is_much && self.ended < ROUNDS_MAX { Lap::Cold } else { Lap::Everything };
            self.before_cold = Some(dirty);
            return self.begin_round(engine, now, lap);
        }
        self.note_left(left);
        let is_late = self.took > self.first_took * PATIENCE;
        if self.shrinks() && (!is_late || left > within) && self.ended < ROUNDS_MAX {
            let lap = self.next_lap();
            self.before_cold = (lap == Lap::Cold).then_some(dirty);
            self.begin_round(engine, now, lap)
        } else if left <= within {
            self.aim = Aim::HandOver;
            RoundVerdict::GoOn
        } else if let Some(strategy) = self.otherwise {
            RoundVerdict::ChangeTo(strategy)
        } else {
            RoundVerdict::GiveUp(self.explain(engine, left))
        }
    }

    /// Returns what a round copies that need not copy everything.
    fn next_lap(&self) -> Lap {
        match self.hot {
            HotBlocks::PutOff => Lap::Cold,
            HotBlocks::AsOthers => Lap::Everything,
        }
    }

    /// Returns the reason of giving up, and what would help.
    fn explain(&self, engine: &Engine, bytes_left: u64) -> String {
        let rate = self.rate(engine).max(1.0);
        let needed = Duration::try_from_secs_f64(bytes_left as f64 / rate).unwrap_or(Duration::MAX);
        let left: Vec<_> = self.left.iter().map(|bytes| mebibytes(*bytes)).collect();
        let written = self.rounds.last().filter(|round| !round.took.is_zero());
        let written = written.map_or(0.0, |round| round.dirtied as f64 / round.took.as_secs_f64());
        format!(
            "it does not converge: after {} rounds guests still change {} a second, and the target takes {} a second; the last \
             rounds left {} to be copied, which takes {} ms with the guests held, and {} ms are allowed. Use --strategy mirror, \
             which converges whatever guests write; or --max-downtime {}; or move it when they write less",
            self.ended,
            mebibytes(written as u64),
            mebibytes(rate as u64),
            left.join(", "),
            needed.as_millis(),
            self.drain_max.as_millis(),
            // Half of it is for the rest, with a margin for the next attempt.
            needed.as_millis().saturating_mul(5) / 2 + 1,
        )
    }
}

impl Policy for Tracking {
    fn terms(&self) -> Terms {
        Terms {
            in_flight: match self.distance {
                Distance::Near => InFlight::Chunks,
                Distance::Far => InFlight::Bytes { values_max: 0 },
            },
            rewritten: Rewritten::Later,
            written: match self.recording {
                Recording::Incremental => Written::NextRound,
                Recording::Full => Written::NextRoundToo,
            },
            hot: self.hot,
        }
    }

    fn course(&mut self, _: &Engine, _: Duration, _: &Write) -> Course {
        Course::Send { route: Route::SourceOnly, toll: None }
    }

    fn judge_convergence(&mut self, _: &mut Engine, _: Duration) {}

    fn judge_round(&mut self, engine: &Engine, now: Duration) -> RoundVerdict {
        let is_over = engine.is_round_over();
        let (dirty, put_off) = left_by(engine);
        let left = dirty + put_off;
        if !engine.is_gate_open() {
            // No guest writes behind the gate: the rest is the last round.
            let is_last = left > 0 && !(dirty == 0 && broken(Bug::HotBlocksLeftOut));
            return if is_last {
                self.end_round(engine, now);
                self.begin_round(engine, now, Lap::Everything)
            } else {
                is_over.then(|| self.end_round(engine, now));
                RoundVerdict::GoOn
            };
        }
        if !is_over {
            if engine.is_mirroring() && self.under_way.is_none() {
                self.begin_round(engine, now, Lap::Everything);
            }
            return RoundVerdict::GoOn;
        }
        let ended = self.end_round(engine, now);
        let within = self.bytes_within_drain(engine);
        let enough = match self.aim {
            // The rest hardly becomes smaller than the hot blocks.
            Aim::Less if self.lap == Lap::Everything && self.before_cold.is_some() => within,
            Aim::Less => within / AIM,
            Aim::HandOver => within * SLACK,
        };
        if left <= enough {
            self.aim = Aim::HandOver;
            // Keep the rest small during the wait for the gate.
            let is_much = left > within / 2;
            return if is_much { self.begin_round(engine, now, Lap::Everything) } else { RoundVerdict::GoOn };
        }
        self.aim = Aim::Less;
        match ended {
            Some(Ended::Judged) => self.judge(engine, now, within),
            Some(Ended::Disturbed) | None => self.begin_round(engine, now, Lap::Everything),
        }
    }

    fn rounds(&self) -> &[Round] {
        &self.rounds
    }

    fn next_run(&mut self, engine: &mut Engine) -> Option<BlockRange> {
        engine.next_cold_of_pass(AGAIN).or_else(|| match self.lap {
            Lap::Everything => engine.next_missing(),
            Lap::Cold => engine.next_cold(),
        })
    }

    /// Confirms during the wait for the gate, so that the flush behind it is short.
    fn judge_pass(&self, engine: &Engine) -> Verdict {
        let is_due = engine.is_round_over() && engine.is_bulk_applied()
            || engine.bytes_unconfirmed() > UNCONFIRMED_MAX / 2;
        let waits = self.aim == Aim::HandOver && engine.is_gate_open();
        if waits && is_due && engine.bytes_unconfirmed() > 0 { Verdict::Confirm } else { Verdict::GoOn }
    }

    fn standing(&mut self, engine: &Engine, _: Duration) -> Standing {
        if !engine.may_hand_over() {
            self.aim = Aim::Less;
            return Standing::Behind;
        }
        let is_held = !engine.is_gate_open();
        let is_copied = engine.is_equal() || broken(Bug::LastRoundSkipped);
        if is_held && is_copied && !engine.has_writes() {
            return Standing::Synchronised;
        }
        if engine.bytes_remaining() > SLACK * self.bytes_within_drain(engine) {
            self.aim = Aim::Less;
            return Standing::Behind;
        }
        let slack = if engine.said() == Standing::Behind { 1 } else { SLACK };
        let is_confirmed = engine.bytes_unconfirmed() <= slack * UNCONFIRMED_MAX;
        let is_near = (self.aim == Aim::HandOver || is_held) && is_confirmed;
        if is_near { Standing::Converged } else { Standing::Behind }
    }

    fn deadline(&self, _: &Engine) -> Option<(Duration, &'static str)> {
        None
    }
}

/// Returns the bytes written since the epoch began, and the bytes put off.
fn left_by(engine: &Engine) -> (u64, u64) {
    (engine.blocks_dirty() * engine.block_bytes(), engine.blocks_put_off() * engine.block_bytes())
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
