//! Removes volumes: images that Sterna made are deleted. Adopted and imported images stay, also in a store
//! that they have moved to.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{RemoveVolume, RemovedVolume};
use chronicle::StayId;
use migration::VolumeId;
use migration::custody::Owner;
use migration::journal::{ImageFate, ImageWish, Record, VolumeRecord};

use crate::error::{AttachmentError, RequestError, SnapshotError};
use crate::host::{VolumeOrders, blocking};
use crate::images::half_made;
use crate::stores::removed_path;
use crate::vms::VmError;
use crate::volumes::registry::{Claim, Service, Users};

/// How long a client that has just left may still be counted: a script may stop a VM and then remove its volume.
const FAREWELL_MAX: Duration = Duration::from_secs(1);
const FAREWELL_POLL: Duration = Duration::from_millis(20);

impl VolumeOrders {
    /// Stops serving a volume and forgets it. After an error the volume is served as before.
    pub(crate) async fn remove_volume(
        self: Arc<Self>,
        name: String,
        how: RemoveVolume,
    ) -> Result<RemovedVolume, RequestError> {
        if let Some(cancelled) = self.cancel_clone(&name).await {
            return Ok(cancelled);
        }
        self.refuse_of_vm(&name)?;
        self.remove_unused_volume(name, how).await
    }

    /// Refuses to remove a volume that a VM needs.
    pub(crate) fn refuse_of_vm(&self, name: &str) -> Result<(), RequestError> {
        if let Some(vm) = self.vms.user_of(name) {
            return Err(RequestError::VolumeOfVm { volume: name.to_owned(), vm });
        }
        match self.vms.adoptions()?.find(|adopted| adopted.uses(name)).map(|adopted| adopted.name) {
            Some(vm) => Err(VmError::Adopted(vm).into()),
            None => Ok(()),
        }
    }

    /// Does the same without a check of VMs, for a volume that no VM needs.
    pub(crate) async fn remove_unused_volume(
        self: Arc<Self>,
        name: String,
        how: RemoveVolume,
    ) -> Result<RemovedVolume, RequestError> {
        self.remove_after(name, how, async |_, _| {}).await
    }

    /// Does the same, after `note` was given the volume and its residency: the volume is not served any more, and nothing of it is
    /// forgotten.
    pub(crate) async fn remove_after(
        self: Arc<Self>,
        name: String,
        how: RemoveVolume,
        note: impl AsyncFnOnce(VolumeRecord, StayId),
    ) -> Result<RemovedVolume, RequestError> {
        let (claim, volume) = self.claims.claim_to_remove(&name, how).await?;
        self.claims.require_unordered(volume, &name)?;
        self.refuse_attached(volume, &name, how)?;
        if let Some(reverting) = self.serving.reverting_to(volume) {
            return Err(SnapshotError::Needed { volume: reverting, snapshot: name }.into());
        }
        self.refuse_in_use(&name, how).await?;
        if self.journal.read(|state| state.questioned(volume).is_some()) {
            return self.restoring.forget(claim, volume, name).await;
        }
        if self.journal.read(|state| state.moved.contains_key(&volume)) {
            return self.remove_forwarding(claim, volume, name).await;
        }
        // Looked at under the claim: the volume may have come back since somebody looked.
        if how.only_forwarding {
            return Err(RequestError::NotForwarded(name));
        }
        let record = self.claims.record(volume, &name)?;
        let fate = ImageFate::of(
            &record.image,
            self.journal.read(|state| state.origin_of(volume)),
            wish(&record, how)?,
        );
        if let Some(image) = doomed(&record, fate) {
            // N.B. Checked before the volume is stopped: a refused removal changes nothing.
            let custody = self.custody.clone();
            blocking(move || Ok(custody.check_removal(volume, &image)?)).await?;
        }
        if let Some(Service::Serving(lane)) = claim.removing() {
            lane.stop(self.limits.now().stop_wait_max).await;
        }
        note(record.clone(), self.serving.stay_of(volume)).await;
        if let Err(error) = self.forget(&record, fate).await {
            claim.not_removed();
            self.serving.serve_in_background(&name);
            return Err(error);
        }
        let socket = self.sockets.volume_socket(&name);
        if let Err(error) = self.sockets.forget_volume(&name) {
            tracing::warn!(path = %socket.display(), %error, "the socket of a removed volume is left over");
        }
        let chronicles = self.chronicles.clone();
        if let Ok(Err(error)) = tokio::task::spawn_blocking(move || chronicles.forget_volume(volume)).await {
            tracing::warn!(volume = %name, %error, "its chronicle is left over");
        }
        claim.removed();
        tracing::info!(volume = %name, "volume removed");
        let (image_fate, kept_because) = match fate {
            ImageFate::Delete => (api::ImageFate::Deleted, None),
            ImageFate::Keep => (api::ImageFate::Kept, None),
            ImageFate::KeepGiven => (api::ImageFate::Kept, Some(api::KeptBecause::Given)),
            ImageFate::KeepUnknown => (api::ImageFate::Kept, Some(api::KeptBecause::Unknown)),
        };
        let image = record.image.place.name().to_owned();
        let snapshots = self.journal.read(|state| {
            let known = state.snapshots_of(volume).filter_map(|(id, _)| state.volumes.get(&id));
            known.map(|known| known.record.name.clone()).collect()
        });
        Ok(RemovedVolume { name, image, image_fate, kept_because, host: None, snapshots })
    }

    async fn remove_forwarding(
        &self,
        claim: Claim,
        volume: VolumeId,
        name: String,
    ) -> Result<RemovedVolume, RequestError> {
        let host = self.journal.read(|state| state.moved.get(&volume).map(|moved| moved.host_name.clone()));
        self.serving.forget_moved(volume).await?;
        if let Some(Service::Serving(lane)) = claim.removing() {
            lane.stop(self.limits.now().stop_wait_max).await;
        }
        let socket = self.sockets.volume_socket(&name);
        if let Err(error) = self.sockets.forget_volume(&name) {
            tracing::warn!(path = %socket.display(), %error, "the socket of a removed volume is left over");
        }
        claim.removed();
        tracing::info!(volume = %name, "stopped forwarding clients");
        let image_fate = api::ImageFate::Elsewhere;
        Ok(RemovedVolume {
            name,
            image: String::new(),
            image_fate,
            kept_because: None,
            host,
            snapshots: Vec::new(),
        })
    }

    /// Refuses to remove a volume that is attached at other hosts, or here: the attachment is ended first.
    fn refuse_attached(&self, volume: VolumeId, name: &str, how: RemoveVolume) -> Result<(), RequestError> {
        let name = name.to_owned();
        self.journal.read(|state| {
            if let Some(attached) = state.attachment_of(volume) {
                let host = attached.host_name.clone();
                return Err(AttachmentError::AttachedHere { volume: name, host }.into());
            }
            let hosts: Vec<_> =
                state.attachments_given(volume).map(|given| format!("\"{}\"", given.host_name)).collect();
            match hosts.is_empty() || how.force {
                true => Ok(()),
                false => {
                    Err(AttachmentError::AttachedElsewhere { volume: name, hosts: hosts.join(", ") }.into())
                }
            }
        })
    }

    pub(super) async fn refuse_in_use(&self, name: &str, how: RemoveVolume) -> Result<(), RequestError> {
        let Some(Service::Serving(lane)) = self.volumes.service(name) else { return Ok(()) };
        let deadline = Instant::now() + FAREWELL_MAX;
        loop {
            let status = lane.status().await.unwrap_or_default();
            let elsewhere = self.hosts.clients_by_name(&status.clients_elsewhere);
            let is_free = status.connections == 0 && elsewhere.is_empty() && !status.awaits_word_of_clients;
            if is_free || how.force {
                return Ok(());
            }
            if Instant::now() < deadline {
                tokio::time::sleep(FAREWELL_POLL).await;
                continue;
            }
            let (volume, connections) = (name.to_owned(), status.connections);
            return Err(if connections == 0 && elsewhere.is_empty() {
                RequestError::ClientsUnknown(volume)
            } else {
                RequestError::VolumeInUse { volume, clients: Users { connections, elsewhere } }
            });
        }
    }

    /// Puts the image aside, records the removal, then deletes the image.
    pub(crate) async fn forget(&self, record: &VolumeRecord, fate: ImageFate) -> Result<(), RequestError> {
        let volume = record.volume;
        // N.B. The host that has missing blocks of a removed volume keeps them: nothing here says whether they are needed.
        let lacks_blocks = self.journal.read(|state| state.fillings.contains_key(&volume));
        let given_up = lacks_blocks.then_some(Record::MissingGivenUp { volume });
        let removed: Vec<Record> = given_up.into_iter().chain([Record::VolumeRemoved { volume }]).collect();
        if let Some(image) = record.image.place.file().map(PathBuf::from) {
            // N.B. The mark is deleted before the volume is: after the removal nothing records that the image is complete.
            let unmarked = tokio::task::spawn_blocking(move || half_made::unmark(&image)).await;
            if let Ok(Err(error)) = unmarked {
                tracing::warn!(volume = %record.name, %error, "cannot delete the half-made mark of a complete image");
            }
        }
        let Some(path) = doomed(record, fate) else {
            return Ok(self.journal.commit(removed).await?);
        };
        let (custody, image) = (self.custody.clone(), path.clone());
        let owner = Owner::Volume(volume);
        blocking(move || {
            custody.check_removal(volume, &image)?;
            Ok(custody.rename(&image, &removed_path(&image), &Owner::Volume(volume)).map(drop)?)
        })
        .await?;
        // N.B. Until this is durable a restart restores the image; afterwards it deletes the image.
        if let Err(fault) = self.journal.commit(removed).await {
            self.custody.rename(&removed_path(&path), &path, &owner)?;
            return Err(fault.into());
        }
        let custody = self.custody.clone();
        let deleted = blocking(move || Ok(custody.delete(&removed_path(&path), &owner)?));
        if let Err(error) = deleted.await {
            tracing::warn!(reason = %error.message(), "the image of a removed volume stays until the next start");
        }
        Ok(())
    }
}

/// Returns what a request says about the image, or [`RequestError::Invalid`].
fn wish(record: &VolumeRecord, how: RemoveVolume) -> Result<ImageWish, RequestError> {
    match (how.keep_image, how.delete_image) {
        (false, false) => Ok(ImageWish::Unsaid),
        (true, false) => Ok(ImageWish::Keep),
        (true, true) => Err(RequestError::Invalid("an image cannot be both kept and deleted".to_owned())),
        (false, true) if record.image.is_adopted() || record.image.place.file().is_none() => {
            let place = &record.image.place;
            Err(RequestError::Invalid(format!(
                "{place} is in no folder of a store, so Sterna does not delete it; remove the volume without --delete-image"
            )))
        }
        (false, true) => Ok(ImageWish::Delete),
    }
}

/// Returns the file that is deleted with the volume, if there is one.
fn doomed(record: &VolumeRecord, fate: ImageFate) -> Option<PathBuf> {
    record.image.place.file().filter(|_| fate == ImageFate::Delete).map(PathBuf::from)
}
