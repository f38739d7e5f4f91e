//! Decides whether an order may accept what has the name of an image by now as that image (`volume promote --exchanged`).
//!
//! ```text
//!   the volume is here        ──► served from it        refused while blocks are missing
//!   the volume has left       ──► left, or a reservoir  refused while the volume returns into the image
//!   promised, or handed back  ──► a copy                refused if blocks are missing
//!   it is still being copied  ──► refused: the image would lack what was copied before
//! ```
//! The order changes no owner. It lets a handover continue whose image is not the one that the journal knows, or lets another
//! order take the volume back. So both hosts of a handover can lose their images, and an order still leads out (law 38).

use crate::identity::{MigrationId, VolumeId};
use crate::journal::{ImageLocation, MigrationState, Moved, Side, Stage, State};

/// An image for which an order may accept what has its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedImage {
    /// The volume that the image is of.
    pub volume: VolumeId,
    /// The image, as the journal knows it.
    pub image: ImageLocation,
    /// What the image is for.
    pub role: Role,
}

/// What an image is for whose name leads to another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Guests use it: the volume is this host's.
    Served,
    /// Another host reads missing blocks from it.
    Reservoir(Box<Moved>),
    /// The volume was released from it, and the other host has not ended the migration.
    Left(MigrationId),
    /// It is a complete copy that waits for its source.
    Copy(MigrationId),
}

/// The reason why no other image is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAccepted {
    /// An earlier copy of the image lacks blocks that are recorded as present.
    #[error(
        "it is being filled: an earlier copy of its image lacks blocks that are recorded as present; put the file back that it was, or \
         remove the volume here and bring it again from its former host"
    )]
    Filled,
    /// A promised copy lacks blocks, and another file lacks others.
    #[error(
        "its copy here lacks blocks that only its source has, and another file lacks others; at the source: sterna volume promote \
         --force; if that host is lost for good: sterna host remove --force gives the copy up"
    )]
    Hollow,
    /// The volume is being copied into the image.
    #[error(
        "it is being copied here, and another file lacks what was copied before: cancel {0}, and begin again"
    )]
    Copied(MigrationId),
    /// The volume returns into the image.
    #[error("it returns into the image by {0}: cancel that first")]
    Returns(MigrationId),
}

/// Returns the image of the volume of this name for which an order may accept what has its name; `None`: there is none here.
///
/// # Errors
/// [`NotAccepted`]: no other image can be accepted for it.
pub fn named_image(state: &State, name: &str) -> Result<Option<NamedImage>, NotAccepted> {
    if let Some((volume, known)) = state.volume_named(name) {
        let image = known.record.image.clone();
        return match state.fillings.contains_key(&volume) {
            true => Err(NotAccepted::Filled),
            false => Ok(Some(NamedImage { volume, image, role: Role::Served })),
        };
    }
    match (left(state, name)?, coming(state, name)) {
        (Some(left), _) => Ok(Some(left)),
        (None, Some((migration, recorded))) => copy(migration, recorded, name),
        (None, None) => Ok(None),
    }
}

/// Returns the image that a volume has left, if the migration has not ended.
fn left(state: &State, name: &str) -> Result<Option<NamedImage>, NotAccepted> {
    let Some((volume, moved)) = state.moved_named(name) else { return Ok(None) };
    let image = moved.volume.record.image.clone();
    if let Some(later) = state.taken_back_by(moved.migration) {
        return Err(NotAccepted::Returns(later));
    }
    let recorded = state.migrations.get(&moved.migration);
    let is_released = recorded.is_some_and(|recorded| matches!(recorded.stage, Stage::Released(_)));
    let role = if state.is_reservoir(image.place.name()) {
        Role::Reservoir(Box::new(moved.clone()))
    } else if is_released {
        Role::Left(moved.migration)
    } else {
        return Ok(None);
    };
    Ok(Some(NamedImage { volume, image, role }))
}

/// Returns the unfinished migration that brings a volume of this name.
fn coming<'a>(state: &'a State, name: &str) -> Option<(MigrationId, &'a MigrationState)> {
    state.unfinished().find(|(_, recorded)| {
        matches!(recorded.side, Side::Incoming { .. }) && recorded.names.iter().any(|known| known == name)
    })
}

fn copy(
    migration: MigrationId,
    recorded: &MigrationState,
    name: &str,
) -> Result<Option<NamedImage>, NotAccepted> {
    let Side::Incoming { volumes, .. } = &recorded.side else { return Ok(None) };
    let Some(record) = volumes.iter().find(|record| record.name == name) else { return Ok(None) };
    let accepted =
        || NamedImage { volume: record.volume, image: record.image.clone(), role: Role::Copy(migration) };
    match recorded.stage {
        Stage::Copying => Err(NotAccepted::Copied(migration)),
        Stage::Prepared(_) | Stage::HandedBack if recorded.is_hollow() => Err(NotAccepted::Hollow),
        Stage::Prepared(_) | Stage::HandedBack => Ok(Some(accepted())),
        Stage::Released(_) | Stage::Owned(_) | Stage::Discarding(_) | Stage::Ended(_) => Ok(None),
    }
}
