//! Tests the strategies against two arrays of sectors. However stores reorder, fail or stall, the replica equals the volume
//! whenever the strategy reports that.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::strategy::{
    ChunkId, Copied, CopyFault, Copying, CopyingSettings, Distance, FlushId, HotBlocks, Otherwise, Recording,
    Route, SourceFault, Strategy, TargetFault, VolumeAction, VolumeEvent, WriteId,
};
use proptest::prelude::*;

const SECTOR: u64 = 512;
const BLOCK: u64 = 4096;
const BLOCKS: u64 = 24;
const SECTORS: usize = (BLOCKS * BLOCK / SECTOR) as usize;
const WAIT_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
enum Pending {
    SourceWrite(usize),
    /// A part of a write; the last part answers.
    TargetWrite(usize, ByteRange),
    ChunkRead(ChunkId, ByteRange),
    ChunkWrite(ChunkId, ByteRange, Vec<u32>),
    Flush(FlushId),
}

struct Write {
    range: ByteRange,
    arrived: Duration,
    /// When it was admitted, answered by the source, and answered to the guest.
    admitted: Option<(Duration, Route)>,
    source_answered: Option<Duration>,
    answered: Option<Duration>,
    parts_left: usize,
    part_failed: bool,
}

struct Model {
    mirror: Copying,
    now: Duration,
    random: Random,
    source: Vec<u32>,
    target: Vec<u32>,
    writes: Vec<Write>,
    pending: Vec<Pending>,
    fault_percent: u64,
    said_synchronised: bool,
    said_near_enough: bool,
    failed: bool,
    mode: Mode,
    gate: Gate,
    link: Link,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Both,
    Source,
    /// The source, and nothing goes to the target by value.
    Rounds,
}

fn draw_hot(random: &mut Random) -> HotBlocks {
    if random.below(3) == 0 { HotBlocks::AsOthers } else { HotBlocks::PutOff }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Gate {
    Open,
    Closed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Link {
    Up,
    Away,
}

impl Model {
    fn new(seed: u64, fault_percent: u64, mode: Mode) -> Self {
        let mut random = Random(seed);
        let strategy = match mode {
            Mode::Both => Strategy::Mirror,
            Mode::Source => Strategy::AsynchronousMirror {
                buffer_bytes_max: BLOCK * (1 + random.below(16)),
                drain_max: Duration::from_millis(100),
                hot: draw_hot(&mut random),
            },
            Mode::Rounds => Strategy::Tracking {
                hot: draw_hot(&mut random),
                distance: if random.below(2) == 0 { Distance::Near } else { Distance::Far },
                recording: if random.below(2) == 0 { Recording::Incremental } else { Recording::Full },
                drain_max: Duration::from_millis(100),
                otherwise: if random.below(2) == 0 { Otherwise::Fail } else { Otherwise::Mirror },
            },
        };
        let settings = CopyingSettings {
            block_size: BlockSize::new(u32::try_from(BLOCK).unwrap()).unwrap(),
            size_bytes: BLOCKS * BLOCK,
            pacing: PacingSettings {
                depth: 1 + random.below(4) as usize,
                chunk_bytes: BLOCK * (1 + random.below(4)),
                bytes_per_second: (random.below(3) == 0).then_some(10 << 20),
            },
            wait_max: WAIT_MAX,
            no_progress_max: Duration::from_secs(300),
        };
        let mut model = Self {
            mirror: Copying::new(settings, strategy),
            now: Duration::ZERO,
            random,
            source: vec![0; SECTORS],
            target: vec![0; SECTORS],
            writes: Vec::new(),
            pending: Vec::new(),
            fault_percent,
            said_synchronised: false,
            said_near_enough: false,
            failed: false,
            mode,
            gate: Gate::Open,
            link: Link::Up,
        };
        for block in 0..BLOCKS {
            if model.random.below(2) == 0 {
                let range = ByteRange::new(block * BLOCK, BLOCK);
                model.source[sectors(range)].fill(1);
                model.mirror.handle_event(model.now, VolumeEvent::Allocated(range));
            }
        }
        model
    }

    fn event(&mut self, event: VolumeEvent) {
        self.mirror.handle_event(self.now, event);
        self.drain();
    }

    fn drain(&mut self) {
        // From then on it is a mirror, and every rule of one holds.
        if self.mode == Mode::Rounds && self.mirror.tally().rounds_given_up > 0 {
            self.mode = Mode::Both;
        }
        while let Some(action) = self.mirror.poll_action() {
            match action {
                VolumeAction::Admit { write, route } => {
                    let index = write.0 as usize;
                    self.writes[index].admitted = Some((self.now, route.clone()));
                    assert!(self.mode != Mode::Rounds || route == Route::SourceOnly, "a write is mirrored");
                    self.pending.push(Pending::SourceWrite(index));
                    let parts = match route {
                        Route::SourceOnly => Vec::new(),
                        Route::Both => vec![self.writes[index].range],
                        Route::BothInPart(parts) => parts,
                    };
                    self.writes[index].parts_left = parts.len();
                    self.pending.extend(parts.into_iter().map(|part| Pending::TargetWrite(index, part)));
                }
                VolumeAction::Complete { write } => {
                    let write = &mut self.writes[write.0 as usize];
                    assert!(write.source_answered.is_some(), "answered before the source");
                    assert_eq!(write.answered.replace(self.now), None, "answered twice");
                }
                VolumeAction::Copy { chunk, range } => self.pending.push(Pending::ChunkRead(chunk, range)),
                VolumeAction::FlushTarget { flush } => self.pending.push(Pending::Flush(flush)),
                VolumeAction::Synchronised => {
                    assert!(self.mode == Mode::Both || self.gate == Gate::Closed, "the gate is open");
                    (self.said_synchronised, self.said_near_enough) = (true, true);
                }
                VolumeAction::Converged => {
                    assert!(self.mode != Mode::Both);
                    (self.said_synchronised, self.said_near_enough) = (false, true);
                }
                VolumeAction::Behind => {
                    (self.said_synchronised, self.said_near_enough) = (false, false);
                }
                VolumeAction::Failed { .. } => self.failed = true,
                VolumeAction::Suspended { .. } | VolumeAction::Resumed => {}
                VolumeAction::TellMissing { .. } | VolumeAction::Told { .. } => {
                    unreachable!("a mirror leaves nothing behind")
                }
            }
        }
    }

    fn guest_writes(&mut self) {
        let first = self.random.below(SECTORS as u64);
        let length = 1 + self.random.below(20).min(SECTORS as u64 - first - 1);
        let range = ByteRange::new(first * SECTOR, length * SECTOR);
        let id = WriteId(self.writes.len() as u64);
        self.writes.push(Write {
            range,
            arrived: self.now,
            admitted: None,
            source_answered: None,
            answered: None,
            parts_left: 0,
            part_failed: false,
        });
        self.event(VolumeEvent::WriteArrived { write: id, range });
    }

    fn store_acts(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let index = self.random.below(self.pending.len() as u64) as usize;
        let to_target = !matches!(self.pending[index], Pending::SourceWrite(_) | Pending::ChunkRead(..));
        if to_target && self.link == Link::Away {
            return;
        }
        let fails = self.random.below(100) < self.fault_percent;
        match self.pending.swap_remove(index) {
            Pending::SourceWrite(write) => {
                self.source_writes(write, fails);
            }
            Pending::TargetWrite(write, range) => {
                let landed = sectors(self.landed(range, fails));
                self.target[landed].fill(stamp(write));
                let state = &mut self.writes[write];
                state.parts_left -= 1;
                state.part_failed |= fails;
                if state.parts_left == 0 {
                    let result = if state.part_failed { Err(TargetFault::Error) } else { Ok(()) };
                    self.event(VolumeEvent::TargetWritten { write: WriteId(write as u64), result });
                }
            }
            Pending::ChunkRead(chunk, range) if fails && self.random.below(4) == 0 => {
                let result = Err(CopyFault::Source(SourceFault));
                let _ = range;
                self.event(VolumeEvent::ChunkCopied { chunk, result });
            }
            Pending::ChunkRead(chunk, range) => {
                let data = self.source[sectors(range)].to_vec();
                self.pending.push(Pending::ChunkWrite(chunk, range, data));
            }
            Pending::ChunkWrite(chunk, range, data) => {
                let landed = sectors(self.landed(range, fails));
                let count = landed.len();
                self.target[landed].copy_from_slice(&data[..count]);
                let result = if fails {
                    Err(CopyFault::Target(TargetFault::Error))
                } else {
                    Ok(Copied { bytes_written: range.length, ..Copied::default() })
                };
                self.event(VolumeEvent::ChunkCopied { chunk, result });
            }
            Pending::Flush(flush) => {
                let result = if fails { Err(TargetFault::Error) } else { Ok(()) };
                self.event(VolumeEvent::TargetFlushed { flush, result });
            }
        }
    }

    fn source_writes(&mut self, write: usize, fails: bool) {
        let range = self.writes[write].range;
        let landed = sectors(self.landed(range, fails));
        self.source[landed].fill(stamp(write));
        self.writes[write].source_answered = Some(self.now);
        if matches!(self.writes[write].admitted, Some((_, Route::SourceOnly))) {
            self.writes[write].answered = Some(self.now);
        }
        let result = if fails { Err(SourceFault) } else { Ok(()) };
        self.event(VolumeEvent::SourceWritten { write: WriteId(write as u64), result });
    }

    /// Breaks or restores the link. Swallowed requests are answered by then: as landed, or as failed for good.
    fn link_changes(&mut self) {
        if self.link == Link::Up {
            self.link = Link::Away;
            self.event(VolumeEvent::LinkLost);
            return;
        }
        self.link = Link::Up;
        if self.random.below(2) == 0 {
            self.event(VolumeEvent::LinkBack);
        }
        let (swallowed, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|pending| !matches!(pending, Pending::SourceWrite(_) | Pending::ChunkRead(..)));
        self.pending = rest;
        for pending in swallowed {
            self.pending.push(pending);
            if self.random.below(2) == 0 {
                let last = self.pending.len() - 1;
                self.answered_lost(last);
            }
        }
        self.event(VolumeEvent::LinkBack);
    }

    /// Fails a request that the link swallowed, without applying it.
    fn answered_lost(&mut self, index: usize) {
        match self.pending.swap_remove(index) {
            Pending::TargetWrite(write, _) => {
                let state = &mut self.writes[write];
                state.parts_left -= 1;
                state.part_failed = true;
                if state.parts_left == 0 {
                    let result = Err(TargetFault::Error);
                    self.event(VolumeEvent::TargetWritten { write: WriteId(write as u64), result });
                }
            }
            Pending::ChunkWrite(chunk, ..) => {
                let result = Err(CopyFault::Target(TargetFault::Error));
                self.event(VolumeEvent::ChunkCopied { chunk, result });
            }
            Pending::Flush(flush) => {
                self.event(VolumeEvent::TargetFlushed { flush, result: Err(TargetFault::Error) });
            }
            other => self.pending.push(other),
        }
    }

    /// Closes the gate once no write is below it, or opens it.
    fn gate_changes(&mut self) {
        if self.gate == Gate::Closed {
            self.gate = Gate::Open;
            self.event(VolumeEvent::GateOpens);
        } else {
            self.gate = Gate::Closed;
            self.event(VolumeEvent::GateCloses);
        }
    }

    /// Returns the part of a write that lands: all of it, or less if it fails.
    fn landed(&mut self, range: ByteRange, fails: bool) -> ByteRange {
        let length = if fails { self.random.below(range.length / SECTOR + 1) * SECTOR } else { range.length };
        ByteRange::new(range.offset, length)
    }

    fn time_passes(&mut self) {
        self.now += Duration::from_millis(self.random.below(300));
        // Deadlines are met in time.
        while let Some((at, reason)) = self.mirror.poll_timeout() {
            if at > self.now {
                break;
            }
            let before = (at, self.pending.len());
            self.mirror.handle_timeout(self.now);
            self.drain();
            let again = self.mirror.poll_timeout().map(|(at, _)| at);
            assert!(
                again != Some(before.0) || self.pending.len() != before.1,
                "a deadline that is met stays: {reason}: {before:?} {again:?} now {:?} pending {}",
                self.now,
                self.pending.len()
            );
        }
    }

    fn check(&self) {
        for write in &self.writes {
            let admitted = write.admitted.as_ref().map_or(self.now, |(at, _)| *at);
            let held = admitted - write.arrived;
            if self.mode != Mode::Both {
                assert_eq!(write.source_answered, write.answered, "a guest waits for the target");
            }
            let waited = match (write.source_answered, write.answered) {
                (Some(source), answered) => answered.unwrap_or(self.now) - source,
                _ => Duration::ZERO,
            };
            // Time moves in steps of up to 300 ms here.
            assert!(
                held + waited <= WAIT_MAX + Duration::from_millis(300),
                "held {held:?}, waited {waited:?}"
            );
        }
        if self.said_synchronised && self.mode != Mode::Both {
            // If nothing is in flight, not even a flush is awaited.
            assert_eq!(self.source, self.target, "the replica differs from the volume");
        }
        let quiet = self.pending.iter().all(|pending| matches!(pending, Pending::Flush(_)));
        if self.said_synchronised && quiet && self.writes.iter().all(|write| write.answered.is_some()) {
            assert_eq!(self.source, self.target, "the replica differs from the volume");
        }
    }

    /// Carries everything out without faults, until nothing changes.
    fn settle(&mut self) {
        self.fault_percent = 0;
        if self.link == Link::Away {
            self.link_changes();
        }
        self.event(VolumeEvent::Resume);
        for _ in 0..100_000 {
            if self.failed || (self.said_synchronised && self.pending.is_empty()) {
                return;
            }
            if self.said_near_enough && self.gate == Gate::Open {
                self.gate_changes();
            }
            if self.pending.is_empty() {
                self.time_passes();
            } else {
                self.store_acts();
            }
        }
        panic!("it does not converge: {} remain", self.mirror.blocks_remaining());
    }
}

fn stamp(write: usize) -> u32 {
    u32::try_from(write).unwrap() + 2
}

fn sectors(range: ByteRange) -> std::ops::Range<usize> {
    (range.offset / SECTOR) as usize..(range.end() / SECTOR) as usize
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }
}

fn run(seed: u64, steps: u32, fault_percent: u64, mode: Mode) {
    let mut model = Model::new(seed, fault_percent, mode);
    for step in 0..steps {
        if step == steps / 8 {
            model.event(VolumeEvent::AllocationKnown);
        }
        match model.random.below(10) {
            0..=2
                if model.gate == Gate::Open
                    && model.writes.iter().filter(|write| write.answered.is_none()).count() < 12 =>
            {
                model.guest_writes();
            }
            3 => model.time_passes(),
            _ => model.store_acts(),
        }
        if model.random.below(400) == 0 {
            model.event(VolumeEvent::TargetRestarted);
        }
        match model.random.below(400) {
            0..=2 => model.link_changes(),
            3 => model.event(VolumeEvent::Pause),
            4..=5 => model.event(VolumeEvent::Resume),
            6..=20 if model.gate == Gate::Closed || model.said_near_enough => model.gate_changes(),
            _ => {}
        }
        model.check();
    }
    model.settle();
    model.check();
    if !model.failed {
        assert!(model.said_synchronised);
        assert_eq!(model.source, model.target);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_replica_equals_the_volume_when_stores_reorder(seed in any::<u64>()) {
        run(seed, 400, 0, Mode::Both);
    }

    #[test]
    fn the_replica_equals_the_volume_when_stores_fail(seed in any::<u64>(), fault_percent in 1u64..20) {
        run(seed, 400, fault_percent, Mode::Both);
    }

    #[test]
    fn the_replica_equals_the_volume_when_guests_do_not_wait_and_links_reorder(seed in any::<u64>()) {
        run(seed, 600, 0, Mode::Source);
    }

    #[test]
    fn the_replica_equals_the_volume_when_guests_do_not_wait_and_links_break(seed in any::<u64>(), fault_percent in 1u64..20) {
        run(seed, 600, fault_percent, Mode::Source);
    }

    #[test]
    fn the_replica_equals_the_volume_when_it_is_copied_in_rounds_and_stores_reorder(seed in any::<u64>()) {
        run(seed, 600, 0, Mode::Rounds);
    }

    #[test]
    fn the_replica_equals_the_volume_when_it_is_copied_in_rounds_and_links_break(seed in any::<u64>(), fault_percent in 1u64..20) {
        run(seed, 600, fault_percent, Mode::Rounds);
    }
}

/// A found failure: a failed mirror kept its policy's deadline, and its driver was called for ever.
#[test]
fn a_copying_that_has_stopped_has_no_deadline_that_is_never_met() {
    run(656_053_786_680_962_609, 600, 19, Mode::Source);
}
