//! The reasons why an export cannot be used as a store.

use crate::device::ALIGNMENT;

/// An unusable server or export; requests to a store that is open fail with [`crate::IoError`] instead.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// There is no server, or it does not answer.
    #[error("{operation} {uri}")]
    Unreachable {
        /// The operation, as a verb.
        operation: &'static str,
        /// The address of the export.
        uri: String,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The address requires TLS.
    #[error("{uri} asks for TLS, which is not supported yet: use a tunnel or a trusted network")]
    Tls {
        /// The address of the export.
        uri: String,
    },
    /// The server refuses the export.
    #[error("the server refuses {uri}: {message}")]
    Refused {
        /// The address of the export.
        uri: String,
        /// The server's own words, or the meaning of its answer.
        message: String,
    },
    /// The server's data is not valid NBD, or not the requested answer.
    #[error("the server of {uri} breaks the protocol: {reason}")]
    Protocol {
        /// The address of the export.
        uri: String,
        /// The violation of the protocol.
        reason: &'static str,
    },
    /// The minimum block size exceeds the smallest requests of a volume.
    #[error("{uri} has a minimum block size of {minimum} bytes; at most {ALIGNMENT} can be used")]
    BlockTooLarge {
        /// The address of the export.
        uri: String,
        /// Its minimum block size in bytes.
        minimum: u32,
    },
    /// Requests of whole blocks cannot reach its end.
    #[error(
        "{uri} has {size} bytes, no multiple of its minimum block size of {minimum}: let the server round it up"
    )]
    OddSize {
        /// The address of the export.
        uri: String,
        /// Its size in bytes.
        size: u64,
        /// Its minimum block size in bytes.
        minimum: u32,
    },
    /// It is read-only but has to be written.
    #[error("{uri} is read-only")]
    ReadOnly {
        /// The address of the export.
        uri: String,
    },
    /// It has to be written, but flushed data could be lost.
    #[error("the server of {uri} offers no flush, so no write could be made durable: it can only be read")]
    NoFlush {
        /// The address of the export.
        uri: String,
    },
    /// It is too small for its volume.
    #[error("{uri} has {size} bytes and needs {needed}")]
    TooSmall {
        /// The address of the export.
        uri: String,
        /// Its size in bytes.
        size: u64,
        /// The size that is needed, in bytes.
        needed: u64,
    },
    /// After a reconnection its properties have changed.
    #[error("{uri} has changed since the connection broke: {what}")]
    Changed {
        /// The address of the export.
        uri: String,
        /// The property that has changed.
        what: &'static str,
    },
}
