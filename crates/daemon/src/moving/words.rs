//! What two hosts say to each other about a machine that moves, as bytes.
//!
//! ```text
//!   source                                             target
//!     │ ── Parcel …, Check ─────────────────────────────► │ looks whether it could run it
//!     │ ◄───────────────────────────────────────── Fits ─ │
//!     │ ── Start ───────────────────────────────────────► │ starts it, loaded with nothing, its disks there
//!     │ ◄──────────────────────────────────── Waiting ─── │
//!     │ ── Data … ──────────────────────────────────────► │ what the hypervisor here writes
//!     │ ◄──────────────────────────────────────── Data ── │ what the hypervisor there answers
//!     │ ◄───────────────────────────────────────Loaded ── │ it stands still, with all that it had here
//!     │ ◄──────────────────────────────────────Failed ─── │ at any time: it will not come to that
//! ```
//! Whether the machine runs there is not decided here: that goes with its volumes ([`migration::message`]).
//!
//! One message is a head (version, then postcard) and, with Data, a payload. All of them are delivered in order.

use serde::{Deserialize, Serialize};

/// Version of the encoding.
const VERSION: u8 = 1;
/// Longest head: a reason in it is cut before.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// Bytes of a reason for people.
const DETAIL_BYTES_MAX: usize = 4 << 10;

/// One message about a machine that moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// The payload is a piece of what the target must have to run it.
    Parcel,
    /// That was all of the parcel: could it be run?
    Check,
    /// It could, as far as can be seen.
    Fits,
    /// Its disks are there: start it, and wait for its memory.
    Start,
    /// It is started, and waits for its memory.
    Waiting,
    /// It has all that it had at the source, and stands still.
    Loaded,
    /// It is not, or will not be, loaded at the target.
    Failed {
        /// Why, for people.
        detail: String,
    },
    /// The payload is what the hypervisor has written.
    Data,
    /// So many bytes of what was sent have been taken: as many may be sent again.
    Taken {
        /// How many.
        bytes: u32,
    },
    /// The hypervisor writes no more.
    End,
}

/// Why bytes are no message about a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WordError {
    /// It is too long.
    #[error("a head of {bytes} bytes is longer than {HEAD_BYTES_MAX}")]
    TooLong {
        /// How long it is.
        bytes: usize,
    },
    /// Another version wrote it.
    #[error("not of version {VERSION}")]
    Version,
    /// The bytes mean nothing.
    #[error("it means nothing")]
    Malformed,
}

impl Word {
    /// What says that the machine cannot be had, and why.
    pub(crate) fn failed(detail: &str) -> Self {
        let end = (0..=DETAIL_BYTES_MAX).rev().find(|end| detail.is_char_boundary(*end)).unwrap_or(0);
        Self::Failed { detail: detail.get(..end).unwrap_or(detail).to_owned() }
    }

    /// As bytes.
    pub(crate) fn encode(&self) -> Vec<u8> {
        // Writing to memory fails only for types that postcard does not know, and these are not.
        postcard::to_extend(self, vec![VERSION]).unwrap_or_default()
    }

    /// Reads a head.
    ///
    /// # Errors
    /// [`WordError`]: the peer has broken the protocol.
    pub(crate) fn decode(head: &[u8]) -> Result<Self, WordError> {
        if head.len() > HEAD_BYTES_MAX {
            return Err(WordError::TooLong { bytes: head.len() });
        }
        match head.split_first() {
            Some((&VERSION, rest)) => match postcard::take_from_bytes(rest) {
                Ok((word, [])) => Ok(word),
                _ => Err(WordError::Malformed),
            },
            _ => Err(WordError::Version),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_as_they_were_sent() {
        let words = [
            Word::Parcel,
            Word::Check,
            Word::Fits,
            Word::Start,
            Word::Waiting,
            Word::Loaded,
            Word::failed("no such machine type"),
            Word::Data,
            Word::Taken { bytes: u32::MAX },
            Word::End,
        ];
        for word in words {
            assert_eq!(Word::decode(&word.encode()), Ok(word));
        }
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let long = "ü".repeat(DETAIL_BYTES_MAX);
        let Word::Failed { detail } = Word::failed(&long) else { unreachable!() };
        assert_eq!(detail.len(), DETAIL_BYTES_MAX);
        assert!(Word::decode(&Word::Failed { detail }.encode()).is_ok());
    }

    #[test]
    fn what_is_no_word_is_refused() {
        assert_eq!(Word::decode(&[]), Err(WordError::Version));
        assert_eq!(Word::decode(&[9, 0]), Err(WordError::Version));
        assert_eq!(Word::decode(&[VERSION]), Err(WordError::Malformed));
        assert_eq!(Word::decode(&[VERSION, 200, 1]), Err(WordError::Malformed));
        let with_rest = [Word::Start.encode(), vec![0]].concat();
        assert_eq!(Word::decode(&with_rest), Err(WordError::Malformed));
        let long = vec![VERSION; HEAD_BYTES_MAX + 1];
        assert_eq!(Word::decode(&long), Err(WordError::TooLong { bytes: long.len() }));
    }
}
