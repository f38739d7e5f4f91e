//! Lets a command for a volume wait until the migration that brought the volume here has ended here too.
//!
//! ```text
//!   owned here, durably ──► the source learns it, and says *moved* ──► a client sends the next command here
//!          └──► ended, durably; the lane learns it; the arrival releases the volume ──► the next command runs
//! ```
//! The source reports its end as soon as this host owns the volume. This host may still have records to write, which is no
//! reason to refuse a command. A command is refused only if that takes too long.

pub(crate) mod within;

use std::sync::Arc;
use std::time::Duration;

use api::{MigrateVolume, RemoveVolume};
use migration::journal::{MigrationState, Moved, State, VolumeRecord};
use migration::promotion::{self, Removal};
use migration::restoration::{ANSWER_MAX, Knowledge};
use migration::{HostId, MigrationId, VolumeId};
use transport::Peer;

use crate::error::{AttachmentError, LackingError, RequestError};
use crate::host::Parts;
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::migrations::ownership::restoration::Restoring;
use crate::migrations::queue::Queue;
use crate::migrations::registry::Migrations;
use crate::peers::{Peers, host_id};
use crate::stores::Stores;
use crate::vms::{VmError, Vms};
use crate::volumes::registry::{Claim, Service, Volumes};

/// How long a command waits at most: two commits, and the start of a volume's VM.
const SETTLED_MAX: Duration = Duration::from_secs(10);
const SETTLED_POLL: Duration = Duration::from_millis(20);

/// The target host and store of volumes.
pub(crate) struct Elsewhere {
    pub peer: Peer,
    /// The store at the remote host; empty: its only one.
    pub store: String,
}

/// Finds volumes by name, and claims them for one operation at a time.
pub(crate) struct VolumeClaims {
    pub(crate) journal: Journal,
    pub(crate) stores: Arc<Stores>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) migrations: Arc<Migrations>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) restoring: Arc<Restoring>,
    pub(crate) vms: Arc<Vms>,
}

impl VolumeClaims {
    pub(crate) fn new(parts: &Parts) -> Arc<Self> {
        let Parts { journal, stores, volumes, migrations, queue, hosts, peers, restoring, vms, .. } =
            parts.clone();
        Arc::new(Self { journal, stores, volumes, migrations, queue, hosts, peers, restoring, vms })
    }

    /// Claims a volume for a new migration. The volume may lack blocks only if it goes to the host that has them. Errors:
    /// [`RequestError::VolumeNotFound`], [`RequestError::VolumeArriving`], [`RequestError::VolumeBusy`],
    /// [`RequestError::AlreadyMigrating`], [`RequestError::DestinationNotFound`], [`RequestError::Invalid`], [`LackingError`],
    /// [`VmError::Suspended`].
    pub(crate) async fn claim_to_move(
        &self,
        name: &str,
        order: &MigrateVolume,
    ) -> Result<(Claim, VolumeId), RequestError> {
        self.settled(name).await;
        let (claim, volume) = self.volumes.claim(name)?;
        self.refuse_suspended(name)?;
        self.check_moves_whole(volume).await?;
        if !self.goes_back(volume, order)? {
            self.check_whole(volume, name)?;
        }
        self.not_migrating(claim, volume, name)
    }

    /// Returns the host to which this order copies a whole volume before the handover; `None`: there
    /// is none. Errors: [`RequestError::DestinationNotFound`], [`RequestError::Invalid`].
    pub(crate) fn copied_to(&self, order: &MigrateVolume) -> Result<Option<HostId>, RequestError> {
        let elsewhere = self.elsewhere(&order.to)?.filter(|_| !order.strategy.leaves_blocks());
        Ok(elsewhere.map(|elsewhere| host_id(elsewhere.peer.id)))
    }

    /// Refuses to change a volume that is a disk of a suspended VM: what its guest remembers of it would be wrong.
    pub(crate) fn refuse_suspended(&self, name: &str) -> Result<(), RequestError> {
        self.vms.suspended_on(name).map_or(Ok(()), |vm| Err(VmError::Suspended(vm).into()))
    }

    /// Claims a volume to copy it. It must have all of its blocks, and stay in its store meanwhile.
    pub(crate) async fn claim_to_clone(&self, name: &str) -> Result<(Claim, VolumeId), RequestError> {
        self.settled(name).await;
        let (claim, volume) = self.volumes.claim(name)?;
        self.check_whole(volume, name)?;
        self.not_migrating(claim, volume, name)
    }

    /// Returns whether a volume lacks blocks, and this order moves it to the host that has them.
    fn goes_back(&self, volume: VolumeId, order: &MigrateVolume) -> Result<bool, RequestError> {
        let to = self.copied_to(order)?;
        Ok(self.journal.read(|state| {
            let filling = state.fillings.get(&volume).filter(|filling| !filling.is_given_up);
            filling.is_some_and(|filling| Some(filling.peer) == to)
        }))
    }

    /// Claims a volume to remove it. The volume may lack blocks for good, or may not be served because it is unknown which.
    pub(crate) async fn claim_to_remove(
        &self,
        name: &str,
        how: RemoveVolume,
    ) -> Result<(Claim, VolumeId), RequestError> {
        self.settled(name).await;
        let (claim, volume) = self.volumes.claim(name)?;
        match self.check_whole(volume, name) {
            Ok(()) | Err(RequestError::Lacking(LackingError::ForGood { .. })) => {}
            Err(error) => match self.volumes.service(name) {
                Some(Service::Failed(_)) => self.check_left_to_source(volume, name, how).await?,
                _ => return Err(error),
            },
        }
        self.not_migrating(claim, volume, name)
    }

    /// Checks before the removal of an incomplete volume that cannot be served whether the host with its missing blocks
    /// continues with it. That host must be lost, or have taken the volume back.
    async fn check_left_to_source(
        &self,
        volume: VolumeId,
        name: &str,
        how: RemoveVolume,
    ) -> Result<(), RequestError> {
        let known = self.journal.read(|state| {
            Some((state.fillings.get(&volume)?.clone(), state.volumes.get(&volume)?.record.generation))
        });
        let Some((filling, generation)) = known else { return Ok(()) };
        let there = self.known_at(filling.peer, volume).await;
        let removal = if how.force { Removal::Forced } else { Removal::Plain };
        promotion::removable(generation, there, removal).map_err(|reason| {
            let (volume, host) = (name.to_owned(), filling.peer_name);
            LackingError::Unserved { volume, host, reason }.into()
        })
    }

    /// Asks another host what it knows of a volume. The outer `None`: it is silent; the inner one: nothing.
    pub(crate) async fn known_at(&self, peer: HostId, volume: VolumeId) -> Option<Option<Knowledge>> {
        let session = self.hosts.session_with(peer).ok().filter(|session| session.status().is_connected)?;
        let answer = tokio::time::timeout(ANSWER_MAX, self.peers.whose(&session, &[volume])).await.ok()??;
        Some(answer.known.get(&volume).copied())
    }

    /// Returns whether a volume came here incomplete, and cannot be served.
    pub(crate) fn cannot_serve(&self, state: &State, volume: VolumeId) -> bool {
        let lacks_blocks = state.fillings.get(&volume).is_some_and(|filling| !filling.is_given_up);
        let known = state.volumes.get(&volume).filter(|_| lacks_blocks);
        known
            .is_some_and(|known| matches!(self.volumes.service(&known.record.name), Some(Service::Failed(_))))
    }

    fn not_migrating(
        &self,
        claim: Claim,
        volume: VolumeId,
        name: &str,
    ) -> Result<(Claim, VolumeId), RequestError> {
        match self.migrations.running_of(volume) {
            None => Ok((claim, volume)),
            Some(migration) => Err(RequestError::AlreadyMigrating { volume: name.to_owned(), migration }),
        }
    }

    /// Refuses a volume that lacks blocks, with a [`LackingError`].
    pub(crate) fn check_whole(&self, volume: VolumeId, name: &str) -> Result<(), RequestError> {
        let filling = self.journal.read(|state| state.fillings.get(&volume).cloned());
        let (volume, host) = (name.to_owned(), filling.as_ref().map(|filling| filling.peer_name.clone()));
        match (filling, host) {
            (Some(filling), Some(host)) if filling.is_given_up => {
                Err(LackingError::ForGood { volume, host }.into())
            }
            (Some(_), Some(host)) => Err(LackingError::BeingFilled { volume, host }.into()),
            _ => Ok(()),
        }
    }

    /// Resolves when the migration that brought the volume here has ended here, or when that takes too long. The command
    /// then reports what still runs.
    pub(crate) async fn settled(&self, name: &str) {
        let settled = async {
            loop {
                let changed = self.volumes.changed();
                if !self.is_settling(name) {
                    return;
                }
                let _ = tokio::time::timeout(SETTLED_POLL, changed).await;
            }
        };
        if tokio::time::timeout(SETTLED_MAX, settled).await.is_err() {
            tracing::warn!(volume = %name, "the work after the volume's arrival takes long");
        }
    }

    fn is_settling(&self, name: &str) -> bool {
        let claimed = self.volumes.arrival_of(name);
        let volume = self.journal.read(|state| state.volume_named(name).map(|(volume, _)| volume));
        let running = volume.and_then(|volume| self.migrations.running_of(volume));
        let has_arrived = |migration: MigrationId| {
            self.journal
                .read(|state| state.migrations.get(&migration).is_some_and(MigrationState::has_arrived))
        };
        claimed.is_some_and(has_arrived) || running.is_some_and(has_arrived)
    }

    pub(crate) fn record(&self, volume: VolumeId, name: &str) -> Result<VolumeRecord, RequestError> {
        let found = self.journal.read(|state| match (state.volumes.get(&volume), state.moved.get(&volume)) {
            (Some(volume), _) => Ok(volume.record.clone()),
            (None, Some(moved)) => Err(elsewhere(state, moved)),
            (None, None) => Err(RequestError::VolumeNotFound(name.to_owned())),
        });
        found.map_err(|error| self.restoring.or_unconfirmed(name, error))
    }

    pub(crate) fn record_named(&self, name: &str) -> Result<VolumeRecord, RequestError> {
        let found = self.journal.read(|state| match state.volume_named(name) {
            Some((_, volume)) => Ok(volume.record.clone()),
            None => {
                let moved = state.moved.values().find(|moved| moved.volume.record.name == name);
                Err(moved.map_or_else(
                    || RequestError::VolumeNotFound(name.to_owned()),
                    |moved| elsewhere(state, moved),
                ))
            }
        });
        found.map_err(|error| self.restoring.or_unconfirmed(name, error))
    }

    /// Refuses to remove a volume for which a migration waits, with [`RequestError::AlreadyMigrating`].
    pub(crate) fn require_unordered(&self, volume: VolumeId, name: &str) -> Result<(), RequestError> {
        match self.queue.of(volume) {
            None => Ok(()),
            Some(migration) => Err(RequestError::AlreadyMigrating { volume: name.to_owned(), migration }),
        }
    }

    /// Returns the host that `to` names, as HOST or HOST:STORE; `None`: `to` is a store of this host. Errors:
    /// [`RequestError::DestinationNotFound`]; [`RequestError::Invalid`]: `to` is this host's own name.
    pub(crate) fn elsewhere(&self, to: &str) -> Result<Option<Elsewhere>, RequestError> {
        if self.stores.get(to).is_ok() {
            return Ok(None);
        }
        let (host, store) = to.split_once(':').unwrap_or((to, ""));
        match self.hosts.find(host) {
            Some(peer) => Ok(Some(Elsewhere { peer, store: store.to_owned() })),
            None if self.hosts.own().is_none() => self.stores.get(to).map(|_| None),
            None if self.hosts.is_own_name(host) => Err(RequestError::Invalid(format!(
                "\"{host}\" is this host; to move within it, name one of its stores: {}",
                self.stores.known()
            ))),
            None => Err(RequestError::DestinationNotFound {
                name: to.to_owned(),
                stores: self.stores.known(),
                hosts: self.hosts.names(),
            }),
        }
    }
}

fn elsewhere(state: &State, moved: &Moved) -> RequestError {
    let record = &moved.volume.record;
    if let Some(attached) = state.attachment_of(record.volume).filter(|attached| !attached.has_left) {
        let (volume, host) = (record.name.clone(), attached.host_name.clone());
        return AttachmentError::AttachedHere { volume, host }.into();
    }
    RequestError::VolumeElsewhere {
        volume: moved.volume.record.name.clone(),
        host: moved.host_name.clone(),
        migration: moved.migration,
    }
}
