//! Messages between the two daemons of a standby, on a channel of its own.
//!
//! ```text
//!   source: Ask ─► Answer            to make it, to delete it, and to describe its VMs
//!   source: Question ─► Word         before the volumes are served
//!   source: ToStandby, with a payload ─► Taken: as much may follow
//!   source: Named, with hashes ─► Wanted: what is to be sent; if HasContent was said before
//!   source: Compare, with hashes ─► Wanted: what differs
//!   standby's host: ToOwner, Fault
//! ```

use std::time::Duration;

use bytes::Bytes;
use chronicle::BlockRange;
use futures_channel::mpsc as lanes;
use lane::peer::ChannelEvent;
use migration::{HostId, MigrationId, VolumeIndex};
use serde::{Deserialize, Serialize};
use standby::asking::{IfSilent, Question, Word};
use standby::record::OwnerRecord;
use standby::wire::{StreamId, ToOwner, ToStandby};
use standby::{LifeId, StandbyId, Watermark};
use transport::{ChannelId, Priority, Session};

use crate::peers::channel::{Kind, Subject};

/// How long the other host may take to answer. Afterwards nobody waits for the answer.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(20);
/// The longest text of another host.
const TEXT_BYTES_MAX: usize = 1000;
/// A channel's number has this many bits of the standby's identity.
const NUMBER_BITS: u32 = 50;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Frame {
    /// An order of the source's administrator, and its number.
    Ask(u64, Ask),
    /// The answer to the order of this number.
    Answer(u64, Result<Answered, String>),
    /// A message to the standby.
    ToStandby(StreamId, ToStandby),
    /// A message to the source.
    ToOwner(StreamId, ToOwner),
    /// The standby's host has taken so many blocks of payload from a stream.
    Taken(StreamId, u64),
    /// The standby's host cannot go on; the text says why. A new stream may find it mended.
    Fault(String),
    /// What the source's administrator orders, at the beginning of each stream.
    Terms(Terms),
    /// Before it serves, the source asks whether the standby was promoted.
    Question(Question),
    /// The answer to the last question.
    Word(Word),
    /// From the standby's host, before it answers an offer: its images have content. What is named may be there.
    HasContent(StreamId),
    /// From the source: does the image have these contents? The payload has the SHA-256 hashes of the blocks.
    Named {
        stream: StreamId,
        /// The number of the question.
        number: u64,
        volume: standby::VolumeIndex,
        blocks: BlockRange,
    },
    /// From the source: as `Named`, but nothing is taken.
    Compare {
        stream: StreamId,
        /// The number of the question.
        number: u64,
        volume: standby::VolumeIndex,
        blocks: BlockRange,
    },
    /// First block and number of blocks of runs whose contents the image does not have, in order. The rest of what was named is taken as
    /// if it had been sent.
    Wanted {
        stream: StreamId,
        /// The number of the question.
        number: u64,
        runs: Vec<(u64, u64)>,
    },
}

/// How often a group is cut, and how old its standby may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terms {
    pub(crate) every_ms: u64,
    pub(crate) rpo_ms: u64,
}

/// An order to the standby's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Make room for a standby. One that is there is a success.
    Make(AskedStandby),
    /// Delete it. One that is not there is a success.
    Remove {
        /// Whether the source knows that it was promoted. Otherwise one that was is not removed.
        knows_promotion: bool,
    },
    /// Keep what starting a VM takes. The payload is a piece of its description.
    Vm(VmPiece),
    /// Forget every described VM that is not one of these.
    Vms(Vec<String>),
    /// From a former owner: it has given its volumes up, because the standby was promoted. It was told, or the standby is not there:
    /// a success.
    Yielded,
    /// To a former owner: make the images that it has given up the standby of the promoted volumes. One that is there is a success.
    Return(AskedReturn),
    /// To a former owner: what do its images lack of a volume, from this block on?
    Lacking {
        /// The volume's position in the group.
        volume: u16,
        /// The first block of interest.
        from: u64,
    },
    /// To a former owner: which blocks of a volume have these contents? The payload has the SHA-256 hashes of successive blocks.
    Compare {
        /// The volume's position in the group.
        volume: u16,
        /// The first block.
        first: u64,
    },
    /// From a former owner: may it give its volumes up, because the standby was promoted? If so, they are not given up here.
    Yielding,
    /// From the source: volumes of the group are about to leave it. Until it says that they stay, or that host says that it has them,
    /// either may have them.
    Leaving(LeavingFor),
    /// From the source: the volumes have not left it.
    Staying,
    /// From the former source, to the host that has the volumes: it is the source of their standby now. One that it is already is a success.
    Follow(Box<Followed>),
    /// From the new source: it has the volumes.
    Arrived,
}

/// The host that volumes leave for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeavingFor {
    pub(crate) host: HostId,
    /// The name that the source knows it by.
    pub(crate) name: String,
}

/// A standby whose volumes have come to another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Followed {
    pub(crate) asked: AskedStandby,
    /// The host that keeps it.
    pub(crate) host: HostId,
    pub(crate) terms: Terms,
    pub(crate) bandwidth: Option<u64>,
    pub(crate) is_paused: bool,
    pub(crate) if_silent: Option<IfSilent>,
    /// The record for the new owner; `None`: the standby has never begun.
    pub(crate) record: Option<OwnerRecord>,
}

/// A standby that former owner's images are to become.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AskedReturn {
    /// The new standby. Its store is that of the images.
    pub(crate) asked: AskedStandby,
    /// The state that was promoted.
    pub(crate) promoted: Watermark,
    /// The life of the new owner's history.
    pub(crate) life: LifeId,
}

/// A piece of the description of a VM. The pieces of one description are asked one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VmPiece {
    pub(crate) vm: String,
    /// Where the piece begins, in bytes.
    pub(crate) offset: u32,
    /// The length of the whole description in bytes.
    pub(crate) bytes: u32,
    /// The SHA-256 hash of the whole description.
    pub(crate) hash: Vec<u8>,
}

/// A standby that is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AskedStandby {
    pub(crate) standby: StandbyId,
    /// The name that the administrator uses: of the volume, or of the VM.
    pub(crate) name: String,
    /// The store at the standby's host; empty: that host chooses.
    pub(crate) store: String,
    pub(crate) keep: AskedKeep,
    pub(crate) volumes: Vec<AskedVolume>,
}

/// The recovery points that are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AskedKeep {
    pub(crate) last: u32,
    pub(crate) hourly: u32,
    pub(crate) daily: u32,
}

/// A volume of the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AskedVolume {
    pub(crate) volume: [u8; 16],
    pub(crate) name: String,
    pub(crate) size_bytes: u64,
}

/// The result of an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answered {
    /// The standby is in this store.
    Made { store: String },
    /// There is nothing to say about it.
    Done,
    /// The description is here; the text says why the VM could not be started there now.
    Vm { problem: Option<String> },
    /// The images are the standby's, in this store, or will be.
    Returning {
        /// The store.
        store: String,
        /// Whether the standby receives.
        is_ready: bool,
        /// Why it does not go on.
        problem: Option<String>,
    },
    /// First block and number of blocks of runs that the images may lack; `None`: perhaps everything.
    Lacking {
        /// The runs, in order.
        runs: Option<Vec<(u64, u64)>>,
        /// Where the next answer begins; `None`: this was the last one.
        next: Option<u64>,
    },
    /// First block and number of blocks of runs that have the contents that were named.
    Same(Vec<(u64, u64)>),
}

impl Frame {
    pub(crate) fn encode(&self) -> Bytes {
        // A growing buffer accepts everything.
        postcard::to_stdvec(self).unwrap_or_default().into()
    }

    /// Returns the message in these bytes; `None`: they are none.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (frame, surplus) = postcard::take_from_bytes(bytes).ok()?;
        surplus.is_empty().then_some(frame)
    }
}

/// What a channel about a standby carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The streams of its machines.
    Streams,
    /// Orders of administrators: they have a channel of their own, because each end of a channel is one reader's.
    Asks,
    /// Questions before the volumes are served.
    Questions,
}

/// Returns a text of another host as it may be shown here.
pub(super) fn cleaned(text: &str) -> String {
    let end = (0..=text.len().min(TEXT_BYTES_MAX)).rev().find(|at| text.is_char_boundary(*at));
    words::clean(&text[..end.unwrap_or(0)])
}

/// Returns the subject of a channel about a standby, whose volumes are at `source`.
pub(crate) fn subject(standby: StandbyId, source: HostId, purpose: Purpose) -> Subject {
    let number = (standby.0 as u64 & ((1 << NUMBER_BITS) - 1)) | (1 << NUMBER_BITS);
    let volume = VolumeIndex(match purpose {
        Purpose::Streams => 0,
        Purpose::Asks => 1,
        Purpose::Questions => 2,
    });
    Subject { kind: Kind::Standby, source, migration: MigrationId(number), volume }
}

/// Returns whether a channel is about a standby, whose volumes are at `source`.
pub(crate) fn is_about(channel: ChannelId, standby: StandbyId, source: HostId, target: HostId) -> bool {
    let is = |purpose| subject(standby, source, purpose).channel(target) == channel;
    is(Purpose::Streams) || is(Purpose::Asks) || is(Purpose::Questions)
}

/// Sends messages to another host in order.
#[derive(Clone)]
pub(crate) struct Line {
    pub(crate) channel: ChannelId,
    pub(crate) way: Way,
}

/// Where a line leads.
#[derive(Clone)]
pub(crate) enum Way {
    /// To another host.
    Peer(Session),
    /// To the source in this process: the standby is exported.
    Here(lanes::UnboundedSender<ChannelEvent>),
}

impl Line {
    pub(crate) fn send(&self, frame: &Frame, payload: Bytes) {
        let session = match &self.way {
            Way::Peer(session) => session,
            Way::Here(source) => {
                let message = ChannelEvent::Message { head: frame.encode(), payload, credit: Box::new(()) };
                // A group that has ended asks again.
                let _ = source.unbounded_send(message);
                return;
            }
        };
        match transport::Message::new(self.channel, Priority::Bulk, frame.encode(), payload) {
            Ok(message) => session.send(message.ordered()),
            // Extents are cut to a part of the limit.
            Err(error) => tracing::error!(%error, "dropped a message about a standby"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written_and_garbage_is_none() {
        let asked = AskedStandby {
            standby: StandbyId(7),
            name: "web1".to_owned(),
            store: String::new(),
            keep: AskedKeep { last: 6, hourly: 0, daily: 0 },
            volumes: vec![AskedVolume { volume: [1; 16], name: "web1".to_owned(), size_bytes: 4096 }],
        };
        let frame = Frame::Ask(3, Ask::Make(asked));
        let bytes = frame.encode();
        assert_eq!(Frame::decode(&bytes), Some(frame));
        for length in 0..bytes.len() {
            assert_eq!(Frame::decode(&bytes[..length]), None);
        }
        assert_eq!(Frame::decode(&[bytes.as_ref(), &[0]].concat()), None);
    }
    #[test]
    fn a_text_of_another_host_is_cut_between_characters() {
        let long = "ä".repeat(TEXT_BYTES_MAX);
        assert_eq!(cleaned(&format!("x{long}")).chars().count(), 1 + (TEXT_BYTES_MAX - 1) / 2);
        assert_eq!(cleaned("short"), "short");
    }
}
