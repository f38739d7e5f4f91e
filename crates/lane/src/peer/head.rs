//! What is said about a call, or about its answer: the head of what a channel carries, and its encoding.
//!
//! The encoding is postcard's of [`Head`]: variants are only ever appended. What hosts can say to each other at all is
//! agreed on by the transport's version.

use block::IoError;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::fencing::FencingToken;

/// Extents in one answer at most: whoever needs more asks for the rest.
pub const EXTENTS_MAX: usize = 4096;

/// The head of one thing that is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Head {
    /// The peer is asked for something; the payload is what is to be written.
    Call {
        /// Its number; never used before on this channel by this process.
        call: u64,
        /// Of what.
        address: Address,
        /// What is to be done.
        operation: Operation,
    },
    /// What became of a call; the payload is what was read.
    Answer {
        /// Of which.
        call: u64,
        /// What became of it.
        result: Result<Answered, Fault>,
    },
    /// The payload is a message of a handover.
    Message,
    /// The peer is asked to change a volume that it may own, and does so only if this is the owner's fencing token.
    FencedCall {
        /// Its number, as of other calls.
        call: u64,
        /// Of what.
        address: Address,
        /// What is to be done.
        operation: Operation,
        /// What this host was told last.
        fence: FencingToken,
    },
}

/// What a call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Address {
    /// The store that a volume is copied to: only until the peer owns the volume.
    Replica(u32),
    /// The volume of this identity, which the peer owns, as its clients see it.
    Owner([u8; 16]),
    /// What the peer has of a volume that it has handed over with blocks missing, for a guest that waits for it.
    Reservoir(u32),
    /// The same, when nobody waits for it.
    ReservoirInBackground(u32),
    /// What the peer, which a volume comes to, knows of copies at other hosts.
    Copies(u32),
}

/// What is to be done; offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Read so many bytes.
    Read {
        /// From here on.
        offset: u64,
        /// So many.
        length: u32,
    },
    /// Write the payload.
    Write {
        /// From here on.
        offset: u64,
        /// Whether it is durable when it is answered.
        durable: bool,
    },
    /// Make durable what has been answered.
    Flush,
    /// Make a range zero and give its space back.
    Discard {
        /// From here on.
        offset: u64,
        /// So many.
        length: u64,
    },
    /// Make a range zero.
    WriteZeroes {
        /// From here on.
        offset: u64,
        /// So many.
        length: u64,
        /// Whether its space stays allocated.
        keep_allocated: bool,
        /// Whether it is durable when it is answered.
        durable: bool,
    },
    /// Describe a range, or its beginning.
    Allocation {
        /// From here on.
        offset: u64,
        /// So many.
        length: u64,
    },
    /// Lend the store's image to this host, which has put this beside it ([`crate::shared_storage`]).
    Lease {
        /// What it has put there.
        answer: [u8; 32],
    },
    /// See that the image is locked by the host that it is leased to.
    LeaseIsHeld,
    /// A client begins to use the volume: raise its fencing token, and say what that is.
    Attach,
    /// The payload says how many clients are led to the volume, by host ([`crate::clients`]); without one nobody is any
    /// more, nor will be by this channel_ends.
    Clients {
        /// Grows with each of these.
        number: u64,
    },
    /// The payload says which units of the replica will be missing ([`migration::filling::encode_runs`]).
    Missing {
        /// Whether it begins with everything that is missing: nothing that was told before counts.
        is_base: bool,
        /// Whether all is said with it: when it is answered, it is durable.
        is_last: bool,
    },
    /// The payload says which units a copy at a third host lacks ([`migration::filling::encode_runs`]).
    Copy {
        /// Its host.
        host: [u8; 32],
        /// The migration by which the volume left there, as that host numbers it.
        departure: u64,
        /// Its generation.
        generation: u64,
    },
    /// All copies have been told.
    CopiesTold,
    /// Say how large the volume is, as soon as that is more than this host knows.
    Size {
        /// What it knows, in bytes.
        known: u64,
    },
}

impl Operation {
    /// Tells whether it changes what it is done to.
    pub(crate) fn is_change(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. })
    }
}

/// What a successful call is answered with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answered {
    /// It is done.
    Done,
    /// The payload is what was read.
    Read,
    /// Lengths in bytes and kinds of the first extents, at most [`EXTENTS_MAX`].
    Extents(Vec<(u64, Kind)>),
    /// The fencing token of the volume. To a change: it was not made and will not be, for it bears another one.
    Fenced(FencingToken),
    /// How large the volume is, in bytes.
    Size(u64),
}

/// Kinds of extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Allocated, may hold anything.
    Data,
    /// Allocated, reads as zeroes.
    Zero,
    /// Not allocated, reads as zeroes.
    Hole,
}

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// The store or volume does not exist there, or no longer.
    Gone,
    /// It is out of range or misaligned.
    Invalid,
    /// The device is read-only.
    ReadOnly,
    /// The device cannot do it.
    Unsupported,
    /// The peer's system refused it with this code.
    Os(i32),
}

/// Something that is no head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the head of {bytes} bytes cannot be decoded")]
pub struct Malformed {
    /// Its size.
    pub bytes: usize,
}

impl Head {
    /// Encodes it.
    pub fn encode(&self) -> Bytes {
        // A head has nothing that postcard cannot encode, and memory is not bounded here.
        postcard::to_stdvec(self).unwrap_or_default().into()
    }

    /// Decodes it.
    ///
    /// # Errors
    /// [`Malformed`].
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
            // Whatever a peer says: only codes that a system has are codes.
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
