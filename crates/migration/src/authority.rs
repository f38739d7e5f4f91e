//! Decides what another host may ask for, according to this host's journal.
//!
//! Knowing a migration's number or a volume's identity gives no permission. The journal must have the named migration with this
//! peer, in this role, with this volume, at a stage that allows the call (design §5.22):
//!
//! ```text
//!   the peer is    it may                                    while the migration is here
//!   source         use the store that the volume is copied to   Copying, Prepared
//!                  send a source's messages                     known
//!   target         send a target's messages                     known
//!   former owner   use the volume, for clients that stayed      Owned, Ended (moved), until the volume is removed or
//!                                                               forgotten, or returns here from a third host after it
//!                                                               returned to the peer; if the peer has brought it here
//!                                                               again, by either migration
//!   new owner      ask for nothing: it answers
//!   attached host  use the volume, or only read it            from the gift to its end; until the volume is here again
//!                                                               after it has left for the peer
//!   filler         read blocks of a volume from the source      Copying, Released, until it is owned here again
//! ```
//! [`judge`] is a function of the journal alone, so a permission that ends in the journal ends for open lines, too. The
//! decision holds until the journal changes.

use chronicle::StayId;

use crate::identity::{HostId, MigrationId, VolumeId, VolumeIndex};
use crate::journal::{ExportAccess, MigratingVolume, MigrationState, Outcome, Side, Stage, State};
use crate::planted::{Bug, broken};

/// The role that the peer claims, by the line that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The source of a migration that comes to this host.
    Source {
        /// The migration's number at the source.
        migration: MigrationId,
        /// The volume of the migration that the line is for.
        volume: VolumeIndex,
    },
    /// The target of a migration that leaves this host.
    Target {
        /// The migration's number at this host.
        migration: MigrationId,
    },
    /// The host that gave volumes away by a migration, for its clients that stayed there; or the host at which a volume is
    /// attached.
    FormerOwner {
        /// The number of the migration, or of the attachment, at that host.
        migration: MigrationId,
    },
    /// The host that took volumes from here by a migration, and answers the clients that stayed here.
    NewOwner {
        /// The migration's number at this host.
        migration: MigrationId,
    },
    /// The host that took a volume from here with blocks missing, and reads these blocks here.
    Filler {
        /// The migration's number at this host.
        migration: MigrationId,
        /// The volume of the migration that the line is for.
        volume: VolumeIndex,
    },
}

/// A request of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Use the target store of the migration's volume at this position.
    Store(VolumeIndex),
    /// Report copies that other hosts have of the migration's volume at this position.
    Copies(VolumeIndex),
    /// Use a volume as its clients do, without a change of its content.
    Volume(VolumeId),
    /// Change the content of a volume as its clients do.
    Change(VolumeId),
    /// Send a message to the target's half of a migration; the number is the source's.
    ToTarget(MigrationId),
    /// Send a message to the source's half of a migration; the number is this host's.
    ToSource(MigrationId),
    /// Read the image of the migration's volume at this position, as of its departure, or as of now while it is here.
    Reservoir(VolumeIndex),
    /// Send a message to the task that runs the migration's VM.
    Vm,
}

/// The reason why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Denied {
    /// The journal has no such migration with this peer.
    #[error("there is no such migration with this host")]
    Unknown,
    /// The role gives no right to this request, or to this volume.
    #[error("the migration does not permit this host to do that")]
    NotGiven,
    /// The volume has not arrived yet.
    #[error("the migration has not reached that stage")]
    NotYet,
    /// The migration has ended, or its permission has.
    #[error("the permission of the migration has ended")]
    Over,
}

/// Decides whether `peer` may make a request in a role.
///
/// # Errors
/// [`Denied`]: the request must not be carried out, and the peer learns only the reason.
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
                // The permission lasts as long as that residency of the volume.
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
        (Role::FormerOwner { migration }, Request::Volume(volume) | Request::Change(volume)) => {
            match state.incoming(peer, migration) {
                Some(known) => judge_former_owner(state, peer, known, volume),
                None => judge_attached(state, peer, request, volume),
            }
        }
        (Role::Filler { migration, volume }, Request::Reservoir(index)) => {
            let recorded = state.outgoing(peer, migration).ok_or(Denied::Unknown)?;
            if index != volume || index.as_usize() >= recorded.volumes.len() {
                return Err(Denied::NotGiven);
            }
            let is_here = |moving: &MigratingVolume| state.volumes.contains_key(&moving.volume);
            let is_in_question = |moving: &MigratingVolume| state.is_departure_in_question(moving.volume);
            match recorded.stage {
                Stage::Copying => Ok(()),
                // The journal was restored, and it is not settled whether the image is still of that departure.
                Stage::Released(_) if recorded.volumes.iter().any(is_in_question) => Err(Denied::NotYet),
                // **N.B.** Once the volume is owned here again, the image holds data of another time.
                Stage::Released(_) if !recorded.volumes.get(index.as_usize()).is_some_and(is_here) => Ok(()),
                _ => over(),
            }
        }
        _ => Err(Denied::NotGiven),
    }
}

/// Decides whether the source of a migration may report on its VM's memory while the VM runs here already. Returns the
/// names of the VM's volumes.
///
/// The permission covers only the VM that this migration has brought. It covers no VM on volumes of the same names, nor
/// on the same volumes once they have been at another host.
///
/// # Errors
/// [`Denied`] holds the reason.
pub fn judge_memory(state: &State, peer: HostId, migration: MigrationId) -> Result<Vec<String>, Denied> {
    let (id, recorded) = state.incoming(peer, migration).ok_or(Denied::Unknown)?;
    match recorded.stage {
        // The VM runs ahead of the commit, on volumes in the state *prepared*.
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

/// Returns whether an ended migration's record is still needed: for who may use a volume, or where one went. Until then
/// it is not forgotten.
///
/// Each known volume and each other host has at most one such migration.
pub(crate) fn is_needed(state: &State, id: MigrationId, recorded: &MigrationState) -> bool {
    let mut volumes = recorded.volumes.iter().map(|moving| moving.volume);
    match &recorded.side {
        Side::OneHost => false,
        Side::Incoming { peer, .. } => {
            let brings = |later: &MigrationState| matches!(later.side, Side::Incoming { .. });
            // It says that an image holds blocks of two times.
            let is_mixed = recorded.volumes.iter().any(|moving| {
                let left_by = state.moved.get(&moving.volume).map(|moved| moved.migration);
                let left = left_by.and_then(|id| state.migrations.get(&id));
                left.is_some_and(|left| left.is_brought_back_by(recorded))
            });
            is_mixed
                || volumes.any(|volume| {
                    // A later migration gives the same right.
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
        // The waiting copy of a restored journal has become this host's volume by order.
        Stage::Ended(_) if state.was_reinstated_from(id, recorded) => {}
        Stage::HandedBack | Stage::Discarding(_) | Stage::Ended(_) => return Err(Denied::Over),
    }
    let is_here = state.volumes.contains_key(&volume);
    if !is_here && !state.moved.contains_key(&volume) {
        return Err(Denied::Over);
    }
    match last_between(state, peer, id, volume).map(|later| &later.side) {
        // The volume was brought here once more: requests under way by the earlier migration have the same right.
        None | Some(Side::Incoming { .. } | Side::OneHost) => Ok(()),
        // **N.B.** Requests under way still ask here for a volume that returned to the peer, until it is at a third host.
        Some(Side::Outgoing { .. }) if !is_here => Ok(()),
        Some(Side::Outgoing { .. }) => over(),
    }
}

/// Decides whether a host at which a volume is attached may use it. The number of the attachment does not matter: it only
/// separates the channels of that host.
fn judge_attached(state: &State, peer: HostId, request: Request, volume: VolumeId) -> Result<(), Denied> {
    let given = state.given.get(&volume).and_then(|hosts| hosts.get(&peer)).ok_or(Denied::Unknown)?;
    let is_here = state.volumes.contains_key(&volume);
    if !is_here && !state.moved.contains_key(&volume) || is_here && given.has_gone_there {
        return Err(Denied::Over);
    }
    match (given.access, request) {
        (ExportAccess::ReadOnly, Request::Change(_)) if !broken(Bug::ReadOnlyAttachmentWrites) => {
            Err(Denied::NotGiven)
        }
        _ => Ok(()),
    }
}

/// Returns the last migration later than `id` that moved a volume between this host and a peer.
fn last_between(state: &State, peer: HostId, id: MigrationId, volume: VolumeId) -> Option<&MigrationState> {
    let later = state.migrations.range(id..).skip(1).map(|(_, later)| later);
    let moved = later.filter(|later| {
        let has_moved = matches!(later.stage, Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }));
        let is_of_both = later.side.peer().is_some_and(|(other, _)| other == peer);
        has_moved && is_of_both && later.volumes.iter().any(|moving| moving.volume == volume)
    });
    moved.last()
}

/// The planted bug keeps serving a peer whose permission has ended.
fn over() -> Result<(), Denied> {
    if broken(Bug::AccessAfterTheRelationEnded) { Ok(()) } else { Err(Denied::Over) }
}
