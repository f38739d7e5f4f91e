//! Entries as bytes, and bytes as entries as far as they are whole.
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

/// Version of the encoding that this program writes.
pub const VERSION: u8 = 4;
/// The oldest version that is read.
const OLDEST_VERSION: u8 = 3;
/// What every journal begins with.
pub const HEADER: [u8; 8] = [b'S', b'T', b'E', b'R', b'N', b'A', b'J', VERSION];
/// Length of [`HEADER`].
pub const HEADER_BYTES: usize = HEADER.len();

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
    if !framing::append(sequence, &payload, bytes) {
        return Err(CodecError::TooLarge { bytes: payload.len() });
    }
    Ok(())
}

/// The whole entries of a journal, in order; ends at the first frame that is not whole.
pub struct Frames<'a> {
    version: u8,
    frames: framing::Frames<'a>,
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
        Ok(Self { version: *version, frames: framing::Frames::new(rest, HEADER_BYTES) })
    }

    /// The version of the encoding. Frames may be appended only if it is [`VERSION`].
    pub fn version(&self) -> u8 {
        self.version
    }

    /// Where the next frame is to be written: behind the last whole one.
    pub fn position(&self) -> usize {
        self.frames.position()
    }

    /// The sequence number of the next frame.
    pub fn sequence(&self) -> u64 {
        self.frames.sequence()
    }

    /// Tells what lies behind the last frame that was returned; to be asked once there are no more.
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
