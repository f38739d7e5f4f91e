//! What two hosts say to each other about a machine that moves, as bytes.
//!
//! ```text
//!   source                                             target
//!     │ ── Parcel …, Terms, Check ──────────────────────► │ looks whether it could run it
//!     │ ◄────────────────────────────────── Terms, Fits ─ │
//!     │ ── Start ───────────────────────────────────────► │ starts it, loaded with nothing, its disks there
//!     │ ◄──────────────────────────────────── Waiting ─── │
//!     │ ── Data … ──────────────────────────────────────► │ what the hypervisor here writes
//!     │ ◄──────────────────────────────────────── Data ── │ what the hypervisor there answers
//!     │ ◄───────────────────────────────────────Loaded ── │ it stands still, with all that it had here
//!     │ ◄──────────────────────────────────────Failed ─── │ at any time: it will not come to that
//! ```
//! If the machine runs before all of its memory is there (post-copy), it goes on after *Waiting* like this:
//!
//! ```text
//!     │ ◄──────────────────────────────────────── Owned ─ │ the volumes are the target's; the machine stands still
//!     │ ── Data … ──────────────────────────────────────► │ its devices; it runs there; then the rest, as it asks for it
//!     │ ◄───────────────────────────────────── Complete ─ │ all of it is there
//!     │ ── Recover (stream) ────────────────────────────► │ after the stream has broken: a daemon was started again
//!     │ ◄─────────────────────────── Recovering (stream)─ │
//!     │ ── Data … ────────────── Lost, from either side ─ │ no more of it will ever come
//! ```
//! Whether the machine runs there is not decided here: that goes with its volumes ([`migration::message`]).
//!
//! One message is a head (version, then postcard) and, with Data, a payload. All of them are delivered in order.

use std::num::NonZeroU8;

use hypervisor::{MemoryMode, MemoryTransfer};
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
    /// Which way the memory is to go: before *Check* as the source wishes it, before *Fits* as the target agrees. Not said
    /// if it goes as it always could.
    Terms(Terms),
    /// The volumes are the target's: let the machine, which stands still at the source, be run there before its memory is.
    Owned,
    /// All of the memory is at the target.
    Complete,
    /// The machine's memory can never be whole again: the text says why.
    Lost {
        /// Why, for people.
        detail: String,
    },
    /// The stream of a machine that runs has broken: the rest of its memory is to come over another one.
    Recover {
        /// By its number: no other attempt has the same soon.
        stream: u8,
    },
    /// It is expected there.
    Recovering {
        /// By its number.
        stream: u8,
    },
}

/// Which way a machine's memory goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terms {
    /// Streams beside the main one; 0: there are none.
    pub(crate) side_streams: u8,
    /// Whether the machine may run at the target before all of it is there.
    pub(crate) post_copy: bool,
}

impl Terms {
    /// As the hypervisor is told.
    pub(super) fn transfer(self) -> MemoryTransfer {
        let mode = if self.post_copy { MemoryMode::PostCopy } else { MemoryMode::PreCopy };
        MemoryTransfer { side_streams: NonZeroU8::new(self.side_streams), mode }
    }
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
        Self::Failed { detail: cut(detail) }
    }

    /// What says that the machine's memory is lost, and why.
    pub(crate) fn lost(detail: &str) -> Self {
        Self::Lost { detail: cut(detail) }
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

/// As much of a reason as is told.
fn cut(detail: &str) -> String {
    let end = (0..=DETAIL_BYTES_MAX).rev().find(|end| detail.is_char_boundary(*end)).unwrap_or(0);
    detail.get(..end).unwrap_or(detail).to_owned()
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
            Word::Terms(Terms { side_streams: 7, post_copy: true }),
            Word::Owned,
            Word::Complete,
            Word::lost("the host is gone"),
            Word::Recover { stream: 16 },
            Word::Recovering { stream: 255 },
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
