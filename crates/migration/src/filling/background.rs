//! The background fetches: most recently written units first, as many at once as the link needs, within the bandwidth limit.

use std::time::Duration;

use chronicle::{BlockIndex, BlockRange, LayeredBitmap};

use super::units::UNIT_BYTES;
use super::{Filling, Urgency};
use crate::pacing::Pacing;
use crate::strategy::{BANDWIDTH_LIMIT, GUESTS_FIRST};

const AWAY_PAUSE: Duration = Duration::from_millis(200);
/// The pause before a failed store is tried again; it doubles up to `STORE_PAUSE_MAX`.
const STORE_PAUSE: Duration = Duration::from_millis(100);
const STORE_PAUSE_MAX: Duration = Duration::from_secs(5);
/// The pause before unreadable bytes are requested again: the disk may have recovered.
const REREAD_PAUSE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Background {
    /// The most recently written units, which are fetched first.
    late: LayeredBitmap,
    cursor: BlockIndex,
    pacing: Pacing,
    /// Asks the pacer of the store's disk.
    paced: pacer::Mover,
    /// When a limit permits the next piece, and which; `None` if none holds it back.
    tokens_at: Option<(Duration, &'static str)>,
    /// The end of the current pause, and its reason.
    pause: Option<(Duration, Pause)>,
    store_pause: Duration,
    /// Whether the store has taken nothing since its last failure.
    store_is_failing: bool,
    reread_at: Option<Duration>,
    /// Whether the background fetches are paused by an event.
    rests: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pause {
    ReservoirAway,
    StoreFails,
}

impl Background {
    pub(super) fn new(late: LayeredBitmap, pacing: Pacing) -> Self {
        Self {
            late,
            cursor: BlockIndex(0),
            pacing,
            paced: pacer::Mover::default(),
            tokens_at: None,
            pause: None,
            store_pause: STORE_PAUSE,
            store_is_failing: false,
            reread_at: None,
            rests: false,
        }
    }

    pub(super) fn set_paced(&mut self, mover: pacer::Mover) {
        self.paced = mover;
    }

    /// Notes that a piece is stored, or never will be.
    pub(super) fn ended(&mut self, now: Duration, bytes: u64) {
        self.paced.ended(now, bytes);
    }

    pub(super) fn rest(&mut self, rests: bool) {
        match rests {
            true => self.paced.rest(),
            false => self.paced.resume(),
        }
        self.rests = rests;
        self.tokens_at = None;
    }

    /// Notes that these units are requested or present.
    pub(super) fn taken(&mut self, units: BlockRange) {
        self.late.remove(units);
    }

    pub(super) fn reservoir_is_away(&mut self, now: Duration) {
        self.pause = Some((now + AWAY_PAUSE, Pause::ReservoirAway));
    }

    pub(super) fn reservoir_answers(&mut self) {
        if matches!(self.pause, Some((_, Pause::ReservoirAway))) {
            self.pause = None;
        }
    }

    /// Returns whether a request to the reservoir would be useless at this time.
    pub(super) fn is_pausing(&self) -> bool {
        self.pause.is_some()
    }

    /// Returns whether the reservoir was away a moment ago.
    pub(super) fn waits_for_reservoir(&self) -> bool {
        matches!(self.pause, Some((_, Pause::ReservoirAway)))
    }

    pub(super) fn store_is_failing(&self) -> bool {
        self.store_is_failing
    }

    pub(super) fn store_fails(&mut self, now: Duration) {
        self.pause = Some((now + self.store_pause, Pause::StoreFails));
        self.store_pause = (self.store_pause * 2).min(STORE_PAUSE_MAX);
        self.store_is_failing = true;
    }

    pub(super) fn store_takes(&mut self) {
        self.store_pause = STORE_PAUSE;
        self.store_is_failing = false;
    }

    pub(super) fn end_pause(&mut self, now: Duration) {
        self.pause = self.pause.filter(|(until, _)| now < *until);
    }

    pub(super) fn is_unreadable(&mut self, now: Duration) {
        self.reread_at.get_or_insert(now + REREAD_PAUSE);
    }

    pub(super) fn reread_at(&self) -> Option<Duration> {
        self.reread_at
    }

    pub(super) fn deadline(&self) -> Option<(Duration, &'static str)> {
        match (self.pause, self.tokens_at) {
            (Some((until, pause)), _) => Some((until, pause.reason())),
            (None, tokens_at) => tokens_at,
        }
    }

    pub(super) fn waits_for(&self) -> Option<&'static str> {
        self.pause.map(|(_, pause)| pause.reason())
    }
}

impl Pause {
    fn reason(self) -> &'static str {
        match self {
            Self::ReservoirAway => "the host that has the missing blocks",
            Self::StoreFails => "the store to write fetched blocks",
        }
    }
}

impl Filling {
    pub(super) fn reread(&mut self, now: Duration) {
        if self.is_given_up || self.background.reread_at.is_none_or(|at| now < at) {
            return;
        }
        self.background.reread_at = None;
        let runs: Vec<_> = self.unreadable.runs().collect();
        self.unreadable.clear();
        runs.into_iter().for_each(|run| self.want(run));
    }

    pub(super) fn fetch_rest(&mut self, now: Duration) {
        self.background.tokens_at = None;
        if self.background.pause.is_some() || self.background.rests {
            return;
        }
        let pacing = self.settings.pacing.clone();
        let of_disk = self.background.paced.chunk_bytes_max(now).unwrap_or(u64::MAX);
        let units_max = (pacing.chunk_bytes.min(of_disk) / UNIT_BYTES).max(1);
        while self.fetches.len() < pacing.depth && !self.wanted.is_empty() {
            let start = self.background.pacing.next_start(now);
            if start > now {
                self.background.tokens_at = Some((start, BANDWIDTH_LIMIT));
                return;
            }
            let start = self.background.paced.next_start(now, units_max * UNIT_BYTES);
            if start > now {
                self.background.tokens_at = Some((start, GUESTS_FIRST));
                return;
            }
            let Some(run) = self.next_run(units_max) else { return };
            let Some(piece) = self.pieces(run, units_max).first().copied() else { return };
            self.background.pacing.spend(now, piece.len() * UNIT_BYTES);
            self.background.paced.began(now, piece.len() * UNIT_BYTES);
            self.ask(piece, Urgency::Background);
        }
    }

    /// Returns the most recently written wanted units, then the others in a cycle.
    fn next_run(&mut self, units_max: u64) -> Option<BlockRange> {
        if let Some(late) = self.background.late.next_run(BlockIndex(0), units_max) {
            let wanted = self.wanted.next_run(late.start, late.len());
            match wanted.map(|run| run.intersect(&late)).filter(|run| !run.is_empty()) {
                Some(run) => return Some(run),
                // Another request provides these units.
                None => {
                    self.background.late.remove(late);
                    return self.next_run(units_max);
                }
            }
        }
        let run = self
            .wanted
            .next_run(self.background.cursor, units_max)
            .or_else(|| self.wanted.next_run(BlockIndex(0), units_max))?;
        self.background.cursor = run.end;
        Some(run)
    }
}
