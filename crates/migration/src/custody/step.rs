//! What is to be done to an image, and for which owner.

use crate::identity::{MigrationId, VolumeId};

/// A step that changes an image or its name, or that relies on nobody else doing so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Deletes the image: its name goes, and its bytes with the last name.
    Discard,
    /// Renames the image that a volume has left, so that no program starts from it.
    Fence,
    /// Gives the image another name; its bytes stay, and go on to be used under that name.
    Rename,
    /// Makes a kept image the target of the migration that brings its volume home: its bytes are written over.
    TakeBack,
    /// Makes a file under a name, or puts one into the place of the empty file that has kept the name.
    Create,
    /// Changes the size of the image.
    Resize,
    /// Writes zeroes over the image, or over a part of it.
    Zero,
    /// Says of the image that it is not complete.
    Mark,
    /// Takes back that the image is not complete.
    Unmark,
    /// Serves the image to guests that write.
    ServeReadWrite,
    /// Serves the image to guests that only read.
    ServeReadOnly,
    /// Says of a device or an export that nobody needs what it holds.
    Release,
    /// Gives the image to the program that had it before Sterna.
    GiveBack,
    /// Serves a volume of a journal that was put back from a backup.
    Restore,
    /// Tells the administrator to do it by hand.
    Advise(Advice),
}

/// What a message tells the administrator to do to an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Advice {
    /// Set its size.
    Truncate,
    /// Delete it.
    Delete,
    /// Give it another name.
    Rename,
}

/// Which part of Sterna asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The operation that has just made the file, holds it open, and has told nobody of it.
    Maker,
    /// The volume that is, or was, served from the image.
    Volume(VolumeId),
    /// The migration whose source or target the image is.
    Migration(MigrationId),
    /// The daemon by itself: a start that settles a folder, the limits on kept images.
    Housekeeping,
    /// An administrator, who names the image.
    Administrator(Word),
}

/// How an administrator orders a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// As long as nothing speaks against it.
    Plain,
    /// Also if the image is an old or partial copy of a disk (`--fenced`). What others use stays refused.
    Insists,
}

impl Step {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::Discard,
        Self::Fence,
        Self::Rename,
        Self::TakeBack,
        Self::Create,
        Self::Resize,
        Self::Zero,
        Self::Mark,
        Self::Unmark,
        Self::ServeReadWrite,
        Self::ServeReadOnly,
        Self::Release,
        Self::GiveBack,
        Self::Restore,
        Self::Advise(Advice::Truncate),
        Self::Advise(Advice::Delete),
        Self::Advise(Advice::Rename),
    ];

    /// What is done, for people: "cannot be …".
    pub fn participle(self) -> &'static str {
        match self {
            Self::Discard | Self::Advise(Advice::Delete) => "deleted",
            Self::Fence | Self::Rename | Self::Advise(Advice::Rename) => "renamed",
            Self::TakeBack => "taken for the volume that comes home",
            Self::Create => "made",
            Self::Resize | Self::Advise(Advice::Truncate) => "resized",
            Self::Zero => "zeroed",
            Self::Mark => "marked as half-made",
            Self::Unmark => "marked as complete",
            Self::ServeReadWrite => "served",
            Self::ServeReadOnly => "served, also not read-only",
            Self::Release => "released",
            Self::GiveBack => "given back",
            Self::Restore => "served from the restored journal",
        }
    }

    /// Whether the bytes of the image are lost or changed by it, or may be from then on.
    pub fn changes_bytes(self) -> bool {
        match self {
            Self::Discard
            | Self::TakeBack
            | Self::Create
            | Self::Resize
            | Self::Zero
            | Self::ServeReadWrite
            | Self::Release
            | Self::GiveBack
            | Self::Restore
            | Self::Advise(Advice::Truncate | Advice::Delete) => true,
            Self::Fence
            | Self::Rename
            | Self::Mark
            | Self::Unmark
            | Self::ServeReadOnly
            | Self::Advise(Advice::Rename) => false,
        }
    }
}
