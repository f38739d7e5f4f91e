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

mod asynchronous;
mod copying;
mod fault;
mod growth;
mod guest_write;

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::{BlockIndex, BlockSize, LayeredBitmap};

use self::asynchronous::Aim;
use super::chunks::Chunks;
use super::drain::{Admission, Drain};
use super::meter::Meter;
use super::replica::ReplicaBlocks;
use super::tally::Tally;
use super::values::Values;
use super::writes::{SourceSide, WriteState, Writes};
use super::{Copied, Strategy, VolumeAction, VolumeEvent};
use crate::handover::source::Costs;
use crate::pacing::{Pacing, PacingSettings};
use crate::planted::{Bug, broken};
use crate::progress::{VolumeProgress, Waiting};

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
    /// Who acknowledges a guest's write.
    pub acknowledgement: Acknowledgement,
}

/// Who has a guest's write before the guest is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acknowledgement {
    /// Source and target: as on one host.
    BothStores,
    /// The source: a target at another host, as far away as it may be.
    Source {
        /// Bytes of guest writes that may be on their way to the target; beyond it their blocks become missing.
        buffer_bytes_max: u64,
        /// How long what is left may take to arrive behind closed gates: with a busy guest not less than a round trip
        /// and some, for so much is always on its way. A try at the handover has to be allowed that, and one and a half
        /// round trips, a flush and two commits besides (hard case 27).
        drain_max: Duration,
    },
}

/// The machine of one volume.
pub struct Mirror {
    settings: MirrorSettings,
    stage: Stage,
    replica: ReplicaBlocks,
    writes: Writes,
    /// Of an asynchronous mirror: what is on its way by value.
    values: Values,
    chunks: Chunks,
    drain: Drain,
    admission: Admission,
    gate: Gate,
    gate_times: GateTimes,
    mover: Mover,
    link: Link,
    pacing: Pacing,
    /// Everything before it has been claimed once; everything behind it has not. At the end of the volume: the first
    /// pass is over.
    cursor: BlockIndex,
    /// Where the mover looks for missing blocks next, once the first pass is over.
    scan: BlockIndex,
    /// When the bandwidth limit lets the next chunk begin; `None` while it does not hold one up.
    tokens_at: Option<Duration>,
    /// When a write may be admitted that waits for the throttle; `None` while none does.
    admits_at: Option<Duration>,
    suspension: Option<Suspension>,
    /// Faults of the target since it last did something.
    target_faults: u32,
    source_faults: u32,
    /// How often the target has restarted.
    restarts: u32,
    /// Whether what the mover has copied is durable.
    bulk: Bulk,
    /// Whether somebody wants what the target has to be durable soon.
    is_flush_wanted: bool,
    /// Whether a flush of the target may have failed that nobody has told of yet.
    is_answer_owed: bool,
    /// Whether the volume is about to become larger.
    is_growing: bool,
    /// The last thing said.
    said: Standing,
    /// Of an asynchronous mirror: how near is near enough.
    aim: Aim,
    next_chunk: u64,
    next_flush: u64,
    meter: Meter,
    copied: Copied,
    bytes_mirrored: u64,
    tally: Tally,
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

/// How near the replica is to the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Behind,
    Converged,
    Synchronised,
}

/// What is known of the volume's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    /// Closing, or closed.
    Closing,
    /// Closed, and what the target has is about to be promised: nothing is sent to it.
    Frozen,
}

/// When the gate was closed the last time, and opened again.
#[derive(Clone, Copy, Debug, Default)]
struct GateTimes {
    closed: Duration,
    /// `None`: it is closed, or never was.
    opened: Option<Duration>,
}

/// Whether the mover may begin chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mover {
    Works,
    /// Somebody has paused the migration.
    Rests,
}

/// What is known of the link to the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Up,
    Away,
    /// Back, and requests of before have yet to be answered.
    Returning {
        since: Duration,
    },
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
            values: Values::default(),
            chunks: Chunks::default(),
            drain: Drain::default(),
            admission: Admission::default(),
            gate: Gate::Open,
            gate_times: GateTimes::default(),
            mover: Mover::Works,
            link: Link::Up,
            cursor: BlockIndex(0),
            scan: BlockIndex(0),
            tokens_at: None,
            admits_at: None,
            suspension: None,
            target_faults: 0,
            source_faults: 0,
            restarts: 0,
            bulk: Bulk::Durable,
            is_flush_wanted: false,
            is_answer_owed: false,
            is_growing: false,
            said: Standing::Behind,
            aim: Aim::default(),
            next_chunk: 0,
            next_flush: 0,
            meter: Meter::default(),
            copied: Copied::default(),
            bytes_mirrored: 0,
            tally: Tally::default(),
            actions: VecDeque::new(),
        }
    }

    /// Blocks missing or in flight, those that late writes touch included.
    pub fn blocks_remaining(&self) -> u64 {
        self.replica.blocks_missing() + self.chunks.blocks()
    }

    /// What it has decided so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// What is waited for as long as it takes: the guest's own disk, which no deadline of a migration binds.
    pub fn waits_for(&self) -> Option<&'static str> {
        match self.stage {
            Stage::Surveying => Some("what the source was asked for before the migration to end"),
            Stage::Copying if self.link == Link::Away => Some("the other host to be reachable again"),
            Stage::Copying if self.mover == Mover::Rests => Some("somebody to resume it"),
            Stage::Copying if self.chunks.is_any_waiting() => {
                Some("guest writes to blocks that are to be copied")
            }
            Stage::Copying if self.is_growing => Some("the volume to become larger"),
            Stage::Copying | Stage::Stopped => None,
        }
    }

    /// Tells whether guest writes are admitted no faster than the target takes them.
    pub fn is_throttled(&self) -> bool {
        self.admission.is_throttled()
    }

    /// Tells whether somebody has paused it.
    pub fn is_paused(&self) -> bool {
        self.mover == Mover::Rests
    }
}

impl Strategy for Mirror {
    fn handle_event(&mut self, now: Duration, event: VolumeEvent) {
        match event {
            VolumeEvent::Allocated(range) => self.replica.mark_missing(self.covering(range)),
            VolumeEvent::AllocationKnown => {
                if self.stage == Stage::Surveying {
                    self.stage = Stage::Copying;
                }
            }
            VolumeEvent::WriteArrived { write, range } => {
                // One that would overtake others that are held takes its turn.
                let takes_turn = self.is_asynchronous() && self.writes.has_held();
                let patience_ends = now + self.patience_left(now);
                self.writes.arrive(write, range, self.covering(range), now, patience_ends);
                if !takes_turn {
                    self.admit(now, write);
                }
            }
            VolumeEvent::SourceWritten { write, result } => self.source_written(now, write, result),
            VolumeEvent::TargetWritten { write, result } => self.target_written(now, write, result),
            VolumeEvent::ChunkCopied { chunk, result } => self.chunk_copied(now, chunk, result),
            VolumeEvent::TargetFlushed { flush, result } => self.target_flushed(now, flush, result),
            VolumeEvent::TargetRestarted => self.target_lost_the_volatile(),
            VolumeEvent::FlushWanted => self.is_flush_wanted = true,
            VolumeEvent::GateCloses => {
                if self.gate == Gate::Open {
                    self.gate_times = GateTimes { closed: now, opened: None };
                }
                self.gate = Gate::Closing;
            }
            VolumeEvent::Freeze => {
                if self.gate == Gate::Closing {
                    self.gate = Gate::Frozen;
                }
            }
            VolumeEvent::GateOpens => {
                // What the target flushed for its promise may have failed: it says so to the next flush.
                self.is_answer_owed |= self.gate == Gate::Frozen && self.stage == Stage::Copying;
                self.gate = Gate::Open;
                self.gate_times.opened = Some(now);
            }
            VolumeEvent::LinkLost => self.link_lost(),
            VolumeEvent::LinkBack => {
                if self.link == Link::Away {
                    self.link = Link::Returning { since: now };
                }
            }
            VolumeEvent::Pause => self.mover = Mover::Rests,
            VolumeEvent::Resume => self.mover = Mover::Works,
            VolumeEvent::GrowthBegins => self.is_growing = true,
            VolumeEvent::GrowthEnds { size_bytes } => self.grown(size_bytes),
            VolumeEvent::Stop => self.stop(now),
        }
        self.advance(now);
    }

    fn handle_timeout(&mut self, now: Duration) {
        self.give_up_waiting(now);
        self.advance(now);
    }

    fn poll_action(&mut self) -> Option<VolumeAction> {
        self.actions.pop_front()
    }

    fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        let patience = self.writes.iter().filter_map(|write| match write.state {
            WriteState::Mirrored { source: SourceSide::Answered { patience_ends }, .. } => {
                Some((patience_ends, "the target to take a mirrored write"))
            }
            WriteState::Held => Some((write.patience_ends, "a chunk that a held write touches")),
            _ => None,
        });
        let retry = self.suspension.and_then(|suspension| Some((suspension.until?, suspension.reason)));
        let tokens = self.tokens_at.map(|at| (at, "the bandwidth limit"));
        let admits = self.admits_at.map(|at| (at, "the target to take what guests have written"));
        let stuck = self
            .oldest_unanswered()
            .map(|since| (since + self.settings.no_progress_max, "the target to answer a request"));
        let aims = self.aims_lower_at().map(|at| (at, "guests to write less for a moment, or for that long"));
        patience.chain(retry).chain(tokens).chain(admits).chain(aims).chain(stuck).min_by_key(|(at, _)| *at)
    }

    fn set_bandwidth(&mut self, now: Duration, bytes_per_second: Option<u64>) {
        self.pacing.set_rate(bytes_per_second);
        self.advance(now);
    }

    fn lacking(&self) -> Option<LayeredBitmap> {
        if self.stage != Stage::Copying || self.gate != Gate::Open {
            return None;
        }
        let mut lacking = self.replica.lacking();
        let chunks = self.chunks.ranges();
        let writes = self.writes.iter().map(|write| write.blocks);
        chunks.chain(writes).chain(self.values.ranges()).for_each(|blocks| {
            lacking.insert(blocks);
        });
        Some(lacking)
    }

    fn costs(&self) -> Costs {
        Costs {
            bytes_copied: self.copied.bytes_written,
            bytes_mirrored: self.bytes_mirrored,
            bytes_zero: self.copied.bytes_zero,
            tally: self.tally,
        }
    }

    fn progress(&mut self, now: Duration) -> VolumeProgress {
        let timeout = self.poll_timeout();
        let waiting = timeout
            .map(|(at, reason)| Waiting { reason, remaining: Some(at.saturating_sub(now)) })
            .or(self.waits_for().map(|reason| Waiting { reason, remaining: None }));
        let (block_bytes, remaining) = (self.settings.block_size.bytes(), self.blocks_remaining());
        VolumeProgress {
            bytes_synchronised: self.meter.blocks() * block_bytes,
            bytes_missing: remaining * block_bytes,
            fraction: self.meter.fraction(remaining),
            waiting,
            remaining: self.meter.remaining(remaining),
            copy_bytes_per_second: self.meter.rate() * block_bytes as f64,
            suspended: self.suspension.map(|suspension| suspension.reason),
            costs: self.costs(),
        }
    }
}

impl Mirror {
    /// Tells whether how a flush of the target ends is still to be heard: it must not end, and fail, beside one by which the
    /// target promises.
    fn awaits_flush(&self) -> bool {
        (self.is_answer_owed || self.replica.is_flushing()) && !broken(Bug::FailedFlushConfirmed)
    }

    /// Tells whether the replica could be handed over to at this instant; always with both stores acknowledging.
    fn is_synchronised(&self) -> bool {
        self.stage == Stage::Copying
            && !self.awaits_flush()
            && self.suspension.is_none()
            && self.mover == Mover::Works
            && self.replica.is_complete()
            && self.chunks.is_empty()
            && !self.writes.has_late()
            && self.cursor == self.end()
            && self.bulk == Bulk::Durable
    }
}
