//! The steps on an image, and the owners that ask for them.

use crate::identity::{MigrationId, VolumeId};

/// A step that changes an image or its name, or that relies on no one else doing so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Deletes the image: its name goes, and its bytes with the last name.
    Discard,
    /// Renames the image that a volume has left, so that no program starts from it.
    Fence,
    /// Gives the image another name; its bytes stay in use under that name.
    Rename,
    /// Makes a kept image the target of the migration that returns its volume; its bytes are overwritten.
    TakeBack,
    /// Creates a file under a name, or replaces the empty file that reserved the name.
    Create,
    /// Changes the size of the image.
    Resize,
    /// Writes zeroes over the image, or over a part of it.
    Zero,
    /// Marks the image as not complete.
    Mark,
    /// Removes the mark that the image is not complete.
    Unmark,
    /// Serves the image to guests that write.
    ServeReadWrite,
    /// Serves the image to guests that only read.
    ServeReadOnly,
    /// Declares that the content of a device or an export is not needed.
    Release,
    /// Returns the image to the program that had it before Sterna.
    GiveBack,
    /// Serves a volume of a journal that was restored from a backup.
    Restore,
    /// Advises the administrator to take the step by hand.
    Advise(Advice),
}

/// A step that a message advises the administrator to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Advice {
    /// Set the size of the image.
    Truncate,
    /// Delete the image by hand.
    Delete,
    /// Give the image another name.
    Rename,
}

/// The part of Sterna that asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The operation that has just made the file, holds it open, and has not published it.
    Maker,
    /// The volume that is, or was, served from the image.
    Volume(VolumeId),
    /// The migration whose source or target the image is.
    Migration(MigrationId),
    /// The daemon itself: when it cleans up a folder at its start, or applies the limits on kept images.
    Housekeeping,
    /// An administrator, who names the image.
    Administrator(Word),
}

/// How an administrator orders a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The step is taken only if no claim is against it.
    Plain,
    /// The step is taken even on an old or partial copy of a disk (`--fenced`), but not on an image in use.
    Insists,
}

impl Step {
    /// All steps, for tests and tables.
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

    /// Returns the word for messages: "cannot be …".
    pub fn participle(self) -> &'static str {
        match self {
            Self::Discard | Self::Advise(Advice::Delete) => "deleted",
            Self::Fence | Self::Rename | Self::Advise(Advice::Rename) => "renamed",
            Self::TakeBack => "taken for the volume that returns",
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

    /// Returns whether the step loses or changes bytes of the image, or allows that from then on.
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
