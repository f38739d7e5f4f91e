//! Why an export cannot be used as a store.

use crate::device::ALIGNMENT;

/// A server or an export that cannot be used; requests to a store that is open fail with [`crate::IoError`] instead.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// There is no server, or it does not answer.
    #[error("{operation} {uri}")]
    Unreachable {
        /// What was tried, as a verb.
        operation: &'static str,
        /// The export.
        uri: String,
        /// What the system answered.
        source: std::io::Error,
    },
    /// TLS was asked for.
    #[error("{uri} asks for TLS, which is not supported yet: use a tunnel, or a network that you trust")]
    Tls {
        /// The export.
        uri: String,
    },
    /// The server does not give us the export.
    #[error("the server refuses {uri}: {message}")]
    Refused {
        /// The export.
        uri: String,
        /// The server's own words, or what its answer means.
        message: String,
    },
    /// What the server sends is not NBD, or not what was asked for.
    #[error("the server of {uri} breaks the protocol: {reason}")]
    Protocol {
        /// The export.
        uri: String,
        /// What was wrong.
        reason: &'static str,
    },
    /// Requests would have to be larger than the smallest that a volume makes.
    #[error("{uri} has a minimum block size of {minimum} bytes; at most {ALIGNMENT} can be used")]
    BlockTooLarge {
        /// The export.
        uri: String,
        /// Its minimum block size in bytes.
        minimum: u32,
    },
    /// Its end cannot be reached with requests of whole blocks.
    #[error(
        "{uri} has {size} bytes, no multiple of its minimum block size of {minimum}: let the server round it up"
    )]
    OddSize {
        /// The export.
        uri: String,
        /// Its size in bytes.
        size: u64,
        /// Its minimum block size in bytes.
        minimum: u32,
    },
    /// It is to be written and cannot be.
    #[error("{uri} is read-only")]
    ReadOnly {
        /// The export.
        uri: String,
    },
    /// It is to be written, and what a guest flushes could be lost.
    #[error(
        "the server of {uri} offers no flush, so that no write could be made durable: it can only be read"
    )]
    NoFlush {
        /// The export.
        uri: String,
    },
    /// It is smaller than what it is to hold.
    #[error("{uri} has {size} bytes and needs {needed}")]
    TooSmall {
        /// The export.
        uri: String,
        /// Its size in bytes.
        size: u64,
        /// The size that is needed, in bytes.
        needed: u64,
    },
    /// After a reconnection it is not what it was.
    #[error("{uri} is not what it was before the connection broke: {what}")]
    Changed {
        /// The export.
        uri: String,
        /// What has changed.
        what: &'static str,
    },
}
