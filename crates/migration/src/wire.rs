//! What two hosts say to each other about migrations, as bytes.
//!
//! ```text
//!   one message:   version (1 byte) │ payload (postcard)
//!
//!   source ── Survey, Surveyed ── target  a look ahead, before anything is offered
//!   source ── Probe, Probed ──── target   whether both have the folder of a store
//!   a host ── Whose, Known ───── another  what it knows of volumes, after a journal was put back
//!   source ── Open ──────────► target         volumes, what is wanted of them there
//!   source ◄── Accepted, or Refused ── target what the target has of them already, or why not
//!   source ◄── ToTarget, ToSource ──► target  the conversation of `crate::message`
//! ```
//! The peer is hostile: [`decode`] never panics, takes no message longer than [`MESSAGE_BYTES_MAX`], and no list or
//! text longer than the limits here; what it says to people is [cleaned](words::clean). The types of the wire are its own; those of the core may change without them.

mod forms;
mod opening;
mod restoring_forms;
mod survey;
mod survey_forms;

pub use opening::{
    Acceptance, AcceptedVolume, Allocation, Beside, FormerContent, Held, LeftBehind, Offer, OfferedStrategy,
    OfferedVm, OfferedVolume, Refusal, RefusalCode, Sharing,
};
pub use survey::{ProbeSeen, Survey, Surveyed, SurveyedPlace};

use crate::handover::message::{ToSource, ToTarget};
use crate::identity::{MigrationId, VolumeId};
use crate::restoration::Knowledge;

/// Version of the encoding that this program writes; the transport agrees upon one that both ends know.
pub const VERSION: u8 = 1;
/// Longest message: the list of what a target holds already is the largest part of it.
pub const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Volumes of one migration: more disks than a VM can have.
pub const VOLUMES_MAX: usize = 256;
/// Bytes of a name.
pub const NAME_BYTES_MAX: usize = 255;
/// Bytes of an explanation for people; longer ones are cut off when they are sent.
pub const DETAIL_BYTES_MAX: usize = 4096;
/// Bytes of a path: what the kernel takes.
pub const PLACE_BYTES_MAX: usize = 4096;
/// Things that are in the way, or that are to be known, in one answer to a look ahead; there are not nearly as many.
pub const REMARKS_MAX: usize = 64;
/// Bytes of what is needed to run a VM, without its files.
pub const VM_BYTES_MAX: usize = 128 << 10;
/// Volumes of one question after a journal was put back; a host that has more asks several times.
pub const ASKED_MAX: usize = 4096;
/// Probes of one question: a host has not nearly as many folders.
pub const PROBES_MAX: usize = 64;

/// A message about one migration, or about one that may come, or of the host itself. The number of a migration is always the source's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The source offers a migration; also again after a break, to go on with it.
    Open {
        /// Its number.
        migration: MigrationId,
        /// What is offered.
        offer: Offer,
    },
    /// The target takes it.
    Accepted {
        /// Its number.
        migration: MigrationId,
        /// What the target has of it.
        acceptance: Acceptance,
    },
    /// The target does not take it.
    Refused {
        /// Its number.
        migration: MigrationId,
        /// Why.
        refusal: Refusal,
    },
    /// Of the handover, from the source.
    ToTarget {
        /// Its number.
        migration: MigrationId,
        /// What it says.
        message: ToTarget,
    },
    /// Of the handover, from the target.
    ToSource {
        /// Its number.
        migration: MigrationId,
        /// What it says.
        message: ToSource,
    },
    /// The source asks what the target would say to an offer.
    Survey {
        /// A number of the source's, for the answer; no migration has it.
        question: u64,
        /// What would be offered.
        survey: Survey,
    },
    /// The target says what it sees.
    Surveyed {
        /// The number of the question.
        question: u64,
        /// What it sees.
        surveyed: Surveyed,
    },
    /// The source asks whether the target finds its probes in the folder of a store: whether both have that folder.
    Probe {
        /// A number of the source's, as of a survey.
        question: u64,
        /// The store, by the target's name for it.
        store: String,
        /// What is in the files that the source has put into folders of its own.
        secrets: Vec<[u8; 32]>,
    },
    /// The target says what it sees of them.
    Probed {
        /// The number of the question.
        question: u64,
        /// Of each, in the order of the question.
        seen: Vec<ProbeSeen>,
    },
    /// A host whose journal was put back from a backup asks what another one knows of volumes.
    Whose {
        /// A number of the host's that asks, as of a survey.
        question: u64,
        /// The volumes, called as those know them again who have them.
        volumes: Vec<VolumeId>,
    },
    /// The other one says it.
    Known {
        /// The number of the question.
        question: u64,
        /// Those of the volumes that it knows something of, as they were called.
        known: Vec<(VolumeId, Knowledge)>,
        /// Whether it would know of the others: its own journal was never put back.
        knows_all: bool,
    },
    /// Which program runs at the host that says so.
    Program {
        /// Its version, for people.
        version: String,
    },
}

/// Why bytes are no message, or a message cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// There are no bytes.
    #[error("an empty message")]
    Empty,
    /// Another version wrote it.
    #[error("a message of version {found}; this program reads version {VERSION}")]
    Version {
        /// What it says.
        found: u8,
    },
    /// It is too long.
    #[error("a message of {bytes} bytes is longer than {MESSAGE_BYTES_MAX}")]
    TooLong {
        /// How long it is.
        bytes: usize,
    },
    /// A list or a name in it is longer than its limit.
    #[error("too many {what} in a message")]
    TooMany {
        /// What there are too many of.
        what: &'static str,
    },
    /// The bytes mean nothing.
    #[error("a message that means nothing")]
    Malformed,
}

/// Turns a message into bytes.
///
/// # Errors
/// [`WireError::TooLong`], [`WireError::TooMany`]: it does not keep to the limits of this module.
pub fn encode(message: &Message) -> Result<Vec<u8>, WireError> {
    let form = forms::Form::from(message.clone());
    form.check()?;
    let bytes = postcard::to_extend(&form, vec![VERSION]).map_err(|_| WireError::Malformed)?;
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(WireError::TooLong { bytes: bytes.len() });
    }
    Ok(bytes)
}

/// Reads one whole message.
///
/// # Errors
/// [`WireError`]; the peer has broken the protocol, and its connection is to be closed.
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
