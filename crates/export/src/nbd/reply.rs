//! Replies to requests, and what they are cut into, without I/O.
//!
//! Headers are written to memory that a whole batch shares; the data of a read stays where it is.

use block::buffer::is_zero;
use block::{Buffer, ByteRange, Extent, ExtentKind};

use crate::nbd::error_code::ErrorCode;
use crate::nbd::export::ReplyStyle;
use crate::nbd::protocol::reply::{self, HEAD_LENGTH_MAX};
use crate::nbd::protocol::{ReplyBody, ReplyHead, allocation};
use crate::nbd::transmission::{ExtentCount, Framing};

/// Limit of the chunks that the data of one read is cut into.
pub const CHUNKS_MAX: usize = 32;
/// Step in which longer reads are searched for runs of zeroes. A shorter read is sent whole or, if all of it is zero, as a hole:
/// the search ends quickly or saves the whole copy.
pub const ZERO_STEP: usize = 64 << 10;
/// The longest text of an error, in bytes.
pub const MESSAGE_LENGTH_MAX: usize = 256;
/// Header bytes that one reply needs at most.
pub const HEADERS_LENGTH_MAX: usize = CHUNKS_MAX * HEAD_LENGTH_MAX + MESSAGE_LENGTH_MAX;
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
        /// Human-readable text; not sent in simple replies.
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

    fn head(&mut self, to: ReplyTo, body: ReplyBody, end: End) {
        let head = ReplyHead { cookie: to.cookie, body, is_last: end == End::Last };
        self.put(head.encode(to.style, to.offset).as_slice());
    }
}

/// Whether a chunk is the last one of its reply.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Last,
    MoreFollows,
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
            headers.head(to, ReplyBody::Simple { error: 0 }, End::Last);
            None
        }
        (Body::Done, ReplyStyle::Extended) => {
            headers.head(to, ReplyBody::None, End::Last);
            None
        }
        (Body::Failed { code, .. }, ReplyStyle::Simple) => {
            headers.head(to, ReplyBody::Simple { error: code.wire() }, End::Last);
            None
        }
        (Body::Failed { code, message }, ReplyStyle::Structured | ReplyStyle::Extended) => {
            let message = &message.as_bytes()[..message.len().min(MESSAGE_LENGTH_MAX)];
            let body = ReplyBody::Error { error: code.wire(), rest: message.len() as u32 };
            headers.head(to, body, End::Last);
            headers.put(message);
            None
        }
        (Body::Data { data, .. }, ReplyStyle::Simple) => {
            headers.head(to, ReplyBody::Simple { error: 0 }, End::Last);
            Some(data)
        }
        (Body::Data { offset, data, framing }, ReplyStyle::Structured | ReplyStyle::Extended) => {
            return encode_chunks(to, offset, &data, framing, headers, segments);
        }
        (Body::Extents(extents), _) => {
            let body = ReplyBody::Extents { context: allocation::ID, length: extents.len() as u32 };
            headers.head(to, body, End::Last);
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
        headers.head(to, ReplyBody::None, End::Last);
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
        let is_last = if end == length { End::Last } else { End::MoreFollows };
        let (at, run) = (offset + start as u64, (end - start) as u32);
        let data = if zero {
            headers.head(to, ReplyBody::Hole { offset: at, length: run }, is_last);
            None
        } else {
            headers.head(to, ReplyBody::Data { offset: at, length: run }, is_last);
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

/// Encodes what a device says of `range` as the extents of a block status chunk: neighbours that are alike become
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
    let mut runs: Vec<reply::Extent> = Vec::new();
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
            Some(run) if run.state == state => run.length += length,
            _ if full => break,
            _ => runs.push(reply::Extent { length, state }),
        }
    }
    if runs.is_empty() {
        // The device described nothing: everything may hold data.
        runs.push(reply::Extent { length: range.length, state: state_of(ExtentKind::Data) });
    }
    reply::encode_extents(&runs, style)
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
