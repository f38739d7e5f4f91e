//! The preflight check: a source's question before it offers a migration, and the target's answer.
//!
//! ```text
//!   source ── Survey ──► target     what would be offered, and what it holds
//!   source ◄── Surveyed ── target   the obstacles, and where the images would be
//! ```
//! The check begins nothing and promises nothing: the state may have changed by the time of the offer.

use super::opening::{Offer, Refusal};
use crate::identity::VolumeId;

/// The question of a preflight check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The offer. Its volumes bear names that only hosts with these volumes recognise, and reveal no identity.
    pub offer: Offer,
    /// The allocated bytes of each volume.
    pub held_bytes: Vec<u64>,
    /// The description of the VM that would move, in a form that only daemons know; empty: the VM is not checked.
    pub vm: Vec<u8>,
}

/// The answer to a preflight check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surveyed {
    /// Everything that prevents the migration.
    pub refusals: Vec<Refusal>,
    /// Further facts that the user should know.
    pub warnings: Vec<String>,
    /// The places of the images, for the volumes that nothing prevents.
    pub places: Vec<SurveyedPlace>,
    /// Whether hooks run at the target before or after the handover.
    pub has_hooks: bool,
}

/// The place of a volume's future image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedPlace {
    /// The identity of the volume.
    pub volume: VolumeId,
    /// The name of the store.
    pub store: String,
    /// The path of the image, or the kind of the store.
    pub place: String,
    /// The format of the image.
    pub format: crate::journal::ImageFormat,
    /// The free bytes there; `None`: the store does not report them.
    pub free_bytes: Option<u64>,
    /// Whether an image of an earlier residency can be reused.
    pub has_replica: bool,
}

/// The result of looking for a source's probe in a store's folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeSeen {
    /// Nothing was found: it is another folder.
    Nothing,
    /// The file was found, but not its lock: the source's locks have no effect here.
    Unlocked,
    /// The file and its lock were found: the source could write blocks there.
    Locked,
}
