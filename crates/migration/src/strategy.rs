//! Brings a volume's replica at the target up to date: one machine for each volume, one file for each strategy.
//!
//! ```text
//!                    ┌───────────── Copying ─────────────┐
//!   VolumeEvent ────►│  Engine ◄── decisions ── Policy   │────► VolumeAction
//!                    │  the same for all        mirror.rs, asynchronous.rs,
//!                    │                          tracking.rs, post_copy.rs
//!                    └───────────────────────────────────┘
//! ```
//! A [`Copying`] receives every guest write and decides its route. It chooses the chunks to copy, and receives the results. It
//! reports when the replica is ready for the handover ([`VolumeAction::Synchronised`]); [`crate::source`] does the handover
//! itself.

mod asynchronous;
mod choice;
mod copying;
mod deadline;
mod engine;
mod heat;
mod mirror;
mod policy;
mod post_copy;
mod round;
mod tracking;

use std::time::Duration;

use chronicle::ByteRange;

pub use choice::{Choice, Diverging};
pub use copying::{Copying, CopyingSettings};
pub use engine::Tally;
pub use heat::{GENERATION_WRITES, Heat, HeatFilter, THRESHOLD};
pub use round::Round;

use crate::filling::Manifest;
use crate::journal::FailureCode;

/// The policy that brings a replica up to date, with its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// One pass; writes behind it go to both stores, which both acknowledge them. Used on one host.
    Mirror,
    /// Like `Mirror`, but only the source acknowledges writes. Used towards another host, at any distance.
    AsynchronousMirror {
        /// The most bytes of guest writes in flight to the target; beyond it their blocks become missing.
        buffer_bytes_max: u64,
        /// How long the rest may take to arrive behind closed gates. With a busy guest this must exceed a round trip, because
        /// that much is always in flight. An attempt at the handover also needs one and a half round trips, a flush and two
        /// commits (hard case 27).
        drain_max: Duration,
        /// The treatment of hot blocks.
        hot: HotBlocks,
    },
    /// Rounds: writes go to the source only, and the next round copies the blocks that they changed. The last round is copied
    /// behind closed gates (\[ESX\] §2.3).
    Tracking {
        /// The recording of writes to blocks that the current round has still to copy.
        recording: Recording,
        /// When hot blocks are copied.
        hot: HotBlocks,
        /// Whether the target is at this host.
        distance: Distance,
        /// How long the rest may take to arrive behind closed gates.
        drain_max: Duration,
        /// What follows if the rounds do not converge.
        otherwise: Otherwise,
    },
    /// A bounded number of rounds; the rest follows the volume after the handover (\[TPM\] §IV; without rounds \[XNBD\] §3.2).
    /// The target must be another host.
    PostCopy {
        /// The most rounds; 0: nothing is copied beforehand.
        rounds_max: u32,
    },
}

/// What follows rounds that do not converge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// The migration fails, and the volume stays.
    Fail,
    /// [`Strategy::Mirror`], with what the rounds have brought to the target.
    Mirror,
    /// [`Strategy::AsynchronousMirror`] likewise.
    AsynchronousMirror {
        /// The most bytes of guest writes in flight to the target, as for the strategy.
        buffer_bytes_max: u64,
        /// How long the rest may take behind closed gates, as for the strategy.
        drain_max: Duration,
    },
}

impl Otherwise {
    /// Returns the strategy that follows; `None`: none does.
    pub(crate) fn strategy(self, hot: HotBlocks) -> Option<Strategy> {
        match self {
            Self::Fail => None,
            Self::Mirror => Some(Strategy::Mirror),
            Self::AsynchronousMirror { buffer_bytes_max, drain_max } => {
                Some(Strategy::AsynchronousMirror { buffer_bytes_max, drain_max, hot })
            }
        }
    }
}

impl Strategy {
    /// Returns whether volumes are handed over incomplete.
    pub fn leaves_blocks(self) -> bool {
        matches!(self, Self::PostCopy { .. })
    }
}

/// What a strategy with rounds records of writes to blocks that the current round has still to copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recording {
    /// Nothing: this round copies the new content (\[ESX\] §2.3, incremental).
    #[default]
    Incremental,
    /// The write: the next round copies the blocks again.
    Full,
}

/// The place of a target, near or far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distance {
    /// A store of this host. Small chunks load a disk as much as large ones, so the number of chunks is limited.
    #[default]
    Near,
    /// Another host. Small chunks would not fill a long link, so the number of bytes is limited.
    Far,
}

/// The treatment of hot blocks, which guests write again and again (\[ESX\] §2.3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HotBlocks {
    /// They are put off, so that they are copied only once: with rounds until the last but one, otherwise until the pass is over.
    #[default]
    PutOff,
    /// They are copied like all other blocks.
    AsOthers,
}

/// A guest's write, discard or zeroing. The lane chooses the number for the time in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WriteId(pub u64);

/// A piece of the volume that is being copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChunkId(pub u64);

/// A flush of the target, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlushId(pub u64);

/// A missing-set update to the target, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TellingId(pub u64);

/// An event of a volume that is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeEvent {
    /// This range of the source is, or may be, allocated. Reported only before [`VolumeEvent::AllocationKnown`], or for a part
    /// by which the volume has just grown.
    Allocated(ByteRange),
    /// All allocated ranges are reported. Every guest write now passes through the strategy, and earlier ones have completed.
    AllocationKnown,
    /// A guest's write has arrived. It waits for [`VolumeAction::Admit`].
    WriteArrived {
        /// The number of the write, never used before.
        write: WriteId,
        /// The bytes that it changes, not empty.
        range: ByteRange,
    },
    /// The source has completed an admitted write.
    SourceWritten {
        /// The number of the write.
        write: WriteId,
        /// Whether it succeeded; a failed write may be partly applied.
        result: Result<(), SourceFault>,
    },
    /// The target has completed all parts of a write that was admitted to both stores.
    TargetWritten {
        /// The number of the write.
        write: WriteId,
        /// Whether the write succeeded.
        result: Result<(), TargetFault>,
    },
    /// The copying of a chunk has ended.
    ChunkCopied {
        /// The number of the chunk.
        chunk: ChunkId,
        /// The cost, or the side that failed.
        result: Result<Copied, CopyFault>,
    },
    /// A flush of the target has ended.
    TargetFlushed {
        /// The number of the flush.
        flush: FlushId,
        /// Whether everything applied before the request is durable.
        result: Result<(), TargetFault>,
    },
    /// The target has restarted and lost everything not durable. Later answers to earlier requests count as failures.
    TargetRestarted,
    /// The target has recorded a missing-set update durably, or has failed to.
    MissingTold {
        /// The number of the update.
        telling: TellingId,
        /// Whether it is durable.
        result: Result<(), TargetFault>,
    },
    /// The target's data should become durable soon, so that a restart of either host costs little.
    FlushWanted,
    /// The volume's gate begins to close for an attempt at the handover. No write is held from here on, and the rest goes to
    /// the target at full speed.
    GateCloses,
    /// The gate is closed, the target has everything, and is about to promise. Until the gate opens nothing is sent to the
    /// target, because it may become the owner before this side knows.
    Freeze,
    /// The attempt is over, and the guest resumes here.
    GateOpens,
    /// The target's host cannot be reached. Requests to the target are answered later, or fail.
    LinkLost,
    /// The target's host can be reached again. **N.B.** Every earlier request will be answered: as a success only if it was
    /// applied, as a failure only if it never will be (design §5.7).
    LinkBack,
    /// The administrator pauses the migration: nothing is copied, and there is no handover.
    Pause,
    /// The administrator resumes the migration.
    Resume,
    /// The volume is about to grow; there is no handover until the growth has ended.
    GrowthBegins,
    /// The volume has this size, unchanged if the growth failed. The new part is unwritten and reads as zeroes at both ends.
    GrowthEnds {
        /// The size in bytes.
        size_bytes: u64,
    },
    /// The migration is over: nothing is sent to the target, and no write is held.
    Stop,
}

/// Why a copy waits that an ordered limit slows down.
pub const BANDWIDTH_LIMIT: &str = "the bandwidth limit";

/// Why a copy waits that its disks' pacers slow down.
pub const GUESTS_FIRST: &str = "guests of its store, which come first";

impl VolumeEvent {
    /// Returns whether the target has carried out a request.
    pub(crate) fn is_answer(&self) -> bool {
        match self {
            Self::TargetWritten { result, .. }
            | Self::TargetFlushed { result, .. }
            | Self::MissingTold { result, .. } => result.is_ok(),
            Self::ChunkCopied { result, .. } => result.is_ok(),
            _ => false,
        }
    }
}

/// An action for a volume that is copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeAction {
    /// Submit a guest's write.
    Admit {
        /// The number of the write.
        write: WriteId,
        /// The stores that it goes to.
        route: Route,
    },
    /// Answer the guest with the source's result, even without the target's. Only for writes that were admitted to both stores
    /// and that the source has completed.
    Complete {
        /// The number of the write.
        write: WriteId,
    },
    /// Read the range from the source and write it to the target.
    Copy {
        /// The number to use in the answer.
        chunk: ChunkId,
        /// The bytes to copy.
        range: ByteRange,
    },
    /// Flush the target's store.
    FlushTarget {
        /// The number to use in the answer.
        flush: FlushId,
    },
    /// Send a missing-set update to the target; [`Copying::telling`] returns its content.
    TellMissing {
        /// The number to use in the answer.
        telling: TellingId,
    },
    /// The target knows its missing set exactly. Precedes [`VolumeAction::Synchronised`].
    Told {
        /// The manifest of the missing set.
        manifest: Manifest,
    },
    /// The handover may begin: the replica equals the volume, or the target knows its missing set and may lack it. If both stores
    /// acknowledge writes, all copied data is durable. Otherwise this is reported only while the gate is closing or closed.
    Synchronised,
    /// The rest of the replica will arrive soon enough for the gate to be closed. Only if the source alone acknowledges writes.
    Converged,
    /// The replica is neither equal to the volume nor near enough.
    Behind,
    /// Mirroring is suspended; guest writes only make blocks missing.
    Suspended {
        /// The reason of the suspension.
        reason: &'static str,
    },
    /// Mirroring has resumed after a suspension.
    Resumed,
    /// The migration cannot succeed.
    Failed {
        /// The cause, for programs.
        code: FailureCode,
        /// The cause, for the administrator.
        detail: String,
    },
}

/// The stores that a guest's write goes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// The source only; the blocks are copied later.
    SourceOnly,
    /// Source and target at once.
    Both,
    /// The source in full, and at once the target with these parts, in order and without overlap: the synchronised blocks. The
    /// others are copied later.
    BothInPart(Vec<ByteRange>),
}

/// The cost of copying a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// The bytes written to the target.
    pub bytes_written: u64,
    /// The bytes that were zero and became a hole.
    pub bytes_zero: u64,
    /// The bytes that share their blocks with the source, and were neither read nor written.
    pub bytes_cloned: u64,
}

/// The side that failed to copy a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyFault {
    /// The source could not be read.
    Source(SourceFault),
    /// The target could not be written.
    Target(TargetFault),
}

/// An error from the source's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceFault;

/// The kind of failure of the target's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetFault {
    /// The target's store is full.
    NoSpace,
    /// Any other error of the store.
    Error,
}
