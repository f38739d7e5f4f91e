//! The handshake: exchanges on a connection that is not part of a session yet.
//!
//! ```text
//!   TCP ─► TLS ─► greetings both ways: version ─► Large ─► Hello, Welcome, Ready   (a session's connection)
//!                                                     └─► Join, Joined            (an invitation is redeemed)
//! ```
//! Each side sends a large frame before its first word. TCP keeps the order, so no connection is made on a path that swallows large
//! packets, and no word waits for an answer to it.

use std::io;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsStream;

use crate::frame::{self, Control, Frame, Greeting, Malformed, Refusal};
use crate::host_id::HostId;
use crate::large_messages::MTU_ADVICE;
use crate::session::Fault;
use crate::settings::Versions;
use crate::tls;

const READ_BYTES: usize = 4 << 10;

/// The feature of a greeting that says: a large frame follows, and one is expected.
const FEATURE_LARGE: u64 = 1;

/// The length of the large frame: more than one packet of any usual size.
const LARGE_BYTES: usize = 16 << 10;

/// How long a peer's large frame may take after its greeting. It is shorter than the time in which the kernel ends a connection
/// whose bytes are not acknowledged ([`Limits::silence_max`](crate::Limits)), so that the cause is named.
const LARGE_WAIT_MAX: Duration = Duration::from_secs(3);

/// How long the word about a path that swallows large packets may take.
const REFUSAL_WAIT_MAX: Duration = Duration::from_millis(500);

/// A connection on which single control frames are exchanged.
pub(crate) struct Wire {
    pub(crate) stream: TlsStream<TcpStream>,
    pub(crate) buffer: BytesMut,
    /// The host whose key the other side holds.
    pub(crate) host: HostId,
    large: Large,
}

/// The large frame of the other side.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Large {
    /// The other side sends none, or has not greeted yet.
    NotExpected,
    Expected,
    Arrived,
}

impl Wire {
    pub(crate) fn new(stream: TlsStream<TcpStream>) -> Result<Self, HandshakeError> {
        let host =
            tls::host_of(stream.get_ref().1.peer_certificates()).ok_or(HandshakeError::NoCertificate)?;
        Ok(Self { stream, buffer: BytesMut::with_capacity(READ_BYTES), host, large: Large::NotExpected })
    }

    /// Exchanges greetings, and checks that both sides speak one version. Sends a large frame to a peer that expects one.
    pub(crate) async fn greet(&mut self, versions: Versions) -> Result<(), HandshakeError> {
        let mut greeting = BytesMut::new();
        let Versions { lowest, highest } = versions;
        frame::encode_greeting(Greeting { lowest, highest, features: FEATURE_LARGE }, &mut greeting);
        self.stream.write_all(&greeting).await?;
        self.stream.flush().await?;
        let theirs = self.read(|frame| match frame {
            Frame::Greeting(greeting) => Some(greeting),
            _ => None,
        });
        let Greeting { lowest, highest, features } = theirs.await?;
        let theirs = Versions { lowest, highest };
        if !versions.overlap(theirs) {
            return Err(HandshakeError::Version { ours: versions, theirs });
        }
        if features & FEATURE_LARGE != 0 {
            self.large = Large::Expected;
            let mut large = BytesMut::new();
            frame::encode_control(&Control::Large(vec![0; LARGE_BYTES]), &mut large);
            self.stream.write_all(&large).await?;
        }
        Ok(())
    }

    pub(crate) async fn write(&mut self, control: &Control) -> Result<(), HandshakeError> {
        let mut bytes = BytesMut::new();
        frame::encode_control(control, &mut bytes);
        self.stream.write_all(&bytes).await?;
        Ok(self.stream.flush().await?)
    }

    /// Reads one control frame; a refusal becomes an error.
    pub(crate) async fn read_control(&mut self) -> Result<Control, HandshakeError> {
        if self.large == Large::Expected {
            match timeout(LARGE_WAIT_MAX, self.next_control()).await {
                Ok(Ok(Control::Large(_))) => self.large = Large::Arrived,
                // The other side has no large frame before its refusal if it misses ours.
                Ok(Ok(Control::Refusal(refusal))) => return Err(self.refused(refusal)),
                Ok(Ok(_)) => return Err(HandshakeError::Unexpected),
                Ok(Err(error)) => return Err(error),
                Err(_) => {
                    let word = self.write(&Control::Refusal(Refusal::LargePackets));
                    // Best effort: small packets pass.
                    drop(timeout(REFUSAL_WAIT_MAX, word).await);
                    return Err(HandshakeError::LargePackets);
                }
            }
        }
        match self.next_control().await? {
            Control::Refusal(refusal) => Err(self.refused(refusal)),
            control => Ok(control),
        }
    }

    async fn next_control(&mut self) -> Result<Control, HandshakeError> {
        self.read(|frame| if let Frame::Control(control) = frame { Some(control) } else { None }).await
    }

    fn refused(&self, refusal: Refusal) -> HandshakeError {
        HandshakeError::Refused { by: self.host, refusal: refusal.into() }
    }

    /// Sends the reason for the refusal, and closes the connection in order, so that it arrives.
    pub(crate) async fn refuse(mut self, refusal: Refusal) {
        // Best effort: if this fails, the other side sees a closed connection.
        if self.write(&Control::Refusal(refusal)).await.is_ok() {
            drop(self.stream.shutdown().await);
        }
    }

    async fn read<T>(&mut self, take: impl Fn(Frame<'_>) -> Option<T>) -> Result<T, HandshakeError> {
        loop {
            if let Some((frame, length)) = frame::decode(&self.buffer)? {
                let taken = take(frame).ok_or(HandshakeError::Unexpected)?;
                self.buffer.advance(length);
                return Ok(taken);
            }
            self.buffer.reserve(READ_BYTES);
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(HandshakeError::Closed);
            }
        }
    }
}

/// Why no connection was made.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The network or TLS failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The other side closed the connection without a reason.
    #[error("the other side closed the connection")]
    Closed,
    /// The handshake took too long.
    #[error("no answer in time")]
    Timeout,
    /// The greeting, which is small, has arrived, and the large frame behind it has not.
    #[error("large packets of the other side do not arrive, and small ones do: {MTU_ADVICE}")]
    LargePackets,
    /// The address cannot be resolved.
    #[error("{address} cannot be resolved: write HOST:PORT")]
    Resolve {
        /// The address that was given.
        address: String,
    },
    /// The other side shows no readable certificate.
    #[error("the other side shows no certificate")]
    NoCertificate,
    /// Another host answered than was called.
    #[error(
        "expected host {expected}, but host {came} answered: check the address, or pair the hosts again if its identity is new"
    )]
    WrongHost {
        /// The host that was called.
        expected: HostId,
        /// The host that answered.
        came: HostId,
    },
    /// The caller expected another host here.
    #[error(
        "host {by} called, expecting host {expected}, but this is host {this}: its address of that host is wrong"
    )]
    WrongHostCalled {
        /// The host that called.
        by: HostId,
        /// The host that it expected.
        expected: HostId,
        /// The identifier of this host.
        this: HostId,
    },
    /// A host that is not known here called.
    #[error("host {came} called, which is not known here: pair the hosts if it should be allowed")]
    UnknownHost {
        /// The host that called.
        came: HostId,
    },
    /// The two hosts have no version of the protocol in common.
    #[error(
        "no common version of the protocol: this host speaks {} to {}, the other {} to {}: update the older one",
        ours.lowest, ours.highest, theirs.lowest, theirs.highest
    )]
    Version {
        /// The versions that this host speaks.
        ours: Versions,
        /// The versions that the other speaks.
        theirs: Versions,
    },
    /// The bytes do not follow the protocol.
    #[error("the other side sent {0}")]
    Malformed(#[from] Malformed),
    /// The frame has no place in a handshake.
    #[error("the other side sent a frame that is not allowed in a handshake")]
    Unexpected,
    /// The other side refused the connection.
    #[error("host {by} refused: {refusal}")]
    Refused {
        /// The host that refused.
        by: HostId,
        /// The reason that it gave.
        refusal: RefusalReason,
    },
    /// Another connection has changed the session meanwhile.
    #[error("another connection was faster: connecting again")]
    Superseded,
    /// The peer has too many connections.
    #[error("host {came} has too many connections already")]
    TooMany {
        /// The host that called.
        came: HostId,
    },
    /// A host's invitation was refused here.
    #[error("host {came} tried to join and was refused: {refusal}")]
    JoinRefused {
        /// The host that tried to join.
        came: HostId,
        /// The reason that was sent.
        refusal: RefusalReason,
    },
    /// The other side's claims about the session break the rules.
    #[error("{0}")]
    Rules(String),
}

impl From<Fault> for HandshakeError {
    fn from(fault: Fault) -> Self {
        Self::Rules(fault.to_string())
    }
}

/// Why the other side refused a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RefusalReason {
    /// It does not know this host.
    #[error("it does not know this host: pair the two (it may have removed this one)")]
    UnknownHost,
    /// It expected another host here.
    #[error("it expected another host at this address")]
    WrongHost {
        /// The host that it expected.
        expected: HostId,
    },
    /// Another connection has changed the session.
    #[error("another connection was faster: connect again")]
    Superseded,
    /// This host has too many connections there.
    #[error("it has too many connections with this host already")]
    TooMany,
    /// It is being stopped there.
    #[error("it is being stopped")]
    Closing,
    /// The large packets of this host do not arrive there.
    #[error("large packets of this host do not arrive there, and small ones do: {MTU_ADVICE}")]
    LargePackets,
    /// This host broke the protocol's rules.
    #[error("this host broke the rules of the protocol")]
    Protocol,
    /// The invitation is not known there.
    #[error("it knows no such invitation: it is another host's, or was made before that host was restarted")]
    InvitationUnknown,
    /// The invitation's time is over.
    #[error("the invitation's time is over: ask for a new one")]
    InvitationExpired,
    /// The invitation has been redeemed.
    #[error(
        "the invitation has been redeemed already, by another host or before this one was removed: ask for a new one"
    )]
    InvitationUsed,
    /// The invitation's secret is wrong.
    #[error("the invitation's secret is wrong: copy the token whole")]
    InvitationProof,
    /// It could not store this host.
    #[error("it could not store this host: its log says why")]
    NotStored,
}

impl From<Refusal> for RefusalReason {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::UnknownHost => Self::UnknownHost,
            Refusal::WrongHost { expected } => Self::WrongHost { expected: HostId(expected) },
            Refusal::Superseded => Self::Superseded,
            Refusal::TooMany => Self::TooMany,
            Refusal::Closing => Self::Closing,
            Refusal::Protocol => Self::Protocol,
            Refusal::InvitationUnknown => Self::InvitationUnknown,
            Refusal::InvitationExpired => Self::InvitationExpired,
            Refusal::InvitationUsed => Self::InvitationUsed,
            Refusal::InvitationProof => Self::InvitationProof,
            Refusal::NotStored => Self::NotStored,
            Refusal::LargePackets => Self::LargePackets,
        }
    }
}
