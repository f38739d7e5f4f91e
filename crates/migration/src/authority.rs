//! What another host may ask for, by what this host's journal says of the two.
//!
//! Knowing the number of a migration or the identity of a volume is no permission. A call is carried out only if the journal
//! has the migration that it names, with this peer, in this role, with this volume, at a stage that allows it (design §5.22):
//!
//! ```text
//!   the peer is    it may                                    while the migration is here
//!   source         use the store that the volume is copied to   Copying, Prepared
//!                  say what a source says                       known
//!   target         say what a target says                       known
//!   former owner   use the volume, for clients that stayed      Owned, Ended (moved), until the volume is removed or
//!                                                               forgotten, or comes back here from elsewhere after it
//!                                                               went home to the peer; if the peer has brought it here
//!                                                               again, by either migration
//!   new owner      ask for nothing: it answers
//!   filler         read what the source has of a volume         Copying, Released, until it is owned here again
//! ```
//! [`judge`] is a function of the journal alone, so what ends in the journal ends for lines that are open, too. Its answer
//! holds until the journal changes.

use chronicle::StayId;

use crate::identity::{HostId, MigrationId, VolumeId, VolumeIndex};
use crate::journal::{MigratingVolume, MigrationState, Outcome, Side, Stage, State};
use crate::planted::{Bug, broken};

/// What the peer claims to be, by the line that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The source of a migration that comes here.
    Source {
        /// Its number there.
        migration: MigrationId,
        /// Which of its volumes the line is for.
        volume: VolumeIndex,
    },
    /// The target of a migration that goes out from here.
    Target {
        /// Its number here.
        migration: MigrationId,
    },
    /// The host that a migration took volumes from, for its clients that stayed.
    FormerOwner {
        /// Its number there.
        migration: MigrationId,
    },
    /// The host that a migration from here took volumes to, which answers the clients that stayed here.
    NewOwner {
        /// Its number here.
        migration: MigrationId,
    },
    /// The host that a migration from here takes a volume to with blocks missing, and that reads these here.
    Filler {
        /// Its number here.
        migration: MigrationId,
        /// Which of its volumes the line is for.
        volume: VolumeIndex,
    },
}

/// What a peer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The store that a migration's volume of this position is copied to.
    Store(VolumeIndex),
    /// To tell of copies that other hosts have of a migration's volume of this position.
    Copies(VolumeIndex),
    /// A volume, as its clients see it.
    Volume(VolumeId),
    /// That the target's half of the migration of this number at its source hears something.
    ToTarget(MigrationId),
    /// That the source's half of the migration of this number here hears something.
    ToSource(MigrationId),
    /// What a migration's volume of this position was when it left, or is while it is here.
    Reservoir(VolumeIndex),
    /// That whoever runs the machine of the migration hears something.
    Vm,
}

/// Why a request is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Denied {
    /// The journal has no such migration with this peer.
    #[error("there is no such migration with this host")]
    Unknown,
    /// It is not what this role may ask for, or another volume.
    #[error("the migration gives this host no right to that")]
    NotGiven,
    /// The volume is not here yet.
    #[error("the migration has not come that far")]
    NotYet,
    /// The migration has ended, or what it gave has.
    #[error("what the migration gave has ended")]
    Over,
}

/// Judges what `peer` asks for in a role.
///
/// # Errors
/// [`Denied`]: nothing is to be done, and nothing to be told but that.
pub fn judge(state: &State, peer: HostId, role: Role, request: Request) -> Result<(), Denied> {
    match (role, request) {
        (Role::Source { migration, volume }, Request::Store(index)) => {
            let (_, recorded) = state.incoming(peer, migration).ok_or(Denied::Unknown)?;
            if index != volume || index.as_usize() >= recorded.volumes.len() {
                return Err(Denied::NotGiven);
            }
            match recorded.stage {
                Stage::Copying | Stage::Prepared(_) => Ok(()),
                _ => over(),
            }
        }
        (Role::Source { migration, volume }, Request::Copies(index)) => {
            let (id, recorded) = state.incoming(peer, migration).ok_or(Denied::Unknown)?;
            let moving = recorded.volumes.get(index.as_usize()).filter(|_| index == volume);
            let moving = moving.ok_or(Denied::NotGiven)?;
            match recorded.stage {
                Stage::Copying | Stage::Prepared(_) => Ok(()),
                // For as long as that stay of the volume lasts.
                Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }) => {
                    let here = state.volumes.get(&moving.volume);
                    let is_of_it = here.is_some_and(|known| known.stay == StayId::Arrived(id.0));
                    if is_of_it { Ok(()) } else { over() }
                }
                _ => over(),
            }
        }
        (Role::Source { migration, .. }, Request::ToTarget(number)) if number == migration => {
            state.incoming(peer, migration).map(drop).ok_or(Denied::Unknown)
        }
        (Role::Target { migration }, Request::ToSource(number)) if number == migration => {
            state.outgoing(peer, migration).map(drop).ok_or(Denied::Unknown)
        }
        (Role::Source { migration, .. }, Request::Vm) => {
            state.incoming(peer, migration).map(drop).ok_or(Denied::Unknown)
        }
        (Role::Target { migration }, Request::Vm) => {
            state.outgoing(peer, migration).map(drop).ok_or(Denied::Unknown)
        }
        (Role::FormerOwner { migration }, Request::Volume(volume)) => {
            let (id, recorded) = state.incoming(peer, migration).ok_or(Denied::Unknown)?;
            judge_former_owner(state, peer, (id, recorded), volume)
        }
        (Role::Filler { migration, volume }, Request::Reservoir(index)) => {
            let recorded = state.outgoing(peer, migration).ok_or(Denied::Unknown)?;
            if index != volume || index.as_usize() >= recorded.volumes.len() {
                return Err(Denied::NotGiven);
            }
            let is_here = |moving: &MigratingVolume| state.volumes.contains_key(&moving.volume);
            match recorded.stage {
                Stage::Copying => Ok(()),
                // N.B. once it is owned here again what is read is of another time.
                Stage::Released(_) if !recorded.volumes.get(index.as_usize()).is_some_and(is_here) => Ok(()),
                _ => over(),
            }
        }
        _ => Err(Denied::NotGiven),
    }
}

/// Judges what the source of a migration says of the memory of its VM, which runs here already while memory still comes; returns the
/// names of the VM's volumes.
///
/// It speaks of the VM that this migration has brought, and of no other: not of one on volumes of the same names, nor on the same
/// volumes after they have been elsewhere.
///
/// # Errors
/// [`Denied`].
pub fn judge_memory(state: &State, peer: HostId, migration: MigrationId) -> Result<Vec<String>, Denied> {
    let (id, recorded) = state.incoming(peer, migration).ok_or(Denied::Unknown)?;
    match recorded.stage {
        // A VM runs ahead of the commit, on volumes that are promised.
        Stage::Prepared(_) => return Ok(recorded.names.clone()),
        Stage::Copying => return Err(Denied::NotYet),
        Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }) => {}
        _ => return Err(Denied::Over),
    }
    let names = recorded.volumes.iter().map(|moving| {
        let here = state.volumes.get(&moving.volume).filter(|known| known.stay == StayId::Arrived(id.0));
        here.map(|known| known.record.name.clone()).ok_or(Denied::Over)
    });
    names.collect()
}

/// Tells whether what an ended migration says is still asked for: who may use a volume, or where one went. It is not
/// forgotten until that is over.
///
/// There is one such migration, at most, for each volume that this host knows and each other host.
pub(crate) fn is_needed(state: &State, id: MigrationId, recorded: &MigrationState) -> bool {
    let mut volumes = recorded.volumes.iter().map(|moving| moving.volume);
    match &recorded.side {
        Side::OneHost => false,
        Side::Incoming { peer, .. } => {
            let brings = |later: &MigrationState| matches!(later.side, Side::Incoming { .. });
            volumes.any(|volume| {
                // A later one gives the same right.
                !last_between(state, *peer, id, volume).is_some_and(brings)
                    && judge_former_owner(state, *peer, (id, recorded), volume).is_ok()
            })
        }
        Side::Outgoing { .. } => {
            volumes.any(|volume| state.moved.get(&volume).is_some_and(|moved| moved.migration == id))
        }
    }
}

fn judge_former_owner(
    state: &State,
    peer: HostId,
    (id, recorded): (MigrationId, &MigrationState),
    volume: VolumeId,
) -> Result<(), Denied> {
    if !recorded.volumes.iter().any(|moving| moving.volume == volume) {
        return Err(Denied::NotGiven);
    }
    match recorded.stage {
        Stage::Copying | Stage::Prepared(_) | Stage::Released(_) => return Err(Denied::NotYet),
        Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }) => {}
        Stage::HandedBack | Stage::Discarding(_) | Stage::Ended(_) => return Err(Denied::Over),
    }
    let is_here = state.volumes.contains_key(&volume);
    if !is_here && !state.moved.contains_key(&volume) {
        return Err(Denied::Over);
    }
    match last_between(state, peer, id, volume).map(|later| &later.side) {
        // The volume was brought here once more: what was on its way by the earlier migration has the same right.
        None | Some(Side::Incoming { .. } | Side::OneHost) => Ok(()),
        // N.B. a volume that went home is still asked for here by what was on its way, until it is somewhere else.
        Some(Side::Outgoing { .. }) if !is_here => Ok(()),
        Some(Side::Outgoing { .. }) => over(),
    }
}

/// The last migration later than `id` that moved a volume between this host and a peer.
fn last_between(state: &State, peer: HostId, id: MigrationId, volume: VolumeId) -> Option<&MigrationState> {
    let later = state.migrations.range(id..).skip(1).map(|(_, later)| later);
    let moved = later.filter(|later| {
        let has_moved = matches!(later.stage, Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }));
        let is_of_both = later.side.peer().is_some_and(|(other, _)| other == peer);
        has_moved && is_of_both && later.volumes.iter().any(|moving| moving.volume == volume)
    });
    moved.last()
}

/// The planted bug goes on serving whoever was given something once.
fn over() -> Result<(), Denied> {
    if broken(Bug::AccessAfterTheRelationEnded) { Ok(()) } else { Err(Denied::Over) }
}
