//! Judges requests, without I/O: from a decoded header to a typed command that may be executed, or to the error it gets.
//!
//! There are two kinds of fault. After a [`Violation`] the next request in the stream cannot be found, so the connection ends. A
//! [`Refusal`] is answered, and the connection continues.

use block::device::check_range;
use block::{ByteRange, Durability, Geometry, IoError, ZeroMode};

use crate::nbd::error_code::ErrorCode;
use crate::nbd::export::{Offer, ReplyStyle};
use crate::nbd::negotiation::AllocationContext;
#[cfg(doc)]
use crate::nbd::protocol::PAYLOAD_LENGTH_MAX;
use crate::nbd::protocol::{EXTENDED_REQUEST_LENGTH, allocation, command, command_flag, transmission_flag};

pub use crate::nbd::protocol::{RequestHeader, RequestViolation as Violation};

/// Tells whether the payload of a request says which range to describe in which contexts; see [`narrow`].
pub fn brings_contexts(header: &RequestHeader, terms: &Terms) -> bool {
    header.command == command::BLOCK_STATUS
        && header.payload_length as usize == STATUS_PAYLOAD_LENGTH
        && terms.offer.has(transmission_flag::BLOCK_STATUS_PAYLOAD)
}

/// Bytes reserved for a request for allocation. If every other block of a disk is written, its store answers with 65,536 extents
/// of 24 bytes, of which 128 KiB are sent.
const DESCRIBE_MEMORY: usize = 2 << 20;

/// Bytes of a payload of `BLOCK_STATUS` that names one context: the length of the range, and the context's id. There is one
/// context only; naming it twice, or none, is an error.
pub const STATUS_PAYLOAD_LENGTH: usize = 12;
/// Bytes of the longest header of a request.
pub const HEADER_LENGTH_MAX: usize = EXTENDED_REQUEST_LENGTH;

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
    /// The reason, as human-readable text.
    pub reason: &'static str,
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
