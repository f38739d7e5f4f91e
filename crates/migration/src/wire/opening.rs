//! The opening of a migration between hosts: what the source offers, and what the target answers.

use chronicle::Generation;

use crate::identity::{MigrationId, VolumeId};
use crate::journal::Origin;

/// A migration that a source offers to a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Its volumes: all move, or none.
    pub volumes: Vec<OfferedVolume>,
    /// Name of the store that they are to go to.
    pub store: String,
    /// The format of their images there; `None`: as the store has it.
    pub format: Option<crate::journal::ImageFormat>,
    /// How the space is to be taken.
    pub allocation: Allocation,
    /// Who goes on offering them to clients.
    pub forwarding: crate::journal::Forwarding,
    /// The VM that goes along with them; `None`: whoever uses them sees to itself.
    pub vm: Option<OfferedVm>,
    /// Whether the source would write to the images itself.
    pub sharing: Sharing,
    /// How the volumes are copied.
    pub strategy: OfferedStrategy,
}

/// How volumes of an offer are copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OfferedStrategy {
    /// In one pass, while guest writes go to both hosts.
    #[default]
    Mirror,
    /// In rounds, while guest writes go to the source only.
    Tracking,
    /// Handed over with blocks missing, which follow.
    PostCopy,
}

/// Whether a source writes to images of the target's store itself if it can open them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// It looks whether it can.
    Wanted,
    /// All goes over the link.
    Refused,
}

/// A VM that goes along with its volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedVm {
    /// The name that it has at the source, and is to have at the target.
    pub name: String,
}

/// One volume of an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedVolume {
    /// Its identity.
    pub volume: VolumeId,
    /// The name that it has at the source, and is to have at the target.
    pub name: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Bytes of a block.
    pub block_size_bytes: u32,
    /// Its generation at the source.
    pub generation: Generation,
    /// Whether the source keeps its image as it is at the handover.
    pub left_behind: LeftBehind,
    /// Whose its content was before Sterna served it.
    pub origin: Origin,
}

/// What a source keeps of a volume that it hands over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftBehind {
    /// Nothing that anybody will come back to.
    Nothing,
    /// A replica: the target is to know what is written from the handover on, for the way home.
    Replica,
}

/// How the space of an image is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// As blocks are written.
    Thin,
    /// All of it before anything is copied.
    Thick,
}

/// What a target has of the volumes that it takes, in the order of the offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acceptance {
    /// One for each volume that was offered.
    pub volumes: Vec<AcceptedVolume>,
    /// How often the target's host has started: what was not confirmed durable under this number is missing.
    pub incarnation: u64,
}

/// What a target has of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedVolume {
    /// Which.
    pub volume: VolumeId,
    /// What of it is there, durably.
    pub held: Held,
    /// What is where nothing of the volume is.
    pub elsewhere: FormerContent,
    /// What the source may find if it has the same folder; `None`: the image is not leased.
    pub beside: Option<Beside>,
}

/// An image and the token beside it, in whatever folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beside {
    /// Name of the image's file.
    pub file: String,
    /// What is in the token.
    pub token: [u8; 32],
}

/// What a target has of a volume already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// Nothing.
    Nothing,
    /// The image that an earlier stay of the volume has left.
    Copy {
        /// The migration by which it left, as the target numbers its own: the source tells by it whether it is the copy
        /// that it knows. Generations do not, once a promotion was forced.
        departure: MigrationId,
        /// The generation that the volume had then.
        generation: Generation,
    },
}

/// What an image holds where nothing of the volume has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormerContent {
    /// It reads as zeroes.
    Zero,
    /// It may be anything.
    Unknown,
}

/// Why a target does not take a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The cause, for programs.
    pub code: RefusalCode,
    /// The cause, for people: what to do about it.
    pub detail: String,
}

/// Causes of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalCode {
    /// There is no store of that name.
    UnknownStore,
    /// The store has no room for the volumes.
    NoSpace,
    /// Another volume there has the name.
    NameTaken,
    /// The volume itself is there already, and is served.
    VolumePresent,
    /// The store cannot hold such an image.
    Unsuitable,
    /// It takes no more migrations at present; worth another try later.
    Busy,
    /// The source's host may not bring volumes.
    NotAllowed,
    /// The migration is known there, and has ended.
    Over,
    /// Something else failed there.
    Failed,
}
