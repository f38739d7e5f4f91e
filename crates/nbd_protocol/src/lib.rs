//! The numbers of the NBD protocol, under the names of its specification.
//!
//! Only what Sterna speaks is here, as a server (`export`) and as a client (`block`, `lab`). All fields on the wire are
//! big-endian. Nothing is encoded, decoded or judged here: each side guards its own door.

pub mod uri;

pub use uri::{NbdUri, Security, Server, UriError};

/// Opens the server's greeting (`NBDMAGIC`).
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Follows it in newstyle, and opens every option (`IHAVEOPT`).
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Opens the reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Opens a request.
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
/// The largest payload of a read or a write, in bytes: the size that the specification asks every server to bear.
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

/// Bits that say what an export can do.
pub mod transmission_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Every write is refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// `FLUSH` is understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The `FUA` flag is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// `TRIM` is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// `WRITE_ZEROES` is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The `DF` flag is understood; only with structured replies.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers writes that completed on any.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// `CACHE` is understood.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The `FAST_ZERO` flag is understood.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    /// `BLOCK_STATUS` takes a payload that names contexts; only with extended headers.
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// What a client asks for during negotiation.
pub mod option {
    /// Ends negotiation; cannot report errors.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the session.
    pub const ABORT: u32 = 2;
    /// Lists the exports.
    pub const LIST: u32 = 3;
    /// Asks for TLS.
    pub const STARTTLS: u32 = 5;
    /// Describes an export.
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

/// How an option is answered.
pub mod option_reply {
    /// Granted, or the end of a list.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One fact about an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;

    /// Bit that all errors have.
    pub const ERROR: u32 = 1 << 31;
    /// The option is not known.
    pub const ERR_UNSUP: u32 = ERROR + 1;
    /// The server does not want to.
    pub const ERR_POLICY: u32 = ERROR + 2;
    /// The option's data is malformed, or it comes at the wrong time.
    pub const ERR_INVALID: u32 = ERROR + 3;
    /// Only after TLS has begun.
    pub const ERR_TLS_REQD: u32 = ERROR + 5;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = ERROR + 6;
    /// The option's data is larger than this server takes.
    pub const ERR_TOO_BIG: u32 = ERROR + 9;
    /// Extended headers were agreed on, and there is no way back from them.
    pub const ERR_EXT_HEADER_REQD: u32 = ERROR + 10;
}

/// Facts about an export that `INFO` and `GO` ask for.
pub mod info {
    /// Size and transmission flags; always sent.
    pub const EXPORT: u16 = 0;
    /// The canonical name.
    pub const NAME: u16 = 1;
    /// The description.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, preferred and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What a client asks for once it has an export.
pub mod command {
    /// Reads.
    pub const READ: u16 = 0;
    /// Writes.
    pub const WRITE: u16 = 1;
    /// Ends the session.
    pub const DISC: u16 = 2;
    /// Makes completed writes durable.
    pub const FLUSH: u16 = 3;
    /// Gives space back.
    pub const TRIM: u16 = 4;
    /// Announces reads.
    pub const CACHE: u16 = 5;
    /// Writes zeroes without sending them.
    pub const WRITE_ZEROES: u16 = 6;
    /// Describes a range in the chosen metadata contexts.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a command.
pub mod command_flag {
    /// Reply only once the write is durable.
    pub const FUA: u16 = 1 << 0;
    /// Zeroes stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// One content chunk only.
    pub const DF: u16 = 1 << 2;
    /// One extent only.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeroes only if that is quicker than writing them.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload, not that of the range; only with extended headers.
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Kinds of structured reply chunks.
pub mod chunk {
    /// Flag: the last chunk of a reply.
    pub const DONE: u16 = 1 << 0;
    /// No payload.
    pub const NONE: u16 = 0;
    /// Offset and data.
    pub const OFFSET_DATA: u16 = 1;
    /// Offset and length of zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Context and extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// Context and extents, with 64 bits for lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Bit that all errors have.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// Error and message.
    pub const ERROR: u16 = ERROR_BIT + 1;
}

/// The errors of replies: numbers of their own, which Linux happens to share.
pub mod error {
    /// Not permitted.
    pub const EPERM: u32 = 1;
    /// The device failed.
    pub const EIO: u32 = 5;
    /// No memory.
    pub const ENOMEM: u32 = 12;
    /// Not a valid request.
    pub const EINVAL: u32 = 22;
    /// No space, or beyond the end.
    pub const ENOSPC: u32 = 28;
    /// Too large.
    pub const EOVERFLOW: u32 = 75;
    /// Not supported.
    pub const ENOTSUP: u32 = 95;
    /// The server is shutting down.
    pub const ESHUTDOWN: u32 = 108;
}

/// The metadata context `base:allocation`.
pub mod allocation {
    /// Its name.
    pub const NAME: &str = "base:allocation";
    /// The query that lists every context of its namespace.
    pub const NAMESPACE: &str = "base:";
    /// The id under which this server reports it.
    pub const ID: u32 = 1;
    /// State bit: not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// State bit: reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}
