//! Frames: pieces of an append-only file, each of them complete or absent.
//!
//! ```text
//!   frame    u32 length of the payload │ u32 CRC-32C of sequence and payload │ u64 sequence │ payload
//! ```
//! All integers are little-endian. A length of zero, a wrong checksum or a wrong sequence number ends the file. Later bytes were
//! never acknowledged, or belong to an earlier use of the space.

/// The largest payload of a frame. A snapshot of thousands of volumes fits; a hostile length does not.
pub const FRAME_BYTES_MAX: usize = 16 << 20;

const FRAME_HEADER_BYTES: usize = 16;
/// The most bytes that [`Frames::ending`] checks: many times the need of an honest file.
const SEARCH_BYTES_MAX: usize = 256 << 20;

/// Appends `payload` to `bytes` as frame number `sequence` (the first of a file is 0); returns whether it fits into a frame.
pub(crate) fn append(sequence: u64, payload: &[u8], bytes: &mut Vec<u8>) -> bool {
    let length = u32::try_from(payload.len()).ok().filter(|length| *length as usize <= FRAME_BYTES_MAX);
    let Some(length) = length else { return false };
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&checksum(sequence, payload).to_le_bytes());
    bytes.extend_from_slice(&sequence.to_le_bytes());
    bytes.extend_from_slice(payload);
    true
}

/// The payloads of the complete frames of a file, in order, up to the first incomplete one.
pub(crate) struct Frames<'a> {
    rest: &'a [u8],
    position: usize,
    sequence: u64,
}

/// How a file continues behind the last frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Nothing follows, or a torn commit that was never acknowledged: its space is free.
    Torn,
    /// A complete frame follows that this program cannot read: a newer version wrote it.
    Foreign,
    /// Damage follows, and behind it complete frames that were acknowledged.
    Damaged,
}

impl<'a> Frames<'a> {
    /// Reads frames from `rest`, which begins at `position` of its file.
    pub(crate) fn new(rest: &'a [u8], position: usize) -> Self {
        Self { rest, position, sequence: 0 }
    }

    /// Returns the position of the next frame, behind the last complete one.
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Returns the next payload, which [`Frames::accept`] consumes.
    pub(crate) fn peek(&self) -> Option<&'a [u8]> {
        frame(self.rest, |sequence| sequence == self.sequence)
    }

    pub(crate) fn accept(&mut self, payload: &[u8]) {
        let length = FRAME_HEADER_BYTES + payload.len();
        self.rest = self.rest.get(length..).unwrap_or_default();
        self.position += length;
        self.sequence += 1;
    }

    /// Returns how the file continues behind the last accepted frame.
    ///
    /// Frames are written one at a time, so nothing was ever written behind a torn frame. `counts` excludes, by their payloads,
    /// frames for which that does not hold.
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
            // Many bytes that look like frames are a fabrication, and are not trusted.
            budget = budget.saturating_sub(length);
            if budget == 0 || frame(&self.rest[start..], follows).is_some_and(&counts) {
                return Ending::Damaged;
            }
        }
        Ending::Torn
    }
}

/// Returns the payload at the start of `bytes`, if its frame is complete and its sequence number is wanted.
fn frame(bytes: &[u8], wanted: impl FnOnce(u64) -> bool) -> Option<&[u8]> {
    let (length, expected, sequence) = header(bytes)?;
    if !wanted(sequence) {
        return None;
    }
    let payload = bytes[FRAME_HEADER_BYTES..].get(..length)?;
    (checksum(sequence, payload) == expected).then_some(payload)
}

/// Returns length, checksum and sequence number, if `bytes` could begin with a frame.
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
