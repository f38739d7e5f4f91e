//! The head of a call or of its answer, as a channel carries it, and its encoding.
//!
//! The encoding is postcard's of [`Head`]: variants are only ever appended. The transport's version says which messages hosts can
//! exchange at all.

use block::IoError;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::fencing::FencingToken;

/// The limit of extents in one answer: the caller asks again for more.
pub const EXTENTS_MAX: usize = 4096;

/// The head of one message on a channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Head {
    /// A call; the payload is the data to be written.
    Call {
        /// A number that this process has not used on this channel before.
        call: u64,
        /// The store or volume that is addressed.
        address: Address,
        /// The operation that is requested.
        operation: Operation,
    },
    /// The result of a call; the payload is the data that was read.
    Answer {
        /// The number of the call.
        call: u64,
        /// The result, or the reason of the failure.
        result: Result<Answered, Fault>,
    },
    /// The payload is a message of a handover.
    Message,
    /// A change to a volume that the peer may own; made only if the owner's fencing token is this one.
    FencedCall {
        /// The call's number, as of other calls.
        call: u64,
        /// The store or volume that is addressed.
        address: Address,
        /// The operation that is requested.
        operation: Operation,
        /// The token that this host was last given.
        fence: FencingToken,
    },
}

/// The object of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Address {
    /// The store that a volume is copied to: only until the peer owns the volume.
    Replica(u32),
    /// The volume of this identity, which the peer owns, as its clients see it.
    Owner([u8; 16]),
    /// The peer's image of a volume that it handed over incomplete, for a read that a guest waits for.
    Reservoir(u32),
    /// The same image, for background fetching.
    ReservoirInBackground(u32),
    /// The arriving volume's list of copies at other hosts, at its target.
    Copies(u32),
    /// The same store as [`Address::Replica`], for chunks of the copy: they give way to guests of its disk.
    ReplicaInBulk(u32),
}

/// The requested operation; offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Read this many bytes.
    Read {
        /// Where the range begins, in bytes.
        offset: u64,
        /// The length, in bytes.
        length: u32,
    },
    /// Write the payload at an offset.
    Write {
        /// Where the range begins, in bytes.
        offset: u64,
        /// Whether it has to be durable when answered.
        durable: bool,
    },
    /// Make all answered changes durable.
    Flush,
    /// Make a range zero and free its space.
    Discard {
        /// Where the range begins, in bytes.
        offset: u64,
        /// The length, in bytes.
        length: u64,
    },
    /// Make a range read as zero.
    WriteZeroes {
        /// Where the range begins, in bytes.
        offset: u64,
        /// The length, in bytes.
        length: u64,
        /// Whether its space stays allocated.
        keep_allocated: bool,
        /// Whether it has to be durable when answered.
        durable: bool,
    },
    /// Describe the allocation of a range, or of its beginning.
    Allocation {
        /// Where the range begins, in bytes.
        offset: u64,
        /// The length, in bytes.
        length: u64,
    },
    /// Lease the store's image to this host, which has put an answer file beside it ([`crate::shared_storage`]).
    Lease {
        /// The content of the answer file.
        answer: [u8; 32],
    },
    /// Verify that the host holding the lease has locked the image.
    LeaseIsHeld,
    /// A client begins to use the volume: raise its fencing token, and return the new one.
    Attach,
    /// The payload holds the number of clients forwarded to the volume, by host ([`crate::clients`]). Without a payload this
    /// channel forwards none, now or later.
    Clients {
        /// Grows with each of these.
        number: u64,
    },
    /// A missing-set update: the payload holds the units that will be missing in the replica
    /// ([`migration::filling::encode_runs`]).
    Missing {
        /// Whether it begins a new set, which replaces earlier updates.
        is_base: bool,
        /// Whether the set is complete with it: the answer then says that the set is durable.
        is_last: bool,
    },
    /// The payload holds the units that a copy at a third host lacks ([`migration::filling::encode_runs`]).
    Copy {
        /// The identity of the copy's host.
        host: [u8; 32],
        /// The migration by which the volume left that host, as numbered there.
        departure: u64,
        /// The generation of the copy.
        generation: u64,
    },
    /// All copies have been sent.
    CopiesTold,
    /// Return the volume's size as soon as it exceeds the known one.
    Size {
        /// The known size, in bytes.
        known: u64,
    },
    /// Let chunks give way to guests of the disk that the replica is on, and say what that does.
    GiveWay {
        /// What these guests may lose, in percent; 0: chunks do not give way.
        impact_percent: u8,
    },
}

impl From<HeldBack> for pacer::Limit {
    fn from(held_back: HeldBack) -> Self {
        match held_back {
            HeldBack::No => Self::Disk,
            HeldBack::ByGuests => Self::Guests,
            HeldBack::Measuring => Self::Measuring,
        }
    }
}

impl From<GivenWay> for pacer::Status {
    fn from(given_way: GivenWay) -> Self {
        Self {
            bytes_per_second: given_way.bytes_per_second as f64,
            loss: f64::from(given_way.loss_permille) / 1000.0,
            has_guests: given_way.has_guests,
        }
    }
}

impl Operation {
    pub(crate) fn is_change(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. })
    }
}

/// The answer to a successful call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answered {
    /// The operation is done.
    Done,
    /// The payload is the data that was read.
    Read,
    /// Lengths in bytes and kinds of the first extents, at most [`EXTENTS_MAX`].
    Extents(Vec<(u64, Kind)>),
    /// The volume's fencing token. As the answer to a change: the change bore another token, and was not and will not be made.
    Fenced(FencingToken),
    /// The size of the volume, in bytes.
    Size(u64),
    /// What giving way does at present.
    GivenWay(GivenWay),
}

/// What it does at the target's host that chunks give way to guests there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenWay {
    /// The bytes of chunks that have arrived and are not stored.
    pub bytes_arrived: u64,
    /// What holds them back.
    pub held_back: HeldBack,
    /// Whether the disk's pacer is asked. Without it the fields below tell nothing.
    pub is_paced: bool,
    /// The rate of all copies of the disk together while guests are active.
    pub bytes_per_second: u64,
    /// The part of their throughput that guests of the disk lose, in thousandths.
    pub loss_permille: u16,
    /// Whether guests are active.
    pub has_guests: bool,
}

/// What holds chunks back that have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HeldBack {
    /// Nothing holds chunks back.
    No,
    /// Guests of the disk.
    ByGuests,
    /// The pause in which guests are measured.
    Measuring,
}

/// The kinds of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Allocated, with any content.
    Data,
    /// Allocated, and reads as zeroes.
    Zero,
    /// Not allocated, and reads as zeroes.
    Hole,
}

/// The reason why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// The store or volume does not exist there.
    Gone,
    /// The range is out of bounds or misaligned.
    Invalid,
    /// The device is read-only there.
    ReadOnly,
    /// The device cannot do it.
    Unsupported,
    /// The peer's system failed with this error code.
    Os(i32),
}

/// The error for bytes that are no head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the head of {bytes} bytes cannot be decoded")]
pub struct Malformed {
    /// The size of the message, in bytes.
    pub bytes: usize,
}

impl Head {
    /// Encodes the head with postcard.
    pub fn encode(&self) -> Bytes {
        // A head has nothing that postcard cannot encode, and memory is not bounded here.
        postcard::to_stdvec(self).unwrap_or_default().into()
    }

    /// Decodes a head from a peer's message.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let malformed = Malformed { bytes: bytes.len() };
        let (head, rest) = postcard::take_from_bytes::<Self>(bytes).map_err(|_| malformed)?;
        let fits = match &head {
            Self::Answer { result: Ok(Answered::Extents(extents)), .. } => extents.len() <= EXTENTS_MAX,
            _ => true,
        };
        if rest.is_empty() && fits { Ok(head) } else { Err(malformed) }
    }
}

impl From<IoError> for Fault {
    fn from(error: IoError) -> Self {
        match error {
            IoError::Os { errno, .. } => Self::Os(errno.raw_os_error()),
            IoError::OutOfRange { .. } | IoError::Misaligned { .. } => Self::Invalid,
            IoError::ReadOnly => Self::ReadOnly,
            IoError::Unsupported => Self::Unsupported,
            IoError::Closed => Self::Gone,
        }
    }
}

impl From<Fault> for IoError {
    fn from(fault: Fault) -> Self {
        use rustix::io::Errno;
        match fault {
            Fault::Gone => Self::Closed,
            Fault::Invalid => Self::os("reach the other host's store", Errno::INVAL),
            Fault::ReadOnly => Self::ReadOnly,
            Fault::Unsupported => Self::Unsupported,
            // A peer may send any number: only valid system error codes are taken as such.
            Fault::Os(code) if (1..4096).contains(&code) => {
                Self::os("use the other host's store", Errno::from_raw_os_error(code))
            }
            Fault::Os(_) => Self::os("use the other host's store", Errno::IO),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_come_back_as_they_were_sent() {
        let heads = [
            Head::Call {
                call: 7,
                address: Address::Replica(1),
                operation: Operation::Write { offset: 1 << 40, durable: true },
            },
            Head::Answer { call: u64::MAX, result: Ok(Answered::Extents(vec![(4096, Kind::Hole)])) },
            Head::Answer { call: 0, result: Err(Fault::Os(28)) },
            Head::Message,
            Head::FencedCall {
                call: 8,
                address: Address::Owner([3; 16]),
                operation: Operation::Attach,
                fence: FencingToken::new(u64::MAX, 2),
            },
            Head::Call {
                call: 9,
                address: Address::ReplicaInBulk(2),
                operation: Operation::GiveWay { impact_percent: 20 },
            },
            Head::Answer {
                call: 9,
                result: Ok(Answered::GivenWay(GivenWay {
                    bytes_arrived: 1 << 20,
                    held_back: HeldBack::ByGuests,
                    is_paced: true,
                    bytes_per_second: 1 << 30,
                    loss_permille: 187,
                    has_guests: true,
                })),
            },
            Head::Answer { call: 8, result: Ok(Answered::Fenced(FencingToken::new(1, 3))) },
        ];
        for head in heads {
            assert_eq!(Head::decode(&head.encode()), Ok(head));
        }
    }

    #[test]
    fn what_a_host_that_knows_no_fences_says_has_not_changed() {
        let operation = Operation::Write { offset: 4096, durable: true };
        let call = Head::Call { call: 7, address: Address::Replica(1), operation };
        assert_eq!(&call.encode()[..], [0, 7, 0, 1, 1, 128, 32, 1]);
        assert_eq!(&Head::Answer { call: 7, result: Ok(Answered::Done) }.encode()[..], [1, 7, 0, 0]);
        assert_eq!(&Head::Message.encode()[..], [2]);
    }

    #[test]
    fn what_is_no_head_is_refused() {
        for bytes in [&[][..], &[9], &[0, 1], &[2, 0], &[1, 1, 0, 2, 255, 255, 255, 255, 15]] {
            assert_eq!(Head::decode(bytes), Err(Malformed { bytes: bytes.len() }), "{bytes:?}");
        }
        let too_many =
            Head::Answer { call: 0, result: Ok(Answered::Extents(vec![(1, Kind::Data); EXTENTS_MAX + 1])) };
        assert!(Head::decode(&too_many.encode()).is_err());
    }

    #[test]
    fn a_full_store_is_known_as_one_on_the_other_host_too() {
        let full = IoError::os("write", rustix::io::Errno::NOSPC);
        assert!(IoError::from(Fault::from(full)).is_no_space());
    }
}
