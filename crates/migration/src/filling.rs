//! Filling of an incomplete volume after its handover: the volume works at its new owner, and the missing blocks follow
//! (\[TPM\] §IV-A-3, \[XNBD\] §3.2).
//!
//! ```text
//!            fetched              stored             flushed, recorded
//!   missing ─────────► filling ──────────► present ────────────────────► present for good
//!      ▲  │ guest writes  │ failed            ▲
//!      │  └─► overwriting ┼───────────────────┘ its write has completed
//!      └──────────────────┴── failed
//! ```
//! If a flush fails, filled units are missing again. Units that the guest has written are written again ([`rewriting`]).
//!
//! The owner drives the filling. Its former owner is the *reservoir*, whose image stays unchanged and locked. The reservoir
//! answers reads by address until it learns that the volume is complete. A guest's read of missing blocks *pulls* them before
//! everything else. The rest is fetched in the background, most recently written first (the papers' push).
//!
//! A [`Filling`] works in units of 4 KiB. The align filter is above it, so no guest's write covers part of a unit, and nothing
//! is merged here. This machine also decides what must be durable, and in which order. A guest's write is answered once a
//! daemon started after a kill would know of it. A flush is answered once the store is flushed *and then* the presence of the
//! new units is recorded (design §5.6, hard case 7). The caller carries this out.

mod background;
mod exchange;
mod lateness;
mod log;
mod manifest;
mod noting;
mod passing;
mod presence;
mod recording;
mod requests;
mod rewriting;
mod snapshot;
mod told;
mod units;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use chronicle::{BlockRange, BlockSize, ByteRange, LayeredBitmap};

use self::background::Background;
use self::lateness::Lateness;
use self::noting::Noting;
use self::recording::Recording;
use self::requests::Waiting;
use self::rewriting::Rewriting;
use self::units::{bytes_of, covering, within};
use crate::pacing::{Pacing, PacingSettings};

pub use exchange::{
    FetchFault, FetchId, FillingAction, FillingEvent, NoteId, OnBehalf, RecordingId, Refusal, RequestId,
    RewriteId, StoreFault, Urgency,
};
pub use log::{LogEntry, LogFault, NO_START, Packed, Telling, UnitMap, encode_entry, header, replay};
pub use manifest::{Manifest, decode_runs, encode_runs, to_units};
pub use presence::{PresenceFile, PresenceWrite};
pub use told::{Complete, NoPiece, Told};
pub use units::{UNIT, UNIT_BYTES, units_of};

/// The settings of one volume's filling.
#[derive(Clone, Debug)]
pub struct FillingSettings {
    /// The volume's size in bytes.
    pub size_bytes: u64,
    /// Limits how much is fetched at once in the background.
    pub pacing: PacingSettings,
}

/// The progress of one volume's filling, in units.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FillingProgress {
    /// The units that were missing at the handover.
    pub units_at_handover: u64,
    /// The units that are still missing.
    pub units_missing: u64,
    /// The units that a guest waited for.
    pub units_pulled: u64,
    /// The units fetched without a waiting guest.
    pub units_pushed: u64,
    /// The fetched units that a guest overwrote before they were stored.
    pub units_dropped: u64,
    /// The units that the guest overwrote before they were fetched.
    pub units_overwritten: u64,
    /// The units that the reservoir cannot read.
    pub units_unreadable: u64,
    /// The number of guests' requests that wait.
    pub requests_waiting: usize,
    /// The number of reads refused because the reservoir did not answer.
    pub reads_late: u64,
    /// The units of these refused reads that have not arrived yet.
    pub units_owed: u64,
    /// The reason why nothing is fetched; `None` if fetches run or are not needed.
    pub waits_for: Option<&'static str>,
    /// Whether the missing blocks were given up.
    pub is_given_up: bool,
}

/// The machine that fills one volume.
#[derive(Debug)]
pub struct Filling {
    settings: FillingSettings,
    missing: LayeredBitmap,
    /// The missing units that may be fetched: not requested, not being overwritten, not unreadable.
    wanted: LayeredBitmap,
    unreadable: LayeredBitmap,
    is_given_up: bool,
    /// Units to be fetched singly, because a run with them could not be read.
    suspect: LayeredBitmap,
    fetches: BTreeMap<FetchId, Fetch>,
    /// Changes under way, with their units, that touch units which are missing now or would be after a restart.
    overwrites: BTreeMap<RequestId, BlockRange>,
    waiting: VecDeque<Waiting>,
    streams: VecDeque<requests::Stream>,
    background: Background,
    lateness: Lateness,
    noting: Noting,
    recording: Recording,
    rewriting: Rewriting,
    next: u64,
    is_whole_said: bool,
    progress: FillingProgress,
    actions: VecDeque<FillingAction>,
}

/// A request to the reservoir, until its bytes are in the store.
#[derive(Debug)]
struct Fetch {
    units: BlockRange,
    urgency: Urgency,
    /// The parts being written to the store; `None` until the bytes have arrived.
    storing: Option<Vec<BlockRange>>,
    /// Whether a flush has failed while the bytes were being written, so that they may be lost.
    is_overtaken: bool,
}

impl Filling {
    /// Makes the machine of a volume that lacks the units in `known`. Called only by [`Told::begin`], so that the result of a
    /// restart is always considered.
    fn new(settings: FillingSettings, known: UnitMap) -> Self {
        let units = units_of(settings.size_bytes);
        let UnitMap { missing, late, volatile, manifest } = known;
        Self {
            wanted: missing.clone(),
            unreadable: LayeredBitmap::new(units),
            is_given_up: false,
            suspect: LayeredBitmap::new(units),
            fetches: BTreeMap::new(),
            overwrites: BTreeMap::new(),
            waiting: VecDeque::new(),
            streams: VecDeque::new(),
            background: Background::new(late, Pacing::new(&settings.pacing)),
            lateness: Lateness::new(units),
            noting: Noting::new(units),
            recording: Recording::new(units),
            rewriting: Rewriting::new(volatile),
            next: 0,
            is_whole_said: false,
            progress: FillingProgress { units_at_handover: manifest.units, ..FillingProgress::default() },
            actions: VecDeque::new(),
            missing,
            settings,
        }
    }

    /// Makes background fetches ask the pacer of the store's disk. Those that guests wait for never do.
    pub fn set_paced(&mut self, mover: pacer::Mover) {
        self.background.set_paced(mover);
    }

    /// Handles an event. An event that does not fit (an answer to an unknown number) changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: FillingEvent) {
        match event {
            FillingEvent::ReadArrived { request, range } => self.read_arrived(now, request, covering(range)),
            FillingEvent::WriteArrived { request, range } => self.write_arrived(request, covering(range)),
            FillingEvent::WriteEnded { request, result } => self.write_ended(now, request, result),
            FillingEvent::Withdrawn { request } => self.withdrawn(request),
            FillingEvent::FlushArrived { request } => self.recording.flush_arrived(request),
            FillingEvent::Fetched { fetch, result } => self.fetched(now, fetch, result),
            FillingEvent::Stored { fetch, result } => self.stored(now, fetch, result),
            FillingEvent::Passed { fetch, result } => self.passed(now, fetch, result),
            FillingEvent::StoreFlushed { recording, result } => self.store_flushed(now, recording, result),
            FillingEvent::Rewritten { rewrite, result } => self.rewritten(now, rewrite, result),
            FillingEvent::Noted { note, result } => self.noted(now, note, result),
            FillingEvent::Recorded { recording, result } => self.recorded(now, recording, result),
            FillingEvent::MissingGivenUp => self.give_up_missing(now),
            FillingEvent::Rest => self.background.rest(true),
            FillingEvent::GoOn => self.background.rest(false),
            FillingEvent::WaitsLimited { to } => self.lateness.limit(to),
        }
        self.advance(now);
    }

    fn give_up_missing(&mut self, now: Duration) {
        self.is_given_up = true;
        self.wanted.clear();
        // Fetches that have not arrived are dropped.
        let not_arrived = self.fetches.iter().filter(|(_, fetch)| fetch.storing.is_none());
        let not_arrived: Vec<_> = not_arrived.map(|(id, _)| *id).collect();
        not_arrived.into_iter().for_each(|id| drop(self.forget_fetch(now, id)));
        let runs: Vec<_> = self.missing.runs().collect();
        runs.into_iter().for_each(|run| self.refuse_readers(run));
    }

    /// Returns the blocks that the reservoir lacks. The reservoir has every block that is wholly missing here. `written` holds
    /// the blocks written by guests since the handover; `None` if they are not known.
    pub fn lacking_there(&self, written: Option<LayeredBitmap>, block_size: BlockSize) -> LayeredBitmap {
        let blocks = block_size.blocks_of(self.settings.size_bytes);
        let mut lacking = written.unwrap_or_else(|| {
            let mut all = LayeredBitmap::new(blocks);
            all.insert(BlockRange::new(0, blocks.0));
            all
        });
        for run in self.missing.runs().map(|run| self.bytes(run)) {
            let is_last = run.end() == self.settings.size_bytes;
            let end = if is_last { blocks.0 } else { run.end() / block_size.bytes() };
            let whole = BlockRange::new(run.offset.div_ceil(block_size.bytes()).min(end), end);
            if !whole.is_empty() {
                lacking.remove(whole);
            }
        }
        lacking
    }

    /// Returns the first runs of missing bytes.
    pub fn first_missing(&self, runs_max: usize) -> Vec<ByteRange> {
        self.missing.runs().take(runs_max).map(|run| self.bytes(run)).collect()
    }

    /// Handles everything that is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.advance(now);
    }

    /// Returns the next action for the caller.
    pub fn poll_action(&mut self) -> Option<FillingAction> {
        self.actions.pop_front()
    }

    /// Returns the latest time to call `handle_timeout`, and the reason for it.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        let background = self.background.deadline().filter(|_| !self.wanted.is_empty());
        let rereads = !self.unreadable.is_empty() && !self.is_given_up;
        let reread = self.background.reread_at().filter(|_| rereads);
        let reread = reread.map(|at| (at, "the former host to read unreadable blocks"));
        background
            .into_iter()
            .chain(reread)
            .chain(self.noting.deadline())
            .chain(self.recording.deadline())
            .chain(self.rewriting.deadline())
            .chain(self.lateness.deadline())
            .min_by_key(|(at, _)| *at)
    }

    /// Returns whether, durably, no block is missing.
    pub fn is_whole(&self) -> bool {
        self.is_whole_said
    }

    /// Returns the missing parts of a range, in order. These must not be taken for holes.
    pub fn missing_in(&self, range: ByteRange) -> Vec<ByteRange> {
        within(&self.missing, covering(range)).into_iter().map(|run| self.bytes(run)).collect()
    }

    /// Returns whether a restart would forget a present unit in the range. Durable changes wait until it is recorded.
    pub fn is_unrecorded(&self, range: ByteRange) -> bool {
        let units = covering(range);
        self.recording.touches(units) || self.rewriting.doubts(units)
    }

    /// Returns whether a failed flush may have lost one of these units. Such a unit must not be recorded as present.
    pub fn is_doubted(&self, units: BlockRange) -> bool {
        self.rewriting.doubts(units)
    }

    /// Returns the progress of the filling.
    pub fn progress(&self) -> FillingProgress {
        FillingProgress {
            units_missing: self.missing.count(),
            units_unreadable: self.unreadable.count(),
            requests_waiting: self.waiting.len(),
            units_owed: self.lateness.owed().count(),
            waits_for: match self.missing.is_empty() || self.is_given_up {
                true => None,
                false => self.background.waits_for(),
            },
            is_given_up: self.is_given_up,
            ..self.progress
        }
    }

    fn advance(&mut self, now: Duration) {
        self.background.end_pause(now);
        self.reread(now);
        self.serve_waiting();
        self.refuse_late(now);
        self.fetch_rest(now);
        let answers =
            self.noting.take_recorded().into_iter().map(|request| FillingAction::Written { request });
        self.actions.extend(answers);
        if let Some(action) = self.noting.begin_if_due(now) {
            self.actions.push_back(action);
        }
        self.rewrite_if_due(now);
        // Requested fetches are dropped on arrival.
        let is_storing = self.fetches.values().any(|fetch| fetch.storing.is_some());
        let is_filled = self.missing.is_empty() && !is_storing;
        if let Some(action) = self.recording.begin_if_due(now, is_filled, self.rewriting.may_flush()) {
            self.actions.push_back(action);
        }
        let is_recorded = self.recording.is_over() && self.rewriting.is_over();
        if is_filled && is_recorded && self.noting.is_over() && !self.is_whole_said {
            self.is_whole_said = true;
            self.background.set_paced(pacer::Mover::default());
            self.actions.push_back(FillingAction::Whole);
        }
    }

    fn ask(&mut self, units: BlockRange, urgency: Urgency) {
        self.wanted.remove(units);
        self.background.taken(units);
        let fetch = FetchId(self.next_number());
        self.fetches.insert(fetch, Fetch { units, urgency, storing: None, is_overtaken: false });
        self.actions.push_back(FillingAction::Fetch { fetch, range: self.bytes(units), urgency });
    }

    fn forget_fetch(&mut self, now: Duration, id: FetchId) -> Option<Fetch> {
        let fetch = self.fetches.remove(&id)?;
        if fetch.urgency == Urgency::Background {
            self.background.ended(now, fetch.units.len() * UNIT_BYTES);
        }
        Some(fetch)
    }

    fn next_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn bytes(&self, units: BlockRange) -> ByteRange {
        bytes_of(units, self.settings.size_bytes)
    }

    /// Allows fetches of the missing units that no request or write will provide.
    fn want(&mut self, units: BlockRange) {
        for run in within(&self.missing, units) {
            let mut free = vec![run];
            let asked = self.fetches.values().map(|fetch| fetch.units);
            for busy in asked.chain(self.overwrites.values().copied()) {
                free = free.into_iter().flat_map(|run| units::without(run, busy)).collect();
            }
            for run in free {
                for run in units::within_complement(&self.unreadable, run) {
                    self.wanted.insert(run);
                }
            }
        }
    }

    /// Notes that units have become present, by a fill or by the guest. Returns how many were missing.
    fn become_present(&mut self, units: BlockRange) -> u64 {
        let became = within(&self.missing, units);
        let count = became.iter().map(BlockRange::len).sum();
        for run in became {
            self.recording.present(run);
            self.noting.present(run);
        }
        self.missing.remove(units);
        self.wanted.remove(units);
        self.unreadable.remove(units);
        self.background.taken(units);
        self.lateness.settled(units);
        count
    }

    fn unreadable_now(&mut self, now: Duration, units: BlockRange) {
        self.background.is_unreadable(now);
        self.refuse_readers(units);
    }

    fn refuse_readers(&mut self, units: BlockRange) {
        self.unreadable.insert(units);
        self.lateness.settled(units);
        let refused: BTreeSet<_> = self.waiting.iter().filter_map(|waiting| waiting.read_of(units)).collect();
        self.waiting.retain(|waiting| !refused.contains(&waiting.request()));
        self.actions.extend(
            refused.into_iter().map(|request| FillingAction::Refuse { request, why: Refusal::Unreadable }),
        );
    }
}
