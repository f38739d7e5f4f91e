//! IO mirroring (\[ESX\] §2.4): one pass of a cursor over the volume, and writes behind it go to both stores at once.
//!
//! ```text
//!    0 ................ cursor ............................... end of the volume
//!      behind:          │ ahead:
//!      synchronised ─► both stores            every write ─► source only; its blocks are missing,
//!      missing, or being copied ─►              also where there was a hole
//!      source only, and missing (again)
//! ```
//! Better than the paper, which defers writes to a chunk that is being copied: such a write goes to the source at
//! once, and its blocks are copied again right after the chunk has landed. Writes to *that* second pass wait for it, so
//! a chunk is never copied for ever. A target that fails, or is slow, never costs the guest more than
//! [`MirrorSettings::wait_max`]: mirroring is suspended, writes become bits, and it tries again.

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::{BlockIndex, BlockRange, BlockSize, ByteRange};

use super::chunks::{Chunk, ChunkState, Chunks, Pass};
use super::meter::Meter;
use super::replica::{Confirmed, ReplicaBlocks};
use super::writes::{SourceSide, TargetSide, WriteState, Writes};
use super::{
    ChunkId, Copied, CopyFault, FlushId, Route, SourceFault, TargetFault, VolumeAction, VolumeEvent, WriteId,
};
use crate::journal::FailureCode;
use crate::pacing::{Pacing, PacingSettings};
use crate::planted::{Bug, broken};

/// Faults of the target in a row, with growing pauses between them, before the migration fails.
const TARGET_FAULTS_MAX: u32 = 5;
/// Tries at reading blocks of the source before the migration fails.
const SOURCE_FAULTS_MAX: u32 = 3;
/// Pause after the first fault in a row; each further one doubles it.
const FAULT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes applied at the target before they are flushed, so that the flush at the handover finds little to do.
const FLUSH_EVERY_BYTES: u64 = 256 << 20;

/// What a mirror is told at its beginning.
#[derive(Clone, Debug)]
pub struct MirrorSettings {
    /// Bytes of a block.
    pub block_size: BlockSize,
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// How much to copy at once.
    pub pacing: PacingSettings,
    /// How long a guest's write may be held, or wait for the target (design §5.7).
    pub wait_max: Duration,
    /// How long the target may leave a request unanswered before the migration fails, whatever else it answers.
    /// Time that passes while it answers is never a reason.
    pub no_progress_max: Duration,
}

/// The machine of one volume.
pub struct Mirror {
    settings: MirrorSettings,
    stage: Stage,
    replica: ReplicaBlocks,
    writes: Writes,
    chunks: Chunks,
    pacing: Pacing,
    /// Everything before it has been claimed once; everything behind it has not. At the end of the volume: the first
    /// pass is over.
    cursor: BlockIndex,
    /// Where the mover looks for missing blocks next, once the first pass is over.
    scan: BlockIndex,
    /// When the bandwidth limit lets the next chunk begin; `None` while it does not hold one up.
    tokens_at: Option<Duration>,
    suspension: Option<Suspension>,
    /// Faults of the target since it last did something.
    target_faults: u32,
    source_faults: u32,
    /// How often the target has restarted.
    restarts: u32,
    /// Whether what the mover has copied is durable.
    bulk: Bulk,
    /// Whether `Synchronised` was the last thing said.
    said_synchronised: bool,
    next_chunk: u64,
    next_flush: u64,
    meter: Meter,
    copied: Copied,
    bytes_mirrored: u64,
    actions: VecDeque<VolumeAction>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Being told what is allocated.
    Surveying,
    Copying,
    /// Failed or cancelled: nothing is sent any more.
    Stopped,
}

/// What has become of the chunks that have landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bulk {
    /// The target has applied them.
    Applied,
    /// The last of them have been applied, and the flush that confirms them is under way.
    Flushing,
    /// All of them survive a power cut.
    Durable,
}

#[derive(Clone, Copy, Debug)]
struct Suspension {
    reason: &'static str,
    /// When to try again; `None`: when the target has answered everything that it was sent.
    until: Option<Duration>,
}

impl Mirror {
    /// Makes a machine that waits to be told what is allocated.
    pub fn new(settings: MirrorSettings) -> Self {
        let blocks = settings.block_size.blocks_of(settings.size_bytes);
        Self {
            pacing: Pacing::new(settings.pacing.clone()),
            settings,
            stage: Stage::Surveying,
            replica: ReplicaBlocks::new(blocks),
            writes: Writes::default(),
            chunks: Chunks::default(),
            cursor: BlockIndex(0),
            scan: BlockIndex(0),
            tokens_at: None,
            suspension: None,
            target_faults: 0,
            source_faults: 0,
            restarts: 0,
            bulk: Bulk::Durable,
            said_synchronised: false,
            next_chunk: 0,
            next_flush: 0,
            meter: Meter::default(),
            copied: Copied::default(),
            bytes_mirrored: 0,
            actions: VecDeque::new(),
        }
    }

    /// Takes what happened. An event that does not fit (an answer to something unknown) changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: VolumeEvent) {
        match event {
            VolumeEvent::Allocated(range) => self.replica.mark_missing(self.covering(range)),
            VolumeEvent::AllocationKnown => {
                if self.stage == Stage::Surveying {
                    self.stage = Stage::Copying;
                }
            }
            VolumeEvent::WriteArrived { write, range } => {
                self.writes.arrive(write, range, self.covering(range), now);
                self.admit(now, write);
            }
            VolumeEvent::SourceWritten { write, result } => self.source_written(now, write, result),
            VolumeEvent::TargetWritten { write, result } => self.target_written(now, write, result),
            VolumeEvent::ChunkCopied { chunk, result } => self.chunk_copied(now, chunk, result),
            VolumeEvent::TargetFlushed { flush, result } => self.target_flushed(now, flush, result),
            VolumeEvent::TargetRestarted => {
                self.restarts += 1;
                self.bulk = Bulk::Applied;
                if !broken(Bug::TargetRestart) {
                    self.replica.target_restarted();
                }
            }
            VolumeEvent::SwitchOverBegins => {
                for write in self.writes.held() {
                    self.submit(now, write, Route::SourceOnly);
                }
            }
            VolumeEvent::Stop => self.stop(now),
        }
        self.advance(now);
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.give_up_waiting(now);
        self.advance(now);
    }

    /// The next thing to be done.
    pub fn poll_action(&mut self) -> Option<VolumeAction> {
        self.actions.pop_front()
    }

    /// When `handle_timeout` is to be called, at the latest, and what is waited for.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        let patience = self.writes.iter().filter_map(|write| match write.state {
            WriteState::Mirrored { source: SourceSide::Answered { patience_ends }, .. } => {
                Some((patience_ends, "the target to take a mirrored write"))
            }
            WriteState::Held => {
                Some((write.arrived + self.settings.wait_max, "a chunk that a held write touches"))
            }
            _ => None,
        });
        let retry = self.suspension.and_then(|suspension| Some((suspension.until?, suspension.reason)));
        let tokens = self.tokens_at.map(|at| (at, "the bandwidth limit"));
        let stuck = self
            .oldest_unanswered()
            .map(|since| (since + self.settings.no_progress_max, "the target to answer a request"));
        patience.chain(retry).chain(tokens).chain(stuck).min_by_key(|(at, _)| *at)
    }

    /// Changes the rate limit of the mover.
    pub fn set_bandwidth(&mut self, now: Duration, bytes_per_second: Option<u64>) {
        self.pacing.set_rate(bytes_per_second);
        self.advance(now);
    }

    /// Blocks missing or in flight, those that late writes touch included.
    pub fn blocks_remaining(&self) -> u64 {
        self.replica.blocks_missing() + self.chunks.blocks()
    }

    /// Blocks that became synchronised, each time counted.
    pub fn blocks_synchronised(&self) -> u64 {
        self.meter.blocks()
    }

    /// The part of the copying that is done; never falls, never reaches 1.
    pub fn fraction(&mut self) -> f64 {
        let remaining = self.blocks_remaining();
        self.meter.fraction(remaining)
    }

    /// When the copying will have ended, counted from now: at the earliest and at the latest.
    pub fn remaining(&self) -> Option<(Duration, Duration)> {
        self.meter.remaining(self.blocks_remaining())
    }

    /// Bytes that became synchronised a second, of late.
    pub fn copy_bytes_per_second(&self) -> f64 {
        self.meter.rate() * self.settings.block_size.bytes() as f64
    }

    /// What the mover has written.
    pub fn copied(&self) -> Copied {
        self.copied
    }

    /// Bytes of guest writes that the target took by value.
    pub fn bytes_mirrored(&self) -> u64 {
        self.bytes_mirrored
    }

    /// Why nothing is mirrored.
    pub fn suspended(&self) -> Option<&'static str> {
        match self.stage {
            Stage::Surveying => Some("what the source was asked for before the migration has to end first"),
            Stage::Copying | Stage::Stopped => self.suspension.map(|suspension| suspension.reason),
        }
    }

    /// Tells whether the replica could be handed over to at this instant.
    pub fn is_synchronised(&self) -> bool {
        self.stage == Stage::Copying
            && self.suspension.is_none()
            && self.replica.is_complete()
            && self.chunks.is_empty()
            && !self.writes.has_late()
            && self.cursor == self.end()
            && self.bulk == Bulk::Durable
    }
}

// Guest writes.
impl Mirror {
    /// Submits a held write if it need not wait.
    fn admit(&mut self, now: Duration, id: WriteId) {
        let Some(write) = self.writes.get(id) else { return };
        let route = self.route(write.blocks);
        let patient = now < write.arrived + self.settings.wait_max;
        let waits = match route {
            Route::Both => self.writes.must_follow(id, write.range),
            Route::SourceOnly => {
                self.stage == Stage::Copying && self.chunks.second_pass_touches(write.blocks)
            }
        };
        if !waits {
            self.submit(now, id, route);
        } else if !patient {
            // Its blocks are copied again after everything that is under way there.
            self.submit(now, id, Route::SourceOnly);
        }
    }

    fn submit(&mut self, now: Duration, id: WriteId, route: Route) {
        let Some(write) = self.writes.get(id) else { return };
        let (blocks, held_for) = (write.blocks, now.saturating_sub(write.arrived));
        let state = match route {
            Route::SourceOnly => {
                self.becomes_missing(blocks);
                WriteState::SourceOnly
            }
            Route::Both => {
                let source = SourceSide::UnderWay { target_answered: TargetSide::UnderWay, held_for };
                WriteState::Mirrored { source, restarts: self.restarts }
            }
        };
        self.writes.set_state(id, state);
        self.actions.push_back(VolumeAction::Admit { write: id, route });
    }

    fn route(&self, blocks: BlockRange) -> Route {
        let synchronised = self.stage == Stage::Copying
            && self.suspension.is_none()
            && blocks.end <= self.cursor
            && !self.replica.misses_any(blocks)
            && (!self.chunks.touch(blocks) || broken(Bug::TwoCopiesInFlight))
            && !self.writes.late_touches(blocks);
        if synchronised { Route::Both } else { Route::SourceOnly }
    }

    fn becomes_missing(&mut self, blocks: BlockRange) {
        let hole_ahead = blocks.start >= self.cursor && !self.replica.misses_any(blocks);
        if hole_ahead && self.stage == Stage::Copying && broken(Bug::HoleAhead) {
            return;
        }
        self.replica.mark_missing(blocks);
    }

    fn source_written(&mut self, now: Duration, id: WriteId, result: Result<(), SourceFault>) {
        let Some(write) = self.writes.get(id) else { return };
        let blocks = write.blocks;
        match write.state {
            WriteState::SourceOnly => self.write_ended(id),
            WriteState::Mirrored { source: SourceSide::UnderWay { target_answered, held_for }, restarts } => {
                if result.is_err() {
                    // The source may hold a part of it, the target all of it.
                    self.replica.mark_missing(blocks);
                }
                match target_answered {
                    TargetSide::Answered => {
                        self.actions.push_back(VolumeAction::Complete { write: id });
                        self.write_ended(id);
                    }
                    TargetSide::UnderWay => {
                        let patience_ends = now + self.settings.wait_max.saturating_sub(held_for);
                        let source = SourceSide::Answered { patience_ends };
                        self.writes.set_state(id, WriteState::Mirrored { source, restarts });
                        if self.stage == Stage::Stopped {
                            self.answer_late(id);
                        }
                    }
                }
            }
            _ => {}
        }
    }

    fn target_written(&mut self, now: Duration, id: WriteId, result: Result<(), TargetFault>) {
        let Some(write) = self.writes.get(id) else { return };
        let (blocks, length, state) = (write.blocks, write.range.length, write.state);
        let submitted_under = match state {
            WriteState::Mirrored { restarts, .. } | WriteState::Late { restarts } => restarts,
            WriteState::Held | WriteState::SourceOnly => return,
        };
        let result = self.under_present_incarnation(submitted_under, result);
        match result {
            Ok(()) => {
                self.replica.applied(blocks);
                self.bytes_mirrored += length;
                self.target_faults = 0;
            }
            Err(_) => self.replica.mark_missing(blocks),
        }
        match state {
            WriteState::Mirrored { source: SourceSide::UnderWay { held_for, .. }, restarts } => {
                let source = SourceSide::UnderWay { target_answered: TargetSide::Answered, held_for };
                self.writes.set_state(id, WriteState::Mirrored { source, restarts });
            }
            WriteState::Mirrored { source: SourceSide::Answered { .. }, .. } => {
                self.actions.push_back(VolumeAction::Complete { write: id });
                self.write_ended(id);
            }
            _ => self.write_ended(id),
        }
        if let Err(fault) = result {
            self.target_failed(now, fault);
        }
    }

    /// The guest gets its answer without the target's.
    fn answer_late(&mut self, id: WriteId) {
        let Some(write) = self.writes.get(id) else { return };
        let WriteState::Mirrored { restarts, .. } = write.state else { return };
        self.replica.mark_missing(write.blocks);
        self.writes.set_state(id, WriteState::Late { restarts });
        self.actions.push_back(VolumeAction::Complete { write: id });
    }

    fn write_ended(&mut self, id: WriteId) {
        self.writes.remove(id);
        self.chunks.write_ended(id);
    }

    /// Ends the patience of writes whose time has come.
    fn give_up_waiting(&mut self, now: Duration) {
        let impatient = |state| matches!(state, WriteState::Mirrored { source: SourceSide::Answered { patience_ends }, .. } if patience_ends <= now);
        let late: Vec<_> =
            self.writes.iter().filter(|write| impatient(write.state)).map(|write| write.id).collect();
        for id in &late {
            self.answer_late(*id);
        }
        if !late.is_empty() {
            self.suspend("the target has not taken a mirrored write in time", None);
        }
    }
}

// Chunks and flushes.
impl Mirror {
    /// Goes on with everything that can go on.
    fn advance(&mut self, now: Duration) {
        if self.stage == Stage::Stopped {
            self.release_held(now);
            return;
        }
        self.resume(now);
        let too_old = |since: Duration| now >= since + self.settings.no_progress_max;
        if self.oldest_unanswered().is_some_and(too_old) {
            let seconds = self.settings.no_progress_max.as_secs();
            let detail = format!("the target has not answered a request for {seconds} s");
            self.fail(now, FailureCode::TargetHung, detail);
            return;
        }
        self.release_held(now);
        while let Some(blocks) = self.next_chunk(now) {
            self.claim(blocks, Pass::First);
            self.pacing.spend(now, self.byte_range(blocks).length);
        }
        self.start_chunks(now);
        self.flush_if_due(now);
        self.say_where_it_stands();
    }

    fn release_held(&mut self, now: Duration) {
        if self.writes.has_held() {
            for write in self.writes.held() {
                self.admit(now, write);
            }
        }
    }

    fn next_chunk(&mut self, now: Duration) -> Option<BlockRange> {
        self.tokens_at = None;
        if !self.wants_chunk() {
            return None;
        }
        let start_at = self.pacing.next_start(now);
        if start_at > now {
            self.tokens_at = Some(start_at);
            return None;
        }
        if self.cursor < self.end() {
            if let Some(run) = self.unclaimed_run(self.cursor) {
                self.cursor = run.end;
                return Some(run);
            }
            self.cursor = self.end();
        }
        let run = self.unclaimed_run(self.scan).or_else(|| self.unclaimed_run(BlockIndex(0)))?;
        self.scan = run.end;
        Some(run)
    }

    /// The first run of blocks at or behind `from` that are missing and not in flight: what is in flight is not sent
    /// again before it has landed (hard case 4).
    fn unclaimed_run(&self, from: BlockIndex) -> Option<BlockRange> {
        let blocks_max = (self.settings.pacing.chunk_bytes / self.settings.block_size.bytes()).max(1);
        let mut from = from;
        loop {
            let run = self.replica.next_missing(from, blocks_max)?;
            match self.chunks.first_touching(run) {
                None => return Some(run),
                Some(busy) if run.start < busy.start => {
                    return Some(BlockRange { start: run.start, end: busy.start });
                }
                Some(busy) => from = busy.end,
            }
        }
    }

    fn wants_chunk(&self) -> bool {
        self.stage == Stage::Copying
            && self.suspension.is_none()
            && self.chunks.len() < self.settings.pacing.depth
            && (!self.replica.is_complete() || self.cursor < self.end())
    }

    fn claim(&mut self, blocks: BlockRange, pass: Pass) {
        let waits_for =
            if broken(Bug::WritesInFlight) { Vec::new() } else { self.writes.submitted_to(blocks) };
        self.replica.claim(blocks);
        let id = ChunkId(self.next_chunk);
        self.next_chunk += 1;
        let restarts = self.restarts;
        self.chunks.push(Chunk { id, blocks, pass, waits_for, state: ChunkState::Waiting, restarts });
    }

    fn start_chunks(&mut self, now: Duration) {
        for (chunk, blocks) in self.chunks.start_ready(now) {
            self.actions.push_back(VolumeAction::Copy { chunk, range: self.byte_range(blocks) });
        }
    }

    fn chunk_copied(&mut self, now: Duration, id: ChunkId, result: Result<Copied, CopyFault>) {
        let Some(chunk) = self.chunks.remove(id) else { return };
        let result = match result {
            Ok(copied) => {
                self.under_present_incarnation(chunk.restarts, Ok(copied)).map_err(CopyFault::Target)
            }
            Err(fault) => Err(fault),
        };
        match result {
            Ok(copied) => {
                self.copied.bytes_written += copied.bytes_written;
                self.copied.bytes_zero += copied.bytes_zero;
                self.source_faults = 0;
                self.bulk = Bulk::Applied;
                self.replica.applied(chunk.blocks);
                self.meter.add(now, chunk.blocks.len());
                self.target_faults = 0;
                if chunk.pass == Pass::First && self.suspension.is_none() && self.stage == Stage::Copying {
                    while let Some(blocks) = self.replica.missing_within(chunk.blocks) {
                        self.claim(blocks, Pass::Second);
                    }
                }
            }
            Err(fault) => {
                self.replica.mark_missing(chunk.blocks);
                match fault {
                    CopyFault::Target(fault) => self.target_failed(now, fault),
                    CopyFault::Source(SourceFault) => self.source_failed(now, chunk.blocks),
                }
            }
        }
    }

    fn flush_if_due(&mut self, now: Duration) {
        if self.replica.is_flushing() || self.suspension.is_some() || self.stage != Stage::Copying {
            return;
        }
        let much = self.replica.blocks_unconfirmed() >= FLUSH_EVERY_BYTES / self.settings.block_size.bytes();
        let last = self.bulk == Bulk::Applied && self.replica.is_complete() && self.chunks.is_empty();
        if much || last {
            let flush = FlushId(self.next_flush);
            self.next_flush += 1;
            self.replica.begin_flush(flush, now);
            if last {
                self.bulk = Bulk::Flushing;
            }
            self.actions.push_back(VolumeAction::FlushTarget { flush });
        }
    }

    fn target_flushed(&mut self, now: Duration, flush: FlushId, result: Result<(), TargetFault>) {
        let confirmed = if result.is_ok() { Confirmed::Yes } else { Confirmed::No };
        if !self.replica.end_flush(flush, confirmed) {
            return;
        }
        match result {
            Ok(()) => {
                if self.bulk == Bulk::Flushing {
                    self.bulk = Bulk::Durable;
                }
                self.target_faults = 0;
            }
            Err(fault) => {
                self.bulk = Bulk::Applied;
                self.target_failed(now, fault);
            }
        }
    }

    fn say_where_it_stands(&mut self) {
        let synchronised = self.is_synchronised();
        if synchronised != self.said_synchronised {
            self.said_synchronised = synchronised;
            self.actions.push_back(if synchronised {
                VolumeAction::Synchronised
            } else {
                VolumeAction::Behind
            });
        }
    }

    fn covering(&self, range: ByteRange) -> BlockRange {
        self.settings.block_size.covering(range.offset, range.length)
    }

    fn byte_range(&self, blocks: BlockRange) -> ByteRange {
        let (offset, length) = self.settings.block_size.byte_range(blocks);
        ByteRange::new(offset, length.min(self.settings.size_bytes.saturating_sub(offset)))
    }

    fn end(&self) -> BlockIndex {
        BlockIndex(self.settings.block_size.blocks_of(self.settings.size_bytes).0)
    }
}

// Faults.
impl Mirror {
    /// What was submitted before the target restarted has failed, whatever the answer says.
    fn under_present_incarnation<T>(
        &self,
        restarts: u32,
        result: Result<T, TargetFault>,
    ) -> Result<T, TargetFault> {
        if restarts == self.restarts || broken(Bug::TargetRestart) { result } else { Err(TargetFault::Error) }
    }

    /// Since when the target has owed an answer. What it answers meanwhile does not count: a migration can neither
    /// end without that answer nor take it for a failure (design §5.20).
    fn oldest_unanswered(&self) -> Option<Duration> {
        if self.stage != Stage::Copying {
            return None;
        }
        let late = self.writes.iter().filter(|write| matches!(write.state, WriteState::Late { .. }));
        let late = late.map(|write| write.arrived).min();
        [self.chunks.copying_since(), self.replica.flushing_since(), late].into_iter().flatten().min()
    }

    fn target_failed(&mut self, now: Duration, fault: TargetFault) {
        if self.stage != Stage::Copying {
            return;
        }
        if fault == TargetFault::NoSpace {
            self.fail(now, FailureCode::TargetFull, "the target's store is full".to_owned());
        } else if self.suspension.is_none() {
            self.target_faults += 1;
            if self.target_faults > TARGET_FAULTS_MAX {
                let detail = format!("the target's store failed {} times in a row", self.target_faults);
                self.fail(now, FailureCode::TargetFaulty, detail);
            } else {
                let pause = FAULT_PAUSE * (1 << (self.target_faults - 1));
                self.suspend("the target's store answered with an error", Some(now + pause));
            }
        }
    }

    fn source_failed(&mut self, now: Duration, blocks: BlockRange) {
        if self.stage != Stage::Copying || self.suspension.is_some() {
            return;
        }
        self.source_faults += 1;
        if self.source_faults >= SOURCE_FAULTS_MAX {
            let ByteRange { offset, length } = self.byte_range(blocks);
            let detail = format!("{length} bytes at {offset} of the source cannot be read");
            self.fail(now, FailureCode::SourceUnreadable, detail);
        } else {
            self.suspend("the source could not be read", Some(now + FAULT_PAUSE));
        }
    }

    fn suspend(&mut self, reason: &'static str, until: Option<Duration>) {
        if self.suspension.is_none() && self.stage == Stage::Copying {
            self.actions.push_back(VolumeAction::Suspended { reason });
        }
        self.suspension = Some(Suspension { reason, until });
        for blocks in self.chunks.abandon_waiting() {
            self.replica.mark_missing(blocks);
        }
    }

    fn resume(&mut self, now: Duration) {
        let Some(suspension) = self.suspension else { return };
        if self.writes.has_late() {
            return;
        }
        match suspension.until {
            None => self.suspension = Some(Suspension { until: Some(now + FAULT_PAUSE), ..suspension }),
            Some(until) if now >= until => {
                self.suspension = None;
                self.actions.push_back(VolumeAction::Resumed);
            }
            Some(_) => {}
        }
    }

    fn fail(&mut self, now: Duration, code: FailureCode, detail: String) {
        self.actions.push_back(VolumeAction::Failed { code, detail });
        self.stop(now);
    }

    fn stop(&mut self, now: Duration) {
        self.stage = Stage::Stopped;
        self.suspension = None;
        self.tokens_at = None;
        for blocks in self.chunks.abandon_waiting() {
            self.replica.mark_missing(blocks);
        }
        let waiting =
            |state| matches!(state, WriteState::Mirrored { source: SourceSide::Answered { .. }, .. });
        let mirrored: Vec<_> =
            self.writes.iter().filter(|write| waiting(write.state)).map(|write| write.id).collect();
        for write in mirrored {
            self.answer_late(write);
        }
        self.release_held(now);
    }
}
