//! Reverts volumes to snapshots of them.
//!
//! ```text
//!   claimed, no client ─► begun, durably, for all ─► lanes end ─► lanes begin again, gates closed ─► lane::revert ─► reverted ─► served
//!                                                        ▲ a start of the daemon continues here
//! ```
//! Until a volume is reverted it is not served, copied, moved or grown, and its snapshot is not removed.

use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use migration::VolumeId;
use migration::journal::{ExportAccess, Record, VolumeRecord};

use super::snapshot::label_of;
use crate::error::{RequestError, SnapshotError};
use crate::host::{VolumeOrders, blocking};
use crate::journal::now_unix_ms;
use crate::volumes::registry::{Claim, Service};

/// A volume that is about to be reverted, claimed with its snapshot.
struct Reverting {
    name: String,
    volume: VolumeId,
    snapshot: VolumeId,
    claim: Claim,
    _snapshot_claim: Claim,
}

impl VolumeOrders {
    /// Reverts volumes, all or none; returns once they are served again. After an error that names a volume which is not served, the
    /// order stands, and is tried again.
    pub(crate) async fn revert_volumes(
        self: Arc<Self>,
        order: api::RevertVolumes,
    ) -> Result<Vec<api::Volume>, RequestError> {
        let api::RevertVolumes { volumes, vm, snapshot, keep_current } = order;
        let volumes = self.volumes_of_order(volumes, vm.as_deref())?;
        for name in &volumes {
            self.refuse_revert_in_use(name).await?;
        }
        // Found before anything is kept.
        let snapshots: Result<Vec<_>, _> =
            volumes.iter().map(|name| self.snapshot_named(name, &snapshot)).collect();
        let snapshots = snapshots?;
        if keep_current {
            let label =
                Some(self.free_label(&volumes, &format!("before-revert-{}", label_of(now_unix_ms()))));
            let kept = api::NewSnapshot { volumes: volumes.clone(), vm: None, label, store: None };
            Arc::clone(&self).take_snapshots(kept).await?;
        }
        let mut reverting = Vec::new();
        for (name, snapshot) in volumes.iter().zip(snapshots) {
            reverting.push(self.claim_to_revert(name, &snapshot).await?);
        }
        // All of them, before any is changed.
        for one in &reverting {
            self.check_snapshot_is_whole(one).await?;
        }
        let reverts = reverting.iter().map(|one| (one.volume, one.snapshot)).collect();
        self.journal.commit(vec![Record::RevertBegun { reverts }]).await?;
        for one in &reverting {
            if let Some(Service::Serving(lane)) = one.claim.removing() {
                lane.stop(self.limits.now().stop_wait_max).await;
            }
            one.claim.not_removed();
            self.serving.serve_in_background(&one.name);
        }
        let mut shown = Vec::new();
        for one in &reverting {
            self.until_reverted(one).await?;
            tracing::info!(volume = %one.name, %snapshot, "volume reverted");
        }
        drop(reverting);
        for name in volumes {
            shown.push(self.views.describe_volume(&name).await?);
        }
        Ok(shown)
    }

    /// Claims a volume and its snapshot, and checks that the one can become equal to the other.
    async fn claim_to_revert(&self, name: &str, snapshot: &str) -> Result<Reverting, RequestError> {
        let (claim, volume) = self.claims.claim_to_clone(name).await?;
        self.claims.require_unordered(volume, name)?;
        let (snapshot_claim, snapshot_id) = self.claims.claim_to_clone(snapshot).await?;
        let record = self.claims.record(volume, name)?;
        let kept = self.claims.record(snapshot_id, snapshot)?;
        let is_of = |taken: &migration::journal::SnapshotOf| taken.volume == volume;
        if !self.journal.read(|state| state.snapshots.get(&snapshot_id).is_some_and(is_of)) {
            let (volume, snapshot) = (name.to_owned(), snapshot.to_owned());
            return Err(SnapshotError::NotFound { volume, snapshot }.into());
        }
        if record.export.access == ExportAccess::ReadOnly {
            return Err(SnapshotError::ReadOnly(name.to_owned()).into());
        }
        if kept.size_bytes > record.size_bytes {
            let (volume, snapshot) = (name.to_owned(), snapshot.to_owned());
            return Err(SnapshotError::Larger { volume, snapshot }.into());
        }
        // Again, as no client was kept away until the claim.
        self.refuse_revert_in_use(name).await?;
        let name = name.to_owned();
        Ok(Reverting { name, volume, snapshot: snapshot_id, claim, _snapshot_claim: snapshot_claim })
    }

    /// Checks that a snapshot's image is there as it was, and that the store has room for what the volume certainly lacks of it.
    async fn check_snapshot_is_whole(self: &Arc<Self>, one: &Reverting) -> Result<(), RequestError> {
        let record = self.claims.record(one.volume, &one.name)?;
        let kept = self.claims.record(one.snapshot, &one.name)?;
        let opened = self.serving.open_snapshot(&kept).await;
        drop(opened.map_err(|error| SnapshotError::Unusable {
            volume: one.name.clone(),
            snapshot: kept.name.clone(),
            reason: error.message(),
        })?);
        let host = Arc::clone(self);
        blocking(move || {
            let allocated = |record: &VolumeRecord| {
                let file = record.image.place.file()?;
                Some(std::fs::metadata(file).ok()?.blocks() * 512)
            };
            let needed = allocated(&kept)
                .zip(allocated(&record))
                .map_or(0, |(kept, present)| kept.saturating_sub(present));
            // A store that does not answer says so when it is written.
            let space =
                host.stores.get(&record.image.store).ok().and_then(|store| store.space().ok().flatten());
            match space.filter(|space| space.free < needed) {
                Some(space) => {
                    Err(RequestError::NoSpace { store: record.image.store.clone(), free: space.free, needed })
                }
                None => Ok(()),
            }
        })
        .await
    }

    /// Returns the name of a volume's snapshot that was given by its label or its name.
    fn snapshot_named(&self, volume: &str, given: &str) -> Result<String, RequestError> {
        let record = self.claims.record_named(volume)?;
        let found = self.journal.read(|state| {
            let mut snapshots = state.snapshots_of(record.volume);
            let is_it = |id: &VolumeId, label: &str| {
                label == given || state.volumes.get(id).is_some_and(|known| known.record.name == given)
            };
            let (id, _) = snapshots.find(|(id, taken)| is_it(id, &taken.label))?;
            Some(state.volumes.get(&id)?.record.name.clone())
        });
        found.ok_or_else(|| {
            SnapshotError::NotFound { volume: volume.to_owned(), snapshot: words::clean(given) }.into()
        })
    }

    async fn refuse_revert_in_use(&self, name: &str) -> Result<(), RequestError> {
        self.claims.refuse_suspended(name)?;
        if self.vms.runs_on(name) {
            let vm = self.vms.user_of(name).unwrap_or_default();
            return Err(SnapshotError::VmRuns(vm).into());
        }
        if let Some(adopted) = self.vms.adoptions()?.find(|adopted| adopted.uses(name)) {
            return Err(SnapshotError::VmRuns(adopted.name).into());
        }
        match self.refuse_in_use(name, api::RemoveVolume::default()).await {
            Err(RequestError::VolumeInUse { volume, clients }) => {
                Err(SnapshotError::InUse { volume, clients }.into())
            }
            other => other,
        }
    }

    /// Resolves when a volume is served again, or cannot be.
    async fn until_reverted(&self, one: &Reverting) -> Result<(), RequestError> {
        loop {
            let changed = self.volumes.changed();
            match self.volumes.service(&one.name) {
                Some(Service::Serving(_)) => return Ok(()),
                Some(Service::Failed(reason)) => {
                    return Err(RequestError::VolumeUnavailable { volume: one.name.clone(), reason });
                }
                None => return Err(RequestError::VolumeNotFound(one.name.clone())),
                Some(_) => {}
            }
            tokio::select! {
                () = changed => {}
                () = self.stopping.begins() => return Err(RequestError::ShuttingDown),
            }
        }
    }
}
