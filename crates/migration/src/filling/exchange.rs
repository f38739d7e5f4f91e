//! What a filling learns from its caller ([`FillingEvent`]), and what it asks the caller to do ([`FillingAction`]).

use std::time::Duration;

use chronicle::{BlockRange, ByteRange};

/// A guest's request. The caller chooses the number for the time in flight and never reuses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// A request to the reservoir for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FetchId(pub u64);

/// A note for the next daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NoteId(pub u64);

/// A round that makes the presence of units durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordingId(pub u64);

/// A write of units whose bytes a failed flush may have lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RewriteId(pub u64);

/// An event of a volume that is being filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillingEvent {
    /// A guest's read has arrived. It waits for [`FillingAction::Admit`] or [`FillingAction::Refuse`].
    ReadArrived {
        /// The number of the read.
        request: RequestId,
        /// The bytes to read, not empty.
        range: ByteRange,
    },
    /// A guest's change of whole units has arrived. It waits for [`FillingAction::Admit`]; after the change it waits for
    /// [`FillingAction::Written`].
    WriteArrived {
        /// The number of the change.
        request: RequestId,
        /// The bytes to change, not empty.
        range: ByteRange,
    },
    /// An admitted change has ended.
    WriteEnded {
        /// The number of the change.
        request: RequestId,
        /// Whether it succeeded; a failed change may be partly applied.
        result: Result<(), StoreFault>,
    },
    /// The guest whose request was not admitted is gone.
    Withdrawn {
        /// The number of the request.
        request: RequestId,
    },
    /// A guest asks to make every answered request durable. It waits for [`FillingAction::Flushed`].
    FlushArrived {
        /// The number of the flush.
        request: RequestId,
    },
    /// The reservoir has answered a fetch.
    Fetched {
        /// The number of the fetch.
        fetch: FetchId,
        /// Whether the bytes have arrived.
        result: Result<(), FetchFault>,
    },
    /// Fetched bytes have been written to the store.
    Stored {
        /// The number of the fetch.
        fetch: FetchId,
        /// Whether the write succeeded.
        result: Result<(), StoreFault>,
    },
    /// The store has been flushed for a recording.
    StoreFlushed {
        /// The number of the recording.
        recording: RecordingId,
        /// Whether everything completed before the flush is durable.
        result: Result<(), StoreFault>,
    },
    /// Units have been read back and written again.
    Rewritten {
        /// The number of the rewrite.
        rewrite: RewriteId,
        /// Whether both succeeded.
        result: Result<(), StoreFault>,
    },
    /// The reservoir has answered a read that passes by the store.
    Passed {
        /// The number of the fetch.
        fetch: FetchId,
        /// Whether the bytes have arrived.
        result: Result<(), FetchFault>,
    },
    /// A recording has ended.
    Recorded {
        /// The number of the recording.
        recording: RecordingId,
        /// Whether the recording is durable.
        result: Result<(), StoreFault>,
    },
    /// The administrator has declared the former host lost. Nothing is fetched from now on, and reads of missing blocks are
    /// refused instead of held. Writes over missing blocks continue.
    MissingGivenUp,
    /// The background fetches pause, because the volume is on its way to a host that has all of it.
    Rest,
    /// The background fetches resume.
    GoOn,
    /// Limits how long a read may wait for a silent reservoir before it is refused; `None`: without limit.
    WaitsLimited {
        /// The longest wait of a read.
        to: Option<Duration>,
    },
    /// A note for the next daemon has ended.
    Noted {
        /// The number of the note.
        note: NoteId,
        /// Whether the note was stored.
        result: Result<(), StoreFault>,
    },
}

/// An action for a volume that is being filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FillingAction {
    /// Submit a guest's request to the store.
    Admit {
        /// The number of the request.
        request: RequestId,
    },
    /// Answer a guest's change as made.
    Written {
        /// The number of the change.
        request: RequestId,
    },
    /// Note that guests have written these units. The note must outlast this daemon, but not a loss of power.
    Note {
        /// The number to use in the answer.
        note: NoteId,
        /// The written units, in order.
        units: Vec<BlockRange>,
    },
    /// Fail a guest's read.
    Refuse {
        /// The number of the read.
        request: RequestId,
        /// The reason of the refusal.
        why: Refusal,
    },
    /// Ask the reservoir for these bytes.
    Fetch {
        /// The number to use in the answer.
        fetch: FetchId,
        /// The bytes to fetch, not empty.
        range: ByteRange,
        /// Whether a guest waits for them.
        urgency: Urgency,
    },
    /// Ask the reservoir for these parts, for one guest's read: the store takes no fetched bytes.
    PassBy {
        /// The number to use in the answer.
        fetch: FetchId,
        /// The parts to fetch, in order.
        parts: Vec<ByteRange>,
    },
    /// Submit a guest's read to the store, and replace the parts that have passed by it.
    AdmitWith {
        /// The number of the read.
        request: RequestId,
        /// The number of the fetch that has the parts.
        fetch: FetchId,
    },
    /// Write parts of the fetched bytes to the store, and drop the rest.
    Store {
        /// The number of the fetch.
        fetch: FetchId,
        /// The parts to write, in order.
        parts: Vec<ByteRange>,
    },
    /// Flush the owner's store.
    FlushStore {
        /// The number to use in the answer.
        recording: RecordingId,
        /// Whether guests must learn of a failure.
        on_behalf: OnBehalf,
    },
    /// Read these bytes from the owner's store, and write them to it again. No guest's change of them is under way.
    Rewrite {
        /// The number to use in the answer.
        rewrite: RewriteId,
        /// The bytes, not empty.
        range: ByteRange,
    },
    /// Record durably that these units are present; their bytes are durable already.
    Record {
        /// The number to use in the answer.
        recording: RecordingId,
        /// The units to record, in order.
        units: Vec<BlockRange>,
    },
    /// Answer a guest's flush.
    Flushed {
        /// The number of the flush.
        request: RequestId,
        /// The result to answer with.
        result: Result<(), StoreFault>,
    },
    /// Durably, no block is missing: the volume is complete.
    Whole,
}

/// The reason why a guest's read fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The reservoir cannot read the bytes, or is lost.
    Unreadable,
    /// The reservoir has not answered within the limit of the read. The bytes are fetched nevertheless.
    Late,
}

/// Whether a guest waits for a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// A guest waits: the unit is pulled.
    Urgent,
    /// No guest waits: the unit is pushed, as the papers call it.
    Background,
}

/// The party for which a store is flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnBehalf {
    /// For guests, which learn of a failure.
    Guests,
    /// The filling itself; no guest learns of a failure.
    Filling,
}

/// The owner's store, or its data folder, failed to take a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreFault;

/// The reason why a fetch failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchFault {
    /// The reservoir cannot read the bytes.
    Unreadable,
    /// The reservoir's host is unreachable, or has not opened the image yet: a retry is worthwhile.
    Away,
}
