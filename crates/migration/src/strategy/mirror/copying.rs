//! Chunks and flushes: what is copied next, and what has become of it.

use std::time::Duration;

use chronicle::{BlockIndex, BlockRange, ByteRange};

use super::{Bulk, Gate, Mirror, Mover, Stage, Standing};
use crate::journal::FailureCode;
use crate::pacing::PacingSettings;
use crate::planted::{Bug, broken};
use crate::strategy::chunks::{Chunk, ChunkState, Pass};
use crate::strategy::replica::Confirmed;
use crate::strategy::{ChunkId, Copied, CopyFault, FlushId, SourceFault, TargetFault, VolumeAction};

/// Bytes applied at the target before they are flushed, so that the flush at the handover finds little to do.
const FLUSH_EVERY_BYTES: u64 = 256 << 20;

/// Chunks in flight to another host, however small: each is looked at whenever a guest writes.
const CHUNKS_MAX: usize = 256;

impl Mirror {
    /// Goes on with everything that can go on.
    pub(super) fn advance(&mut self, now: Duration) {
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
        self.judge_convergence(now);
        while let Some(blocks) = self.next_chunk(now) {
            self.claim(blocks, Pass::First);
            self.pacing.spend(now, self.byte_range(blocks).length);
        }
        self.start_chunks(now);
        self.flush_if_due(now);
        self.say_where_it_stands(now);
    }

    pub(super) fn release_held(&mut self, now: Duration) {
        self.admits_at = None;
        if self.writes.has_held() {
            for write in self.writes.held() {
                self.admit(now, write);
            }
        }
    }

    pub(super) fn next_chunk(&mut self, now: Duration) -> Option<BlockRange> {
        self.tokens_at = None;
        if !self.wants_chunk() {
            return None;
        }
        let start_at = self.pacing.next_start(now);
        // Behind closed gates guests wait for what is left: it is counted, and kept to no rate.
        if start_at > now && self.gate == Gate::Open {
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
    pub(super) fn unclaimed_run(&self, from: BlockIndex) -> Option<BlockRange> {
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

    pub(super) fn wants_chunk(&self) -> bool {
        self.stage == Stage::Copying
            && self.suspension.is_none()
            && self.mover == Mover::Works
            && self.gate != Gate::Frozen
            && !self.is_mover_full()
            && (!self.replica.is_complete() || self.cursor < self.end())
    }

    /// Tells whether as much is in flight as may be. Towards another host it is bytes that count: many small chunks, as
    /// are left late in a copying, would not fill a long link.
    pub(super) fn is_mover_full(&self) -> bool {
        let PacingSettings { depth, chunk_bytes, .. } = self.settings.pacing;
        let count = self.chunks.len();
        if self.is_asynchronous() {
            let bytes = self.chunks.blocks() * self.settings.block_size.bytes();
            count >= CHUNKS_MAX || bytes > chunk_bytes.saturating_mul((depth as u64).saturating_sub(1))
        } else {
            count >= depth
        }
    }

    pub(super) fn claim(&mut self, blocks: BlockRange, pass: Pass) {
        let mut waits_for =
            if broken(Bug::WritesInFlight) { Vec::new() } else { self.writes.submitted_to(blocks) };
        if !broken(Bug::ChunkOvertakesValue) {
            waits_for.extend(self.values.in_blocks(blocks));
        }
        self.replica.claim(blocks);
        let id = ChunkId(self.next_chunk);
        self.next_chunk += 1;
        let restarts = self.restarts;
        self.chunks.push(Chunk { id, blocks, pass, waits_for, state: ChunkState::Waiting, restarts });
    }

    pub(super) fn start_chunks(&mut self, now: Duration) {
        let ready = self.chunks.start_ready(now);
        if !ready.is_empty() {
            self.drain.note(now, 0, self.load());
        }
        for (chunk, blocks) in ready {
            self.actions.push_back(VolumeAction::Copy { chunk, range: self.byte_range(blocks) });
        }
    }

    pub(super) fn chunk_copied(&mut self, now: Duration, id: ChunkId, result: Result<Copied, CopyFault>) {
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
                self.tally.chunks_copied += 1;
                self.tally.chunks_copied_again += u64::from(chunk.pass == Pass::Second);
                self.source_faults = 0;
                self.bulk = Bulk::Applied;
                self.replica.applied(chunk.blocks);
                self.meter.add(now, chunk.blocks.len());
                self.target_faults = 0;
                self.admission.note_moved(chunk.blocks.len() * self.settings.block_size.bytes());
                self.drain.note(now, copied.bytes_written, self.load());
                // Guests do not wait for a link: an asynchronous mirror comes back to these blocks later.
                let again = chunk.pass == Pass::First && !self.is_asynchronous();
                if again && self.suspension.is_none() && self.stage == Stage::Copying {
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

    pub(super) fn flush_if_due(&mut self, now: Duration) {
        let waits = self.replica.is_flushing() || self.suspension.is_some() || self.gate == Gate::Frozen;
        if waits || self.stage != Stage::Copying {
            return;
        }
        let much = self.replica.blocks_unconfirmed() >= FLUSH_EVERY_BYTES / self.settings.block_size.bytes();
        let last = self.bulk == Bulk::Applied && self.replica.is_complete() && self.chunks.is_empty();
        let last = if self.is_asynchronous() { self.wants_confirmation() } else { last };
        let wanted = self.is_flush_wanted && self.replica.blocks_unconfirmed() > 0;
        if much || last || wanted || self.is_answer_owed {
            self.is_flush_wanted = false;
            self.is_answer_owed = false;
            let flush = FlushId(self.next_flush);
            self.next_flush += 1;
            self.tally.target_flushes += 1;
            self.replica.begin_flush(flush, now);
            if last {
                self.bulk = Bulk::Flushing;
            }
            self.actions.push_back(VolumeAction::FlushTarget { flush });
        }
    }

    pub(super) fn target_flushed(&mut self, now: Duration, flush: FlushId, result: Result<(), TargetFault>) {
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
                if !broken(Bug::FailedFlushConfirmed) {
                    self.target_lost_the_volatile();
                }
                self.target_failed(now, fault);
            }
        }
    }

    pub(super) fn say_where_it_stands(&mut self, now: Duration) {
        let standing = self.standing(now);
        if standing != self.said {
            self.said = standing;
            self.actions.push_back(match standing {
                Standing::Behind => VolumeAction::Behind,
                Standing::Converged => VolumeAction::Converged,
                Standing::Synchronised => VolumeAction::Synchronised,
            });
        }
    }

    pub(super) fn covering(&self, range: ByteRange) -> BlockRange {
        self.settings.block_size.covering(range.offset, range.length)
    }

    pub(super) fn byte_range(&self, blocks: BlockRange) -> ByteRange {
        let (offset, length) = self.settings.block_size.byte_range(blocks);
        ByteRange::new(offset, length.min(self.settings.size_bytes.saturating_sub(offset)))
    }

    pub(super) fn end(&self) -> BlockIndex {
        BlockIndex(self.settings.block_size.blocks_of(self.settings.size_bytes).0)
    }
}
