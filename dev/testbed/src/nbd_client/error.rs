//! Errors that end a client.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::Errno;

/// A failure of the connection or of the protocol.
///
/// An error answer of the server to a request is not such a failure, but a completion with an [`Errno`]. Only
/// [`Client::perform`](super::Client::perform) returns it as an error.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// This client does not support the address.
    #[error("not an NBD address on a unix socket: {address}: {reason}")]
    Address {
        /// The text that was given.
        address: String,
        /// The mistake in the text.
        reason: &'static str,
    },
    /// The socket cannot be connected to.
    #[error("connect to {}", socket.display())]
    Connect {
        /// Path of the server's socket.
        socket: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Sending or receiving failed.
    #[error("talk to the server")]
    Transfer(#[source] io::Error),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// The server has violated the protocol.
    #[error("the server broke the protocol: {0}")]
    Protocol(&'static str),
    /// The server refuses the export.
    #[error("the server refuses export {export:?}: {message}")]
    Refused {
        /// Name of the requested export.
        export: String,
        /// The server's message, or the code of its reply.
        message: String,
    },
    /// The connection broke, and no new one could be made in time.
    #[error("no new connection within {} s", .deadline.as_secs_f64())]
    Reconnect {
        /// The time of the attempts.
        deadline: Duration,
        /// The error of the last attempt.
        source: Box<ClientError>,
    },
    /// After a reconnect the export had another size.
    #[error("the export changed its size from {before} to {after} bytes")]
    SizeChanged {
        /// Size in bytes before the reconnect.
        before: u64,
        /// Size in bytes after the reconnect.
        after: u64,
    },
    /// A request has waited too long for its answer.
    #[error("no answer to a request for {} s", .deadline.as_secs_f64())]
    NoAnswer {
        /// The time of the wait.
        deadline: Duration,
    },
    /// The request does not fit the export or the protocol's limits; nothing was sent.
    #[error("request {offset}+{length} does not fit the export")]
    Request {
        /// First byte of the request.
        offset: u64,
        /// Bytes of the request.
        length: u64,
    },
    /// The server answered the request with an error.
    #[error("the server answered with an error")]
    Answered(#[source] Errno),
    /// The client's stop flag was raised.
    #[error("stopped on request")]
    Stopped,
}

impl ClientError {
    /// Returns whether a new connection may help.
    pub(super) fn is_broken_connection(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Transfer(_) | Self::Closed)
    }
}
