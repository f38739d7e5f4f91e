//! The messages between two hosts about migrations, as bytes.
//!
//! ```text
//!   one message:   version (1 byte) │ payload (postcard)
//!
//!   source ── Survey, Surveyed ── target  the preflight check, before anything is offered
//!   source ── Probe, Probed ──── target   whether both have the folder of a store
//!   a host ── Whose, Known ───── another  what it knows of volumes, after a journal was restored
//!   a host ── Attach, Detach ──► another  a volume that it is to offer to clients, or to stop offering: Attached
//!   source ── Open ──────────► target         volumes, and what the target is to have of them
//!   source ◄── Accepted, or Refused ── target what the target has of them already, or why not
//!   source ◄── ToTarget, ToSource ──► target  the conversation of `crate::message`
//! ```
//! The peer may be hostile: [`decode`] never panics, and limits the length of messages ([`MESSAGE_BYTES_MAX`]), lists and texts.
//! Text for administrators is [cleaned](words::clean). The wire has types of its own, so those of the core may change
//! independently.

mod attaching;
mod forms;
mod opening;
mod restoring_forms;
mod survey;
mod survey_forms;

pub use attaching::OfferedAttachment;
pub use opening::{
    Acceptance, AcceptedVolume, Allocation, Beside, FormerContent, Held, LeftBehind, Offer, OfferedStrategy,
    OfferedVm, OfferedVolume, Refusal, RefusalCode, Sharing,
};
pub use survey::{ProbeSeen, Survey, Surveyed, SurveyedPlace};

use crate::handover::message::{ToSource, ToTarget};
use crate::identity::{MigrationId, VolumeId};
use crate::restoration::Knowledge;

/// Version of the encoding that this program writes, and the only one that it reads.
pub const VERSION: u8 = 3;
/// The longest message; its largest part is the list of blocks that a target already holds.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// The most volumes of one migration: more disks than a VM can have.
pub const VOLUMES_MAX: usize = 256;
/// The longest name, in bytes.
pub const NAME_BYTES_MAX: usize = 255;
/// The longest explanation for the administrator, in bytes; a longer one is cut before it is sent.
pub const DETAIL_BYTES_MAX: usize = 4096;
/// The longest path, in bytes: the kernel's limit.
pub const PLACE_BYTES_MAX: usize = 4096;
/// The most refusals, and the most warnings, in one answer to a preflight check: far more than there are.
pub const REMARKS_MAX: usize = 64;
/// The longest description of a VM, in bytes, without its files.
pub const VM_BYTES_MAX: usize = 128 << 10;
/// The most volumes of one question after a journal was restored; for more, a host asks several times.
pub const ASKED_MAX: usize = 4096;
/// The most probes of one question: far more folders than a host has.
pub const PROBES_MAX: usize = 64;

/// A message about a migration, a possible migration, or the host itself. The number of a migration is always the source's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The source offers a migration, or offers it again to resume after a break.
    Open {
        /// The migration's number at the source.
        migration: MigrationId,
        /// The offer to the target.
        offer: Offer,
    },
    /// The target accepts the offer.
    Accepted {
        /// The migration's number at the source.
        migration: MigrationId,
        /// The state of the volumes at the target.
        acceptance: Acceptance,
    },
    /// The target refuses the offer.
    Refused {
        /// The migration's number at the source.
        migration: MigrationId,
        /// The reason of the refusal.
        refusal: Refusal,
    },
    /// A handover message from the source.
    ToTarget {
        /// The migration's number at the source.
        migration: MigrationId,
        /// The message to the target.
        message: ToTarget,
    },
    /// A handover message from the target.
    ToSource {
        /// The migration's number at the source.
        migration: MigrationId,
        /// The message to the source.
        message: ToSource,
    },
    /// The source asks for a preflight check of an offer.
    Survey {
        /// The number of the question, chosen by the source; no migration has it.
        question: u64,
        /// The offer to check.
        survey: Survey,
    },
    /// The target answers a preflight check.
    Surveyed {
        /// The number of the question.
        question: u64,
        /// The result of the check.
        surveyed: Surveyed,
    },
    /// The source asks whether the target finds its probes in a store's folder: whether both hosts share that folder.
    Probe {
        /// The number of the question, chosen by the source.
        question: u64,
        /// The store, by its name at the target.
        store: String,
        /// The contents of the files that the source has put into its own folders.
        secrets: Vec<[u8; 32]>,
    },
    /// The target answers a probe.
    Probed {
        /// The number of the question.
        question: u64,
        /// The result for each probe, in order.
        seen: Vec<ProbeSeen>,
    },
    /// A host whose journal was restored from a backup asks another host about volumes.
    Whose {
        /// The number of the question, chosen by the asking host.
        question: u64,
        /// The volumes, under names that only hosts with these volumes recognise.
        volumes: Vec<VolumeId>,
    },
    /// The other host answers the question about volumes.
    Known {
        /// The number of the question.
        question: u64,
        /// The known volumes, under the names of the question.
        known: Vec<(VolumeId, Knowledge)>,
        /// Whether its silence about the others counts: its own journal was never restored.
        knows_all: bool,
    },
    /// The program version of the sending host.
    Program {
        /// The version, for the administrator.
        version: String,
    },
    /// A host asks another one to offer a volume to its clients, which it forwards.
    Attach {
        /// The number of the question, chosen by the asking host.
        question: u64,
        /// The volume, and what clients may do there.
        offered: OfferedAttachment,
    },
    /// A host asks another one to stop offering an attached volume.
    Detach {
        /// The number of the question, chosen by the asking host.
        question: u64,
        /// The volume that is attached there.
        volume: VolumeId,
        /// Whether clients that use it are disconnected.
        is_forced: bool,
    },
    /// The other host has attached or detached the volume, or refuses that.
    Attached {
        /// The number of the question.
        question: u64,
        /// The reason of a refusal.
        refused: Option<Refusal>,
    },
    /// A host at which a volume was attached has detached it.
    AttachmentGivenUp {
        /// The volume that was attached at the sending host.
        volume: VolumeId,
    },
}

/// The reason why bytes are not a message, or a message cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The message has no bytes.
    #[error("an empty message")]
    Empty,
    /// The message has another version.
    #[error("a message of version {found}; this program reads version {VERSION}")]
    Version {
        /// The version of the message.
        found: u8,
    },
    /// The message is too long.
    #[error("a message of {bytes} bytes is longer than {MESSAGE_BYTES_MAX}")]
    TooLong {
        /// The length in bytes.
        bytes: usize,
    },
    /// A list or a name in the message exceeds its limit.
    #[error("too many {what} in a message")]
    TooMany {
        /// The kind of item.
        what: &'static str,
    },
    /// The bytes cannot be decoded.
    #[error("a message that means nothing")]
    Malformed,
}

/// Encodes a message with its version.
///
/// # Errors
/// [`WireError::TooLong`], [`WireError::TooMany`]: the message exceeds the limits of this module.
pub fn encode(message: &Message) -> Result<Vec<u8>, WireError> {
    let form = forms::Form::from(message.clone());
    form.check()?;
    let bytes = postcard::to_extend(&form, vec![VERSION]).map_err(|_| WireError::Malformed)?;
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(WireError::TooLong { bytes: bytes.len() });
    }
    Ok(bytes)
}

/// Decodes one complete message.
///
/// # Errors
/// [`WireError`]: the peer has broken the protocol, and its connection must be closed.
pub fn decode(bytes: &[u8]) -> Result<Message, WireError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(WireError::TooLong { bytes: bytes.len() });
    }
    let (version, payload) = bytes.split_first().ok_or(WireError::Empty)?;
    if *version != VERSION {
        return Err(WireError::Version { found: *version });
    }
    let (form, rest) = postcard::take_from_bytes::<forms::Form>(payload).map_err(|_| WireError::Malformed)?;
    if !rest.is_empty() {
        return Err(WireError::Malformed);
    }
    form.check()?;
    Ok(form.into())
}
