//! Encodes and decodes the entries of a journal, up to the first torn frame.
//!
//! ```text
//!   header   8 bytes   "STERNAJ" and the version
//!   frame    an entry (postcard), as `framing.rs` has it
//!   …
//! ```

use super::framing;
use super::record::Entry;

pub use super::framing::{Ending, FRAME_BYTES_MAX};

/// Version of the encoding that this program writes, and the only one that it reads.
pub const VERSION: u8 = 4;
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
    #[error("the journal has version {found} of the format, this program reads version {VERSION} alone")]
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
        if *version != VERSION {
            return Err(CodecError::Version { found: *version });
        }
        Ok(Self { frames: framing::Frames::new(rest, HEADER_BYTES) })
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
        let entry = postcard::from_bytes(payload).ok()?;
        self.frames.accept(payload);
        Some(entry)
    }
}
