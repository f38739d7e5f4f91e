//! The mechanism of copying a volume: missing, in-flight and unconfirmed blocks, the state of guest writes, chunks and flushes,
//! and the handling of faults.
//!
//! ```text
//!   guest writes ───► guest_write ─► writes (guests that wait for both stores), by_value ─► values (that do not)
//!   chunks ─────────► mover ───────► chunks ──┐
//!   faults, links ──► fault                   ├──► replica: missing ─► in flight ─► applied ─► durable
//!   flushes ────────► flush ──────────────────┘
//! ```
//! The engine knows no strategy. A [policy](super::policy) decides the route of a write, the next run, and when the replica is
//! near enough. It reads the engine's state through `questions.rs`. [`Copying`](super::Copying) calls both.

mod by_value;
mod chunks;
mod drain;
mod fault;
mod flush;
mod gate;
mod growth;
mod guest_write;
mod hot;
mod meter;
mod mover;
mod questions;
mod replica;
mod rounds;
mod tally;
mod telling;
mod values;
mod writes;

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::{BlockIndex, BlockRange, ByteRange, LayeredBitmap};

use self::chunks::Chunks;
use self::drain::{Admission, Drain};
use self::fault::{FaultCounts, Suspension};
use self::flush::Flushes;
use self::gate::Gate;
use self::meter::Meter;
use self::replica::ReplicaBlocks;
use self::telling::Tellings;
use self::values::Values;
use self::writes::{SourceSide, WriteState, Writes};
use super::deadline::Outlook;
use super::heat::HeatFilter;
use super::{CopyingSettings, HotBlocks, VolumeAction, VolumeEvent};
use crate::handover::source::Costs;
use crate::pacing::{Budget, Pacing};
use crate::progress::{Carried, VolumeProgress, Waiting};

pub(super) use by_value::Toll;
pub use tally::Tally;
pub(super) use writes::Write;

pub(super) struct Engine {
    settings: CopyingSettings,
    terms: Terms,
    stage: Stage,
    replica: ReplicaBlocks,
    /// The missing set that the target knows. Only for strategies that hand over incomplete volumes.
    tellings: Tellings,
    writes: Writes,
    /// Writes in flight by value whose guests do not wait.
    values: Values,
    chunks: Chunks,
    flushes: Flushes,
    drain: Drain,
    admission: Admission,
    queue: Queue,
    gate: Gate,
    mover: Mover,
    link: Link,
    pacing: Pacing,
    /// Asks the pacers of both disks.
    paced: pacer::Mover,
    /// The most bytes of the next chunk.
    chunk_bytes_max: u64,
    /// Every block before it has been claimed once, and none behind it. At the end of the volume the first pass is over.
    cursor: BlockIndex,
    /// Where the search for missing blocks continues after the first pass.
    scan: BlockIndex,
    /// When a limit permits the next chunk, and which; `None` while none holds it back.
    tokens_at: Option<(Duration, &'static str)>,
    suspension: Option<Suspension>,
    faults: FaultCounts,
    /// How often guests write which blocks, if the strategy uses that.
    heat: HeatFilter,
    restarts: u32,
    is_growing: bool,
    said: Standing,
    meter: Meter,
    costs: Costs,
    actions: VecDeque<VolumeAction>,
}

/// The parameters that an engine takes from its strategy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) in_flight: InFlight,
    pub(super) rewritten: Rewritten,
    pub(super) written: Written,
    pub(super) hot: HotBlocks,
}

/// When blocks are copied that guests have written, and that did not go to the target at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// Like any other missing block.
    AnyTime,
    /// In the next round. Blocks that this round has still to copy are copied in it with their new content.
    NextRound,
    /// In the next round, even if this round has still to copy them.
    NextRoundToo,
}

/// How the limit of data in flight is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InFlight {
    Chunks,
    /// By bytes: many small chunks, which remain late in a copying, would not fill a long link.
    Bytes {
        /// The most bytes of guest writes in flight by value.
        values_max: u64,
    },
}

/// When blocks are copied again that were written during their copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rewritten {
    /// Right after the chunk has landed, in a second pass that holds writes to them.
    AtOnce,
    /// Like any other missing block.
    Later,
}

/// The decision at this point of the copying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    GoOn,
    /// The copied data is applied at the target, and must be made durable.
    Confirm,
}

/// How near the replica is to the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Behind,
    /// The rest will arrive soon enough for the gate to be closed.
    Converged,
    Synchronised,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The allocated ranges are being reported.
    Surveying,
    Copying,
    /// Failed or cancelled: nothing is sent.
    Stopped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mover {
    Works,
    /// The administrator has paused the migration.
    Rests,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Up,
    /// For `waited` before, the target has owed an answer without giving any.
    Away {
        waited: Duration,
    },
    /// Back, but earlier requests have still to be answered: since then, without the time away.
    Returning {
        since: Duration,
    },
}

/// The writes that a slow target holds, in order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Queue {
    Empty,
    /// The last of them waits until the target has taken more.
    UntilTaken,
    /// The last of them may be submitted at this time.
    Until(Duration),
}

impl Engine {
    pub(super) fn new(settings: CopyingSettings, terms: Terms) -> Self {
        let blocks = settings.block_size.blocks_of(settings.size_bytes);
        Self {
            pacing: Pacing::new(&settings.pacing),
            paced: pacer::Mover::default(),
            chunk_bytes_max: settings.pacing.chunk_bytes,
            settings,
            terms,
            stage: Stage::Surveying,
            replica: ReplicaBlocks::new(blocks),
            tellings: Tellings::new(blocks),
            writes: Writes::default(),
            values: Values::default(),
            chunks: Chunks::default(),
            flushes: Flushes::default(),
            drain: Drain::default(),
            admission: Admission::default(),
            queue: Queue::Empty,
            gate: Gate::default(),
            mover: Mover::Works,
            link: Link::Up,
            cursor: BlockIndex(0),
            scan: BlockIndex(0),
            tokens_at: None,
            suspension: None,
            faults: FaultCounts::default(),
            heat: HeatFilter::default(),
            restarts: 0,
            is_growing: false,
            said: Standing::Behind,
            meter: Meter::default(),
            costs: Costs::default(),
            actions: VecDeque::new(),
        }
    }

    /// Handles an event. A write that arrives is held until it is submitted.
    pub(super) fn handle_event(&mut self, now: Duration, event: VolumeEvent) {
        if event.is_answer() {
            self.target_answered(now);
        }
        match event {
            VolumeEvent::Allocated(range) => {
                self.tellings.missing(self.covering(range));
                self.replica.mark_missing(self.covering(range));
            }
            VolumeEvent::AllocationKnown => {
                if self.stage == Stage::Surveying {
                    self.stage = Stage::Copying;
                }
            }
            VolumeEvent::WriteArrived { write, range } => self.arrive(now, write, range),
            VolumeEvent::SourceWritten { write, result } => self.source_written(now, write, result),
            VolumeEvent::TargetWritten { write, result } => self.target_written(now, write, result),
            VolumeEvent::ChunkCopied { chunk, result } => self.chunk_copied(now, chunk, result),
            VolumeEvent::TargetFlushed { flush, result } => self.target_flushed(now, flush, result),
            VolumeEvent::TargetRestarted => self.target_lost_the_volatile(),
            VolumeEvent::MissingTold { telling, result } => self.missing_told(now, telling, result),
            VolumeEvent::FlushWanted => self.flushes.want(),
            VolumeEvent::GateCloses => self.gate.close(now),
            VolumeEvent::Freeze => self.gate.freeze(),
            VolumeEvent::GateOpens => {
                if self.gate.is_frozen() && self.stage == Stage::Copying {
                    // The flush for the target's promise may have failed; the next flush reports that.
                    self.flushes.owe_answer();
                }
                self.gate.open(now);
            }
            VolumeEvent::LinkLost => self.link_lost(now),
            VolumeEvent::LinkBack => self.link_back(now),
            VolumeEvent::Pause => {
                self.mover = Mover::Rests;
                self.paced.rest();
            }
            VolumeEvent::Resume => {
                self.mover = Mover::Works;
                self.paced.resume();
            }
            VolumeEvent::GrowthBegins => self.is_growing = true,
            VolumeEvent::GrowthEnds { size_bytes } => self.grown(size_bytes),
            VolumeEvent::Stop => {
                self.paced.set_terms(now, None);
                self.stop();
            }
        }
    }

    /// Notes that the target lacks these blocks. Called only before the allocation is known.
    pub(super) fn lacks(&mut self, lacking: &LayeredBitmap) {
        self.replica.mark_all_missing(lacking);
    }

    pub(super) fn poll_action(&mut self) -> Option<VolumeAction> {
        self.actions.pop_front()
    }

    pub(super) fn set_bandwidth(&mut self, bytes_per_second: Option<u64>) {
        self.pacing.set_rate(bytes_per_second);
    }

    pub(super) fn share(&mut self, budget: Budget) {
        self.pacing.share(budget);
    }

    pub(super) fn set_paced(&mut self, mover: pacer::Mover) {
        self.paced = mover;
    }

    /// Returns what guests may lose to chunks at present; `None`: chunks do not give way.
    pub(super) fn impact(&self) -> Option<pacer::Impact> {
        self.paced.terms().filter(|_| self.gate.is_open()).map(|terms| terms.impact)
    }

    /// Returns what is known of the end of the copying.
    pub(super) fn outlook(&self) -> Outlook {
        let rest = self.meter.remaining(self.blocks_remaining()).map(|(_, latest)| latest);
        Outlook { rest, gives_way: self.paced.limit() == pacer::Limit::Guests }
    }

    pub(super) fn paced(&mut self) -> &mut pacer::Mover {
        &mut self.paced
    }

    /// Returns the engine's deadlines, apart from [`Engine::gives_up_at`], and their reasons.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = (Duration, &'static str)> {
        let patience = self.writes.iter().filter_map(|write| match write.state {
            WriteState::Mirrored { source: SourceSide::Answered { patience_ends }, .. } => {
                Some((patience_ends, "the target to take a mirrored write"))
            }
            WriteState::Held => Some((write.patience_ends, "a chunk that a held write touches")),
            _ => None,
        });
        let retry = self.suspension.and_then(|suspension| Some((suspension.until?, suspension.reason)));
        let admits = match self.queue {
            Queue::Until(at) => Some((at, "the target to store guest writes")),
            Queue::Empty | Queue::UntilTaken => None,
        };
        patience.chain(retry).chain(self.tokens_at).chain(admits)
    }

    /// Returns the reason of a wait without limit, for example the guest's own disk.
    pub(super) fn waits_for(&self) -> Option<&'static str> {
        match self.stage {
            Stage::Surveying => Some("earlier requests to the source to end"),
            Stage::Copying if matches!(self.link, Link::Away { .. }) => {
                Some("the other host to be reachable again")
            }
            Stage::Copying if self.mover == Mover::Rests => Some("an administrator to resume it"),
            Stage::Copying if self.chunks.is_any_waiting() => {
                Some("guest writes to blocks that are to be copied")
            }
            Stage::Copying if self.is_growing => Some("the volume to become larger"),
            Stage::Copying | Stage::Stopped => None,
        }
    }

    pub(super) fn say(&mut self, standing: Standing) {
        if standing != self.said {
            self.said = standing;
            self.actions.push_back(match standing {
                Standing::Behind => VolumeAction::Behind,
                Standing::Converged => VolumeAction::Converged,
                Standing::Synchronised => VolumeAction::Synchronised,
            });
            if standing == Standing::Synchronised && self.is_told() {
                // **N.B.** Before the report that the handover may begin.
                let told = VolumeAction::Told { manifest: self.manifest() };
                self.actions.insert(self.actions.len() - 1, told);
            }
        }
    }

    /// Returns the target's missing set if both hosts lose, at this instant, everything that is not durable.
    pub(super) fn lacking(&self) -> Option<LayeredBitmap> {
        if self.stage != Stage::Copying || !self.gate.is_open() {
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

    pub(super) fn carry(&mut self, carried: &Carried) {
        self.costs = carried.costs;
        self.meter.carry(carried.bytes_synchronised / self.block_bytes(), carried.fraction);
    }

    /// Returns whether nothing is under way, and everything at the target is durable.
    pub(super) fn is_settled(&self) -> bool {
        let is_idle = self.chunks.is_empty()
            && self.writes.iter().next().is_none()
            && self.values.ranges().next().is_none();
        is_idle && !self.replica.is_flushing() && self.replica.blocks_unconfirmed() == 0
    }

    pub(super) fn costs(&self) -> Costs {
        self.costs
    }

    /// Returns the progress. `waiting` is the reason of a wait with a limit.
    pub(super) fn progress(&mut self, now: Duration, waiting: Option<Waiting>) -> VolumeProgress {
        let waiting = waiting.or(self.waits_for().map(|reason| Waiting { reason, remaining: None }));
        let (block_bytes, remaining) = (self.block_bytes(), self.blocks_remaining());
        VolumeProgress {
            bytes_synchronised: self.meter.blocks() * block_bytes,
            bytes_missing: remaining * block_bytes,
            fraction: self.meter.fraction(remaining),
            waiting,
            remaining: self.meter.remaining(remaining),
            copy_bytes_per_second: self.meter.rate() * block_bytes as f64,
            suspended: self.suspension.map(|suspension| suspension.reason),
            costs: self.costs,
            rounds: Vec::new(),
            paced: self.paced.status(now),
            limited_by: None,
            hurry: None,
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
