//! Random guests, faults and power cuts for a volume that is being filled, against a model of the promises. A read sees the
//! last answered write or one under way. After a power cut the flushed data is there, or later data. A failed flush loses data, which
//! reads see until the power is cut.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "filling/model.rs"]
mod model;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use chronicle::{BlockRange, ByteRange, LayeredBitmap};
use migration::PacingSettings;
use migration::filling::{
    FetchFault, FetchId, Filling, FillingAction, FillingEvent, FillingSettings, LogEntry, Manifest, NO_START,
    NoteId, OnBehalf, RecordingId, Refusal, RequestId, RewriteId, StoreFault, Telling, Told, UNIT_BYTES,
    UnitMap, encode_entry, header, replay, units_of,
};
use model::{Cell, Promise, Random, UNITS};

const SIZE: u64 = UNITS * UNIT_BYTES;
const WHOSE: [u8; 32] = [7; 32];

/// The limit of reads' waits, if there is one: most reads stay below it.
const WAIT_MAX: Duration = Duration::from_millis(600);

fn boot(number: u8) -> [u8; 16] {
    [number; 16]
}

struct World {
    random: Random,
    now: Duration,
    filling: Filling,
    store: Vec<Cell>,
    reservoir: Vec<u64>,
    log: Vec<u8>,
    log_durable: usize,
    sequence: u64,
    promises: Vec<Promise>,
    next_request: u64,
    next_version: u64,
    reads: BTreeMap<RequestId, BlockRange>,
    /// The units of writes that were answered since each read arrived.
    answered_since: BTreeMap<RequestId, BTreeSet<u64>>,
    /// The store's content when each read was admitted.
    found: BTreeMap<RequestId, Vec<u64>>,
    writes: BTreeMap<RequestId, (BlockRange, u64)>,
    /// The last part has the units that have passed by the store.
    admitted_reads: Vec<(RequestId, BlockRange, Vec<BlockRange>)>,
    passing: Vec<(FetchId, Vec<BlockRange>)>,
    passed: Vec<(FetchId, Vec<BlockRange>)>,
    admitted_writes: Vec<RequestId>,
    flushes: BTreeMap<RequestId, Vec<(BTreeSet<u64>, BTreeSet<u64>)>>,
    fetches: Vec<(FetchId, BlockRange)>,
    stores: Vec<(FetchId, Vec<ByteRange>)>,
    /// Flushes of the store, with what it had when they began.
    store_flushes: Vec<(RecordingId, OnBehalf, Vec<u64>)>,
    /// Whether guests have yet to learn of a failed flush: their next one fails, and ours fail until then.
    owes_failure: bool,
    recordings: Vec<(RecordingId, Vec<BlockRange>)>,
    /// Rewrites under way, with the versions that were read back.
    rewrites: Vec<(RewriteId, BlockRange, Vec<u64>)>,
    notes: Vec<(NoteId, Vec<BlockRange>)>,
    made: BTreeMap<RequestId, (BlockRange, u64)>,
    boot: u8,
    /// Whether another machine keeps the store, and may restart while the host runs.
    is_far: bool,
    whole: bool,
    reads_checked: u64,
    /// The limit of reads' waits for the reservoir.
    wait_max: Option<Duration>,
    reads_refused: u64,
    reads_passed: u64,
}

fn units(range: ByteRange) -> BlockRange {
    BlockRange::new(range.offset / UNIT_BYTES, range.end().div_ceil(UNIT_BYTES))
}

fn bytes(units: BlockRange) -> ByteRange {
    ByteRange::new(units.start.0 * UNIT_BYTES, units.len() * UNIT_BYTES)
}

fn settings() -> FillingSettings {
    let pacing = PacingSettings { depth: 3, chunk_bytes: 4 * UNIT_BYTES, bytes_per_second: None };
    FillingSettings { size_bytes: SIZE, pacing }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut missing = LayeredBitmap::new(units_of(SIZE));
        for _ in 0..12 {
            missing.insert(random.range());
        }
        let manifest = Manifest::of(&missing);
        let mut log = header(SIZE, WHOSE);
        let entry = LogEntry::Missing { telling: Telling::Everything, runs: missing.runs().collect() };
        assert!(encode_entry(0, &entry, &mut log));
        let version = |unit: u64| 1000 + unit;
        // Present units were copied. For missing ones the store has something else.
        let is_missing = |unit: u64| missing.contains(chronicle::BlockIndex(unit));
        let cell = |unit| {
            if is_missing(unit) {
                Cell::default()
            } else {
                Cell { volatile: version(unit), durable: version(unit), is_lost: false }
            }
        };
        let promise = |unit| Promise {
            answered: [version(unit)].into(),
            flushed: [version(unit)].into(),
            since: BTreeSet::new(),
            doubted: BTreeSet::new(),
        };
        let empty = LayeredBitmap::new(units_of(SIZE));
        let presence = UnitMap { missing: missing.clone(), late: empty.clone(), volatile: empty, manifest };
        Self {
            random,
            now: Duration::ZERO,
            filling: Told::new(SIZE, Some(presence)).begin(settings()),
            store: (0..UNITS).map(cell).collect(),
            reservoir: (0..UNITS).map(version).collect(),
            log_durable: log.len(),
            log,
            sequence: 1,
            promises: (0..UNITS).map(promise).collect(),
            next_request: 0,
            next_version: 100_000,
            reads: BTreeMap::new(),
            answered_since: BTreeMap::new(),
            found: BTreeMap::new(),
            writes: BTreeMap::new(),
            admitted_reads: Vec::new(),
            passing: Vec::new(),
            passed: Vec::new(),
            reads_passed: 0,
            admitted_writes: Vec::new(),
            flushes: BTreeMap::new(),
            fetches: Vec::new(),
            stores: Vec::new(),
            store_flushes: Vec::new(),
            owes_failure: false,
            recordings: Vec::new(),
            rewrites: Vec::new(),
            notes: Vec::new(),
            made: BTreeMap::new(),
            boot: 0,
            is_far: seed.is_multiple_of(3),
            whole: false,
            reads_checked: 0,
            wait_max: seed.is_multiple_of(3).then_some(WAIT_MAX),
            reads_refused: 0,
        }
    }

    fn event(&mut self, event: FillingEvent) {
        self.filling.handle_event(self.now, event);
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(action) = self.filling.poll_action() {
            match action {
                FillingAction::Admit { request } => {
                    if let Some(range) = self.reads.get(&request) {
                        self.admitted_reads.push((request, *range, Vec::new()));
                        self.found.insert(request, self.store.iter().map(|cell| cell.volatile).collect());
                    } else {
                        self.admitted_writes.push(request);
                    }
                }
                FillingAction::AdmitWith { request, fetch } => {
                    let at = self.passed.iter().position(|(passed, _)| *passed == fetch).unwrap();
                    let (_, parts) = self.passed.swap_remove(at);
                    self.admitted_reads.push((request, self.reads[&request], parts));
                    self.reads_passed += 1;
                }
                FillingAction::PassBy { fetch, parts } => {
                    self.passing.push((fetch, parts.into_iter().map(units).collect()));
                }
                FillingAction::Written { request } => {
                    if let Some((range, version)) = self.made.remove(&request) {
                        for unit in range.iter() {
                            self.promises[unit.0 as usize].answered = [version].into();
                            self.answered_since.values_mut().for_each(|since| since.extend([unit.0]));
                        }
                    }
                }
                FillingAction::Note { note, units } => self.notes.push((note, units)),
                FillingAction::Refuse { request, why } => {
                    assert_eq!(why, Refusal::Late, "nothing is unreadable");
                    assert!(self.wait_max.is_some(), "reads wait, for however long");
                    self.reads.remove(&request);
                    self.reads_refused += 1;
                }
                FillingAction::Fetch { fetch, range, .. } => self.fetches.push((fetch, units(range))),
                FillingAction::Store { fetch, parts } => self.stores.push((fetch, parts)),
                FillingAction::FlushStore { recording, on_behalf } => {
                    let volatile = self.store.iter().map(|cell| cell.volatile).collect();
                    self.store_flushes.push((recording, on_behalf, volatile));
                }
                FillingAction::Rewrite { rewrite, range } => {
                    let range = units(range);
                    let read = range.iter().map(|unit| self.store[unit.0 as usize].volatile).collect();
                    self.rewrites.push((rewrite, range, read));
                }
                FillingAction::Record { recording, units } => self.recordings.push((recording, units)),
                FillingAction::Flushed { request, result } => {
                    let Some(asked) = self.flushes.remove(&request) else { continue };
                    for (promise, (answered, since)) in self.promises.iter_mut().zip(asked) {
                        if result.is_err() {
                            promise.doubted.extend(promise.answered.union(&promise.since));
                        } else if promise.doubted.is_disjoint(&answered) {
                            promise.flushed = answered;
                            promise.since = promise.since.difference(&since).copied().collect();
                        }
                    }
                }
                FillingAction::Whole => self.whole = true,
            }
        }
    }

    fn request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }

    fn step(&mut self) {
        // Repeated, because of restarts.
        self.event(FillingEvent::WaitsLimited { to: self.wait_max });
        self.now += Duration::from_millis(self.random.below(120));
        match self.random.below(100) {
            0..=17 => {
                let (request, range) = (self.request(), self.random.range());
                self.reads.insert(request, range);
                self.answered_since.insert(request, BTreeSet::new());
                self.event(FillingEvent::ReadArrived { request, range: bytes(range) });
            }
            18..=35 => self.write(),
            36..=41 => self.flush(),
            42 if self.is_far && self.random.percent(50) => self.both_start_again(),
            42 => self.power_cut(),
            43..=44 => self.kill(),
            _ => self.complete(),
        }
        if self.filling.poll_timeout().is_some_and(|(at, _)| at <= self.now) {
            self.filling.handle_timeout(self.now);
            self.drain();
        }
    }

    /// Returns whether a write to the unit was answered while the read was under way.
    fn raced(&self, read: RequestId, unit: u64) -> bool {
        self.answered_since.get(&read).is_some_and(|since| since.contains(&unit))
    }

    fn flush(&mut self) {
        let request = self.request();
        let asked = self.promises.iter().map(|promise| (promise.answered.clone(), promise.since.clone()));
        self.flushes.insert(request, asked.collect());
        self.event(FillingEvent::FlushArrived { request });
    }

    fn write(&mut self) {
        let range = self.random.range();
        // In the product, claims keep overlapping changes apart.
        let busy = self.writes.values().chain(self.made.values());
        if busy.into_iter().any(|(busy, _)| busy.overlaps(&range)) {
            return;
        }
        let request = self.request();
        self.next_version += 1;
        let version = self.next_version;
        for unit in range.iter() {
            let promise = &mut self.promises[unit.0 as usize];
            // From here on the version may be seen, and may survive.
            promise.answered.insert(version);
            promise.since.insert(version);
        }
        self.writes.insert(request, (range, version));
        self.event(FillingEvent::WriteArrived { request, range: bytes(range) });
    }

    fn complete(&mut self) {
        let faulty = self.random.percent(8);
        match self.random.below(9) {
            0 if !self.admitted_reads.is_empty() => {
                let at = self.random.below(self.admitted_reads.len() as u64) as usize;
                let (request, range, passed) = self.admitted_reads.swap_remove(at);
                self.reads.remove(&request);
                for unit in range.iter() {
                    let has_passed =
                        passed.iter().any(|part| part.overlaps(&BlockRange::new(unit.0, unit.0 + 1)));
                    let seen = match has_passed {
                        true => self.reservoir[unit.0 as usize],
                        false => self.store[unit.0 as usize].volatile,
                    };
                    let promise = &self.promises[unit.0 as usize];
                    // A write that was answered while the read was under way may be seen or not.
                    let raced = has_passed && self.raced(request, unit.0);
                    assert!(
                        raced || promise.answered.contains(&seen),
                        "unit {unit} read {seen}, promised {:?}",
                        promise.answered
                    );
                    let is_found =
                        self.found.get(&request).is_some_and(|found| found[unit.0 as usize] == seen);
                    if is_found {
                        // A version that a read has seen stays while the host runs.
                        self.promises[unit.0 as usize].answered.retain(|version| *version >= seen);
                        self.answered_since.values_mut().for_each(|since| since.extend([unit.0]));
                    }
                    self.reads_checked += 1;
                }
                self.answered_since.remove(&request);
                self.found.remove(&request);
            }
            1 if !self.admitted_writes.is_empty() => {
                let at = self.random.below(self.admitted_writes.len() as u64) as usize;
                let request = self.admitted_writes.swap_remove(at);
                let (range, version) = self.writes.remove(&request).unwrap();
                for unit in range.iter() {
                    if !faulty {
                        self.store[unit.0 as usize].write(version);
                    }
                }
                if !faulty {
                    self.made.insert(request, (range, version));
                }
                let result = if faulty { Err(StoreFault) } else { Ok(()) };
                self.event(FillingEvent::WriteEnded { request, result });
            }
            2 if !self.fetches.is_empty() => {
                let at = self.random.below(self.fetches.len() as u64) as usize;
                let (fetch, _) = self.fetches.swap_remove(at);
                let result = if faulty { Err(FetchFault::Away) } else { Ok(()) };
                self.event(FillingEvent::Fetched { fetch, result });
            }
            3 if !self.stores.is_empty() => {
                let at = self.random.below(self.stores.len() as u64) as usize;
                let (fetch, parts) = self.stores.swap_remove(at);
                for unit in parts.into_iter().flat_map(|part| units(part).iter()) {
                    // A failed write may have been made.
                    if !faulty || self.random.percent(50) {
                        self.store[unit.0 as usize].write(self.reservoir[unit.0 as usize]);
                    }
                }
                let result = if faulty { Err(StoreFault) } else { Ok(()) };
                self.event(FillingEvent::Stored { fetch, result });
            }
            4 if !self.store_flushes.is_empty() => {
                let (recording, on_behalf, volatile) = self.store_flushes.remove(0);
                let is_owed = self.owes_failure;
                match (on_behalf, is_owed, faulty) {
                    (OnBehalf::Filling, true, _) => {}
                    (_, _, false) => self.store.iter_mut().for_each(Cell::flush),
                    (_, _, true) => {
                        for (cell, version) in self.store.iter_mut().zip(volatile) {
                            cell.is_lost |= cell.volatile == version && cell.durable != version;
                        }
                    }
                }
                self.owes_failure = on_behalf == OnBehalf::Filling && (is_owed || faulty);
                let result = if is_owed || faulty { Err(StoreFault) } else { Ok(()) };
                self.event(FillingEvent::StoreFlushed { recording, result });
            }
            5 if !self.recordings.is_empty() => {
                let (recording, runs) = self.recordings.remove(0);
                if !faulty {
                    assert!(encode_entry(self.sequence, &LogEntry::Present { runs }, &mut self.log));
                    self.sequence += 1;
                    self.log_durable = self.log.len();
                }
                let result = if faulty { Err(StoreFault) } else { Ok(()) };
                self.event(FillingEvent::Recorded { recording, result });
            }
            8 if !self.rewrites.is_empty() => {
                let (rewrite, range, read) = self.rewrites.remove(0);
                for (unit, version) in range.iter().zip(read) {
                    if !faulty || self.random.percent(50) {
                        self.store[unit.0 as usize].write(version);
                    }
                }
                let result = if faulty { Err(StoreFault) } else { Ok(()) };
                self.event(FillingEvent::Rewritten { rewrite, result });
            }
            7 if !self.passing.is_empty() => {
                let at = self.random.below(self.passing.len() as u64) as usize;
                let (fetch, parts) = self.passing.swap_remove(at);
                let result = if faulty { Err(FetchFault::Away) } else { Ok(()) };
                self.passed.push((fetch, parts));
                self.event(FillingEvent::Passed { fetch, result });
                self.passed.retain(|(passed, _)| *passed != fetch);
            }
            6 if !self.notes.is_empty() => {
                let (note, runs) = self.notes.remove(0);
                let is_noted = !faulty && self.note(runs);
                let result = if is_noted { Ok(()) } else { Err(StoreFault) };
                self.event(FillingEvent::Noted { note, result });
            }
            _ => {}
        }
    }

    /// Returns the start of the host with which the presence file is read.
    fn start(&self) -> [u8; 16] {
        if self.is_far { NO_START } else { boot(self.boot) }
    }

    fn note(&mut self, runs: Vec<BlockRange>) -> bool {
        if self.is_far {
            if self.owes_failure || runs.iter().any(|run| self.filling.is_doubted(*run)) {
                return false;
            }
            // Mere notes would not be trusted.
            self.store.iter_mut().for_each(Cell::flush);
            assert!(encode_entry(self.sequence, &LogEntry::Present { runs }, &mut self.log));
            self.sequence += 1;
            self.log_durable = self.log.len();
            return true;
        }
        let entry = LogEntry::Noted { boot: boot(self.boot), runs };
        assert!(encode_entry(self.sequence, &entry, &mut self.log));
        self.sequence += 1;
        true
    }

    /// Kills the daemon: requests to the store land or not, and answered ones stay.
    fn kill(&mut self) {
        for (range, version) in std::mem::take(&mut self.writes).into_values() {
            for unit in range.iter().filter(|_| self.random.percent(50)).collect::<Vec<_>>() {
                self.store[unit.0 as usize].write(version);
            }
        }
        for (_, range, read) in std::mem::take(&mut self.rewrites) {
            for (unit, version) in range.iter().zip(read) {
                if self.random.percent(50) {
                    self.store[unit.0 as usize].write(version);
                }
            }
        }
        for (_, parts) in std::mem::take(&mut self.stores) {
            for unit in parts.into_iter().flat_map(|part| units(part).iter()) {
                if self.random.percent(50) {
                    self.store[unit.0 as usize].write(self.reservoir[unit.0 as usize]);
                }
            }
        }
        if let Some((_, runs)) = self.notes.pop().filter(|_| self.random.percent(50)) {
            self.note(runs);
        }
        if self.owes_failure {
            // The knowledge of the loss ends with the daemon (`docs/failure-model.md`): nothing is lost then.
            self.store.iter_mut().for_each(|cell| cell.is_lost = false);
        }
        self.restart();
    }

    /// Cuts the power: each volatile unit is lost or not, and the presence file ends at or behind its durable part.
    fn power_cut(&mut self) {
        self.lose_what_is_volatile();
        self.boot += 1;
        // Mere notes may be there or not.
        if self.random.percent(70) {
            self.log.truncate(self.log_durable);
        }
        self.restart();
    }

    /// Restarts the store's machine and the daemon, while the host runs on.
    fn both_start_again(&mut self) {
        self.lose_what_is_volatile();
        self.restart();
    }

    fn lose_what_is_volatile(&mut self) {
        for cell in &mut self.store {
            if cell.is_lost || self.random.percent(50) {
                cell.volatile = cell.durable;
            }
            *cell = Cell { durable: cell.volatile, is_lost: false, ..*cell };
        }
        for promise in &mut self.promises {
            let survives: BTreeSet<u64> =
                promise.flushed.iter().chain(&promise.since).chain(&promise.answered).copied().collect();
            let (since, doubted) = (BTreeSet::new(), BTreeSet::new());
            *promise = Promise { answered: survives.clone(), flushed: survives, since, doubted };
        }
    }

    fn restart(&mut self) {
        if self.random.percent(50) {
            self.log.extend_from_slice(&[0x5a; 11]);
        }
        let (presence, position, sequence) = replay(&self.log, SIZE, WHOSE, self.start()).unwrap();
        self.log.truncate(position);
        self.sequence = sequence;
        self.filling = Told::new(SIZE, Some(presence)).begin(settings());
        self.reads.clear();
        self.writes.clear();
        self.admitted_reads.clear();
        self.passing.clear();
        self.passed.clear();
        self.answered_since.clear();
        self.found.clear();
        self.admitted_writes.clear();
        self.flushes.clear();
        self.fetches.clear();
        self.stores.clear();
        self.store_flushes.clear();
        self.owes_failure = false;
        self.recordings.clear();
        self.rewrites.clear();
        self.notes.clear();
        self.made.clear();
    }

    fn finish(&mut self) {
        for _ in 0..100_000 {
            if self.whole && self.reads.is_empty() && self.writes.is_empty() && self.made.is_empty() {
                return;
            }
            self.now += Duration::from_millis(50);
            if self.owes_failure && self.flushes.is_empty() {
                self.flush();
            }
            self.filling.handle_timeout(self.now);
            self.drain();
            self.complete();
        }
        panic!("it is not whole: {:?}", self.filling.progress());
    }
}

#[test]
fn guests_see_what_they_were_promised_whatever_is_fetched_overwritten_fails_or_is_lost() {
    let (mut reads, mut refused, mut passed) = (0, 0, 0);
    for seed in 1..=3000 {
        let mut world = World::new(seed);
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..300 {
                world.step();
            }
            world.finish();
            for unit in 0..UNITS as usize {
                let (seen, promise) = (world.store[unit].volatile, &world.promises[unit]);
                assert!(promise.answered.contains(&seen), "unit {unit} has {seen} in the end");
            }
            let (presence, ..) = replay(&world.log, SIZE, WHOSE, world.start()).unwrap();
            assert!(presence.missing.is_empty(), "a restart would fetch {:?}", presence.missing);
        }));
        assert!(run.is_ok(), "seed {seed}");
        reads += world.reads_checked;
        refused += world.reads_refused;
        passed += world.reads_passed;
    }
    assert!(reads > 100_000, "{reads} units were read");
    assert!(passed > 1000, "{passed} reads passed by a failing store");
    assert!(refused > 1000, "{refused} reads waited as long as they may");
}

#[test]
fn a_file_of_presence_that_is_damaged_or_of_another_is_not_believed_at_all() {
    let mut log = header(SIZE, WHOSE);
    let runs = |start, end| vec![BlockRange::new(start, end)];
    for (sequence, entry) in [
        LogEntry::Missing { telling: Telling::Everything, runs: runs(0, 20) },
        LogEntry::Missing { telling: Telling::Since, runs: runs(30, 31) },
        LogEntry::Present { runs: runs(3, 5) },
        LogEntry::Present { runs: runs(6, 7) },
    ]
    .iter()
    .enumerate()
    {
        assert!(encode_entry(sequence as u64, entry, &mut log));
    }
    let (presence, position, sequence) = replay(&log, SIZE, WHOSE, boot(0)).unwrap();
    assert_eq!((presence.missing.count(), presence.late.count(), presence.manifest.units), (18, 1, 21));
    assert_eq!((position, sequence), (log.len(), 4));
    // A cut end was never relied on; any other change is noticed.
    for length in 0..log.len() {
        let cut = replay(&log[..length], SIZE, WHOSE, boot(0));
        assert_eq!(cut.is_ok(), length >= 48, "{length}");
    }
    let last = log.len() - 20;
    for at in 0..last {
        let mut damaged = log.clone();
        damaged[at] ^= 0x10;
        assert!(replay(&damaged, SIZE, WHOSE, boot(0)).is_err(), "byte {at}");
    }
    assert!(replay(&log, SIZE, [8; 32], boot(0)).is_err());
    assert!(replay(&log, SIZE + UNIT_BYTES, WHOSE, boot(0)).is_err());
}
