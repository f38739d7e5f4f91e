//! A look ahead: what a source asks a target before it offers a migration, and what the target sees.
//!
//! ```text
//!   source ── Survey ──► target     what would be offered, and what it holds
//!   source ◄── Surveyed ── target   what is in the way, and where the images would be
//! ```
//! Nothing is begun by it, and nothing is promised: what is seen may have changed by the time of the offer.

use super::opening::{Offer, Refusal};
use crate::identity::VolumeId;

/// What would be offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// The offer. Its volumes are called as those know them again who have them; it gives away no identity.
    pub offer: Offer,
    /// What each of its volumes holds, in bytes.
    pub held_bytes: Vec<u64>,
    /// What is needed to run the VM that would come along, in a form that only daemons know; empty: it is not to be
    /// looked at.
    pub vm: Vec<u8>,
}

/// What a target sees of what would be offered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surveyed {
    /// Everything that is in the way.
    pub refusals: Vec<Refusal>,
    /// What the user should know besides.
    pub warnings: Vec<String>,
    /// Where the images would be: of the volumes that nothing is in the way of.
    pub places: Vec<SurveyedPlace>,
    /// Whether something is run there before or after volumes change hands.
    pub has_hooks: bool,
}

/// Where the image of a volume would be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SurveyedPlace {
    /// Which volume.
    pub volume: VolumeId,
    /// Name of the store.
    pub store: String,
    /// Its path, or what the store is.
    pub place: String,
    /// Its format.
    pub format: crate::journal::ImageFormat,
    /// Bytes that are free there; `None`: the store does not say.
    pub free_bytes: Option<u64>,
    /// Whether an image of an earlier stay is there to begin with.
    pub has_replica: bool,
}

/// What a target sees of a source's probe in the folder of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeSeen {
    /// Nothing: it is another folder.
    Nothing,
    /// The file, and no lock: locks of the source do not count here.
    Unlocked,
    /// The file and its lock: blocks could be written there by the source.
    Locked,
}
