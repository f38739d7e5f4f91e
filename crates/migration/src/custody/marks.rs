//! When an image is complete, so that no mark may call it half-made.
//!
//! ```text
//!   target made ─► mark ─► filled … ─► outcome durable ─► mark gone ─► the outcome is answered, guests write
//! ```
//! A mark outlives the journal: if the data folder is lost, an image that is marked is offered for deletion. So the mark goes before
//! the first write that only this image has.

use crate::journal::{ImageLocation, Place, Record, State};
use crate::planted::{Bug, broken};

/// Whether a record may make images complete.
pub fn completes(record: &Record) -> bool {
    matches!(
        record,
        Record::Owned { .. } | Record::Promoted { .. } | Record::Filled { .. } | Record::Reinstated { .. }
    )
}

/// The images that these records, which are durable, have made complete. Their marks go before the records are answered.
pub fn completed_by(records: &[Record], state: &State) -> Vec<Place> {
    if broken(Bug::MarkOutlivesOutcome) {
        return Vec::new();
    }
    let mut volumes = Vec::new();
    for record in records {
        match record {
            Record::Owned { generations, .. } | Record::Promoted { generations, .. } => {
                volumes.extend(generations.iter().map(|(volume, _)| *volume));
            }
            Record::Filled { volume } | Record::Reinstated { volume, .. } => volumes.push(*volume),
            _ => {}
        }
    }
    let places = volumes.iter().filter_map(|volume| Some(&state.volumes.get(volume)?.record.image.place));
    places.filter(|place| is_complete(place, state)).cloned().collect()
}

/// Tells whether the journal says that a volume has all that it is to have in the image.
pub fn is_complete(place: &Place, state: &State) -> bool {
    let is_it = |location: &ImageLocation| location.place == *place;
    let waits = state.unfinished().filter(|(_, known)| !known.has_arrived());
    let is_filled = waits.flat_map(|(_, known)| &known.volumes).any(|moving| is_it(&moving.target));
    let volume = state.volumes.iter().find(|(_, known)| is_it(&known.record.image));
    volume.is_some_and(|(id, _)| !is_filled && !state.fillings.contains_key(id))
}
