//! Encodes and decodes the entries of a journal, up to the first torn frame.
//!
//! ```text
//!   header   8 bytes   "STERNAJ" and the version
//!   frame    an entry (postcard), as `framing.rs` has it
//!   …
//! ```

use super::framing;
use super::record::Entry;
use super::version_3;

pub use super::framing::{Ending, FRAME_BYTES_MAX};

/// The version of the encoding that this program writes.
pub const VERSION: u8 = 4;
const OLDEST_VERSION: u8 = 3;
/// The first bytes of every journal.
pub const HEADER: [u8; 8] = [b'S', b'T', b'E', b'R', b'N', b'A', b'J', VERSION];
/// The length of [`HEADER`] in bytes.
pub const HEADER_BYTES: usize = HEADER.len();

/// The reason why bytes are not a journal, or why an entry does not fit a frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The first bytes are not those of a journal.
    #[error("this is no journal: it begins with other bytes")]
    NotAJournal,
    /// The journal was written by another version.
    #[error("the journal has version {found}, this program reads versions up to {VERSION}")]
    Version {
        /// The version in the header.
        found: u8,
    },
    /// The entry is too large for a frame.
    #[error("an entry of {bytes} bytes is larger than {FRAME_BYTES_MAX}")]
    TooLarge {
        /// The size of the encoded entry.
        bytes: usize,
    },
    /// The entry cannot be encoded at all.
    #[error("an entry cannot be encoded")]
    Encode(#[source] postcard::Error),
}

/// Appends `entry` to `bytes` as frame number `sequence`; the first of a journal is 0.
///
/// # Errors
/// [`CodecError::TooLarge`], [`CodecError::Encode`]; `bytes` is then unchanged.
pub fn encode(sequence: u64, entry: &Entry, bytes: &mut Vec<u8>) -> Result<(), CodecError> {
    let payload = postcard::to_stdvec(entry).map_err(CodecError::Encode)?;
    if !framing::append(sequence, &payload, bytes) {
        return Err(CodecError::TooLarge { bytes: payload.len() });
    }
    Ok(())
}

/// The complete entries of a journal, in order, up to the first incomplete frame.
pub struct Frames<'a> {
    version: u8,
    frames: framing::Frames<'a>,
}

impl<'a> Frames<'a> {
    /// Reads the header of a journal.
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
        Ok(Self { version: *version, frames: framing::Frames::new(rest, HEADER_BYTES) })
    }

    /// Returns the version of the encoding. Frames may be appended only if it is [`VERSION`].
    pub fn version(&self) -> u8 {
        self.version
    }

    /// Returns the position of the next frame, behind the last complete one.
    pub fn position(&self) -> usize {
        self.frames.position()
    }

    /// Returns the sequence number of the next frame.
    pub fn sequence(&self) -> u64 {
        self.frames.sequence()
    }

    /// Returns how the file ends behind the last frame. Call it after the last entry.
    pub fn ending(&self) -> Ending {
        self.frames.ending(|_| true)
    }
}

impl Iterator for Frames<'_> {
    type Item = Entry;

    fn next(&mut self) -> Option<Entry> {
        let payload = self.frames.peek()?;
        let entry = decode(self.version, payload)?;
        self.frames.accept(payload);
        Some(entry)
    }
}

fn decode(version: u8, payload: &[u8]) -> Option<Entry> {
    match version {
        3 => postcard::from_bytes::<version_3::Entry>(payload).ok().map(Into::into),
        _ => postcard::from_bytes(payload).ok(),
    }
}
