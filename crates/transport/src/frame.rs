//! The bytes on a connection: frames, and their pure encoder and decoder.
//!
//! ```text
//!   frame     ┌ header, 20 bytes ─────────────────────────────────────────┬ body ────────┐
//!             │ kind · priority · codec · order · length · checksum · number │ length bytes │
//!             └───────────────────────────────────────────────────────────┴──────────────┘
//!   bodies    Greeting  magic · lowest version · highest version · features
//!             Control   a postcard of [`Control`]
//!             First     message header, 28 bytes · head · the payload's first part
//!             Next      a further part of the payload
//! ```
//!
//! All numbers are little-endian. The checksum (CRC-32C) covers header and body. A message consists of a *first* frame and *next*
//! frames of the same number, on the same connection. A more urgent message may be sent in between. [`Greeting`] has the same
//! layout in every version of the protocol, for it serves to agree on the version.
//!
//! Decoding checks the layout and the limits; the session checks the numbers.

mod assembly;
mod control;

use bytes::{Buf, BytesMut};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub(crate) use assembly::{Assembly, Begun};
pub(crate) use control::{
    Acknowledgement, Control, Hello, JoinReply, JoinRequest, RANGES_MAX, Refusal, Welcome, WireLink,
};

use crate::message::{HEAD_BYTES_MAX, PAYLOAD_BYTES_MAX, Priority};

/// Limit of the payload in one frame. It is small enough that a more urgent message waits 2 ms at most at 1 Gbit, and large
/// enough that the work per frame does not matter.
pub(crate) const PART_BYTES_MAX: usize = 256 << 10;

/// Limit of a control frame's body: a host's name and links are the longest.
const CONTROL_BYTES_MAX: usize = 32 << 10;

const BODY_BYTES_MAX: usize = MESSAGE_HEADER_BYTES + HEAD_BYTES_MAX + PART_BYTES_MAX;

pub(crate) const FRAME_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX;

pub(crate) const HEADER_BYTES: usize = size_of::<Header>();
pub(crate) const MESSAGE_HEADER_BYTES: usize = size_of::<MessageHeader>();

/// Opens every greeting: tells a stranger's bytes from those of a peer of any version.
const MAGIC: [u8; 8] = *b"STERNA\r\n";

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    kind: u8,
    priority: u8,
    codec: u8,
    order: u8,
    length: U32,
    checksum: U32,
    number: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct MessageHeader {
    channel: U64,
    after: U64,
    head_length: U32,
    payload_length: U32,
    wire_length: U32,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct GreetingBody {
    magic: [u8; 8],
    lowest: U16,
    highest: U16,
    reserved: U32,
    features: U64,
}

const KIND_GREETING: u8 = 0;
const KIND_CONTROL: u8 = 1;
const KIND_FIRST: u8 = 2;
const KIND_NEXT: u8 = 3;

/// First frame in either direction: the protocol versions and features of its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub(crate) lowest: u16,
    pub(crate) highest: u16,
    pub(crate) features: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codec {
    Plain,
    Lz4,
    Zstd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Start {
    /// Number of the message in its session, from 1 on.
    pub(crate) number: u64,
    pub(crate) channel: u64,
    pub(crate) priority: Priority,
    pub(crate) codec: Codec,
    /// For an ordered message the number of the one before it, or 0; `None` if others may overtake it.
    pub(crate) after: Option<u64>,
    pub(crate) head_bytes: usize,
    /// Bytes of the unpacked payload, and those that are sent.
    pub(crate) payload_bytes: usize,
    pub(crate) wire_bytes: usize,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Frame<'a> {
    Greeting(Greeting),
    Control(Control),
    First { start: Start, head: &'a [u8], part: &'a [u8] },
    Next { number: u64, part: &'a [u8] },
}

/// Why bytes are not a frame. Their connection is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The frame's kind is unknown.
    #[error("a frame of an unknown kind")]
    Kind,
    /// A field has an unknown value.
    #[error("a frame with a field that has no meaning")]
    Field,
    /// A length is beyond its limit, or does not fit the others.
    #[error("a frame with a wrong length")]
    Length,
    /// The checksum does not match the bytes.
    #[error("a frame with a wrong checksum")]
    Checksum,
    /// A greeting lacks the magic bytes.
    #[error("a greeting that is not Sterna's")]
    Magic,
    /// A control frame's body does not decode.
    #[error("a control frame that does not decode")]
    Control,
    /// Parts of a message do not fit together.
    #[error("a part that belongs to no message")]
    Part,
    /// A payload does not unpack to its length.
    #[error("a payload that does not decompress to its length")]
    Packing,
}

/// Decodes the frame at the beginning of `bytes`, and returns it with its length. Returns `None` if it is not whole yet. Fails if
/// the bytes can never become a frame.
pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(Frame<'_>, usize)>, Malformed> {
    let Ok((header, rest)) = Header::ref_from_prefix(bytes) else { return Ok(None) };
    let length = header.length.get() as usize;
    let length_max = match header.kind {
        KIND_GREETING => size_of::<GreetingBody>(),
        KIND_CONTROL => CONTROL_BYTES_MAX,
        KIND_FIRST => BODY_BYTES_MAX,
        KIND_NEXT => PART_BYTES_MAX,
        _ => return Err(Malformed::Kind),
    };
    if length > length_max {
        return Err(Malformed::Length);
    }
    let Some(body) = rest.get(..length) else { return Ok(None) };
    if checksum(header, &[body]) != header.checksum.get() {
        return Err(Malformed::Checksum);
    }
    let frame = match header.kind {
        KIND_GREETING => decode_greeting(body)?,
        KIND_CONTROL => Frame::Control(postcard::from_bytes(body).map_err(|_| Malformed::Control)?),
        KIND_FIRST => decode_first(header, body)?,
        _ if body.is_empty() => return Err(Malformed::Length),
        _ => Frame::Next { number: header.number.get(), part: body },
    };
    Ok(Some((frame, HEADER_BYTES + length)))
}

fn decode_greeting(body: &[u8]) -> Result<Frame<'static>, Malformed> {
    let greeting = GreetingBody::ref_from_bytes(body).map_err(|_| Malformed::Length)?;
    if greeting.magic != MAGIC {
        return Err(Malformed::Magic);
    }
    let (lowest, highest) = (greeting.lowest.get(), greeting.highest.get());
    if lowest > highest {
        return Err(Malformed::Field);
    }
    Ok(Frame::Greeting(Greeting { lowest, highest, features: greeting.features.get() }))
}

fn decode_first<'a>(header: &Header, body: &'a [u8]) -> Result<Frame<'a>, Malformed> {
    let (message, rest) = MessageHeader::ref_from_prefix(body).map_err(|_| Malformed::Length)?;
    let priority = *Priority::ALL.get(usize::from(header.priority)).ok_or(Malformed::Field)?;
    let codec = match header.codec {
        0 => Codec::Plain,
        1 => Codec::Lz4,
        2 => Codec::Zstd,
        _ => return Err(Malformed::Field),
    };
    let number = header.number.get();
    let after = match header.order {
        0 => None,
        1 if message.after.get() < number => Some(message.after.get()),
        _ => return Err(Malformed::Field),
    };
    let start = Start {
        number,
        channel: message.channel.get(),
        priority,
        codec,
        after,
        head_bytes: message.head_length.get() as usize,
        payload_bytes: message.payload_length.get() as usize,
        wire_bytes: message.wire_length.get() as usize,
    };
    let fits = match codec {
        Codec::Plain => start.wire_bytes == start.payload_bytes,
        // Packing must have made it smaller, or it would have been sent plain.
        Codec::Lz4 | Codec::Zstd => start.wire_bytes < start.payload_bytes,
    };
    if start.head_bytes > HEAD_BYTES_MAX || start.payload_bytes > PAYLOAD_BYTES_MAX || !fits {
        return Err(Malformed::Length);
    }
    let (head, part) = rest.split_at_checked(start.head_bytes).ok_or(Malformed::Length)?;
    // An empty part belongs only to a message without payload: otherwise the message would never make progress.
    if part.len() > start.wire_bytes
        || (part.is_empty() && start.wire_bytes > 0)
        || part.len() > PART_BYTES_MAX
    {
        return Err(Malformed::Length);
    }
    Ok(Frame::First { start, head, part })
}

pub(crate) fn encode_greeting(greeting: Greeting, into: &mut BytesMut) {
    let body = GreetingBody {
        magic: MAGIC,
        lowest: greeting.lowest.into(),
        highest: greeting.highest.into(),
        reserved: 0.into(),
        features: greeting.features.into(),
    };
    encode(Header::new(KIND_GREETING, 0), &[body.as_bytes()], into);
}

/// Appends a control frame.
///
/// The caller keeps it below the limit: names, links and ranges are bounded where they are made.
pub(crate) fn encode_control(control: &Control, into: &mut BytesMut) {
    match postcard::to_stdvec(control) {
        Ok(body) if body.len() <= CONTROL_BYTES_MAX => encode(Header::new(KIND_CONTROL, 0), &[&body], into),
        // It is not sent. The other side misses it like a lost frame, and gives up the connection.
        _ => tracing::error!("a control frame was too long to be sent"),
    }
}

/// Appends a message's first frame up to its part of the payload; the caller sends the part after it.
pub(crate) fn encode_first(start: &Start, head: &[u8], part: &[u8], into: &mut BytesMut) {
    let mut header = Header::new(KIND_FIRST, start.number);
    header.priority = start.priority.index() as u8;
    header.codec = start.codec as u8;
    header.order = u8::from(start.after.is_some());
    let message = MessageHeader {
        channel: start.channel.into(),
        after: start.after.unwrap_or(0).into(),
        head_length: (start.head_bytes as u32).into(),
        payload_length: (start.payload_bytes as u32).into(),
        wire_length: (start.wire_bytes as u32).into(),
    };
    encode(header, &[message.as_bytes(), head, part], into);
    into.truncate(into.len() - part.len());
}

/// Appends a next frame's header; the caller sends the part after it.
pub(crate) fn encode_next(number: u64, part: &[u8], into: &mut BytesMut) {
    let header = Header::new(KIND_NEXT, number);
    seal(header, &[part], into);
}

impl Header {
    fn new(kind: u8, number: u64) -> Self {
        let [length, checksum] = [U32::ZERO; 2];
        Self { kind, priority: 0, codec: 0, order: 0, length, checksum, number: number.into() }
    }
}

fn encode(header: Header, body: &[&[u8]], into: &mut BytesMut) {
    seal(header, body, into);
    body.iter().for_each(|piece| into.extend_from_slice(piece));
}

fn seal(mut header: Header, body: &[&[u8]], into: &mut BytesMut) {
    let length: usize = body.iter().map(|piece| piece.len()).sum();
    header.length = (length as u32).into();
    header.checksum = checksum(&header, body).into();
    into.extend_from_slice(header.as_bytes());
}

/// Computes the checksum of a frame, in which its own field counts as zero.
fn checksum(header: &Header, body: &[&[u8]]) -> u32 {
    let blank = Header { checksum: U32::ZERO, ..*header };
    body.iter().fold(crc32c::crc32c(blank.as_bytes()), |sum, piece| crc32c::crc32c_append(sum, piece))
}

/// Takes whole frames out of the received bytes, one after the other. Fails as [`decode`] and `take` do.
pub(crate) fn drain<E: From<Malformed>>(
    bytes: &mut BytesMut,
    mut take: impl FnMut(Frame<'_>) -> Result<(), E>,
) -> Result<(), E> {
    while let Some((frame, length)) = decode(bytes)? {
        take(frame)?;
        bytes.advance(length);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
