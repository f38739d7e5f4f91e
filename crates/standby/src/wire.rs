//! Messages between the owner of a group and the host of its standby.
//!
//! ```text
//!   Offer ─► Answer            once a stream
//!   Begin ─► Ready ─► Extent, Extent, … Seal ─► Acknowledged        once an epoch
//!   StillCurrent ─► Heard       an interval without writes
//! ```
//! A stream is the messages between one process of the owner and one of the standby's host, in order and without gaps. Messages of
//! another stream are dropped. A payload goes beside the [`ToStandby::Extent`] that describes it.

use chronicle::{BlockCount, BlockRange, Epoch, Generation};
use serde::{Deserialize, Serialize};

use crate::identity::{LifeId, StandbyId, VolumeIndex, Watermark};

/// Numbers the streams of one standby. The caller draws it; no two streams share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamId(pub u64);

/// A message to the standby's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToStandby {
    /// Begins a stream. An owner of a lower generation than one before is fenced.
    Offer {
        /// The standby that is meant.
        standby: StandbyId,
        /// The owner's generation.
        generation: Generation,
        /// The life of the owner's history.
        life: LifeId,
        /// The watermark that the owner has last made durable. Both sides agree after a restored journal only if it is equal.
        acknowledged: Option<Epoch>,
    },
    /// Announces an epoch. A spool of this stream that has no seal belongs to this epoch from now on.
    Begin {
        /// The number of the epoch.
        epoch: Epoch,
        /// The epoch as of which the standby must be, or must have sealed; `None`: the epoch has every block.
        base: Option<Epoch>,
        /// The number of blocks that follow at most.
        blocks: u64,
        /// The sizes of the volumes at the cut, in the group's order.
        sizes: Vec<BlockCount>,
    },
    /// Describes content of the epoch that has begun. Later extents replace earlier ones.
    Extent {
        /// The volume.
        volume: VolumeIndex,
        /// The blocks that follow, or that read as zeroes.
        blocks: BlockRange,
        /// Whether a payload follows.
        content: Content,
    },
    /// Ends an epoch: every block of it was sent, and none of a later one.
    Seal {
        /// The epoch that was begun.
        epoch: Epoch,
        /// How long ago it was cut, in milliseconds. What the seal itself travels is not in it.
        age_ms: u64,
    },
    /// Nothing was written since the epoch that was acknowledged last.
    StillCurrent,
}

/// What an extent holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// The payload beside it, as long as its blocks.
    Payload,
    /// Zeroes. The receiver writes them where its store does not promise that discarded blocks read as zeroes.
    Zeroes,
}

/// A message to the owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToOwner {
    /// Answers an offer.
    Answer(Answer),
    /// The epoch that was announced may be sent.
    Ready {
        /// The epoch of the announcement.
        epoch: Epoch,
    },
    /// The epoch that was announced is not taken. What was sent of it and has no seal is dropped.
    Refused {
        /// The reason that the owner shows.
        reason: RefusedBecause,
    },
    /// The standby's image is durably as of this epoch.
    Acknowledged {
        /// The epoch of the watermark.
        epoch: Epoch,
    },
    /// Answers [`ToStandby::StillCurrent`].
    Heard,
}

/// The answer to an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The standby receives.
    Receiving {
        /// The watermark of the image; `None` if it has none, or if the image was changed by others.
        watermark: Option<Watermark>,
        /// The newest sealed epoch of that life; at least that of the watermark.
        sealed_through: Epoch,
        /// Whether there is any recovery point.
        has_point: bool,
        /// Whether the image may have newer content of blocks that were written since the watermark: a migration that had begun
        /// with it has failed, or an epoch was being written in place. What was cut before the answer is sealed by itself no more.
        is_mixed: bool,
    },
    /// The standby was promoted: another host owns the group.
    Promoted,
    /// The standby does not exist any longer: a migration has used it.
    Consumed,
    /// An owner of a higher generation has spoken.
    Fenced,
    /// The journal was restored, and both sides do not agree. An administrator decides.
    Unsure,
    /// The standby was promoted, and an administrator has given that up: the standby is gone, and the owner has the group alone.
    GivenUp,
}

/// The reason why an epoch is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusedBecause {
    /// There is no room for it that leaves the last recovery point alone.
    NoSpace,
    /// A volume has grown, and its image cannot.
    CannotGrow,
    /// The standby lacks the epoch on which it builds.
    BaseMissing,
}
