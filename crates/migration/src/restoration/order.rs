//! What people may order about a volume of a journal that was put back, and the records of it.

use chronicle::{BranchId, Generation};

use super::next_stay;
use super::ruling::{Claims, Ruling, Standing, Words, ruling};
use crate::identity::VolumeId;
use crate::journal::{Record, State};

/// How somebody takes a volume although other hosts have not all confirmed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// They know that no other host has it.
    Known,
    /// They accept that another host says otherwise, or that it may have been written to elsewhere.
    Force,
}

/// Why a volume waits, or an order is not carried out.
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
    /// Nobody has looked at its image yet.
    #[error("its image has not been looked at yet")]
    NotLooked,
    /// Its image is not there.
    #[error("its image is not to be had")]
    NoImage,
    /// Not all hosts have said what they know.
    #[error("not every other host has said whose it is")]
    Unheard,
    /// No host can know.
    #[error("no host can know whether this image is the volume")]
    InDoubt,
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
    carried_out(state, volume, standing, ruling(standing, Some(order)), branch)
}

/// The records by which a volume is this host's, or stays another's, that every other host has confirmed.
///
/// # Errors
/// [`Refused`]: it waits.
pub fn confirm(state: &State, volume: VolumeId, standing: &Standing) -> Result<Vec<Record>, Refused> {
    // Nobody has ordered it, so there is no branch.
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
        Ruling::StaysAway => return Ok(vec![Record::DepartureConfirmed { volume }]),
        Ruling::Waits(refused) => return Err(refused),
    };
    let left = state.moved.get(&volume).map(|moved| moved.generation);
    let own = known.record.generation;
    let highest = [standing.words.generation(), standing.came_back, left]
        .into_iter()
        .flatten()
        .fold(own, Generation::max);
    // N.B. above all that anybody has seen, so that a copy of the other branch is never taken for a later one of this.
    let (generation, branch) = match claims {
        Claims::Sole => (highest, None),
        Claims::Branch => (highest.next(), Some(branch)),
    };
    Ok(vec![Record::Reinstated { volume, generation, stay: next_stay(state), branch }])
}

/// The records by which nobody needs to know any more whose a volume is; its image stays.
///
/// # Errors
/// [`Refused::NotWaiting`].
pub fn forget(state: &State, volume: VolumeId) -> Result<Vec<Record>, Refused> {
    state.questioned(volume).ok_or(Refused::NotWaiting)?;
    Ok(match state.is_departure_in_question(volume) {
        true => vec![Record::MovedForgotten { volume }],
        false => vec![Record::RestoredForgotten { volume }],
    })
}

impl Words {
    /// The highest generation that a host speaks of which contradicts.
    fn generation(&self) -> Option<Generation> {
        match self {
            Self::Contradicted(words) => words.iter().filter_map(|(_, word)| word.generation()).max(),
            Self::Away(_, generation) => Some(*generation),
            _ => None,
        }
    }
}
