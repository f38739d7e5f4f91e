//! A handover before everything has arrived: a few rounds or none, and the rest follows the volume (\[TPM\] §IV *three-phase*,
//! \[XNBD\] §3.2 *post-copy*).
//!
//! ```text
//!   rounds, as in tracking, bounded ──► idle: sending has stopped, all that was sent is durable
//!     └ ended early when little is      ──► the full missing-set update ──► converged
//!       left, or guests write faster    ──► gate closed: the last missing-set update ──► synchronised
//! ```
//! It converges whatever guests write, and throttles none of them. The wait at the handover depends on the writes during the
//! missing-set update, not on the number of missing blocks. *Synchronised* means here that the target knows its missing set
//! exactly.

use std::time::Duration;

use chronicle::BlockRange;

use super::engine::{Engine, InFlight, Rewritten, Standing, Terms, Verdict, Write, Written};
use super::policy::{Course, Policy, RoundVerdict};
use super::{HotBlocks, Round, Route};

/// A round gains on the guests if it leaves at most this percentage of what it copied; otherwise more rounds are useless.
const WINS_PERCENT: u64 = 90;
/// The most bytes that count as a small rest, which follows in no time.
const LITTLE_BYTES: u64 = 1 << 20;

pub(super) struct PostCopy {
    rounds_max: u32,
    rounds: Vec<Round>,
    /// The start of the current round, and the blocks and bytes copied by then.
    under_way: Option<(Duration, (u64, u64))>,
    /// Whether the copying has ended.
    rests: bool,
}

impl PostCopy {
    pub(super) fn new(rounds_max: u32) -> Self {
        Self { rounds_max, rounds: Vec::new(), under_way: None, rests: rounds_max == 0 }
    }

    fn end_round(&mut self, engine: &Engine, now: Duration) -> Option<&Round> {
        let (began, (blocks_before, bytes_before)) = self.under_way.take()?;
        let (blocks, bytes) = engine.copied_so_far();
        let dirtied = engine.blocks_dirty() * engine.block_bytes();
        self.rounds.push(Round {
            blocks: blocks - blocks_before,
            bytes: bytes - bytes_before,
            took: now.saturating_sub(began),
            dirtied,
            put_off: 0,
        });
        self.rounds.last()
    }
}

impl Policy for PostCopy {
    fn terms(&self) -> Terms {
        Terms {
            in_flight: InFlight::Bytes { values_max: 0 },
            rewritten: Rewritten::Later,
            written: if self.rounds_max == 0 { Written::AnyTime } else { Written::NextRound },
            // The rest follows the volume, hot or not.
            hot: HotBlocks::AsOthers,
        }
    }

    fn course(&mut self, _: &Engine, _: Duration, _: &Write) -> Course {
        Course::Send { route: Route::SourceOnly, toll: None }
    }

    fn judge_convergence(&mut self, _: &mut Engine, _: Duration) {}

    fn judge_round(&mut self, engine: &Engine, now: Duration) -> RoundVerdict {
        if self.rests || !engine.is_mirroring() {
            return RoundVerdict::GoOn;
        }
        if !engine.is_round_over() {
            self.under_way.get_or_insert((now, engine.copied_so_far()));
            return RoundVerdict::GoOn;
        }
        let block_bytes = engine.block_bytes();
        let wins = self
            .end_round(engine, now)
            .is_none_or(|round| round.dirtied * 100 <= round.blocks * block_bytes * WINS_PERCENT);
        let is_little = engine.blocks_dirty() * block_bytes <= LITTLE_BYTES;
        if !wins || is_little || self.rounds.len() >= self.rounds_max as usize {
            self.rests = true;
            return RoundVerdict::GoOn;
        }
        self.under_way = Some((now, engine.copied_so_far()));
        RoundVerdict::Next
    }

    fn rounds(&self) -> &[Round] {
        &self.rounds
    }

    fn next_run(&mut self, engine: &mut Engine) -> Option<BlockRange> {
        if self.rests {
            return None;
        }
        engine.next_of_pass().or_else(|| engine.next_missing())
    }

    /// Makes the copied data durable before the rest is reported.
    fn judge_pass(&self, engine: &Engine) -> Verdict {
        if self.rests && engine.bytes_unconfirmed() > 0 { Verdict::Confirm } else { Verdict::GoOn }
    }

    fn may_tell(&self, engine: &Engine) -> bool {
        self.rests && engine.may_be_left() && engine.is_at_rest()
    }

    fn standing(&mut self, engine: &Engine, _: Duration) -> Standing {
        if !self.may_tell(engine) || !engine.is_told() && engine.said() == Standing::Behind {
            return Standing::Behind;
        }
        let is_held = !engine.is_gate_open();
        if is_held && engine.is_all_told() && !engine.has_writes() {
            return Standing::Synchronised;
        }
        Standing::Converged
    }

    fn deadline(&self, _: &Engine) -> Option<(Duration, &'static str)> {
        None
    }
}
