//! How a volume's replica at the target is brought up to date: one machine a volume, one file a strategy.
//!
//! ```text
//!                    ┌───────────── Copying ─────────────┐
//!   VolumeEvent ────►│  Engine ◄── decisions ── Policy   │────► VolumeAction
//!                    │  the same for all        mirror.rs, asynchronous.rs,
//!                    │                          tracking.rs, post_copy.rs
//!                    └───────────────────────────────────┘
//! ```
//! A [`Copying`] is told of every guest write and says where it goes; it says which chunks to copy and is told how that
//! went. It reports when the replica could be handed over to ([`VolumeAction::Synchronised`]); the handover itself
//! is [`crate::source`]'s.

mod asynchronous;
mod choice;
mod copying;
mod engine;
mod heat;
mod mirror;
mod policy;
mod post_copy;
mod round;
mod tracking;

use std::time::Duration;

use chronicle::ByteRange;

pub use choice::Choice;
pub use copying::{Copying, CopyingSettings};
pub use engine::Tally;
pub use heat::{GENERATION_WRITES, Heat, HeatFilter, THRESHOLD};
pub use round::Round;

use crate::filling::Manifest;
use crate::journal::FailureCode;

/// By which policy a replica is brought up to date, and what that alone is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// One pass, and writes behind it go to both stores, which both acknowledge them: as on one host.
    Mirror,
    /// The same, but the source alone acknowledges writes: a target at another host, as far away as it may be.
    AsynchronousMirror {
        /// Bytes of guest writes that may be on their way to the target; beyond it their blocks become missing.
        buffer_bytes_max: u64,
        /// How long what is left may take to arrive behind closed gates: with a busy guest not less than a round trip
        /// and some, for so much is always on its way. A try at the handover has to be allowed that, and one and a half
        /// round trips, a flush and two commits besides (hard case 27).
        drain_max: Duration,
        /// What becomes of writes to blocks that are written again and again.
        hot: HotBlocks,
    },
    /// Rounds: writes go to the source only, and what they changed in one round is copied in the next; what is left in the
    /// end arrives behind closed gates (\[ESX\] §2.3).
    Tracking {
        /// What is recorded of writes to blocks that the round under way has still to copy.
        recording: Recording,
        /// When blocks are copied that are written again and again.
        hot: HotBlocks,
        /// Where the target is.
        distance: Distance,
        /// How long what is left may take to arrive behind closed gates.
        drain_max: Duration,
    },
    /// A bounded number of rounds, and the rest follows the volume when it has changed hands (\[TPM\] §IV; without rounds
    /// \[XNBD\] §3.2). Only towards another host.
    PostCopy {
        /// Rounds at most; 0: nothing is copied beforehand.
        rounds_max: u32,
    },
}

/// What a strategy that copies in rounds records of writes to blocks that the round under way has still to copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recording {
    /// Nothing: they are copied in this round with what was written (\[ESX\] §2.3, incremental).
    #[default]
    Incremental,
    /// That they were written: they are copied in the next one, too.
    Full,
}

/// Where a target is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distance {
    /// A store of this host. Small chunks take as much of a disk as large ones: so many are in flight.
    #[default]
    Near,
    /// Another host. Small chunks would not fill a long link: so many bytes are in flight.
    Far,
}

/// What becomes of blocks that guests write again and again (\[ESX\] §2.3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HotBlocks {
    /// They are put off, so that they are copied once rather than each time: in rounds until the last but one, otherwise until
    /// the pass is over.
    #[default]
    PutOff,
    /// They are copied as all others are.
    AsOthers,
}

/// A guest write (or discard, or zeroing), named by the lane while it is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WriteId(pub u64);

/// A piece of the volume that is being copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChunkId(pub u64);

/// A flush of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlushId(pub u64);

/// Something that the target is told about what it lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TellingId(pub u64);

/// What happened to a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeEvent {
    /// This range of the source is allocated, or may be; told only before [`VolumeEvent::AllocationKnown`], or of what
    /// has just become part of the volume.
    Allocated(ByteRange),
    /// All allocated ranges have been told. Every guest write goes through the strategy by now, and those that did
    /// not have completed.
    AllocationKnown,
    /// A guest wants to write. It waits for [`VolumeAction::Admit`].
    WriteArrived {
        /// Its name; never used before.
        write: WriteId,
        /// The bytes it changes, not empty.
        range: ByteRange,
    },
    /// The source has completed an admitted write.
    SourceWritten {
        /// Which.
        write: WriteId,
        /// Whether it succeeded; a write that failed may have been applied in part.
        result: Result<(), SourceFault>,
    },
    /// The target has completed a write that was admitted to both, in whole or in part: all of its parts.
    TargetWritten {
        /// Which.
        write: WriteId,
        /// Whether it succeeded.
        result: Result<(), TargetFault>,
    },
    /// A chunk has been copied, or not.
    ChunkCopied {
        /// Which.
        chunk: ChunkId,
        /// What it took, or who failed.
        result: Result<Copied, CopyFault>,
    },
    /// A flush of the target has ended.
    TargetFlushed {
        /// Which.
        flush: FlushId,
        /// Whether everything applied before it was asked for is durable.
        result: Result<(), TargetFault>,
    },
    /// The target has lost what was not durable, and works again. Answers to what was submitted before may still
    /// come, and count as failures.
    TargetRestarted,
    /// The target has taken note, durably, of what it was told to lack, or has not.
    MissingTold {
        /// Of which telling.
        telling: TellingId,
        /// Whether it has.
        result: Result<(), TargetFault>,
    },
    /// What the target has is to be made durable soon: a restart of either host is to cost little.
    FlushWanted,
    /// The volume's gate begins to close for a try at the handover: nothing is held from here on, and what is left goes
    /// to the target as fast as it can.
    GateCloses,
    /// The gate is closed, the target has everything, and is about to promise: until the gate opens nothing is sent to
    /// it, whatever is heard of it. It may be the owner before that is known here.
    Freeze,
    /// The try is over, and the guest goes on here.
    GateOpens,
    /// The target's host cannot be reached. Requests to the target are answered later, or fail.
    LinkLost,
    /// The target's host can be reached again. **N.B.** Every request of before will be answered: as a success only if
    /// it was applied, as a failure only if it never will be (design §5.7).
    LinkBack,
    /// Somebody wants the migration to rest: nothing is copied, and it is not handed over.
    Pause,
    /// It is to go on.
    Resume,
    /// The volume is about to become larger: until that has ended it is not handed over.
    GrowthBegins,
    /// The volume has this size; the same as before if it could not grow. What is new reads as zeroes at both ends, and
    /// nobody has written there yet.
    GrowthEnds {
        /// Its size in bytes.
        size_bytes: u64,
    },
    /// The migration is over: nothing is sent to the target any more, and nothing is held.
    Stop,
}

/// What is to be done for a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeAction {
    /// Submit a guest's write.
    Admit {
        /// Which.
        write: WriteId,
        /// Where to.
        route: Route,
    },
    /// Answer the guest with what the source said, whether or not the target has answered. Only for writes that were
    /// admitted to both and that the source has completed.
    Complete {
        /// Which.
        write: WriteId,
    },
    /// Read the range from the source and write it to the target.
    Copy {
        /// A name for the answer.
        chunk: ChunkId,
        /// The bytes.
        range: ByteRange,
    },
    /// Flush the target.
    FlushTarget {
        /// A name for the answer.
        flush: FlushId,
    },
    /// Tell the target what it lacks: [`Copying::telling`] says what.
    TellMissing {
        /// A name for the answer.
        telling: TellingId,
    },
    /// The target knows exactly what it lacks: said just before [`VolumeAction::Synchronised`].
    Told {
        /// What identifies that.
        manifest: Manifest,
    },
    /// The replica equals the volume, or the target knows what it lacks and may: it may be handed over to. If both stores acknowledge, everything copied in bulk is
    /// durable, too; otherwise it is said only while the gate is closing, or closed.
    Synchronised,
    /// What the replica lacks will have arrived soon enough for the gate to be closed. Only if the source alone
    /// acknowledges.
    Converged,
    /// The replica is neither equal to the volume nor near enough.
    Behind,
    /// Mirroring is suspended; guest writes only become bits.
    Suspended {
        /// Why.
        reason: &'static str,
    },
    /// Mirroring goes on.
    Resumed,
    /// The migration cannot succeed.
    Failed {
        /// The cause, for programs.
        code: FailureCode,
        /// The cause, for people.
        detail: String,
    },
}

/// Where a guest's write goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// To the source; the blocks are copied later.
    SourceOnly,
    /// To source and target at once.
    Both,
    /// To the source in whole, and to the target at once these parts of it, in order and without overlap: the blocks
    /// that are synchronised. The others are copied later.
    BothInPart(Vec<ByteRange>),
}

/// What copying a chunk took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Bytes written to the target.
    pub bytes_written: u64,
    /// Bytes that were zero and became a hole.
    pub bytes_zero: u64,
}

/// Who failed to copy a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyFault {
    /// The source could not be read.
    Source(SourceFault),
    /// The target could not be written.
    Target(TargetFault),
}

/// The source's store answered with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceFault;

/// How the target's store failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetFault {
    /// It is full.
    NoSpace,
    /// Anything else.
    Error,
}
