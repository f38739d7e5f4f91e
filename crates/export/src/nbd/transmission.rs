//! Decodes requests, without I/O: from 28 bytes to a typed command that may be executed, or to the error it gets.
//!
//! Two kinds of fault are kept apart. A [`Violation`] leaves no way to find the next request in the stream, so the
//! connection ends. A [`Refusal`] is answered, and the connection lives on.

use block::device::check_range;
use block::{ByteRange, Durability, Geometry, IoError, ZeroMode};

use crate::nbd::error_code::ErrorCode;
use crate::nbd::export::{Offer, ReplyStyle};
use crate::nbd::negotiation::AllocationContext;
use crate::nbd::protocol::{
    PAYLOAD_LENGTH_MAX, REQUEST_LENGTH, REQUEST_MAGIC, command, command_flag, transmission_flag,
};

/// A request as it stands on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Flags of the command.
    pub flags: u16,
    /// Number of the command.
    pub command: u16,
    /// What the reply must bear.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u32,
}

impl RequestHeader {
    /// Bytes that follow the header: at most [`PAYLOAD_LENGTH_MAX`].
    pub fn payload_length(&self) -> u32 {
        if self.command == command::WRITE { self.length } else { 0 }
    }
}

/// What a client may ask of the export that it chose.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// What it was told of the export.
    pub offer: Offer,
    /// Whether it may ask for allocation.
    pub allocation: AllocationContext,
}

/// A request that is in order: its range lies within the export and is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reads the range; at most [`PAYLOAD_LENGTH_MAX`] bytes.
    Read(ByteRange, Framing),
    /// Writes the payload to the range; at most [`PAYLOAD_LENGTH_MAX`] bytes.
    Write(ByteRange, Durability),
    /// Makes completed writes durable.
    Flush,
    /// Gives the range back.
    Discard(ByteRange, Durability),
    /// Announces reads of the range.
    Cache(ByteRange),
    /// Zeroes the range.
    WriteZeroes(ByteRange, ZeroMode, Durability),
    /// Describes the range; it is not empty.
    Describe(ByteRange, ExtentCount),
    /// Ends the session.
    Disconnect,
}

impl Command {
    /// Bytes of memory that the request holds while it is executed.
    pub fn payload_length(&self) -> usize {
        match self {
            // Bounded by `PAYLOAD_LENGTH_MAX`.
            Self::Read(range, _) | Self::Write(range, _) => range.length as usize,
            _ => 0,
        }
    }
}

/// Whether the data of a read may come in several chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// One piece of data.
    Whole,
    /// Data and zeroes as they come.
    Chunks,
}

/// How many extents a client wants to hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentCount {
    /// The first.
    One,
    /// As many as fit.
    Many,
}

/// A request that is answered with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The error.
    pub code: ErrorCode,
    /// What is wrong, for people.
    pub reason: &'static str,
}

/// A breach of the protocol that ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// No request where one must be.
    #[error("a request opens with {magic:#x}")]
    RequestMagic {
        /// What was there.
        magic: u32,
    },
    /// More payload than is read.
    #[error("a write brings {length} bytes, more than {PAYLOAD_LENGTH_MAX}")]
    PayloadTooLong {
        /// Its length in bytes.
        length: u32,
    },
}

/// Decodes the header of a request.
///
/// # Errors
/// [`Violation`], also if a payload is announced that is larger than [`PAYLOAD_LENGTH_MAX`].
pub fn decode_request(bytes: &[u8; REQUEST_LENGTH]) -> Result<RequestHeader, Violation> {
    let [m0, m1, m2, m3, f0, f1, t0, t1, rest @ ..] = bytes;
    let [c0, c1, c2, c3, c4, c5, c6, c7, rest @ ..] = rest;
    let [o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3] = rest;
    let magic = u32::from_be_bytes([*m0, *m1, *m2, *m3]);
    if magic != REQUEST_MAGIC {
        return Err(Violation::RequestMagic { magic });
    }
    let header = RequestHeader {
        flags: u16::from_be_bytes([*f0, *f1]),
        command: u16::from_be_bytes([*t0, *t1]),
        cookie: u64::from_be_bytes([*c0, *c1, *c2, *c3, *c4, *c5, *c6, *c7]),
        offset: u64::from_be_bytes([*o0, *o1, *o2, *o3, *o4, *o5, *o6, *o7]),
        length: u32::from_be_bytes([*l0, *l1, *l2, *l3]),
    };
    match header.payload_length() {
        length if length > PAYLOAD_LENGTH_MAX => Err(Violation::PayloadTooLong { length }),
        _ => Ok(header),
    }
}

/// Judges a request by what was agreed on with the client.
///
/// # Errors
/// The [`Refusal`] that the client is to be told; its payload, if any, is still in the stream.
pub fn judge(header: &RequestHeader, terms: &Terms) -> Result<Command, Refusal> {
    use command_flag::{DF, FUA, NO_HOLE, REQ_ONE};
    let RequestHeader { flags, .. } = *header;
    let offer = &terms.offer;
    let range = ByteRange::new(header.offset, u64::from(header.length));
    let durability = if flags & FUA == 0 { Durability::Volatile } else { Durability::Durable };
    match header.command {
        command::READ => {
            let framing = match (flags & DF, offer.replies) {
                (0, ReplyStyle::Structured) => Framing::Chunks,
                _ => Framing::Whole,
            };
            let allowed = if offer.has(transmission_flag::SEND_DF) { DF } else { 0 };
            check_flags(flags, allowed, offer)?;
            if header.length > offer.block_size_maximum {
                return Err(refuse(ErrorCode::Invalid, "longer than the maximum block size"));
            }
            check(range, offer, BeyondEnd::Invalid)?;
            Ok(Command::Read(range, framing))
        }
        command::WRITE => {
            check_writable(offer)?;
            check_flags(flags, 0, offer)?;
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
            check_flags(flags, NO_HOLE, offer)?;
            check(range, offer, BeyondEnd::NoSpace)?;
            let mode = if flags & NO_HOLE == 0 { ZeroMode::MayUnmap } else { ZeroMode::KeepAllocated };
            Ok(Command::WriteZeroes(range, mode, durability))
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

/// What a range beyond the end of the export is: the protocol has it differ by command.
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

/// FUA may come with every command once it is offered; clients are known to do so.
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
