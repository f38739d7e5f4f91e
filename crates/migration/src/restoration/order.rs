//! The administrator's orders for a volume of a restored journal, and their records.

use chronicle::{BranchId, Generation};

use super::next_stay;
use super::ruling::{Claims, Ruling, Standing, Words, ruling};
use crate::identity::VolumeId;
use crate::journal::{Moved, Outcome, Record, State, Summary};

/// An order to take a volume without the confirmation of every host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The administrator knows that no other host has the volume.
    Known,
    /// The administrator accepts that another host contradicts, or that the volume may have been written there.
    Force,
}

/// The reason why a volume waits, or an order is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The volume is not one of a restored journal.
    #[error("it needs no confirmation: it is not from a restored journal")]
    NotWaiting,
    /// The volume lacks blocks, and it is not known which.
    #[error("it lacked blocks when the journal was saved, and it is unknown which ones it still lacks")]
    Hollow,
    /// The image has not been inspected yet.
    #[error("its image has not been checked yet")]
    NotLooked,
    /// The image does not exist, or cannot be inspected.
    #[error("its image is not available")]
    NoImage,
    /// Some host has not answered yet.
    #[error("not every other host has answered which host owns it")]
    Unheard,
    /// No host can know whether the image is the volume.
    #[error("no host can know whether this image is the volume")]
    InDoubt,
    /// A host or an image contradicts.
    #[error("other hosts or images contradict it")]
    Contradicted,
}

/// Returns the records of an order that makes a volume this host's again. Unless every host has confirmed it, another host may
/// have the volume as well, and `branch` names the branch that begins.
///
/// # Errors
/// [`Refused`] holds the reason.
pub fn order(
    state: &State,
    volume: VolumeId,
    standing: &Standing,
    order: Order,
    branch: BranchId,
) -> Result<Vec<Record>, Refused> {
    carried_out(state, volume, standing, ruling(standing, Some(order)), branch)
}

/// Returns the records for a volume that every other host has confirmed: as this host's, or as still away.
///
/// # Errors
/// [`Refused`]: the volume waits.
pub fn confirm(state: &State, volume: VolumeId, standing: &Standing) -> Result<Vec<Record>, Refused> {
    // There is no branch without an order.
    carried_out(state, volume, standing, ruling(standing, None), BranchId([0; 16]))
}

fn carried_out(
    state: &State,
    volume: VolumeId,
    standing: &Standing,
    ruling: Ruling,
    branch: BranchId,
) -> Result<Vec<Record>, Refused> {
    let known = state.questioned(volume).ok_or(Refused::NotWaiting)?;
    let claims = match ruling {
        Ruling::Serve(claims) => claims,
        Ruling::StaysAway => return Ok(stays_away(state, volume, standing)),
        Ruling::Waits(refused) => return Err(refused),
    };
    let left = state.moved.get(&volume).map(|moved| moved.generation);
    let own = known.record.generation;
    let highest = [standing.words.generation(), standing.came_back, left]
        .into_iter()
        .flatten()
        .fold(own, Generation::max);
    // **N.B.** Above every known generation, so that a copy of the other branch never counts as a later one of this.
    let (generation, branch) = match claims {
        Claims::Sole => (highest, None),
        Claims::Branch => (highest.next(), Some(branch)),
    };
    Ok(vec![Record::Reinstated { volume, generation, stay: next_stay(state), branch }])
}

/// Returns the records that forget a volume of a restored journal; its image stays.
///
/// # Errors
/// [`Refused::NotWaiting`] if there is no such volume.
pub fn forget(state: &State, volume: VolumeId) -> Result<Vec<Record>, Refused> {
    state.questioned(volume).ok_or(Refused::NotWaiting)?;
    Ok(match state.is_departure_in_question(volume) {
        true => {
            end_of_departure(state, volume).into_iter().chain([Record::MovedForgotten { volume }]).collect()
        }
        false => vec![Record::RestoredForgotten { volume }],
    })
}

/// Returns the records for a volume that is where it went. Its departure continues if its owner still reads missing blocks here.
fn stays_away(state: &State, volume: VolumeId, standing: &Standing) -> Vec<Record> {
    let confirmed = Record::DepartureConfirmed { volume };
    let is_unchanged = |moved: &Moved| match standing.words {
        // **N.B.** After another return and departure the image here is of another time, or another departure's.
        Words::Away(host, generation) => (host, generation) == (moved.host, moved.generation),
        _ => false,
    };
    match state.moved.get(&volume).is_some_and(is_unchanged) {
        true => vec![confirmed],
        false => end_of_departure(state, volume).into_iter().chain([confirmed]).collect(),
    }
}

/// Ends the unfinished departure of a volume in this journal. **N.B.** Nothing is deleted.
fn end_of_departure(state: &State, volume: VolumeId) -> Option<Record> {
    let migration = state.moved.get(&volume)?.migration;
    state.migrations.get(&migration).filter(|known| !known.has_ended())?;
    let left_over = "the journal was restored from a backup; the image that the volume left stays".to_owned();
    let (outcome, summary) = (Outcome::Moved { left_over }, Summary::default());
    Some(Record::MigrationEnded { migration, outcome, summary })
}

impl Words {
    fn generation(&self) -> Option<Generation> {
        match self {
            Self::Contradicted(words) => words.iter().filter_map(|(_, word)| word.generation()).max(),
            Self::Away(_, generation) => Some(*generation),
            _ => None,
        }
    }
}
