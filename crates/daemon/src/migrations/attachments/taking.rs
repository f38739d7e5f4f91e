//! Offers volumes of other hosts to clients here, and stops that.

use std::sync::Arc;
use std::time::{Duration, Instant};

use migration::HostId;
use migration::VolumeId;
use migration::journal::{
    AttachedVolume, ExportSettings, ImageFormat, ImageLocation, Place, Record, State, VolumeRecord,
};
use migration::wire::OfferedAttachment;

use super::Attachments;
use crate::error::{AttachmentError, RequestError, with_causes};
use crate::names;
use crate::volumes::registry::{Claim, Service, Users};

/// The most volumes that are attached here for one host. A host that asks for more is broken, or hostile.
const ATTACHMENTS_MAX: usize = 256;
/// How long a client that has just left may still be counted: a script may stop a VM and then detach its volume.
const FAREWELL_MAX: Duration = Duration::from_secs(1);
const FAREWELL_POLL: Duration = Duration::from_millis(20);

impl Attachments {
    /// Offers a volume of another host to clients here. Answers when it is offered, durably. A repetition changes nothing.
    pub(crate) async fn take(
        self: &Arc<Self>,
        peer: HostId,
        offered: OfferedAttachment,
    ) -> Result<(), RequestError> {
        let name = offered.name.clone();
        names::check(&name).map_err(|reason| RequestError::Name { name: name.clone(), reason })?;
        self.sockets.check(&name).map_err(|error| RequestError::Invalid(with_causes(&error)))?;
        if i64::try_from(offered.size_bytes).is_err() {
            return Err(RequestError::Invalid("the volume is larger than any disk".to_owned()));
        }
        if !self.hosts.is_paired(peer) {
            return Err(RequestError::Invalid("the hosts are not paired".to_owned()));
        }
        if self.journal.read(|state| is_repeated(state, peer, &offered))? {
            return Ok(());
        }
        self.draining.refuse_new()?;
        if let Some(standby) = self.standbys.name_of_kept(offered.volume) {
            return Err(AttachmentError::HasStandby { volume: name, standby }.into());
        }
        let mine = self.journal.read(|state| {
            let present = state.attached.keys().filter_map(|volume| state.attachment_of(*volume));
            present.filter(|attached| attached.host == peer).count()
        });
        if mine >= ATTACHMENTS_MAX {
            return Err(AttachmentError::TooMany(ATTACHMENTS_MAX).into());
        }
        self.end_other_way(peer, &offered).await;
        // A volume that has left, and whose clients are still forwarded, has a lane.
        match self.volumes.service(&name) {
            None => {
                let (claim, _) = self.volumes.claim_new(&name)?;
                self.offer_anew(peer, &offered, claim).await
            }
            Some(_) => {
                let (_claim, known) = self.volumes.claim(&name)?;
                let has_left = self.journal.read(|state| state.moved.contains_key(&known));
                if known != offered.volume || !has_left {
                    return Err(RequestError::VolumeExists(name));
                }
                self.record_attached(peer, &offered).await.map(drop)
            }
        }
    }

    /// Ends the forwarding of a volume that left for a host other than `peer`: that host may be gone, and `peer` has the volume or leads
    /// to it. Clients that are still connected stay where they are.
    async fn end_other_way(&self, peer: HostId, offered: &OfferedAttachment) {
        let leads_elsewhere = self.journal.read(|state| {
            let moved = state.moved.get(&offered.volume);
            moved.is_some_and(|moved| moved.host != peer && moved.volume.record.name == offered.name)
        });
        if !leads_elsewhere {
            return;
        }
        let how = api::RemoveVolume { only_forwarding: true, ..api::RemoveVolume::default() };
        let ended = Arc::clone(&self.volume_orders).remove_unused_volume(offered.name.clone(), how).await;
        if let Err(error) = ended {
            tracing::info!(volume = %offered.name, why = %error.message(), "clients go on being forwarded by the host that the volume left for");
        }
    }

    /// Makes an attachment durable, and starts the lane that forwards its clients.
    async fn offer_anew(
        self: &Arc<Self>,
        peer: HostId,
        offered: &OfferedAttachment,
        claim: Claim,
    ) -> Result<(), RequestError> {
        let name_taken = self.journal.read(|state| {
            let others = state.moved_named(&offered.name).filter(|(volume, _)| *volume != offered.volume);
            others.is_some_and(|(volume, _)| state.attachment_of(volume).is_some())
        });
        if name_taken {
            return Err(RequestError::VolumeExists(offered.name.clone()));
        }
        self.record_attached(peer, offered).await?;
        let moved = self.journal.read(|state| state.moved.get(&offered.volume).cloned());
        let Some(moved) = moved else {
            return Err(RequestError::Internal("an attached volume is not in the journal".to_owned()));
        };
        if let Err(error) = self.resumption.forward_and_see(moved).await {
            self.journal.commit(vec![Record::Detached { volume: offered.volume }]).await?;
            return Err(error);
        }
        drop(claim);
        tracing::info!(volume = %offered.name, host = %self.hosts.name_of(peer), "attached: clients are forwarded");
        Ok(())
    }

    async fn record_attached(&self, peer: HostId, offered: &OfferedAttachment) -> Result<(), RequestError> {
        // N.B. held until the number is durable: no migration gets it.
        let _starting = self.runner.starting_migration.lock().await;
        let left_by =
            self.journal.read(|state| state.moved.get(&offered.volume).map(|moved| moved.migration));
        let number = left_by.unwrap_or_else(|| self.runner.next_identity(None));
        let host_name = self.hosts.name_of(peer);
        let attached = AttachedVolume {
            record: record_of(offered, &host_name),
            number,
            host: peer,
            host_name,
            has_left: left_by.is_some(),
        };
        Ok(self.journal.commit(vec![Record::Attached(Box::new(attached))]).await?)
    }

    /// Stops offering a volume that is attached here, and tells the host that has attached it.
    pub(super) async fn detach_here(
        &self,
        name: String,
        force: bool,
    ) -> Result<api::DetachedVolume, RequestError> {
        let attached = self.journal.read(|state| {
            let (volume, _) = state.moved_named(&name)?;
            state.attachment_of(volume).cloned()
        });
        let Some(attached) = attached else {
            if self.volumes.service(&name).is_none() {
                return Err(RequestError::VolumeNotFound(name));
            }
            return Err(AttachmentError::NotAttached(name).into());
        };
        self.stop_offering(&attached, force).await?;
        if let Ok(session) = self.hosts.session_with(attached.host) {
            self.peers.give_attachment_up(&session, attached.record.volume);
        }
        Ok(api::DetachedVolume {
            name,
            host: self.hosts.describe_identity().map(|own| own.name).unwrap_or_default(),
        })
    }

    /// Stops offering a volume, because the host that has attached it asks for that. A volume that is not attached is no error: the
    /// answer to an earlier question may have been lost.
    pub(crate) async fn release(
        &self,
        peer: HostId,
        volume: VolumeId,
        is_forced: bool,
    ) -> Result<(), RequestError> {
        let attached = self.journal.read(|state| state.attachment_of(volume).cloned());
        match attached.filter(|attached| attached.host == peer) {
            Some(attached) => self.stop_offering(&attached, is_forced).await,
            None => Ok(()),
        }
    }

    async fn stop_offering(&self, attached: &AttachedVolume, force: bool) -> Result<(), RequestError> {
        let (name, volume) = (&attached.record.name, attached.record.volume);
        let claim = match self.volumes.claim(name) {
            Ok((claim, _)) => Some(claim),
            // It has no lane: the host that has it is not paired.
            Err(RequestError::VolumeNotFound(_)) => None,
            Err(error) => return Err(error),
        };
        if !force {
            self.refuse_used(name).await?;
        }
        self.journal.commit(vec![Record::Detached { volume }]).await?;
        // A lane of a volume that was here before ends when its last client has left.
        if let Some(claim) = claim.filter(|_| !attached.has_left) {
            if let Some(Service::Serving(lane)) = claim.removing() {
                lane.stop(self.limits.now().stop_wait_max).await;
            }
            let socket = self.sockets.volume_socket(name);
            if let Err(error) = self.sockets.forget_volume(name) {
                tracing::warn!(path = %socket.display(), %error, "the socket of a detached volume is left over");
            }
            claim.removed();
        }
        tracing::info!(volume = %name, host = %attached.host_name, "detached: clients are not forwarded");
        Ok(())
    }

    /// Refuses to detach a volume that clients use here, or at hosts that are led through this one.
    async fn refuse_used(&self, name: &str) -> Result<(), RequestError> {
        let Some(Service::Serving(lane)) = self.volumes.service(name) else { return Ok(()) };
        if let Some(vm) = self.vms.user_of(name) {
            return Err(RequestError::VolumeOfVm { volume: name.to_owned(), vm });
        }
        let deadline = Instant::now() + FAREWELL_MAX;
        loop {
            let status = lane.status().await.unwrap_or_default();
            let elsewhere = self.hosts.clients_by_name(&status.clients_elsewhere);
            if status.connections == 0 && elsewhere.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let (volume, connections) = (name.to_owned(), status.connections);
                let clients = Users { connections, elsewhere };
                return Err(RequestError::VolumeInUse { volume, clients });
            }
            tokio::time::sleep(FAREWELL_POLL).await;
        }
    }
}

/// Returns whether this host has made that very attachment. Errors: the volume cannot be attached here.
fn is_repeated(state: &State, peer: HostId, offered: &OfferedAttachment) -> Result<bool, RequestError> {
    let (volume, name) = (offered.volume, offered.name.clone());
    if let Some(attached) = state.attachment_of(volume) {
        return match attached.host == peer {
            true if attached.record.export.access == offered.access => Ok(true),
            true => Err(AttachmentError::OtherAccess { volume: name }.into()),
            false => {
                let host = attached.host_name.clone();
                Err(AttachmentError::AttachedByAnother { volume: name, host }.into())
            }
        };
    }
    if state.volumes.contains_key(&volume) || state.restored_volume(volume).is_some() {
        return Err(AttachmentError::HasIt(name).into());
    }
    let mut coming = state.unfinished().flat_map(|(_, known)| &known.volumes);
    if coming.any(|moving| moving.volume == volume) {
        return Err(AttachmentError::Arrives(name).into());
    }
    let is_reader = offered.access == migration::journal::ExportAccess::ReadOnly;
    if state.is_departure_in_question(volume) || is_reader && state.moved.contains_key(&volume) {
        return Err(AttachmentError::WasThere(name).into());
    }
    Ok(false)
}

/// Returns the record of a volume that has no image here.
fn record_of(offered: &OfferedAttachment, host: &str) -> VolumeRecord {
    let place = Place::Nbd(format!("sterna://{host}/{}", offered.name));
    VolumeRecord {
        volume: offered.volume,
        name: offered.name.clone(),
        size_bytes: offered.size_bytes,
        block_size_bytes: offered.block_size_bytes,
        image: ImageLocation { store: String::new(), place, format: ImageFormat::Raw },
        generation: offered.generation,
        export: ExportSettings { access: offered.access, ..ExportSettings::default() },
    }
}
