//! The words of the protocol: what control frames say. Their postcards change only with the protocol's version.

use serde::{Deserialize, Serialize};

use crate::credit::CLASSES;

/// Runs of numbers in one acknowledgement: with more gaps than that the rest is acknowledged as the gaps close.
pub(crate) const RANGES_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Control {
    /// The dialler's side of the session.
    Hello(Hello),
    /// The called side's.
    Welcome(Welcome),
    /// The dialler is there and agrees: frames may follow.
    Ready,
    /// No connection for this one; why.
    Refusal(Refusal),
    /// What has been delivered, and how much more may come.
    Acknowledgement(Acknowledgement),
    /// Asks for a [`Control::Pong`] with the same number.
    Ping(u64),
    /// Answers a [`Control::Ping`].
    Pong(u64),
    /// The connection ends on purpose.
    Goodbye,
    Join(JoinRequest),
    /// Welcomes the one who redeemed it.
    Joined(JoinReply),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Which connection of the session this is: a random number.
    pub(crate) connection: u64,
    /// Which life of the session the dialler is in, and which of the peer's it knows.
    pub(crate) incarnation: u64,
    pub(crate) expected: Option<u64>,
    /// Connections that the dialler has given up: nothing of them may be delivered after this.
    pub(crate) fenced: Vec<u64>,
    /// What the dialler has delivered, and how much it takes.
    pub(crate) acknowledgement: Acknowledgement,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub(crate) incarnation: u64,
    pub(crate) fenced: Vec<u64>,
    pub(crate) acknowledgement: Acknowledgement,
}

/// Which frames of a life of a session have been delivered, and how many bytes may be sent in it, all in all.
///
/// It says everything anew each time, so any may be lost and the newest counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Acknowledgement {
    /// Everything below has been delivered.
    pub(crate) floor: u64,
    /// And these, each run with its first and last number; at most [`RANGES_MAX`].
    pub(crate) ranges: Vec<(u64, u64)>,
    /// Cost that may be sent since the beginning, by class.
    pub(crate) granted: [u64; CLASSES],
}

/// Why a connection is refused. The codes are closed: people are shown sentences of their own side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// The host that calls is not known here.
    UnknownHost,
    /// The host that was called is another one than the caller expected.
    WrongHost { expected: [u8; 32] },
    /// Both have changed while they were agreeing: dial again.
    Superseded,
    /// Too many connections to one peer.
    TooMany,
    /// The host is being stopped, or the session closed.
    Closing,
    /// A frame broke the rules of the protocol.
    Protocol,
    /// The invitation is not known: another host's, or one from before a restart.
    InvitationUnknown,
    /// The invitation's time is over.
    InvitationExpired,
    /// The invitation has been redeemed by another host.
    InvitationUsed,
    /// The proof does not match the invitation's secret.
    InvitationProof,
    /// The peer could not be stored.
    NotStored,
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
