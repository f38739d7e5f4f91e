//! Parts of error messages.

use migration::journal::{Reservation, ReservedContent};

use crate::stores::Occupant;

/// Returns what to do about the kept content of a store.
pub(super) fn if_kept(store: &str, occupant: &Occupant) -> String {
    match occupant {
        Occupant::Kept { .. } => format!("; if it is not needed: sterna store release {store}"),
        _ => String::new(),
    }
}

/// Returns which other images of the volume were kept.
pub(super) fn if_others(known: &str) -> String {
    match known {
        "" => "; see: sterna replica list".to_owned(),
        known => format!("; there are those of {known}"),
    }
}

pub(crate) fn fenced(fence: &Reservation) -> String {
    let Reservation { volume, migration, content } = fence;
    match content {
        ReservedContent::Left => {
            format!("the old copy of the volume \"{volume}\", which {migration} moved away")
        }
        ReservedContent::Kept => format!("the image of volume \"{volume}\" that {migration} kept"),
        ReservedContent::HalfMade => {
            format!("a part of the volume \"{volume}\", which {migration} did not move")
        }
    }
}
