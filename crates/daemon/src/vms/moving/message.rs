//! The messages of two hosts about a moving VM, as bytes.
//!
//! ```text
//!   source                                             target
//!     │ ── Manifest …, Terms, Check ──────────────────────► │ checks whether it could run it
//!     │ ◄────────────────────────────────── Terms, Fits ─ │
//!     │ ── Start ───────────────────────────────────────► │ starts it, with its disks and without memory
//!     │ ◄──────────────────────────────────── Waiting ─── │
//!     │ ── Data … ──────────────────────────────────────► │ output of the source's hypervisor
//!     │ ◄──────────────────────────────────────── Data ── │ answers of the target's hypervisor
//!     │ ── Files …, StaysPaused ────────────────────────► │ if they have changed; if its user has paused it
//!     │ ◄───────────────────────────────────────Loaded ── │ it stands still, complete
//!     │ ◄──────────────────────────────────────Failed ─── │ at any time: the move fails
//! ```
//! If the VM runs before all of its memory is there (post-copy), this follows after *Waiting*:
//!
//! ```text
//!     │ ◄──────────────────────────────────────── Owned ─ │ the volumes are the target's; the VM stands still
//!     │ ── Data … ──────────────────────────────────────► │ its devices; it runs there; then the rest, as requested
//!     │ ◄───────────────────────────────────── Complete ─ │ all of it is there
//!     │ ── Recover (stream) ────────────────────────────► │ the stream has broken, because a daemon was restarted
//!     │ ◄─────────────────────────── Recovering (stream)─ │
//!     │ ── Data … ────────────── Lost, from either side ─ │ the rest will never come
//! ```
//! A stopped VM needs less, before the copying and again before the handover ([`super::cold`]):
//!
//! ```text
//!     │ ── Manifest …, Keep ──────────────────────────────► │ keeps all of it durably, stopped
//!     │ ◄─────────────────────────────────────── Kept ─── │
//! ```
//! The messages do not decide whether the VM runs at the target: that depends on its volumes ([`migration::message`]).
//! A message is a head (version, then postcard) and, with Data, a payload. All messages are delivered in order.

use std::num::NonZeroU8;

use hypervisor::{MemoryMode, MemoryTransfer};
use serde::{Deserialize, Serialize};

const VERSION: u8 = 1;
/// The longest head; a reason in it is cut to fit.
const HEAD_BYTES_MAX: usize = 8 << 10;
const DETAIL_BYTES_MAX: usize = 4 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum VmMessage {
    /// The payload is a piece of the VM description.
    Manifest,
    /// The VM description is complete: could the VM run?
    Check,
    /// As far as can be checked, it could.
    Fits,
    /// Its disks are at the target: start it, and wait for its memory.
    Start,
    /// It is started, and waits for its memory.
    Waiting,
    /// It is complete at the target, and stands still.
    Loaded,
    /// It is not, or will not be, loaded at the target.
    Failed {
        detail: String,
    },
    /// The payload is output of the hypervisor.
    Data,
    /// This many bytes were taken, so as many more may be sent.
    Taken {
        bytes: u32,
    },
    End,
    /// The way of the memory: requested before *Check*, agreed before *Fits*. Not sent for the default terms.
    Terms(Terms),
    /// The volumes are the target's: run the VM, which stands still at the source, at the target before its memory is there.
    Owned,
    Complete,
    /// The VM's memory can never be complete again.
    Lost {
        detail: String,
    },
    /// The stream of a running VM has broken: the rest of its memory is to come over another stream.
    Recover {
        /// The stream's number, which no other attempt uses soon.
        stream: u8,
    },
    /// The target expects that stream.
    Recovering {
        stream: u8,
    },
    /// The payload is a piece of the files of a stopped VM, in the form of the VM description.
    Files,
    /// The VM's user has paused it, so that it stays paused. Sent, like *Files*, before its devices.
    StaysPaused,
    /// The VM is stopped, and its description is complete: keep the VM.
    Keep {
        /// Whether its volumes change hands next.
        hands_over: bool,
        /// The length of the description.
        bytes: u32,
    },
    /// It is kept, durably.
    Kept {
        hands_over: bool,
    },
}

/// The way of a VM's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Terms {
    /// The number of streams besides the main one.
    pub(crate) side_streams: u8,
    /// Whether the VM may run at the target before all of its memory is there.
    pub(crate) post_copy: bool,
}

impl Terms {
    pub(super) fn transfer(self) -> MemoryTransfer {
        let mode = if self.post_copy { MemoryMode::PostCopy } else { MemoryMode::PreCopy };
        MemoryTransfer { side_streams: NonZeroU8::new(self.side_streams), mode }
    }
}

/// Why bytes are no message about a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum VmMessageError {
    #[error("a head of {bytes} bytes is longer than {HEAD_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("not of version {VERSION}")]
    Version,
    #[error("it means nothing")]
    Malformed,
}

impl VmMessage {
    pub(crate) fn failed(detail: &str) -> Self {
        Self::Failed { detail: cut(detail) }
    }

    pub(crate) fn lost(detail: &str) -> Self {
        Self::Lost { detail: cut(detail) }
    }

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

    /// Decodes a head. Fails if the peer has broken the protocol.
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
            VmMessage::Keep { hands_over: true, bytes: u32::MAX },
            VmMessage::Kept { hands_over: false },
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
