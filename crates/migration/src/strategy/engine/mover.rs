//! The chunks: the candidates for the next one, and the result of each.

use std::time::Duration;

use chronicle::{BlockIndex, BlockRange};
use pacer::Limit;

use super::chunks::Pass;
use super::{Engine, InFlight, Mover, Rewritten};
use crate::pacing::PacingSettings;
use crate::planted::{Bug, broken};
use crate::progress::{ArrivedChunks, ChunksInFlight, LimitedBy};
use crate::strategy::{BANDWIDTH_LIMIT, ChunkId, Copied, CopyFault, GUESTS_FIRST, SourceFault, VolumeAction};

/// The most chunks in flight where bytes are limited, however small: every guest write checks each of them.
const CHUNKS_MAX: usize = 256;
/// Chunks below this size are small. More of them are in flight, because a disk would otherwise wait for the next scattered
/// block most of the time …
const CHUNK_BYTES_SMALL: u64 = 64 << 10;
/// … but at most this many times the usual number, because guests' requests wait behind them.
const SMALL_CHUNKS: usize = 4;

impl Engine {
    pub(in crate::strategy) fn may_begin_chunk(&mut self, now: Duration) -> bool {
        self.tokens_at = None;
        if !self.wants_chunk() {
            return false;
        }
        // Behind closed gates guests wait for the rest: it is counted, but not limited in rate.
        if !self.gate.is_open() {
            self.chunk_bytes_max = self.settings.pacing.chunk_bytes;
            return true;
        }
        let limited_until = self.pacing.next_start(now);
        if limited_until > now {
            self.tokens_at = Some((limited_until, BANDWIDTH_LIMIT));
            return false;
        }
        // Every guest's write comes this way: the pacers, which other threads use as well, are asked only when they have to be.
        if let Some(until) = self.paced.holds_until(now) {
            self.tokens_at = Some((until, GUESTS_FIRST));
            return false;
        }
        let of_disks = self.paced.chunk_bytes_max(now);
        self.chunk_bytes_max = of_disks.unwrap_or(u64::MAX).min(self.settings.pacing.chunk_bytes);
        let paced_until = self.paced.next_start(now, self.chunk_bytes_max);
        if paced_until > now {
            self.tokens_at = Some((paced_until, GUESTS_FIRST));
            return false;
        }
        true
    }

    /// Returns what limits the copying; `None`: nothing is copied.
    pub(in crate::strategy) fn limited_by(&self, chunks: ChunksInFlight) -> Option<LimitedBy> {
        let is_copying = self.is_mirroring() && self.mover == Mover::Works;
        if !is_copying || self.chunks.is_empty() && self.replica.is_complete() && self.is_pass_over() {
            return None;
        }
        let (disk, guests) = match self.paced.limited_at() {
            0 => (LimitedBy::SourceDisk, LimitedBy::SourceGuests),
            _ => (LimitedBy::TargetDisk, LimitedBy::TargetGuests),
        };
        if let Some((_, reason)) = self.tokens_at {
            return Some(match self.paced.limit() {
                _ if reason == BANDWIDTH_LIMIT => LimitedBy::Bandwidth,
                Limit::Guests => guests,
                Limit::Measuring => LimitedBy::Measuring,
                Limit::Disk => disk,
            });
        }
        // As much is in flight as may be: it is where most of it waits.
        let in_flight = self.chunks.blocks() * self.block_bytes();
        let sent = in_flight.saturating_sub(chunks.reading);
        let Some(ArrivedChunks { bytes, limit }) = chunks.arrived else {
            return Some(if chunks.reading >= sent { LimitedBy::SourceDisk } else { LimitedBy::TargetDisk });
        };
        let on_the_way = sent.saturating_sub(bytes);
        Some(match limit {
            Limit::Guests if bytes > 0 => LimitedBy::TargetGuests,
            Limit::Measuring if bytes > 0 => LimitedBy::Measuring,
            _ if chunks.reading >= on_the_way.max(bytes) => LimitedBy::SourceDisk,
            _ if on_the_way >= bytes => LimitedBy::Link,
            _ => LimitedBy::TargetDisk,
        })
    }

    /// Returns the next run of the first pass, which visits each block once; `None` when the pass is over.
    pub(in crate::strategy) fn next_of_pass(&mut self) -> Option<BlockRange> {
        if self.is_pass_over() {
            return None;
        }
        let run = self.unclaimed_run(self.cursor);
        self.cursor = run.map_or(self.end(), |run| run.end);
        run
    }

    /// Returns the next cold run of the first pass; blocks written `times` times recently are put off.
    pub(in crate::strategy) fn next_cold_of_pass(&mut self, times: u32) -> Option<BlockRange> {
        loop {
            let run = self.next_of_pass()?;
            let cold = self.first_cold(run, times);
            self.cursor = cold.map_or(run.end, |cold| cold.end);
            if cold.is_some() {
                return cold;
            }
        }
    }

    /// Returns the next run of missing blocks, in a cycle.
    pub(in crate::strategy) fn next_missing(&mut self) -> Option<BlockRange> {
        let run = self.unclaimed_run(self.scan).or_else(|| self.unclaimed_run(BlockIndex(0)))?;
        self.scan = run.end;
        Some(run)
    }

    /// Claims a run for its first copy, which starts once the earlier writes to it have ended.
    pub(in crate::strategy) fn begin_chunk(&mut self, now: Duration, blocks: BlockRange) {
        self.claim(now, blocks, Pass::First);
        self.pacing.spend(now, self.byte_range(blocks).length);
    }

    /// Returns the first run at or behind `from` that is missing and not in flight. Blocks in flight are not sent again before
    /// they have landed (hard case 4).
    fn unclaimed_run(&self, from: BlockIndex) -> Option<BlockRange> {
        let blocks_max = (self.chunk_bytes_max / self.settings.block_size.bytes()).max(1);
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
        self.is_mirroring()
            && self.mover == Mover::Works
            && !self.gate.is_frozen()
            && !self.is_mover_full()
            && (!self.replica.is_complete() || !self.is_pass_over())
    }

    pub(super) fn is_mover_full(&self) -> bool {
        let PacingSettings { depth, chunk_bytes, .. } = self.settings.pacing;
        let (count, bytes) = (self.chunks.len(), self.chunks.blocks() * self.block_bytes());
        match self.terms.in_flight {
            InFlight::Chunks => {
                let bytes_of_small = chunk_bytes.min(CHUNK_BYTES_SMALL).saturating_mul(depth as u64);
                count >= depth && (bytes >= bytes_of_small || count >= SMALL_CHUNKS * depth)
            }
            InFlight::Bytes { .. } => {
                count >= CHUNKS_MAX || bytes > chunk_bytes.saturating_mul((depth as u64).saturating_sub(1))
            }
        }
    }

    fn claim(&mut self, now: Duration, blocks: BlockRange, pass: Pass) {
        let overtakes =
            broken(Bug::WritesInFlight) || self.copies_in_rounds() && broken(Bug::RoundOvertakesWrites);
        let mut waits_for = if overtakes { Vec::new() } else { self.writes.submitted_to(blocks) };
        if !broken(Bug::ChunkOvertakesValue) {
            waits_for.extend(self.values.overlapping(self.byte_range(blocks)));
        }
        self.tellings.forget();
        self.replica.claim(blocks);
        self.paced.began(now, self.byte_range(blocks).length);
        self.chunks.push(blocks, pass, waits_for, self.restarts);
    }

    pub(in crate::strategy) fn start_chunks(&mut self, now: Duration) {
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
        self.paced.ended(now, self.byte_range(chunk.blocks).length);
        let result = match result {
            Ok(copied) => {
                self.under_present_incarnation(chunk.restarts, Ok(copied)).map_err(CopyFault::Target)
            }
            Err(fault) => Err(fault),
        };
        match result {
            Ok(copied) => {
                self.costs.bytes_copied += copied.bytes_written;
                self.costs.bytes_zero += copied.bytes_zero;
                self.costs.bytes_cloned += copied.bytes_cloned;
                self.costs.tally.chunks_copied += 1;
                self.costs.tally.chunks_copied_again += u64::from(chunk.pass == Pass::Second);
                self.faults.both_work();
                self.flushes.bulk_is_applied();
                self.replica.applied(chunk.blocks);
                self.meter.add(now, chunk.blocks.len());
                self.admission.note_moved(chunk.blocks.len() * self.block_bytes());
                self.drain.note(now, copied.bytes_written, self.load());
                let again = chunk.pass == Pass::First && self.terms.rewritten == Rewritten::AtOnce;
                if again && self.is_mirroring() {
                    while let Some(blocks) = self.replica.missing_within(chunk.blocks) {
                        self.claim(now, blocks, Pass::Second);
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
}
