//! Entries as bytes, and bytes as entries as far as they are whole.
//!
//! ```text
//!   header   8 bytes   "STERNAJ" and the version
//!   frame    u32 length of the payload │ u32 CRC-32C of sequence and payload │ u64 sequence │ payload (postcard)
//!   …
//! ```
//! All integers are little-endian. A length of zero, a checksum that does not fit, or a sequence that is not the next
//! one ends the journal: what lies behind was never acknowledged, or belongs to an earlier use of the space.

use super::record::Entry;
use super::version_3;

/// Version of the encoding that this program writes.
pub const VERSION: u8 = 4;
/// The oldest version that is read.
const OLDEST_VERSION: u8 = 3;
/// What every journal begins with.
pub const HEADER: [u8; 8] = [b'S', b'T', b'E', b'R', b'N', b'A', b'J', VERSION];
/// Length of [`HEADER`].
pub const HEADER_BYTES: usize = HEADER.len();
/// Largest payload of a frame: a snapshot of thousands of volumes fits, a hostile length does not.
pub const FRAME_BYTES_MAX: usize = 16 << 20;

const FRAME_HEADER_BYTES: usize = 16;
/// Bytes of which [`Frames::ending`] computes checksums at most: many times what an honest journal asks for.
const SEARCH_BYTES_MAX: usize = 256 << 20;

/// Why bytes are no journal, or an entry cannot be one frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The first bytes are not a journal's.
    #[error("this is no journal: it begins with other bytes")]
    NotAJournal,
    /// The journal was written by another version.
    #[error("the journal has version {found}, this program reads versions up to {VERSION}")]
    Version {
        /// What the header says.
        found: u8,
    },
    /// The entry is too large for a frame.
    #[error("an entry of {bytes} bytes is larger than {FRAME_BYTES_MAX}")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// The entry cannot be encoded.
    #[error("an entry cannot be encoded")]
    Encode(#[source] postcard::Error),
}

/// Appends `entry` as the frame number `sequence` (the first of a journal is 0) to `bytes`.
///
/// # Errors
/// [`CodecError::TooLarge`], [`CodecError::Encode`]; `bytes` is unchanged then.
pub fn encode(sequence: u64, entry: &Entry, bytes: &mut Vec<u8>) -> Result<(), CodecError> {
    let payload = postcard::to_stdvec(entry).map_err(CodecError::Encode)?;
    let length = u32::try_from(payload.len()).ok().filter(|length| *length as usize <= FRAME_BYTES_MAX);
    let Some(length) = length else { return Err(CodecError::TooLarge { bytes: payload.len() }) };
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&checksum(sequence, &payload).to_le_bytes());
    bytes.extend_from_slice(&sequence.to_le_bytes());
    bytes.extend_from_slice(&payload);
    Ok(())
}

/// The whole entries of a journal, in order; ends at the first frame that is not whole.
pub struct Frames<'a> {
    version: u8,
    rest: &'a [u8],
    position: usize,
    sequence: u64,
}

impl<'a> Frames<'a> {
    /// Reads the header.
    ///
    /// # Errors
    /// [`CodecError::NotAJournal`], [`CodecError::Version`].
    pub fn new(bytes: &'a [u8]) -> Result<Self, CodecError> {
        let Some((header, rest)) = bytes.split_at_checked(HEADER_BYTES) else {
            return Err(CodecError::NotAJournal);
        };
        let [magic @ .., version] = header else { return Err(CodecError::NotAJournal) };
        if *magic != HEADER[..HEADER_BYTES - 1] {
            return Err(CodecError::NotAJournal);
        }
        if !(OLDEST_VERSION..=VERSION).contains(version) {
            return Err(CodecError::Version { found: *version });
        }
        Ok(Self { version: *version, rest, position: HEADER_BYTES, sequence: 0 })
    }

    /// The version of the encoding. Frames may be appended only if it is [`VERSION`].
    pub fn version(&self) -> u8 {
        self.version
    }

    /// Where the next frame is to be written: behind the last whole one.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The sequence number of the next frame.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }
}

impl Iterator for Frames<'_> {
    type Item = Entry;

    fn next(&mut self) -> Option<Entry> {
        let payload = frame(self.rest, |sequence| sequence == self.sequence)?;
        let entry = decode(self.version, payload)?;
        let length = FRAME_HEADER_BYTES + payload.len();
        self.rest = &self.rest[length..];
        self.position += length;
        self.sequence += 1;
        Some(entry)
    }
}

/// How a journal goes on behind the last frame that [`Frames`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With nothing, or with a commit that was cut off: it was never acknowledged, and its space is free.
    Torn,
    /// With a whole frame whose records mean nothing to this program: a newer one wrote it.
    Foreign,
    /// With damage: whole frames that were acknowledged lie behind it.
    Damaged,
}

impl Frames<'_> {
    /// Tells what lies behind the last frame that was returned; to be asked once there are no more.
    ///
    /// It relies on one frame being written at a time, so that nothing was ever written behind a torn one.
    pub fn ending(&self) -> Ending {
        if frame(self.rest, |sequence| sequence == self.sequence).is_some() {
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
            if budget == 0 || frame(&self.rest[start..], follows).is_some() {
                return Ending::Damaged;
            }
        }
        Ending::Torn
    }
}

fn decode(version: u8, payload: &[u8]) -> Option<Entry> {
    match version {
        3 => postcard::from_bytes::<version_3::Entry>(payload).ok().map(Into::into),
        _ => postcard::from_bytes(payload).ok(),
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
