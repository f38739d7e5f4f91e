//! Why the client cannot go on.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::Errno;

/// A failure of the connection or of the protocol.
///
/// A request that the server answers with an error is no such failure: it is a completion that bears an
/// [`Errno`]. Only [`Client::perform`](super::Client::perform) makes it one.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is not one that this client can connect to.
    #[error("not an NBD address on a unix socket: {address}: {reason}")]
    Address {
        /// What was given.
        address: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The socket cannot be connected to.
    #[error("connect to {}", socket.display())]
    Connect {
        /// Where the server should listen.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Sending or receiving failed.
    #[error("talk to the server")]
    Transfer(#[source] io::Error),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server sent what the protocol does not allow.
    #[error("the server broke the protocol: {0}")]
    Protocol(&'static str),
    /// The server refuses the export.
    #[error("the server refuses export {export:?}: {message}")]
    Refused {
        /// The export asked for.
        export: String,
        /// The server's own words, or the code of its reply.
        message: String,
    },
    /// The connection broke and no new one came about in time.
    #[error("no new connection within {} s", .deadline.as_secs_f64())]
    Reconnect {
        /// How long it was tried.
        deadline: Duration,
        /// The last failure.
        source: Box<ClientError>,
    },
    /// After a reconnect the export had another size.
    #[error("the export changed its size from {before} to {after} bytes")]
    SizeChanged {
        /// Size in bytes at first.
        before: u64,
        /// Size in bytes now.
        after: u64,
    },
    /// A request has waited too long for its answer.
    #[error("no answer to a request for {} s", .deadline.as_secs_f64())]
    NoAnswer {
        /// How long was waited.
        deadline: Duration,
    },
    /// The request does not fit the export or the protocol's limits; nothing was sent.
    #[error("request {offset}+{length} does not fit the export")]
    Request {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        length: u64,
    },
    /// The server answered the request with an error.
    #[error("the server answered with an error")]
    Answered(#[source] Errno),
    /// The client was told to stop.
    #[error("stopped on request")]
    Stopped,
}

impl ClientError {
    /// Tells whether a new connection may help.
    pub(super) fn is_broken_connection(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Transfer(_) | Self::Closed)
    }
}
