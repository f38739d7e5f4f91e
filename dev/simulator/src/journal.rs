//! A journal that is slow, fails, and tears when the daemon is killed or power is cut. It uses the real encoding and the rules of
//! the daemon's journal: one frame in flight; queued commits share a frame; a commit that contradicts the state is refused;
//! nothing is written behind a frame of unknown fate.
//!
//! ```text
//!   commit ──► queue ──► frame in flight ──► on the medium, acknowledged
//!                            │ killed, power cut: whole, cut off, garbled, or not there
//!                            │ fault: taken back (not written), or of unknown fate; then the journal is closed
//! ```

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use lane::LaneFuture;
use migration::journal::{Entry, Frames, HEADER, Inconsistent, Record, State, encode};
use migration::{CommitFault, Phase};

use crate::checker::journal::wrong_state;
use crate::faults::Fault;
use crate::random::Random;
use crate::world::World;

const LATENCY: Duration = Duration::from_micros(100);
/// Frames that take longer excuse a guest's wait.
const EXCUSED_AFTER: Duration = Duration::from_millis(2);
/// The pause before a failed commit is repeated; it excuses a guest's wait.
const REPEAT_PAUSE: Duration = Duration::from_millis(250);

pub(crate) struct SimJournal {
    me: Weak<Self>,
    world: Rc<World>,
    random: RefCell<Random>,
    wall: Box<dyn Fn() -> u64>,
    log: RefCell<Log>,
    changed: Box<dyn Fn(&SimJournal)>,
}

struct Log {
    /// Bytes of the file: the header, frames, and remains of a crash behind them.
    medium: Vec<u8>,
    position: usize,
    sequence: u64,
    queue: VecDeque<Request>,
    in_flight: Option<Frame>,
    acknowledged: State,
    /// The states that a restart may find instead: with the frame in flight, or one of unknown fate.
    possible: Vec<State>,
    /// Whether all writing has stopped until a restart.
    is_closed: bool,
    /// Separates answers to a dead daemon's frames from the living one's.
    incarnation: u64,
}

struct Request {
    records: Vec<Record>,
    slot: Rc<Slot>,
}

struct Frame {
    bytes: Vec<u8>,
    state: State,
    slots: Vec<Rc<Slot>>,
}

#[derive(Default)]
struct Slot {
    result: Cell<Option<Result<(), CommitFault>>>,
    waker: Cell<Option<Waker>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Written,
    TakenBack,
    /// The write and the wiping failed: it may be there.
    Unknown,
}

impl SimJournal {
    /// Makes a journal that holds `records`; `wall` returns the time of day in milliseconds since 1970.
    pub(crate) fn new(
        world: &Rc<World>,
        random: Random,
        records: Vec<Record>,
        wall: impl Fn() -> u64 + 'static,
        changed: impl Fn(&SimJournal) + 'static,
    ) -> Rc<Self> {
        let mut state = State::default();
        let entry = Entry { at_unix_ms: 0, records };
        if let Err(error) = state.apply(&entry) {
            world.violated("journal", || error.to_string());
        }
        let journal = Rc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            world: Rc::clone(world),
            random: RefCell::new(random),
            log: RefCell::new(Log {
                medium: HEADER.to_vec(),
                position: HEADER.len(),
                sequence: 0,
                queue: VecDeque::new(),
                in_flight: None,
                acknowledged: state.clone(),
                possible: Vec::new(),
                is_closed: false,
                incarnation: 0,
            }),
            wall: Box::new(wall),
            changed: Box::new(changed),
        });
        journal.begin_file(state);
        journal
    }

    pub(crate) fn commit(&self, records: Vec<Record>) -> LaneFuture<Result<(), CommitFault>> {
        let slot = Rc::<Slot>::default();
        self.log.borrow_mut().queue.push_back(Request { records, slot: Rc::clone(&slot) });
        self.write_next();
        Box::pin(poll_fn(move |context| match slot.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                slot.waker.set(Some(context.waker().clone()));
                Poll::Pending
            }
        }))
    }

    pub(crate) fn acknowledged(&self) -> State {
        self.log.borrow().acknowledged.clone()
    }

    pub(crate) fn look<T>(&self, look: impl FnOnce(&State, &[State]) -> T) -> T {
        let log = self.log.borrow();
        look(&log.acknowledged, &log.possible)
    }

    /// Returns the certain state: the one that a restart finds, if no frame is in flight.
    pub(crate) fn what_is_certain(&self) -> Option<State> {
        let is_settled = {
            let log = self.log.borrow();
            log.in_flight.is_none() && log.queue.is_empty() && !log.is_closed
        };
        is_settled.then(|| self.read())
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.log.borrow().is_closed
    }

    /// Handles a kill or a power cut: the frame in flight is whole, torn or missing. The state becomes the one that
    /// a restart will find.
    pub(crate) fn crash(&self) {
        self.tear();
        let found = self.read();
        let mut log = self.log.borrow_mut();
        if let Some(wrong) = wrong_state(&found, &log.acknowledged, &log.possible) {
            self.world.violated("journal", || wrong);
        }
        log.acknowledged = found;
        log.possible.clear();
    }

    fn tear(&self) {
        let mut log = self.log.borrow_mut();
        log.incarnation += 1;
        log.queue.clear();
        if let Some(frame) = log.in_flight.take() {
            let mut random = self.random.borrow_mut();
            let position = log.position;
            let mut bytes = frame.bytes;
            match random.below(4) {
                0 => bytes.clear(),
                1 => bytes.truncate(random.index(bytes.len())),
                2 => {
                    let start = random.index(bytes.len());
                    let end = start + random.index(bytes.len() - start);
                    bytes[start..=end].iter_mut().for_each(|byte| *byte ^= 1 | random.next() as u8);
                }
                _ => {}
            }
            log.write_at(position, &bytes);
        }
    }

    /// Reads and checks the journal as a starting daemon does, and begins a new file with its state.
    pub(crate) fn open(&self) -> State {
        let state = self.read();
        {
            let log = self.log.borrow();
            if let Some(wrong) = wrong_state(&state, &log.acknowledged, &log.possible) {
                self.world.violated("journal", || wrong);
            }
        }
        self.world.note("journal read", self.log.borrow().sequence, state.migrations.len() as u64);
        self.begin_file(state.clone());
        state
    }

    fn read(&self) -> State {
        let log = self.log.borrow();
        let mut state = State::default();
        match Frames::new(&log.medium) {
            Err(error) => self.world.violated("journal", || error.to_string()),
            Ok(frames) => {
                for entry in frames {
                    if let Err(error) = state.apply(&entry) {
                        self.world.violated("journal", || format!("a restart finds: {error}"));
                    }
                }
            }
        }
        state
    }

    fn begin_file(&self, state: State) {
        let mut log = self.log.borrow_mut();
        let mut medium = HEADER.to_vec();
        let entry = Entry { at_unix_ms: 0, records: state.snapshot() };
        if let Err(error) = encode(0, &entry, &mut medium) {
            self.world.violated("journal", || error.to_string());
        }
        (log.position, log.sequence, log.is_closed) = (medium.len(), 1, false);
        log.medium = medium;
        log.acknowledged = state;
        log.possible.clear();
        drop(log);
        (self.changed)(self);
    }

    fn write_next(&self) {
        let mut refused = Vec::new();
        let mut log = self.log.borrow_mut();
        if log.in_flight.is_some() {
            return;
        }
        let (mut state, mut records, mut slots) = (log.acknowledged.clone(), Vec::new(), Vec::new());
        let at_unix_ms = (self.wall)();
        while let Some(request) = log.queue.pop_front() {
            if log.is_closed {
                refused.push(request.slot);
                continue;
            }
            let mut next = state.clone();
            match next.apply(&Entry { at_unix_ms, records: request.records.clone() }) {
                Ok(()) => {
                    state = next;
                    records.extend(request.records);
                    slots.push(request.slot);
                }
                // The other one, an order or a handover, came first.
                Err(Inconsistent::Overtaken(_)) => refused.push(request.slot),
                Err(error) => {
                    let records = request.records;
                    self.world
                        .violated("journal", || format!("{records:?} contradicts the journal: {error}"));
                    refused.push(request.slot);
                }
            }
        }
        if !slots.is_empty() {
            let mut bytes = Vec::new();
            let names: Vec<_> = records.iter().map(name).collect();
            if let Err(error) = encode(log.sequence, &Entry { at_unix_ms, records }, &mut bytes) {
                self.world.violated("journal", || error.to_string());
            }
            log.possible = vec![state.clone()];
            log.in_flight = Some(Frame { bytes, state, slots });
            let incarnation = log.incarnation;
            drop(log);
            self.schedule(incarnation, &names);
            (self.changed)(self);
        } else {
            drop(log);
        }
        for slot in refused {
            self.excuse_repetition();
            slot.answer(Err(CommitFault::NotWritten));
        }
    }

    fn schedule(&self, incarnation: u64, records: &[&'static str]) {
        let mut random = self.random.borrow_mut();
        let mut latency = LATENCY / 5 + Duration::from_nanos(random.below(LATENCY.as_nanos() as u64 * 4 / 5));
        if self.world.strikes(Fault::JournalSlow) {
            self.world.struck(Fault::JournalSlow);
            latency = random.duration(Duration::from_millis(5), Duration::from_secs(3));
        }
        let fate = if self.world.strikes(Fault::JournalError) {
            if random.percent(70) { Fate::TakenBack } else { Fate::Unknown }
        } else {
            Fate::Written
        };
        self.world.say(|| format!("commit of {records:?} ends in {latency:?}: {fate:?}"));
        let me = Weak::clone(&self.me);
        // A slow commit may end in a later attempt: the fault meets the phase that ordered it.
        let (began, phase) = (self.world.now(), self.world.phase());
        self.world.clock.after(latency, move || {
            if let Some(journal) = me.upgrade() {
                journal.finish(incarnation, (began, phase), fate);
            }
        });
    }

    fn finish(&self, incarnation: u64, (began, phase): (Duration, Option<Phase>), fate: Fate) {
        let mut log = self.log.borrow_mut();
        if log.incarnation != incarnation {
            return;
        }
        let Some(frame) = log.in_flight.take() else { return };
        let now = self.world.now();
        if now - began > EXCUSED_AFTER {
            self.world.excuses.borrow_mut().add(began, now);
        }
        self.world.note("commit", frame.slots.len() as u64, fate as u64);
        let position = log.position;
        let result = match fate {
            Fate::Written => {
                log.write_at(position, &frame.bytes);
                log.position += frame.bytes.len();
                log.sequence += 1;
                log.acknowledged = frame.state;
                log.possible.clear();
                Ok(())
            }
            Fate::TakenBack => {
                self.world.struck_in(Fault::JournalError, phase);
                log.possible.clear();
                Err(CommitFault::NotWritten)
            }
            Fate::Unknown => {
                self.world.struck_in(Fault::JournalError, phase);
                if self.random.borrow_mut().percent(50) {
                    log.write_at(position, &frame.bytes);
                }
                log.is_closed = true;
                Err(CommitFault::Unknown)
            }
        };
        drop(log);
        if result.is_err() {
            self.excuse_repetition();
        }
        (self.changed)(self);
        frame.slots.iter().for_each(|slot| slot.answer(result));
        self.write_next();
    }

    fn excuse_repetition(&self) {
        let now = self.world.now();
        self.world.excuses.borrow_mut().add(now, now + REPEAT_PAUSE);
    }
}

impl Log {
    fn write_at(&mut self, position: usize, bytes: &[u8]) {
        let end = position + bytes.len();
        if self.medium.len() < end {
            self.medium.resize(end, 0);
        }
        self.medium[position..end].copy_from_slice(bytes);
    }
}

impl Slot {
    fn answer(&self, result: Result<(), CommitFault>) {
        self.result.set(Some(result));
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

fn name(record: &Record) -> &'static str {
    match record {
        Record::Snapshot(_) => "snapshot",
        Record::VolumeAdded(_) => "volume added",
        Record::VolumeRemoved { .. } => "volume removed",
        Record::MigrationStarted { .. } => "started",
        Record::TargetPrepared { .. } => "prepared",
        Record::AttemptAborted { .. } => "aborted",
        Record::Discarding { .. } => "discarding",
        Record::Released { .. } => "released",
        Record::Hollow { .. } => "hollow",
        Record::FillingKnown { .. } => "filling",
        Record::Filled { .. } => "filled",
        Record::MissingGivenUp { .. } => "missing given up",
        Record::Restored(_) => "restored",
        Record::Reinstated { .. } => "reinstated",
        Record::RestoredForgotten { .. } => "restored forgotten",
        Record::RestoredMore(_) => "more of restored",
        Record::DepartureConfirmed { .. } => "departure confirmed",
        Record::Owned { .. } => "owned",
        Record::HandedBack { .. } => "handed back",
        Record::MigrationEnded { .. } => "ended",
        Record::ResizeBegun { .. } => "resize begun",
        Record::Resized { .. } => "resized",
        Record::ReservationLifted { .. } => "fence lifted",
        Record::Promoted { .. } => "promoted",
        Record::MovedForgotten { .. } => "moved forgotten",
        Record::CancelOrdered { .. } => "cancel ordered",
        Record::GrewElsewhere { .. } => "grew elsewhere",
        Record::OriginKnown { .. } => "origin known",
        Record::ImageKnown { .. } => "image known",
        Record::ImageForgotten { .. } => "image forgotten",
        Record::AttachmentGiven { .. } => "attachment given",
        Record::AttachmentEnded { .. } => "attachment ended",
        Record::Attached(_) => "attached",
        Record::Detached { .. } => "detached",
        Record::SnapshotKnown { .. } => "snapshot known",
        Record::RevertBegun { .. } => "revert begun",
        Record::Reverted { .. } => "reverted",
    }
}
