//! Heads of replies: the meaning of a reply, and the number of bytes that follow.
//!
//! ```text
//!   simple      magic · error · cookie                               ┐
//!   structured  magic · flags · kind · cookie · length               ├─ and what the kind has before its data: `Body`
//!   extended    magic · flags · kind · cookie · offset · length      ┘
//! ```
//! The decoder checks every length against the protocol's limits. The caller, who knows the request,
//! checks the length against that.

use crate::fields::Fields;
use crate::{
    CHUNK_HEADER_LENGTH, EXTENDED_CHUNK_HEADER_LENGTH, EXTENDED_REPLY_MAGIC, PAYLOAD_LENGTH_MAX, ReplyStyle,
    SIMPLE_REPLY_LENGTH, SIMPLE_REPLY_MAGIC, STRING_LENGTH_MAX, STRUCTURED_REPLY_MAGIC, chunk,
};

/// Length of the longest head: an extended chunk for zeroes.
pub const HEAD_LENGTH_MAX: usize = EXTENDED_CHUNK_HEADER_LENGTH + 12;
/// Limit of a received list of extents, in bytes: a million extents are more than any server sends.
const EXTENTS_LENGTH_MAX: u32 = 8 << 20;
/// Limit of an error's message with its offset, in bytes.
const ERROR_REST_MAX: u32 = STRING_LENGTH_MAX as u32 + 8;

/// A description of the breach of the protocol, which ends the connection.
pub type ReplyViolation = &'static str;

/// The head of a simple reply or of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHead {
    /// The cookie of the request.
    pub cookie: u64,
    /// The meaning of the reply, with its fields.
    pub body: ReplyBody,
    /// Whether this is the last reply to the request.
    pub is_last: bool,
}

/// The meaning of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyBody {
    /// A simple reply with an error, or 0; after 0 the data of a read follow.
    Simple {
        /// The number of the error.
        error: u32,
    },
    /// A chunk without content.
    None,
    /// Data of a read: `length` bytes follow.
    Data {
        /// Offset in the export, in bytes.
        offset: u64,
        /// Number of bytes that follow.
        length: u32,
    },
    /// A run of zeroes, without data.
    Hole {
        /// Offset in the export, in bytes.
        offset: u64,
        /// Number of zero bytes.
        length: u32,
    },
    /// Extents of a context: `length` bytes follow.
    Extents {
        /// The number of the context.
        context: u32,
        /// Number of bytes that follow.
        length: u32,
    },
    /// An error with a message: `rest` bytes follow.
    Error {
        /// The number of the error.
        error: u32,
        /// Number of bytes that follow.
        rest: u32,
    },
}

/// An encoded head, without its data.
#[derive(Clone, Copy)]
pub struct HeadBytes {
    bytes: [u8; HEAD_LENGTH_MAX],
    length: usize,
}

impl HeadBytes {
    /// Returns the bytes to send; the data follow them.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.length..self.length + bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }
}

impl ReplyHead {
    /// Encodes the head of a reply to a request of this offset, which extended replies repeat.
    ///
    /// A simple reply has the same form in every style; a client with extended headers takes none.
    #[inline]
    pub fn encode(&self, style: ReplyStyle, request_offset: u64) -> HeadBytes {
        let mut head = HeadBytes { bytes: [0; HEAD_LENGTH_MAX], length: 0 };
        let is_extended = style == ReplyStyle::Extended;
        let (kind, length) = match self.body {
            ReplyBody::Simple { error } => {
                head.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
                head.put(&error.to_be_bytes());
                head.put(&self.cookie.to_be_bytes());
                return head;
            }
            ReplyBody::None => (chunk::NONE, 0),
            ReplyBody::Data { length, .. } => (chunk::OFFSET_DATA, u64::from(length) + 8),
            ReplyBody::Hole { .. } => (chunk::OFFSET_HOLE, 12),
            ReplyBody::Extents { length, .. } if is_extended => {
                (chunk::BLOCK_STATUS_EXT, u64::from(length) + 8)
            }
            ReplyBody::Extents { length, .. } => (chunk::BLOCK_STATUS, u64::from(length) + 4),
            ReplyBody::Error { rest, .. } => (chunk::ERROR, u64::from(rest) + 6),
        };
        let magic = if is_extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        head.put(&magic.to_be_bytes());
        head.put(&(if self.is_last { chunk::DONE } else { 0 }).to_be_bytes());
        head.put(&kind.to_be_bytes());
        head.put(&self.cookie.to_be_bytes());
        if is_extended {
            head.put(&request_offset.to_be_bytes());
            head.put(&length.to_be_bytes());
        } else {
            // The length is at most `PAYLOAD_LENGTH_MAX` and an offset.
            head.put(&(length as u32).to_be_bytes());
        }
        match self.body {
            ReplyBody::Simple { .. } | ReplyBody::None => {}
            ReplyBody::Data { offset, .. } => head.put(&offset.to_be_bytes()),
            ReplyBody::Hole { offset, length } => {
                head.put(&offset.to_be_bytes());
                head.put(&length.to_be_bytes());
            }
            ReplyBody::Extents { context, length } => {
                head.put(&context.to_be_bytes());
                if is_extended {
                    head.put(&(length / 16).to_be_bytes());
                }
            }
            ReplyBody::Error { error, rest } => {
                head.put(&error.to_be_bytes());
                head.put(&(rest as u16).to_be_bytes());
            }
        }
        head
    }

    /// Decodes the head at the start of `bytes`, and returns it with its length; `None` if it is incomplete.
    ///
    /// # Errors
    /// [`ReplyViolation`]; the rest of the stream is meaningless.
    #[inline]
    pub fn decode(bytes: &[u8], style: ReplyStyle) -> Result<Option<(Self, usize)>, ReplyViolation> {
        let mut fields = Fields(bytes);
        match (fields.u32(), style) {
            (None, _) => Ok(None),
            (Some(SIMPLE_REPLY_MAGIC), ReplyStyle::Simple | ReplyStyle::Structured) => {
                let (Some(error), Some(cookie)) = (fields.u32(), fields.u64()) else { return Ok(None) };
                let head = Self { cookie, body: ReplyBody::Simple { error }, is_last: true };
                Ok(Some((head, SIMPLE_REPLY_LENGTH)))
            }
            (Some(STRUCTURED_REPLY_MAGIC), ReplyStyle::Structured | ReplyStyle::Simple)
            | (Some(EXTENDED_REPLY_MAGIC), ReplyStyle::Extended) => decode_chunk(fields, bytes.len(), style),
            (Some(_), _) => Err("a reply opens with a number that no reply has"),
        }
    }
}

fn decode_chunk(
    mut fields: Fields<'_>,
    arrived: usize,
    style: ReplyStyle,
) -> Result<Option<(ReplyHead, usize)>, ReplyViolation> {
    let is_extended = style == ReplyStyle::Extended;
    let (Some(flags), Some(kind), Some(cookie)) = (fields.u16(), fields.u16(), fields.u64()) else {
        return Ok(None);
    };
    let length = match is_extended {
        true => fields.u64().and_then(|_| fields.u64()),
        false => fields.u32().map(u64::from),
    };
    let Some(length) = length else { return Ok(None) };
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    let is_error = kind & chunk::ERROR_BIT != 0;
    // The part of the payload that belongs to the head.
    let fixed = match kind {
        chunk::NONE if length == 0 => 0,
        chunk::OFFSET_DATA if (9..=PAYLOAD_LENGTH_MAX + 8).contains(&length) => 8,
        chunk::OFFSET_HOLE if length == 12 => 12,
        chunk::BLOCK_STATUS if !is_extended && are_extents(length, 4, 8) => 4,
        chunk::BLOCK_STATUS_EXT if is_extended && are_extents(length, 8, 16) => 8,
        _ if is_error && (6..=ERROR_REST_MAX + 6).contains(&length) => 6,
        chunk::NONE | chunk::OFFSET_DATA | chunk::OFFSET_HOLE | chunk::BLOCK_STATUS => {
            return Err("a chunk has a length that its kind does not allow");
        }
        _ if is_error => return Err("an error has a length that errors do not have"),
        _ => return Err("a chunk is of a kind that nobody asked for"),
    };
    let head_length =
        if is_extended { EXTENDED_CHUNK_HEADER_LENGTH } else { CHUNK_HEADER_LENGTH } + fixed as usize;
    if arrived < head_length {
        return Ok(None);
    }
    // The check above ensures that they are present.
    let mut number = || fields.u32().unwrap_or(0);
    let body = match kind {
        chunk::NONE => ReplyBody::None,
        chunk::OFFSET_DATA => ReplyBody::Data { offset: join(number(), number()), length: length - fixed },
        chunk::OFFSET_HOLE => ReplyBody::Hole { offset: join(number(), number()), length: number() },
        chunk::BLOCK_STATUS => ReplyBody::Extents { context: number(), length: length - fixed },
        chunk::BLOCK_STATUS_EXT => {
            let (context, count) = (number(), number());
            if u64::from(count) * 16 != u64::from(length - fixed) {
                return Err("a list of extents is not as long as it says");
            }
            ReplyBody::Extents { context, length: length - fixed }
        }
        _ => ReplyBody::Error { error: number(), rest: length - fixed },
    };
    Ok(Some((ReplyHead { cookie, body, is_last: flags & chunk::DONE != 0 }, head_length)))
}

/// Returns whether `length` is that of a list of at least one extent behind `before` bytes.
fn are_extents(length: u32, before: u32, each: u32) -> bool {
    length >= before + each && (length - before).is_multiple_of(each) && length <= EXTENTS_LENGTH_MAX + before
}

fn join(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// A run of bytes in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes; without extended headers it fits into 32 bits.
    pub length: u64,
    /// Bits of [`crate::allocation`].
    pub state: u32,
}

/// Encodes extents: the data of [`ReplyBody::Extents`].
pub fn encode_extents(extents: &[Extent], style: ReplyStyle) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(16 * extents.len());
    for Extent { length, state } in extents {
        if style == ReplyStyle::Extended {
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(&u64::from(*state).to_be_bytes());
        } else {
            bytes.extend_from_slice(&(*length as u32).to_be_bytes());
            bytes.extend_from_slice(&state.to_be_bytes());
        }
    }
    bytes
}

/// Decodes the data of [`ReplyBody::Extents`].
///
/// # Errors
/// [`ReplyViolation`]: an extent is empty, or there is none.
pub fn decode_extents(bytes: &[u8], style: ReplyStyle) -> Result<Vec<Extent>, ReplyViolation> {
    let (mut fields, mut extents) = (Fields(bytes), Vec::new());
    loop {
        let extent = match style {
            // The state has no meaningful bit beyond the lower half.
            ReplyStyle::Extended => fields.u64().zip(fields.u64().map(|state| state as u32)),
            ReplyStyle::Simple | ReplyStyle::Structured => fields.u32().map(u64::from).zip(fields.u32()),
        };
        let Some((length, state)) = extent else { break };
        extents.push(Extent { length, state });
    }
    if extents.is_empty() || extents.iter().any(|extent| extent.length == 0) {
        return Err("an extent is empty, or there is none");
    }
    Ok(extents)
}

#[cfg(test)]
mod tests;
