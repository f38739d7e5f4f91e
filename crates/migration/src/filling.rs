//! What follows a handover that left blocks behind: the volume works at its new owner, and what is missing there comes
//! after it (\[TPM\] §IV-A-3, \[XNBD\] §3.2).
//!
//! ```text
//!            fetched              stored             flushed, recorded
//!   missing ─────────► filling ──────────► present ────────────────────► present for good
//!      ▲  │ guest writes  │ failed            ▲
//!      │  └─► overwriting ┼───────────────────┘ its write has completed
//!      └──────────────────┴── failed
//! ```
//! The owner drives. Its former owner is the *reservoir*: unchanged and locked, it answers reads by address until it hears that
//! the volume is whole. A guest's read of what is missing *pulls* it ahead of everything else; the rest is fetched in the
//! background, most recently written first (the papers' push).
//!
//! A [`Filling`] works in units of 4 KiB. Below the align filter no guest's write covers a part of one, so nothing is
//! merged here. What is durable, and in which order, is decided here as well: a guest's write is answered when a daemon that
//! begins after this one was killed would know of it, and its flush when the store is flushed *and then* what became present is
//! recorded (design §5.6, hard case 7); the caller only does it.

mod background;
mod lateness;
mod log;
mod manifest;
mod noting;
mod recording;
mod requests;
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
use self::units::{bytes_of, covering, within};
use crate::pacing::{Pacing, PacingSettings};

pub use log::{LogEntry, LogFault, NO_START, Telling, UnitMap, encode_entry, header, replay};
pub use manifest::{Manifest, decode_runs, encode_runs, to_units};
pub use told::{Complete, NoPiece, Told};
pub use units::{UNIT, UNIT_BYTES, units_of};

/// A guest's request, named by the caller while it is in flight; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Something that was asked of the reservoir.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FetchId(pub u64);

/// Something that is noted for the next daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NoteId(pub u64);

/// A round of making durable what has become present.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordingId(pub u64);

/// What happened to a volume that is being filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillingEvent {
    /// A guest wants to read. It waits for [`FillingAction::Admit`] or [`FillingAction::Refuse`].
    ReadArrived {
        /// Its name.
        request: RequestId,
        /// The bytes, not empty.
        range: ByteRange,
    },
    /// A guest wants to change whole units. It waits for [`FillingAction::Admit`], and, once the change is made, for
    /// [`FillingAction::Written`].
    WriteArrived {
        /// Its name.
        request: RequestId,
        /// The bytes, not empty.
        range: ByteRange,
    },
    /// An admitted change has ended.
    WriteEnded {
        /// Which.
        request: RequestId,
        /// Whether it was made; one that failed may have been made in part.
        result: Result<(), StoreFault>,
    },
    /// The guest has gone that made a request which was not admitted.
    Withdrawn {
        /// Which.
        request: RequestId,
    },
    /// A guest wants everything that it was answered to be durable. It waits for [`FillingAction::Flushed`].
    FlushArrived {
        /// Its name.
        request: RequestId,
    },
    /// The reservoir has answered.
    Fetched {
        /// What.
        fetch: FetchId,
        /// Whether the bytes are here.
        result: Result<(), FetchFault>,
    },
    /// What was fetched has been written to the store.
    Stored {
        /// What.
        fetch: FetchId,
        /// Whether it was.
        result: Result<(), StoreFault>,
    },
    /// The store has been flushed for a recording.
    StoreFlushed {
        /// For which.
        recording: RecordingId,
        /// Whether everything completed before is durable.
        result: Result<(), StoreFault>,
    },
    /// A recording is durable, or not.
    Recorded {
        /// Which.
        recording: RecordingId,
        /// Whether it is.
        result: Result<(), StoreFault>,
    },
    /// The former host is lost, somebody says: nothing is fetched any more, and whoever reads what is missing is refused, and not
    /// held. It goes on being overwritten.
    MissingGivenUp,
    /// What nobody waits for is not fetched for the time being: the volume is on its way to where all of it is.
    Rest,
    /// It is fetched again.
    GoOn,
    /// Reads wait so long at most for a reservoir that does not answer, and are refused then; `None`: for however long.
    WaitsLimited {
        /// How long.
        to: Option<Duration>,
    },
    /// What was to be noted is, or is not.
    Noted {
        /// What.
        note: NoteId,
        /// Whether it is.
        result: Result<(), StoreFault>,
    },
}

/// What is to be done for a volume that is being filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FillingAction {
    /// Submit a guest's request to the store.
    Admit {
        /// Which.
        request: RequestId,
    },
    /// Answer a guest's change that was made.
    Written {
        /// Which.
        request: RequestId,
    },
    /// Note that guests have written these units: it has to outlast this daemon, not a loss of power.
    Note {
        /// For the answer.
        note: NoteId,
        /// The units.
        units: Vec<BlockRange>,
    },
    /// Fail a guest's read.
    Refuse {
        /// Which.
        request: RequestId,
        /// Why.
        why: Refusal,
    },
    /// Ask the reservoir for these bytes.
    Fetch {
        /// A name for the answer.
        fetch: FetchId,
        /// The bytes.
        range: ByteRange,
        /// Whether a guest waits for them.
        urgency: Urgency,
    },
    /// Write parts of what was fetched to the store; the rest of it is of no use any more.
    Store {
        /// What was fetched.
        fetch: FetchId,
        /// The parts, in order.
        parts: Vec<ByteRange>,
    },
    /// Flush the store.
    FlushStore {
        /// For the answer.
        recording: RecordingId,
        /// Who wants it: what a flush of ours fails by is owed to the guest.
        on_behalf: OnBehalf,
    },
    /// Record durably that these units are present: their bytes are durable.
    Record {
        /// For the answer.
        recording: RecordingId,
        /// The units.
        units: Vec<BlockRange>,
    },
    /// Answer a guest's flush.
    Flushed {
        /// Which.
        request: RequestId,
        /// With this.
        result: Result<(), StoreFault>,
    },
    /// Nothing is missing any more, durably.
    Whole,
}

/// Why a guest's read is failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The reservoir cannot read what it asks for, or is lost.
    Unreadable,
    /// The reservoir has not answered for as long as the read may wait. What it asks for is fetched all the same.
    Late,
}

/// Whether a guest waits for what is fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// One does: pulled.
    Urgent,
    /// Nobody does: what the papers call pushed.
    Background,
}

/// For whom a store is flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBehalf {
    /// For guests, who hear of it if it fails.
    Guests,
    /// For the filling alone.
    Filling,
}

/// The owner's store, or its data folder, did not take something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreFault;

/// Why something could not be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchFault {
    /// The reservoir cannot read it.
    Unreadable,
    /// Its host is not to be reached, or has not opened it yet: it is worth another try.
    Away,
}

/// How a volume is filled.
#[derive(Clone, Debug)]
pub struct FillingSettings {
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// How much is fetched at once in the background.
    pub pacing: PacingSettings,
}

/// Where a filling stands.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FillingProgress {
    /// Units that were missing at the handover.
    pub units_at_handover: u64,
    /// Units that are missing now.
    pub units_missing: u64,
    /// Units that a guest waited for.
    pub units_pulled: u64,
    /// Units that nobody waited for.
    pub units_pushed: u64,
    /// Units that were fetched and overwritten meanwhile.
    pub units_dropped: u64,
    /// Units that the guest overwrote before they were fetched.
    pub units_overwritten: u64,
    /// Units that the reservoir cannot read.
    pub units_unreadable: u64,
    /// Requests of guests that wait.
    pub requests_waiting: usize,
    /// Guests' reads that were refused because the reservoir did not answer.
    pub reads_late: u64,
    /// Units that they were refused for, and that have not come.
    pub units_owed: u64,
    /// Why nothing is fetched; `None` if something is, or need not be.
    pub waits_for: Option<&'static str>,
    /// Whether what is missing was given up.
    pub is_given_up: bool,
}

/// Fills one volume.
#[derive(Debug)]
pub struct Filling {
    settings: FillingSettings,
    /// Units that are not present.
    missing: LayeredBitmap,
    /// Of these, the ones that could be fetched: not asked for, not being overwritten, not unreadable.
    wanted: LayeredBitmap,
    unreadable: LayeredBitmap,
    /// Whether what is missing never comes.
    is_given_up: bool,
    /// Units that are to be fetched one by one, since something among them could not be read.
    suspect: LayeredBitmap,
    fetches: BTreeMap<FetchId, Fetch>,
    /// Changes under way that touch units that are missing, or would be after a restart, with what they touch.
    overwrites: BTreeMap<RequestId, BlockRange>,
    waiting: VecDeque<Waiting>,
    /// What reads in sequence have come to.
    streams: VecDeque<requests::Stream>,
    background: Background,
    lateness: Lateness,
    noting: Noting,
    recording: Recording,
    next: u64,
    is_whole_said: bool,
    progress: FillingProgress,
    actions: VecDeque<FillingAction>,
}

/// Something that was asked of the reservoir, until it is in the store.
#[derive(Debug)]
struct Fetch {
    units: BlockRange,
    urgency: Urgency,
    /// What of it is being written to the store; `None`: it has not arrived.
    storing: Option<Vec<BlockRange>>,
}

impl Filling {
    /// Makes the machine of a volume that lacks what is missing in `known`. Only [`Told::begin`] does: nothing passes by what a restart
    /// has found.
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
            background: Background::new(late, Pacing::new(settings.pacing.clone())),
            lateness: Lateness::new(units),
            noting: Noting::new(units),
            recording: Recording::new(volatile),
            next: 0,
            is_whole_said: false,
            progress: FillingProgress { units_at_handover: manifest.units, ..FillingProgress::default() },
            actions: VecDeque::new(),
            missing,
            settings,
        }
    }

    /// Takes what happened. An event that does not fit (an answer to something unknown) changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: FillingEvent) {
        match event {
            FillingEvent::ReadArrived { request, range } => self.read_arrived(now, request, covering(range)),
            FillingEvent::WriteArrived { request, range } => self.write_arrived(request, covering(range)),
            FillingEvent::WriteEnded { request, result } => self.write_ended(now, request, result),
            FillingEvent::Withdrawn { request } => self.withdrawn(request),
            FillingEvent::FlushArrived { request } => self.recording.flush_arrived(request),
            FillingEvent::Fetched { fetch, result } => self.fetched(now, fetch, result),
            FillingEvent::Stored { fetch, result } => self.stored(now, fetch, result),
            FillingEvent::StoreFlushed { recording, result } => self.store_flushed(now, recording, result),
            FillingEvent::Noted { note, result } => self.noted(now, note, result),
            FillingEvent::Recorded { recording, result } => self.recorded(now, recording, result),
            FillingEvent::MissingGivenUp => self.give_up_missing(),
            FillingEvent::Rest => self.background.rest(true),
            FillingEvent::GoOn => self.background.rest(false),
            FillingEvent::WaitsLimited { to } => self.lateness.limit(to),
        }
        self.advance(now);
    }

    fn give_up_missing(&mut self) {
        self.is_given_up = true;
        self.wanted.clear();
        // What was asked for and has not arrived is not waited for.
        self.fetches.retain(|_, fetch| fetch.storing.is_some());
        let runs: Vec<_> = self.missing.runs().collect();
        runs.into_iter().for_each(|run| self.refuse_readers(run));
    }

    /// What the reservoir lacks, in blocks of this size; `written`: what guests have written since the volume came, as far as that is
    /// known. What is missing here is there; a block of which only a part is missing is copied there as a whole.
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

    /// The first runs of what is missing.
    pub fn first_missing(&self, runs_max: usize) -> Vec<ByteRange> {
        self.missing.runs().take(runs_max).map(|run| self.bytes(run)).collect()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.advance(now);
    }

    /// The next thing to be done.
    pub fn poll_action(&mut self) -> Option<FillingAction> {
        self.actions.pop_front()
    }

    /// When `handle_timeout` is to be called, at the latest, and what is waited for.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        let background = self.background.deadline().filter(|_| !self.wanted.is_empty());
        let rereads = !self.unreadable.is_empty() && !self.is_given_up;
        let reread = self.background.reread_at().filter(|_| rereads);
        let reread = reread.map(|at| (at, "what the former host could not read"));
        background
            .into_iter()
            .chain(reread)
            .chain(self.noting.deadline())
            .chain(self.recording.deadline())
            .chain(self.lateness.deadline())
            .min_by_key(|(at, _)| *at)
    }

    /// Tells whether nothing is missing, and that is durable.
    pub fn is_whole(&self) -> bool {
        self.is_whole_said
    }

    /// The parts of a range that are missing, in order: what must not be taken for holes.
    pub fn missing_in(&self, range: ByteRange) -> Vec<ByteRange> {
        within(&self.missing, covering(range)).into_iter().map(|run| self.bytes(run)).collect()
    }

    /// Tells whether something of a range is present, and a restart would not know it: a change that is to be durable is
    /// answered only when that is recorded.
    pub fn is_unrecorded(&self, range: ByteRange) -> bool {
        self.recording.touches(covering(range))
    }

    /// How far it is.
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

    /// Goes on with everything that can go on.
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
        // What is still asked for is dropped when it comes.
        let is_storing = self.fetches.values().any(|fetch| fetch.storing.is_some());
        let is_filled = self.missing.is_empty() && !is_storing;
        if let Some(action) = self.recording.begin_if_due(now, is_filled) {
            self.actions.push_back(action);
        }
        if is_filled && self.recording.is_over() && self.noting.is_over() && !self.is_whole_said {
            self.is_whole_said = true;
            self.actions.push_back(FillingAction::Whole);
        }
    }

    fn ask(&mut self, units: BlockRange, urgency: Urgency) {
        self.wanted.remove(units);
        self.background.taken(units);
        let fetch = FetchId(self.next_number());
        self.fetches.insert(fetch, Fetch { units, urgency, storing: None });
        self.actions.push_back(FillingAction::Fetch { fetch, range: self.bytes(units), urgency });
    }

    fn next_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn bytes(&self, units: BlockRange) -> ByteRange {
        bytes_of(units, self.settings.size_bytes)
    }

    /// Units that are missing and that nobody is about to bring: they may be asked for.
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

    /// Units have become present, by a fill or by the guest.
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
