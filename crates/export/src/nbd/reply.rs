//! Replies to requests, and their encoding, without I/O.
//!
//! Headers are written to memory that a whole batch shares; the data of a read stays where it is.

use block::buffer::is_zero;
use block::{Buffer, ByteRange, Extent, ExtentKind};

use crate::nbd::error_code::ErrorCode;
use crate::nbd::export::ReplyStyle;
use crate::nbd::protocol::{
    CHUNK_HEADER_LENGTH, EXTENDED_CHUNK_HEADER_LENGTH, EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_LENGTH,
    SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, allocation, chunk,
};
use crate::nbd::transmission::{ExtentCount, Framing};

/// Limit of the chunks that the data of one read is cut into.
pub const CHUNKS_MAX: usize = 32;
/// Step in which longer reads are searched for runs of zeroes. A shorter read is sent whole or, if all of it is zero, as a hole:
/// the search ends quickly or saves the whole copy.
pub const ZERO_STEP: usize = 64 << 10;
/// The longest text of an error, in bytes.
pub const MESSAGE_LENGTH_MAX: usize = 256;
/// Header bytes that one reply needs at most.
pub const HEADERS_LENGTH_MAX: usize = CHUNKS_MAX * (EXTENDED_CHUNK_HEADER_LENGTH + 12) + MESSAGE_LENGTH_MAX;
/// Extents in one reply: 64 or 128 KiB of them; the client asks again after the last.
pub const EXTENTS_MAX: usize = 8192;

/// A reply to one request.
#[derive(Debug)]
pub struct Reply {
    /// The request's own cookie, repeated.
    pub cookie: u64,
    /// The request's own offset, repeated.
    pub offset: u64,
    /// Bytes of payload that were reserved for the request.
    pub reserved: usize,
    /// The content of the reply.
    pub body: Body,
}

/// The content of a reply.
#[derive(Debug)]
pub enum Body {
    /// The request was carried out.
    Done,
    /// The request failed or was refused.
    Failed {
        /// The error in the protocol.
        code: ErrorCode,
        /// Text for people; not sent in simple replies.
        message: &'static str,
    },
    /// The data of a read.
    Data {
        /// Offset on the export, in bytes.
        offset: u64,
        /// The bytes that were read.
        data: Buffer,
        /// Whether it may be cut into chunks.
        framing: Framing,
    },
    /// The described extents, as [`encode_extents`] made them.
    Extents(Buffer),
}

/// Header bytes, and the data that is sent after them.
#[derive(Debug)]
pub struct Segment {
    /// End of its header in the batch's headers; it begins where the segment before it ends.
    pub headers_end: usize,
    /// Data after the header, if any.
    pub data: Option<Buffer>,
}

/// The memory that a batch's headers are written to.
pub struct Headers<'a> {
    bytes: &'a mut [u8],
    filled: usize,
}

impl<'a> Headers<'a> {
    /// Begins at the start of `bytes`.
    pub fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, filled: 0 }
    }

    /// Returns whether there is room for another reply.
    pub fn has_room(&self) -> bool {
        self.bytes.len() - self.filled >= HEADERS_LENGTH_MAX
    }

    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.filled..self.filled + bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
    }

    fn simple(&mut self, cookie: u64, error: u32) {
        let mut header = [0; SIMPLE_REPLY_LENGTH];
        header[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        header[4..8].copy_from_slice(&error.to_be_bytes());
        header[8..].copy_from_slice(&cookie.to_be_bytes());
        self.put(&header);
    }

    fn chunk(&mut self, reply: ReplyTo, flags: u16, kind: u16, payload_length: usize) {
        let ReplyTo { cookie, offset, style } = reply;
        let mut header = [0; EXTENDED_CHUNK_HEADER_LENGTH];
        header[4..6].copy_from_slice(&flags.to_be_bytes());
        header[6..8].copy_from_slice(&kind.to_be_bytes());
        header[8..16].copy_from_slice(&cookie.to_be_bytes());
        if style == ReplyStyle::Extended {
            header[..4].copy_from_slice(&EXTENDED_REPLY_MAGIC.to_be_bytes());
            header[16..24].copy_from_slice(&offset.to_be_bytes());
            header[24..].copy_from_slice(&(payload_length as u64).to_be_bytes());
            self.put(&header);
        } else {
            header[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
            // The length is at most `PAYLOAD_LENGTH_MAX` and an offset.
            header[16..20].copy_from_slice(&(payload_length as u32).to_be_bytes());
            self.put(&header[..CHUNK_HEADER_LENGTH]);
        }
    }
}

#[derive(Clone, Copy)]
struct ReplyTo {
    cookie: u64,
    offset: u64,
    style: ReplyStyle,
}

/// Encodes one reply: its headers to `headers`, which must have room, and the data after them to `segments`.
pub fn encode_reply(reply: Reply, style: ReplyStyle, headers: &mut Headers<'_>, segments: &mut Vec<Segment>) {
    let Reply { cookie, offset, body, .. } = reply;
    let to = ReplyTo { cookie, offset, style };
    let data = match (body, style) {
        // Clients take simple replies where there is no payload, and they are shorter.
        (Body::Done, ReplyStyle::Simple | ReplyStyle::Structured) => {
            headers.simple(cookie, 0);
            None
        }
        (Body::Done, ReplyStyle::Extended) => {
            headers.chunk(to, chunk::DONE, chunk::NONE, 0);
            None
        }
        (Body::Failed { code, .. }, ReplyStyle::Simple) => {
            headers.simple(cookie, code.wire());
            None
        }
        (Body::Failed { code, message }, ReplyStyle::Structured | ReplyStyle::Extended) => {
            let message = &message.as_bytes()[..message.len().min(MESSAGE_LENGTH_MAX)];
            headers.chunk(to, chunk::DONE, chunk::ERROR, 6 + message.len());
            headers.put(&code.wire().to_be_bytes());
            headers.put(&(message.len() as u16).to_be_bytes());
            headers.put(message);
            None
        }
        (Body::Data { data, .. }, ReplyStyle::Simple) => {
            headers.simple(cookie, 0);
            Some(data)
        }
        (Body::Data { offset, data, framing }, ReplyStyle::Structured | ReplyStyle::Extended) => {
            return encode_chunks(to, offset, &data, framing, headers, segments);
        }
        (Body::Extents(extents), _) => {
            let kind = match style {
                ReplyStyle::Extended => chunk::BLOCK_STATUS_EXT,
                ReplyStyle::Simple | ReplyStyle::Structured => chunk::BLOCK_STATUS,
            };
            headers.chunk(to, chunk::DONE, kind, extents.len());
            Some(extents)
        }
    };
    segments.push(Segment { headers_end: headers.filled, data });
}

/// Encodes the data of a read; runs of zeroes are sent as a length.
fn encode_chunks(
    to: ReplyTo,
    offset: u64,
    data: &Buffer,
    framing: Framing,
    headers: &mut Headers<'_>,
    segments: &mut Vec<Segment>,
) {
    let length = data.len();
    if length == 0 {
        headers.chunk(to, chunk::DONE, chunk::NONE, 0);
        segments.push(Segment { headers_end: headers.filled, data: None });
        return;
    }
    let step = match framing {
        Framing::Whole => length,
        Framing::Chunks => length.div_ceil(CHUNKS_MAX).next_multiple_of(ZERO_STEP),
    };
    let mut start = 0;
    while start < length {
        let zero = framing == Framing::Chunks && step_is_zero(data, start, step);
        let mut end = start + step;
        while end < length && step_is_zero(data, end, step) == zero {
            end += step;
        }
        let end = end.min(length);
        let flags = if end == length { chunk::DONE } else { 0 };
        let at = (offset + start as u64).to_be_bytes();
        let data = if zero {
            headers.chunk(to, flags, chunk::OFFSET_HOLE, 12);
            headers.put(&at);
            headers.put(&((end - start) as u32).to_be_bytes());
            None
        } else {
            headers.chunk(to, flags, chunk::OFFSET_DATA, 8 + end - start);
            headers.put(&at);
            Some(data.slice(start, end - start))
        };
        segments.push(Segment { headers_end: headers.filled, data });
        start = end;
    }
}

fn step_is_zero(data: &Buffer, start: usize, step: usize) -> bool {
    let bytes = data.as_slice();
    is_zero(&bytes[start..(start + step).min(bytes.len())])
}

/// Encodes a device's description of `range` as the payload of a block status chunk. Neighbours of the same kind become one, and
/// the list ends after [`EXTENTS_MAX`].
///
/// `range` is not empty, and without extended headers at most 4 GiB − 1 long.
pub fn encode_extents(
    range: ByteRange,
    extents: &[Extent],
    count: ExtentCount,
    style: ReplyStyle,
) -> Vec<u8> {
    let limit = match count {
        ExtentCount::One => 1,
        ExtentCount::Many => EXTENTS_MAX,
    };
    let mut runs: Vec<(u64, u32)> = Vec::new();
    let mut position = range.offset;
    for extent in extents {
        // Parts before or after the range do not concern the client.
        let length = extent.range.end().min(range.end()).saturating_sub(position);
        if length == 0 {
            continue;
        }
        position += length;
        let state = state_of(extent.kind);
        let full = runs.len() == limit;
        match runs.last_mut() {
            Some((run, last)) if *last == state => *run += length,
            _ if full => break,
            _ => runs.push((length, state)),
        }
    }
    if runs.is_empty() {
        // The device described nothing: everything may hold data.
        runs.push((range.length, state_of(ExtentKind::Data)));
    }
    let mut payload = Vec::with_capacity(8 + 16 * runs.len());
    payload.extend_from_slice(&allocation::ID.to_be_bytes());
    if style == ReplyStyle::Extended {
        payload.extend_from_slice(&(runs.len() as u32).to_be_bytes());
    }
    for (length, state) in runs {
        if style == ReplyStyle::Extended {
            payload.extend_from_slice(&length.to_be_bytes());
            payload.extend_from_slice(&u64::from(state).to_be_bytes());
        } else {
            payload.extend_from_slice(&(length as u32).to_be_bytes());
            payload.extend_from_slice(&state.to_be_bytes());
        }
    }
    payload
}

const fn state_of(kind: ExtentKind) -> u32 {
    match kind {
        ExtentKind::Data => 0,
        ExtentKind::Zero => allocation::ZERO,
        ExtentKind::Hole => allocation::ZERO | allocation::HOLE,
    }
}

#[cfg(test)]
mod tests;
