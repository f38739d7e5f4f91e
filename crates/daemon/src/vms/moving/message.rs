//! The messages of two hosts about a VM that moves, as bytes.
//!
//! ```text
//!   source                                             target
//!     │ ── Manifest …, Terms, Check ──────────────────────► │ looks whether it could run it
//!     │ ◄────────────────────────────────── Terms, Fits ─ │
//!     │ ── Start ───────────────────────────────────────► │ starts it, loaded with nothing, its disks there
//!     │ ◄──────────────────────────────────── Waiting ─── │
//!     │ ── Data … ──────────────────────────────────────► │ what the hypervisor here writes
//!     │ ◄──────────────────────────────────────── Data ── │ what the hypervisor there answers
//!     │ ── Files …, StaysPaused ────────────────────────► │ if they have changed; if somebody has paused it
//!     │ ◄───────────────────────────────────────Loaded ── │ it stands still, with all that it had here
//!     │ ◄──────────────────────────────────────Failed ─── │ at any time: it will not come to that
//! ```
//! If the VM runs before all of its memory is there (post-copy), it goes on after *Waiting* like this:
//!
//! ```text
//!     │ ◄──────────────────────────────────────── Owned ─ │ the volumes are the target's; the VM stands still
//!     │ ── Data … ──────────────────────────────────────► │ its devices; it runs there; then the rest, as it asks for it
//!     │ ◄───────────────────────────────────── Complete ─ │ all of it is there
//!     │ ── Recover (stream) ────────────────────────────► │ after the stream has broken: a daemon was started again
//!     │ ◄─────────────────────────── Recovering (stream)─ │
//!     │ ── Data … ────────────── Lost, from either side ─ │ no more of it will ever come
//! ```
//! Whether the VM runs there is not decided here: that goes with its volumes ([`migration::message`]).
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

/// One message about a VM that moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum VmMessage {
    /// The payload is a piece of what the target must have to run it.
    Manifest,
    /// That was all of the manifest: could it be run?
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
    Taken { bytes: u32 },
    /// The hypervisor writes no more.
    End,
    /// Which way the memory is to go: before *Check* as the source wishes it, before *Fits* as the target agrees. Not said
    /// if it goes as it always could.
    Terms(Terms),
    /// The volumes are the target's: let the VM, which stands still at the source, be run there before its memory is.
    Owned,
    /// All of the memory is at the target.
    Complete,
    /// The VM's memory can never be whole again: the text says why.
    Lost {
        /// Why, for people.
        detail: String,
    },
    /// The stream of a VM that runs has broken: the rest of its memory is to come over another one.
    Recover {
        /// By its number: no other attempt has the same soon.
        stream: u8,
    },
    /// It is expected there.
    Recovering { stream: u8 },
    /// The payload is a piece of the VM's files as they are when it stands still, in the manifest's form.
    Files,
    /// Somebody has paused the VM, and it is to stay so. It is said, as *Files* are, before its devices are sent.
    StaysPaused,
}

/// Which way a VM's memory goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terms {
    /// Streams beside the main one; 0: there are none.
    pub(crate) side_streams: u8,
    /// Whether the VM may run at the target before all of it is there.
    pub(crate) post_copy: bool,
}

impl Terms {
    /// As the hypervisor is told.
    pub(super) fn transfer(self) -> MemoryTransfer {
        let mode = if self.post_copy { MemoryMode::PostCopy } else { MemoryMode::PreCopy };
        MemoryTransfer { side_streams: NonZeroU8::new(self.side_streams), mode }
    }
}

/// Why bytes are no message about a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum VmMessageError {
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

impl VmMessage {
    /// What says that the VM cannot be had, and why.
    pub(crate) fn failed(detail: &str) -> Self {
        Self::Failed { detail: cut(detail) }
    }

    /// What says that the VM's memory is lost, and why.
    pub(crate) fn lost(detail: &str) -> Self {
        Self::Lost { detail: cut(detail) }
    }

    /// The message, with what it says to people cleaned.
    fn cleaned(self) -> Self {
        match self {
            Self::Failed { detail } => Self::Failed { detail: words::clean(&detail) },
            Self::Lost { detail } => Self::Lost { detail: words::clean(&detail) },
            other => other,
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        // Writing to memory fails only for types that postcard does not know, and these are not.
        postcard::to_extend(self, vec![VERSION]).unwrap_or_default()
    }

    /// Reads a head.
    ///
    /// # Errors
    /// [`VmMessageError`]: the peer has broken the protocol.
    pub(crate) fn decode(head: &[u8]) -> Result<Self, VmMessageError> {
        if head.len() > HEAD_BYTES_MAX {
            return Err(VmMessageError::TooLong { bytes: head.len() });
        }
        match head.split_first() {
            Some((&VERSION, rest)) => match postcard::take_from_bytes(rest) {
                Ok((message, [])) => Ok(Self::cleaned(message)),
                _ => Err(VmMessageError::Malformed),
            },
            _ => Err(VmMessageError::Version),
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
    fn messages_come_as_they_were_sent() {
        let messages = [
            VmMessage::Manifest,
            VmMessage::Check,
            VmMessage::Fits,
            VmMessage::Start,
            VmMessage::Waiting,
            VmMessage::Loaded,
            VmMessage::failed("no such machine type"),
            VmMessage::Data,
            VmMessage::Taken { bytes: u32::MAX },
            VmMessage::End,
            VmMessage::Terms(Terms { side_streams: 7, post_copy: true }),
            VmMessage::Owned,
            VmMessage::Complete,
            VmMessage::lost("the host is gone"),
            VmMessage::Recover { stream: 16 },
            VmMessage::Recovering { stream: 255 },
            VmMessage::Files,
            VmMessage::StaysPaused,
        ];
        for message in messages {
            assert_eq!(VmMessage::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let long = "ü".repeat(DETAIL_BYTES_MAX);
        let VmMessage::Failed { detail } = VmMessage::failed(&long) else { unreachable!() };
        assert_eq!(detail.len(), DETAIL_BYTES_MAX);
        assert!(VmMessage::decode(&VmMessage::Failed { detail }.encode()).is_ok());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        assert_eq!(VmMessage::decode(&[]), Err(VmMessageError::Version));
        assert_eq!(VmMessage::decode(&[9, 0]), Err(VmMessageError::Version));
        assert_eq!(VmMessage::decode(&[VERSION]), Err(VmMessageError::Malformed));
        assert_eq!(VmMessage::decode(&[VERSION, 200, 1]), Err(VmMessageError::Malformed));
        let with_rest = [VmMessage::Start.encode(), vec![0]].concat();
        assert_eq!(VmMessage::decode(&with_rest), Err(VmMessageError::Malformed));
        let long = vec![VERSION; HEAD_BYTES_MAX + 1];
        assert_eq!(VmMessage::decode(&long), Err(VmMessageError::TooLong { bytes: long.len() }));
    }
}
