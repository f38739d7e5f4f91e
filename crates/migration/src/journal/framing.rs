//! Frames: pieces of a file that is only ever appended to, each whole or not there.
//!
//! ```text
//!   frame    u32 length of the payload │ u32 CRC-32C of sequence and payload │ u64 sequence │ payload
//! ```
//! All integers are little-endian. A length of zero, a checksum that does not fit, or a sequence that is not the next
//! one ends the file: what lies behind was never acknowledged, or belongs to an earlier use of the space.

/// Largest payload of a frame: a snapshot of thousands of volumes fits, a hostile length does not.
pub const FRAME_BYTES_MAX: usize = 16 << 20;

const FRAME_HEADER_BYTES: usize = 16;
/// Bytes of which [`Frames::ending`] computes checksums at most: many times what an honest file asks for.
const SEARCH_BYTES_MAX: usize = 256 << 20;

/// Appends `payload` as the frame number `sequence` (the first of a file is 0) to `bytes`; returns whether it fits into a frame.
pub(crate) fn append(sequence: u64, payload: &[u8], bytes: &mut Vec<u8>) -> bool {
    let length = u32::try_from(payload.len()).ok().filter(|length| *length as usize <= FRAME_BYTES_MAX);
    let Some(length) = length else { return false };
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&checksum(sequence, payload).to_le_bytes());
    bytes.extend_from_slice(&sequence.to_le_bytes());
    bytes.extend_from_slice(payload);
    true
}

/// The payloads of the whole frames of a file, in order; ends at the first that is not whole.
pub(crate) struct Frames<'a> {
    rest: &'a [u8],
    position: usize,
    sequence: u64,
}

/// How a file goes on behind the last frame that was returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With nothing, or with a commit that was cut off: it was never acknowledged, and its space is free.
    Torn,
    /// With a whole frame whose payload means nothing to this program: a newer one wrote it.
    Foreign,
    /// With damage: whole frames that were acknowledged lie behind it.
    Damaged,
}

impl<'a> Frames<'a> {
    /// Those that `rest` begins with, which lies at `position` of its file.
    pub(crate) fn new(rest: &'a [u8], position: usize) -> Self {
        Self { rest, position, sequence: 0 }
    }

    /// Where the next frame is to be written: behind the last whole one.
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    /// The sequence number of the next frame.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The next payload; it is gone past by [`Frames::accept`].
    pub(crate) fn peek(&self) -> Option<&'a [u8]> {
        frame(self.rest, |sequence| sequence == self.sequence)
    }

    /// Goes on behind the frame of this payload.
    pub(crate) fn accept(&mut self, payload: &[u8]) {
        let length = FRAME_HEADER_BYTES + payload.len();
        self.rest = self.rest.get(length..).unwrap_or_default();
        self.position += length;
        self.sequence += 1;
    }

    /// Tells what lies behind the last frame that was accepted.
    ///
    /// It relies on one frame being written at a time, so that nothing was ever written behind a torn one; frames of which that is
    /// not so do not count: `counts` tells them apart by their payloads.
    pub(crate) fn ending(&self, counts: impl Fn(&[u8]) -> bool) -> Ending {
        if self.peek().is_some() {
            return Ending::Foreign;
        }
        // Every frame has a payload, so this is more frames than can follow.
        let last = self.sequence.saturating_add((self.rest.len() / FRAME_HEADER_BYTES) as u64);
        let mut budget = SEARCH_BYTES_MAX;
        for start in 1..self.rest.len().saturating_sub(FRAME_HEADER_BYTES) {
            let follows = |sequence| sequence > self.sequence && sequence <= last;
            let Some((length, _, sequence)) = header(&self.rest[start..]) else { continue };
            if !follows(sequence) {
                continue;
            }
            // Bytes that look like frames again and again were made to; they are not trusted.
            budget = budget.saturating_sub(length);
            if budget == 0 || frame(&self.rest[start..], follows).is_some_and(&counts) {
                return Ending::Damaged;
            }
        }
        Ending::Torn
    }
}

/// The payload of the frame that `bytes` begin with, if it is whole and has a sequence number that is wanted.
fn frame(bytes: &[u8], wanted: impl FnOnce(u64) -> bool) -> Option<&[u8]> {
    let (length, expected, sequence) = header(bytes)?;
    if !wanted(sequence) {
        return None;
    }
    let payload = bytes[FRAME_HEADER_BYTES..].get(..length)?;
    (checksum(sequence, payload) == expected).then_some(payload)
}

/// Length, checksum and sequence number, if `bytes` could begin with a frame.
fn header(bytes: &[u8]) -> Option<(usize, u32, u64)> {
    let header = bytes.get(..FRAME_HEADER_BYTES)?;
    let length = u32::from_le_bytes(*header.first_chunk()?) as usize;
    let expected = u32::from_le_bytes(*header[4..].first_chunk()?);
    let sequence = u64::from_le_bytes(*header[8..].first_chunk()?);
    (length > 0 && length <= FRAME_BYTES_MAX).then_some((length, expected, sequence))
}

fn checksum(sequence: u64, payload: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&sequence.to_le_bytes()), payload)
}
