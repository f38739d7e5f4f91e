//! What people may order about a volume of a journal that was put back, and the records of it.

use chronicle::{BranchId, Generation};

use super::machine::Standing;
use super::next_stay;
use crate::identity::VolumeId;
use crate::journal::{Doubt, Record, State};

/// How somebody takes a volume although other hosts have not all confirmed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// They know that no other host has it.
    Known,
    /// They accept that another host says otherwise, or that it may have been written to elsewhere.
    Force,
}

/// Why an order is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no such volume.
    #[error("it does not wait for that: it is no volume of a journal that was put back")]
    NotWaiting,
    /// Parts of it are missing, and which ones is not known.
    #[error(
        "it lacked blocks when the journal was saved, and which ones it still lacks is not known any more"
    )]
    Hollow,
    /// Its image is not there, or was being filled.
    #[error("its image is not to be had, or is not complete")]
    NoImage,
    /// Something speaks against it.
    #[error("other hosts or images speak against it")]
    Contradicted,
}

/// The records by which a volume is this host's again by somebody's order. `branch` names the branch of its history that begins
/// if another host may have it as well: that is so unless every host has confirmed it.
///
/// # Errors
/// [`Refused`].
pub fn order(
    state: &State,
    volume: VolumeId,
    standing: &Standing,
    order: Order,
    branch: BranchId,
) -> Result<Vec<Record>, Refused> {
    let waiting = state.restored_volume(volume).ok_or(Refused::NotWaiting)?;
    if matches!(waiting.doubt, Some(Doubt::Hollow { .. })) {
        return Err(Refused::Hollow);
    }
    let highest = match (standing, order) {
        (Standing::NoImage, _) => return Err(Refused::NoImage),
        (Standing::HalfMade | Standing::Rival { .. }, Order::Known) => return Err(Refused::Contradicted),
        (Standing::Contradicted(_), Order::Known) => return Err(Refused::Contradicted),
        (Standing::Contradicted(words), _) => words.iter().map(|(_, word)| word.generation()).max().flatten(),
        (Standing::InDoubt { generation }, _) => *generation,
        _ => None,
    };
    let own = waiting.volume.record.generation;
    let branch = (!matches!(standing, Standing::InDoubt { .. } | Standing::Confirmed)).then_some(branch);
    // N.B. above all that anybody has seen, so that a copy of the other branch is never taken for a later one of this.
    let generation = match branch {
        None => highest.map_or(own, |highest| highest.max(own)),
        Some(_) => highest.map_or(own, |highest| highest.max(own)).next(),
    };
    Ok(vec![Record::Reinstated { volume, generation, stay: next_stay(state), branch }])
}

/// The records by which a volume is this host's that every other host has confirmed.
///
/// # Errors
/// [`Refused::NotWaiting`].
pub fn reinstate(state: &State, volume: VolumeId) -> Result<Vec<Record>, Refused> {
    let waiting = state.restored_volume(volume).ok_or(Refused::NotWaiting)?;
    let generation: Generation = waiting.volume.record.generation;
    Ok(vec![Record::Reinstated { volume, generation, stay: next_stay(state), branch: None }])
}

/// The records by which nobody needs to know any more whose a volume is; its image stays.
///
/// # Errors
/// [`Refused::NotWaiting`].
pub fn forget(state: &State, volume: VolumeId) -> Result<Vec<Record>, Refused> {
    state.restored_volume(volume).ok_or(Refused::NotWaiting)?;
    Ok(vec![Record::RestoredForgotten { volume }])
}
