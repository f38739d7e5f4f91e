//! The opening of a migration between hosts: the source's offer, and the target's answer.

use chronicle::Generation;

use crate::identity::{MigrationId, VolumeId};
use crate::journal::{ImageFormat, Origin};
use crate::vm::cold::Form;

/// A migration that a source offers to a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The volumes; either all move, or none.
    pub volumes: Vec<OfferedVolume>,
    /// The name of the store that they are to go to.
    pub store: String,
    /// The format of their images there; `None`: the store's, or that of each at the source.
    pub format: Option<ImageFormat>,
    /// How the space is allocated.
    pub allocation: Allocation,
    /// Whether the source keeps offering them to clients.
    pub forwarding: crate::journal::Forwarding,
    /// The VM that moves with them; `None`: their clients continue by themselves.
    pub vm: Option<OfferedVm>,
    /// Whether the source would write to the images itself.
    pub sharing: Sharing,
    /// How the volumes are copied.
    pub strategy: OfferedStrategy,
}

/// The strategy for the volumes of an offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OfferedStrategy {
    /// One pass, while guest writes go to both hosts.
    #[default]
    Mirror,
    /// Rounds, while guest writes go to the source only.
    Tracking,
    /// A handover of incomplete volumes; the rest follows.
    PostCopy,
}

/// Whether a source writes to images of the target's store itself if it can open them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// The source checks whether it can.
    Wanted,
    /// All data goes over the link.
    Refused,
}

/// A VM that moves with its volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedVm {
    /// The name of the VM at both hosts.
    pub name: String,
    /// Whether it comes with its memory.
    pub form: Form,
}

/// One volume of an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedVolume {
    /// The identity of the volume.
    pub volume: VolumeId,
    /// The name of the volume at both hosts.
    pub name: String,
    /// The volume's size in bytes.
    pub size_bytes: u64,
    /// The size of a block in bytes.
    pub block_size_bytes: u32,
    /// The generation at the source.
    pub generation: Generation,
    /// The format of its image at the source: that of the target, unless the order or the target's store has another.
    pub format: ImageFormat,
    /// Whether the source keeps its image of the handover.
    pub left_behind: LeftBehind,
    /// The origin of its content, before Sterna served it.
    pub origin: Origin,
}

/// What a source keeps of a volume that it hands over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftBehind {
    /// Nothing that is used again.
    Nothing,
    /// A replica. The target records the writes since the handover, for an incremental return.
    Replica,
}

/// How the space of an image is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Blocks are allocated as they are written.
    Thin,
    /// All blocks are allocated before anything is copied.
    Thick,
}

/// A target's state of the accepted volumes, in the order of the offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acceptance {
    /// The state of each offered volume.
    pub volumes: Vec<AcceptedVolume>,
    /// The number of starts of the target's host. Data not confirmed as durable under this number is missing.
    pub incarnation: u64,
}

/// A target's state of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedVolume {
    /// The identity of the volume.
    pub volume: VolumeId,
    /// The part of the volume that the target has durably.
    pub held: Held,
    /// The content of the image outside of that part.
    pub elsewhere: FormerContent,
    /// The proof for a source that shares the folder; `None`: the image is not leased.
    pub beside: Option<Beside>,
}

/// An image and the token beside it, in any folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beside {
    /// The name of the image's file.
    pub file: String,
    /// The content of the token.
    pub token: [u8; 32],
}

/// The part of a volume that a target already has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// No part of the volume.
    Nothing,
    /// The image that an earlier residency of the volume has left.
    Copy {
        /// The migration by which it left, in the target's numbering. The source recognises a known copy by it; generations do
        /// not suffice after a forced promotion.
        departure: MigrationId,
        /// The volume's generation at that time.
        generation: Generation,
    },
}

/// The content of an image where nothing of the volume has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormerContent {
    /// The image reads as zeroes.
    Zero,
    /// The image may hold anything.
    Unknown,
}

/// The reason why a target refuses a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The cause, for programs.
    pub code: RefusalCode,
    /// The cause, for the administrator, with the remedy.
    pub detail: String,
}

/// The cause of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalCode {
    /// No store has this name.
    UnknownStore,
    /// The store has no room for the volumes.
    NoSpace,
    /// Another volume at the target has the name.
    NameTaken,
    /// The volume itself is at the target already, and is served.
    VolumePresent,
    /// The store cannot hold such an image.
    Unsuitable,
    /// The target takes no more migrations now; a later attempt may succeed.
    Busy,
    /// The source's host may not bring volumes.
    NotAllowed,
    /// The target knows the migration, and it has ended.
    Over,
    /// Another failure at the target.
    Failed,
}
