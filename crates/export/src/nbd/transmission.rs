//! Decodes requests, without I/O: from 28 or 32 bytes to a typed command that may be executed, or to the error it gets.
//!
//! There are two kinds of fault. After a [`Violation`] the next request in the stream cannot be found, so the connection ends. A
//! [`Refusal`] is answered, and the connection continues.

use block::device::check_range;
use block::{ByteRange, Durability, Geometry, IoError, ZeroMode};

use crate::nbd::error_code::ErrorCode;
use crate::nbd::export::{Offer, ReplyStyle};
use crate::nbd::negotiation::AllocationContext;
use crate::nbd::protocol::{
    EXTENDED_REQUEST_LENGTH, EXTENDED_REQUEST_MAGIC, PAYLOAD_LENGTH_MAX, REQUEST_LENGTH, REQUEST_MAGIC,
    allocation, command, command_flag, transmission_flag,
};

/// A request as it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Flags of the command.
    pub flags: u16,
    /// Number of the command.
    pub command: u16,
    /// The cookie for the reply.
    pub cookie: u64,
    /// Offset of its first byte.
    pub offset: u64,
    /// Length in bytes of its range, or of its payload.
    pub length: u64,
    /// Bytes that follow the header: at most [`PAYLOAD_LENGTH_MAX`].
    pub payload_length: u32,
}

impl RequestHeader {
    /// Returns whether the payload names the range and context to describe; see [`narrow`].
    pub fn brings_contexts(&self, terms: &Terms) -> bool {
        self.command == command::BLOCK_STATUS
            && self.payload_length as usize == STATUS_PAYLOAD_LENGTH
            && terms.offer.has(transmission_flag::BLOCK_STATUS_PAYLOAD)
    }
}

/// Bytes reserved for a request for allocation. If every other block of a disk is written, its store answers with 65,536 extents
/// of 24 bytes, of which 128 KiB are sent.
const DESCRIBE_MEMORY: usize = 2 << 20;

/// Bytes of a payload of `BLOCK_STATUS` that names one context: the length of the range, and the context's id. There is one
/// context only; naming it twice, or none, is an error.
pub const STATUS_PAYLOAD_LENGTH: usize = 12;
/// Bytes of the longest header of a request.
pub const HEADER_LENGTH_MAX: usize = EXTENDED_REQUEST_LENGTH;

/// Returns the bytes of a request's header.
pub const fn header_length(style: ReplyStyle) -> usize {
    match style {
        ReplyStyle::Simple | ReplyStyle::Structured => REQUEST_LENGTH,
        ReplyStyle::Extended => EXTENDED_REQUEST_LENGTH,
    }
}

/// What a client may request of the export that it chose.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The description that the client got.
    pub offer: Offer,
    /// Whether it may request allocation.
    pub allocation: AllocationContext,
}

/// A valid request: its range lies within the export and is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reads the range; at most [`PAYLOAD_LENGTH_MAX`] bytes.
    Read(ByteRange, Framing),
    /// Writes the payload to the range; at most [`PAYLOAD_LENGTH_MAX`] bytes.
    Write(ByteRange, Durability),
    /// Makes completed writes durable.
    Flush,
    /// Deallocates the given range.
    Discard(ByteRange, Durability),
    /// Announces reads of the range.
    Cache(ByteRange),
    /// Zeroes the given range.
    WriteZeroes(ByteRange, ZeroMode, Effort, Durability),
    /// Describes the range; it is not empty.
    Describe(ByteRange, ExtentCount),
    /// Ends the client's session.
    Disconnect,
}

impl Command {
    /// Returns the bytes of memory that the request holds while it is executed.
    pub fn payload_length(&self) -> usize {
        match self {
            // Bounded by `PAYLOAD_LENGTH_MAX`.
            Self::Read(range, _) | Self::Write(range, _) => range.length as usize,
            Self::Describe(..) => DESCRIBE_MEMORY,
            _ => 0,
        }
    }

    /// Returns the offset that the request was sent with.
    pub fn offset(&self) -> u64 {
        match self {
            Self::Read(range, _)
            | Self::Write(range, _)
            | Self::Discard(range, _)
            | Self::Cache(range)
            | Self::WriteZeroes(range, ..)
            | Self::Describe(range, _) => range.offset,
            Self::Flush | Self::Disconnect => 0,
        }
    }
}

/// How long zeroing may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Zeroing may take any time.
    Any,
    /// Zeroing must be faster than writing zeroes, or is refused.
    Fast,
}

/// Whether the data of a read may come in several chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// The data must come in one piece.
    Whole,
    /// Data and zeroes may be separate chunks.
    Chunks,
}

/// How many extents a client requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentCount {
    /// The first extent alone.
    One,
    /// All extents that fit.
    Many,
}

/// A request that is answered with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The error in the protocol.
    pub code: ErrorCode,
    /// The reason, for people to read.
    pub reason: &'static str,
}

/// A breach of the protocol that ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The bytes are not a request.
    #[error("a request opens with {magic:#x}")]
    RequestMagic {
        /// The bytes in place of the magic number.
        magic: u32,
    },
    /// The payload is longer than is read.
    #[error("a request brings {length} bytes, more than {PAYLOAD_LENGTH_MAX}")]
    PayloadTooLong {
        /// Length of the payload in bytes.
        length: u64,
    },
}

/// Decodes the header of a request: the first [`header_length`] bytes.
///
/// # Errors
/// [`Violation`], also if a payload is announced that is larger than [`PAYLOAD_LENGTH_MAX`].
pub fn decode_request(
    bytes: &[u8; HEADER_LENGTH_MAX],
    style: ReplyStyle,
) -> Result<RequestHeader, Violation> {
    let [m0, m1, m2, m3, f0, f1, t0, t1, rest @ ..] = bytes;
    let [c0, c1, c2, c3, c4, c5, c6, c7, rest @ ..] = rest;
    let [o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, l4, l5, l6, l7] = rest;
    let magic = u32::from_be_bytes([*m0, *m1, *m2, *m3]);
    let flags = u16::from_be_bytes([*f0, *f1]);
    let command = u16::from_be_bytes([*t0, *t1]);
    let (expected, length, has_payload) = match style {
        ReplyStyle::Simple | ReplyStyle::Structured => {
            let length = u32::from_be_bytes([*l0, *l1, *l2, *l3]);
            (REQUEST_MAGIC, u64::from(length), command == command::WRITE)
        }
        ReplyStyle::Extended => {
            let length = u64::from_be_bytes([*l0, *l1, *l2, *l3, *l4, *l5, *l6, *l7]);
            // QEMU omits the flag in its writes, which still have a payload.
            let has_payload = command == command::WRITE || flags & command_flag::PAYLOAD_LEN != 0;
            (EXTENDED_REQUEST_MAGIC, length, has_payload)
        }
    };
    if magic != expected {
        return Err(Violation::RequestMagic { magic });
    }
    let payload_length = match u32::try_from(length) {
        _ if !has_payload => 0,
        Ok(length) if length <= PAYLOAD_LENGTH_MAX => length,
        _ => return Err(Violation::PayloadTooLong { length }),
    };
    Ok(RequestHeader {
        flags,
        command,
        cookie: u64::from_be_bytes([*c0, *c1, *c2, *c3, *c4, *c5, *c6, *c7]),
        offset: u64::from_be_bytes([*o0, *o1, *o2, *o3, *o4, *o5, *o6, *o7]),
        length,
        payload_length,
    })
}

/// Applies the payload of `BLOCK_STATUS`, and returns the equivalent request without one.
///
/// # Errors
/// A [`Refusal`] if it names a context that was not chosen.
pub fn narrow(
    header: &RequestHeader,
    payload: [u8; STATUS_PAYLOAD_LENGTH],
) -> Result<RequestHeader, Refusal> {
    let [l0, l1, l2, l3, l4, l5, l6, l7, i0, i1, i2, i3] = payload;
    if u32::from_be_bytes([i0, i1, i2, i3]) != allocation::ID {
        return Err(refuse(ErrorCode::Invalid, "a metadata context that was not chosen"));
    }
    Ok(RequestHeader {
        flags: header.flags & !command_flag::PAYLOAD_LEN,
        length: u64::from_be_bytes([l0, l1, l2, l3, l4, l5, l6, l7]),
        payload_length: 0,
        ..*header
    })
}

/// Checks a request against the agreement with the client.
///
/// # Errors
/// The [`Refusal`] to answer with; the request's payload, if any, is still in the stream.
pub fn judge(header: &RequestHeader, terms: &Terms) -> Result<Command, Refusal> {
    use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
    let RequestHeader { flags, length, .. } = *header;
    let offer = &terms.offer;
    let range = ByteRange::new(header.offset, length);
    let durability = if flags & FUA == 0 { Durability::Volatile } else { Durability::Durable };
    match header.command {
        command::READ => {
            let framing = match (flags & DF, offer.replies) {
                (0, ReplyStyle::Structured | ReplyStyle::Extended) => Framing::Chunks,
                _ => Framing::Whole,
            };
            let allowed = if offer.has(transmission_flag::SEND_DF) { DF } else { 0 };
            check_flags(flags, allowed, offer)?;
            if length > u64::from(offer.block_size_maximum) {
                let code = if flags & DF == 0 { ErrorCode::Invalid } else { ErrorCode::Overflow };
                return Err(refuse(code, "longer than the maximum block size"));
            }
            check(range, offer, BeyondEnd::Invalid)?;
            Ok(Command::Read(range, framing))
        }
        command::WRITE => {
            check_writable(offer)?;
            let marked = if offer.replies == ReplyStyle::Extended { PAYLOAD_LEN } else { 0 };
            check_flags(flags, marked, offer)?;
            check(range, offer, BeyondEnd::NoSpace)?;
            Ok(Command::Write(range, durability))
        }
        command::DISC => Ok(Command::Disconnect),
        command::FLUSH => {
            check_flags(flags, 0, offer)?;
            if range != ByteRange::new(0, 0) {
                return Err(refuse(ErrorCode::Invalid, "a flush has no range"));
            }
            Ok(Command::Flush)
        }
        command::TRIM => {
            check_writable(offer)?;
            if !offer.has(transmission_flag::SEND_TRIM) {
                return Err(refuse(ErrorCode::Invalid, "trim is not offered"));
            }
            check_flags(flags, 0, offer)?;
            check(range, offer, BeyondEnd::Invalid)?;
            Ok(Command::Discard(range, durability))
        }
        command::CACHE => {
            check_flags(flags, 0, offer)?;
            check(range, offer, BeyondEnd::Invalid)?;
            Ok(Command::Cache(range))
        }
        command::WRITE_ZEROES => {
            check_writable(offer)?;
            let allowed =
                if offer.has(transmission_flag::SEND_FAST_ZERO) { NO_HOLE | FAST_ZERO } else { NO_HOLE };
            check_flags(flags, allowed, offer)?;
            check(range, offer, BeyondEnd::NoSpace)?;
            let mode = if flags & NO_HOLE == 0 { ZeroMode::MayUnmap } else { ZeroMode::KeepAllocated };
            let effort = if flags & FAST_ZERO == 0 { Effort::Any } else { Effort::Fast };
            Ok(Command::WriteZeroes(range, mode, effort, durability))
        }
        command::BLOCK_STATUS => {
            if terms.allocation == AllocationContext::NotChosen {
                return Err(refuse(ErrorCode::Invalid, "no metadata context was chosen"));
            }
            check_flags(flags, REQ_ONE, offer)?;
            if range.length == 0 {
                return Err(refuse(ErrorCode::Invalid, "nothing to describe"));
            }
            check(range, offer, BeyondEnd::Invalid)?;
            let count = if flags & REQ_ONE == 0 { ExtentCount::Many } else { ExtentCount::One };
            Ok(Command::Describe(range, count))
        }
        _ => Err(refuse(ErrorCode::Invalid, "unknown command")),
    }
}

/// Error for a range beyond the end of the export, which differs by command in the protocol.
#[derive(Clone, Copy)]
enum BeyondEnd {
    Invalid,
    NoSpace,
}

const fn refuse(code: ErrorCode, reason: &'static str) -> Refusal {
    Refusal { code, reason }
}

fn check_writable(offer: &Offer) -> Result<(), Refusal> {
    if offer.has(transmission_flag::READ_ONLY) {
        return Err(refuse(ErrorCode::NotPermitted, "the export is read-only"));
    }
    Ok(())
}

/// Checks the flags. FUA is allowed with every command once it is offered, since clients send it so.
fn check_flags(flags: u16, allowed: u16, offer: &Offer) -> Result<(), Refusal> {
    let fua = if offer.has(transmission_flag::SEND_FUA) { command_flag::FUA } else { 0 };
    if flags & !(allowed | fua) != 0 {
        return Err(refuse(ErrorCode::Invalid, "a flag that this command does not have"));
    }
    Ok(())
}

fn check(range: ByteRange, offer: &Offer, beyond_end: BeyondEnd) -> Result<(), Refusal> {
    let geometry =
        Geometry { size: offer.size, alignment: offer.block_size_minimum, read_only: false, discards: false };
    check_range(&geometry, range).map_err(|error| match (error, beyond_end) {
        (IoError::OutOfRange { .. }, BeyondEnd::NoSpace) => {
            refuse(ErrorCode::NoSpace, "beyond the end of the export")
        }
        (IoError::OutOfRange { .. }, BeyondEnd::Invalid) => {
            refuse(ErrorCode::Invalid, "beyond the end of the export")
        }
        _ => refuse(ErrorCode::Invalid, "not aligned to the minimum block size"),
    })
}

#[cfg(test)]
mod tests;
