//! Decides when an image is complete, so that its mark as half-made is removed.
//!
//! ```text
//!   target made ─► mark ─► filled … ─► outcome durable ─► mark gone ─► the outcome is answered, guests write
//! ```
//! A mark outlives the journal: if the data folder is lost, a marked image is offered for deletion. So the mark is
//! removed before the first write that only this image has.

use crate::journal::{ImageLocation, Place, Record, State};
use crate::planted::{Bug, broken};

/// Returns whether a record can make images complete.
pub fn completes(record: &Record) -> bool {
    matches!(
        record,
        Record::Owned { .. } | Record::Promoted { .. } | Record::Filled { .. } | Record::Reinstated { .. }
    )
}

/// Returns the images that these durable records have made complete. Their marks are removed before the records are answered.
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
            // An administrator has said that a half-made image is whole.
            Record::VolumeAdded(record) => volumes.push(record.volume),
            Record::Filled { volume } | Record::Reinstated { volume, .. } => volumes.push(*volume),
            _ => {}
        }
    }
    let places = volumes.iter().filter_map(|volume| Some(&state.volumes.get(volume)?.record.image.place));
    places.filter(|place| is_complete(place, state)).cloned().collect()
}

/// Returns whether, by the journal, an image has all blocks of its volume.
pub fn is_complete(place: &Place, state: &State) -> bool {
    let is_it = |location: &ImageLocation| location.place == *place;
    let waits = state.unfinished().filter(|(_, known)| !known.has_arrived());
    let is_filled = waits.flat_map(|(_, known)| &known.volumes).any(|moving| is_it(&moving.target));
    let volume = state.volumes.iter().find(|(_, known)| is_it(&known.record.image));
    volume.is_some_and(|(id, _)| !is_filled && !state.fillings.contains_key(id))
}
