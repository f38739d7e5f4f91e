//! The control frames of the protocol. Their postcards change only with the protocol's version.

use serde::{Deserialize, Serialize};

use crate::credit::CLASSES;

/// Limit of the runs in one acknowledgement: with more gaps, the rest is acknowledged as the gaps close.
pub(crate) const RANGES_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Control {
    Hello(Hello),
    Welcome(Welcome),
    /// The dialler is there and agrees: frames may follow.
    Ready,
    Refusal(Refusal),
    Acknowledgement(Acknowledgement),
    /// Asks for a [`Control::Pong`] with the same number.
    Ping(u64),
    Pong(u64),
    Goodbye,
    Join(JoinRequest),
    /// Answers a host that has redeemed an invitation.
    Joined(JoinReply),
    /// Fills packets, so that a path which swallows large ones is found; its bytes mean nothing.
    Large(Vec<u8>),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// A random number which names the connection in its session.
    pub(crate) connection: u64,
    /// The dialler's incarnation, and the one that it knows of the peer.
    pub(crate) incarnation: u64,
    pub(crate) expected: Option<u64>,
    /// Connections that the dialler has given up: none of their messages may be delivered after this.
    pub(crate) fenced: Vec<u64>,
    /// What the dialler has delivered, and its grants.
    pub(crate) acknowledgement: Acknowledgement,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub(crate) incarnation: u64,
    pub(crate) fenced: Vec<u64>,
    pub(crate) acknowledgement: Acknowledgement,
}

/// The delivered frames of one life of a session, and the total of bytes that may be sent in it.
///
/// Each acknowledgement is complete, so any may be lost and the newest counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Acknowledgement {
    /// All lower numbers have been delivered.
    pub(crate) floor: u64,
    /// Further delivered runs, each with its first and last number; at most [`RANGES_MAX`].
    pub(crate) ranges: Vec<(u64, u64)>,
    /// Cost that may be sent since the beginning, by class.
    pub(crate) granted: [u64; CLASSES],
}

/// Why a connection is refused. The codes are closed: each side shows its own text for them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    UnknownHost,
    /// The caller expected another host.
    WrongHost {
        expected: [u8; 32],
    },
    /// Another connection has changed the pair of incarnations meanwhile: dial again.
    Superseded,
    TooMany,
    /// The host is stopping, or the session is closed.
    Closing,
    Protocol,
    /// The invitation is another host's, or from before a restart.
    InvitationUnknown,
    InvitationExpired,
    InvitationUsed,
    InvitationProof,
    NotStored,
    /// Large packets of the caller do not arrive.
    LargePackets,
}

/// Redeems an invitation: proves its secret without showing it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JoinRequest {
    pub(crate) invitation: [u8; 16],
    pub(crate) proof: [u8; 32],
    pub(crate) name: String,
    pub(crate) links: Vec<WireLink>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JoinReply {
    pub(crate) proof: [u8; 32],
    pub(crate) name: String,
    pub(crate) links: Vec<WireLink>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WireLink {
    pub(crate) address: String,
    pub(crate) speed_bits_per_second: Option<u64>,
}
