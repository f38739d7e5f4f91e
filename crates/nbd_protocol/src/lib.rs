//! The NBD protocol: its numbers under the names of its specification, and the one codec of its messages, without I/O.
//!
//! ```text
//!   negotiation   greeting, options, replies to options     both directions
//!   request       headers of requests                       both directions
//!   reply         heads of replies, extents                 both directions
//!   client        a client's side of the negotiation over a blocking stream
//!   uri           addresses of exports
//! ```
//! Only what Sterna speaks is here, as a server (`export`) and as a client (`block`, `testbed`). All fields on the wire are
//! big-endian. Decoders check each length before anything is allocated by it. What an export offers, and whether a request
//! may be carried out, is decided elsewhere.

pub mod client;
mod fields;
pub mod negotiation;
pub mod reply;
pub mod request;
pub mod uri;

pub use reply::{ReplyBody, ReplyHead, ReplyViolation};
pub use request::{ReplyStyle, RequestHeader, RequestViolation};
pub use uri::{NbdUri, Security, Server, UriError};

/// Opens the server's greeting (`NBDMAGIC`).
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Follows it in newstyle, and opens every option (`IHAVEOPT`).
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Opens the reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Opens a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Opens a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Opens a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Opens a request where extended headers were agreed on.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Opens a chunk of a reply where extended headers were agreed on.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Bytes of the client's flags, its first message.
pub const CLIENT_FLAGS_LENGTH: usize = 4;
/// Bytes of the server's greeting.
pub const GREETING_LENGTH: usize = 18;
/// Bytes before an option's data.
pub const OPTION_HEADER_LENGTH: usize = 16;
/// Bytes before the data of the reply to an option.
pub const OPTION_REPLY_HEADER_LENGTH: usize = 20;
/// Bytes of a request without its payload.
pub const REQUEST_LENGTH: usize = 28;
/// Bytes of an extended request without its payload.
pub const EXTENDED_REQUEST_LENGTH: usize = 32;
/// Bytes of a simple reply without data.
pub const SIMPLE_REPLY_LENGTH: usize = 16;
/// Bytes of a structured reply chunk before its payload.
pub const CHUNK_HEADER_LENGTH: usize = 20;
/// Bytes of an extended reply chunk before its payload.
pub const EXTENDED_CHUNK_HEADER_LENGTH: usize = 32;
/// Reserved zeroes at the end of the reply to `EXPORT_NAME`, unless `NO_ZEROES` was agreed on.
pub const EXPORT_NAME_PADDING: usize = 124;

/// The longest string that the specification allows, in bytes: names, descriptions, queries, messages.
pub const STRING_LENGTH_MAX: usize = 4096;
/// The largest payload of a read or a write, in bytes: the size that the specification requires every server to accept.
pub const PAYLOAD_LENGTH_MAX: u32 = 32 << 20;
/// The largest minimum block size that may be advertised, in bytes.
pub const MINIMUM_BLOCK_SIZE_MAX: u32 = 1 << 16;

/// Bits of the greeting, and of the client's answer to it.
pub mod handshake_flag {
    /// Errors are reported, options can be refused.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// The reply to `EXPORT_NAME` has no padding.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Bits that tell what an export supports.
pub mod transmission_flag {
    /// Set in every export's flags.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Every write is refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// The command `FLUSH` is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The `FUA` flag is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// The command `TRIM` is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// The command `WRITE_ZEROES` is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The `DF` flag is supported; only with structured replies.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers writes that completed on any.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// The command `CACHE` is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The `FAST_ZERO` flag is supported.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// `BLOCK_STATUS` takes a payload that names contexts; only with extended headers.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// The options of a client during negotiation.
pub mod option {
    /// Chooses an export and ends negotiation; cannot report errors.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the client's session.
    pub const ABORT: u32 = 2;
    /// Lists all the exports.
    pub const LIST: u32 = 3;
    /// Begins TLS on the connection.
    pub const STARTTLS: u32 = 5;
    /// Describes an export only.
    pub const INFO: u32 = 6;
    /// Describes an export and ends negotiation.
    pub const GO: u32 = 7;
    /// Turns structured replies on.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Lists an export's metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Chooses an export's metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Turns extended headers on.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// The replies to an option.
pub mod option_reply {
    /// Granted, or the end of a list.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One fact about an export.
    pub const INFO: u32 = 3;
    /// One metadata context of a list.
    pub const META_CONTEXT: u32 = 4;

    /// Bit that all errors have.
    pub const ERROR: u32 = 1 << 31;
    /// The option is not known.
    pub const ERR_UNSUP: u32 = ERROR + 1;
    /// The server's policy forbids the option.
    pub const ERR_POLICY: u32 = ERROR + 2;
    /// The option's data is malformed, or it comes at the wrong time.
    pub const ERR_INVALID: u32 = ERROR + 3;
    /// The option requires TLS first.
    pub const ERR_TLS_REQD: u32 = ERROR + 5;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = ERROR + 6;
    /// The option's data is larger than this server takes.
    pub const ERR_TOO_BIG: u32 = ERROR + 9;
    /// Extended headers were agreed on and cannot be given up.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR + 10;
}

/// Facts about an export that `INFO` and `GO` request.
pub mod info {
    /// Size and transmission flags; always sent.
    pub const EXPORT: u16 = 0;
    /// The export's canonical name.
    pub const NAME: u16 = 1;
    /// The export's description text.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, preferred and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// The commands of a client that uses an export.
pub mod command {
    /// Reads a given range.
    pub const READ: u16 = 0;
    /// Writes a given range.
    pub const WRITE: u16 = 1;
    /// Ends the client's session.
    pub const DISC: u16 = 2;
    /// Makes completed writes durable.
    pub const FLUSH: u16 = 3;
    /// Deallocates a given range.
    pub const TRIM: u16 = 4;
    /// Announces reads of a range.
    pub const CACHE: u16 = 5;
    /// Writes zeroes without sending them.
    pub const WRITE_ZEROES: u16 = 6;
    /// Describes a range in the chosen metadata contexts.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a command in a request.
pub mod command_flag {
    /// Reply only once the write is durable.
    pub const FUA: u16 = 1 << 0;
    /// The zeroes stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Reply with one content chunk only.
    pub const DF: u16 = 1 << 2;
    /// Reply with one extent only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Write zeroes only if that is faster than sending them.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload, not that of the range; only with extended headers.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Kinds of structured reply chunks.
pub mod chunk {
    /// Flag: the last chunk of a reply.
    pub const DONE: u16 = 1 << 0;
    /// A chunk without a payload.
    pub const NONE: u16 = 0;
    /// Offset and data of a read.
    pub const OFFSET_DATA: u16 = 1;
    /// Offset and length of zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Context and its extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// Context and extents, with 64 bits for lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Bit that all errors have.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// Error number and its message.
    pub const ERROR: u16 = ERROR_BIT + 1;
}

/// The errors of replies; Linux happens to use the same numbers.
pub mod error {
    /// The operation is not permitted.
    pub const EPERM: u32 = 1;
    /// The device has failed.
    pub const EIO: u32 = 5;
    /// There is no memory left.
    pub const ENOMEM: u32 = 12;
    /// The request is not valid.
    pub const EINVAL: u32 = 22;
    /// There is no space, or a write is beyond the end.
    pub const ENOSPC: u32 = 28;
    /// The request is too large.
    pub const EOVERFLOW: u32 = 75;
    /// The operation is not supported.
    pub const ENOTSUP: u32 = 95;
    /// The server is shutting down.
    pub const ESHUTDOWN: u32 = 108;
}

/// The metadata context `base:allocation`.
pub mod allocation {
    /// Name of the metadata context.
    pub const NAME: &str = "base:allocation";
    /// The query that lists every context of its namespace.
    pub const NAMESPACE: &str = "base:";
    /// The id under which this server reports it.
    pub const ID: u32 = 1;
    /// State bit: not allocated here.
    pub const HOLE: u32 = 1 << 0;
    /// State bit: reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}
