//! Makes a volume that is a copy of another one at one instant, also while that is used.
//!
//! ```text
//!   claimed ─► IMAGE.sterna-new, locked ─► the lane copies and cuts (lane::duplicate) ─► in the journal ─► IMAGE ─► served
//! ```
//! Until the journal has the new volume, a start deletes the unfinished image. The other volume is only read, and keeps its claim
//! meanwhile: it does not move, grow or go away.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::RemovedVolume;
use block::ZeroMode;
use lane::{DuplicateOrder, Duplicated, MigrationTarget, Refused, TargetContent};
use migration::custody::Owner;
use migration::journal::{ExportSettings, ImageFormat, ImageLocation, Record, VolumeRecord};

use super::create::Staged;
use crate::error::RequestError;
use crate::fail_point::{self, Step};
use crate::host::{VolumeOrders, blocking};
use crate::images::opening::{self, Allocation};
use crate::images::sharing::{self, Within};
use crate::migrations::orders::migrate::allocated_bytes;
use crate::stores::new_path;
use crate::volumes::registry::{Claim, Creation, Service};

/// How long the end of the daemon waits for the end of a copy. If that takes longer, the next start deletes its file.
const CANCELLED_WITHIN: Duration = Duration::from_secs(3);

/// An order to copy a volume.
pub(super) struct NewClone {
    pub(super) of: String,
    pub(super) name: String,
    pub(super) store: Option<String>,
    pub(super) format: Option<ImageFormat>,
    pub(super) export: ExportSettings,
}

/// A new image that is to be filled.
struct Blank {
    staged: Staged,
    /// Its unfinished name.
    new: PathBuf,
    target: MigrationTarget,
}

impl VolumeOrders {
    /// Copies a volume. After an error there is no new volume, and the other one is as before.
    pub(super) async fn clone_volume(
        self: &Arc<Self>,
        claim: &Claim,
        order: NewClone,
        creation: &Creation,
    ) -> Result<(), RequestError> {
        let (_source, volume) = self.claims.claim_to_clone(&order.of).await?;
        let record = self.claims.record(volume, &order.of)?;
        let lane = self.volumes.lane(&order.of).await?;
        let (host, from, export) = (Arc::clone(self), record.clone(), order.export.clone());
        let (of, name) = (order.of.clone(), order.name.clone());
        let Blank { staged, new, target } = blocking(move || host.make_blank(&from, &order)).await?;
        let impact = pacer::Impact::percent(self.limits.now().impact_percent);
        let shared = creation.copy.get_or_init(Arc::default);
        creation.bytes_total.store(record.size_bytes, Ordering::Relaxed);
        let order = DuplicateOrder {
            image: record.image.clone(),
            target_disk: self.serving.disk_of(&staged.image.place).await?,
            pacing: self.limits.now().mover.pacing(),
            impact,
            shared: Arc::clone(shared),
        };
        let copying = lane.duplicate(order, target);
        tokio::pin!(copying);
        let copied = tokio::select! {
            copied = &mut copying => copied,
            // N.B. A restart cannot go on with it, so that the order has to be repeated.
            () = self.stopping.begins() => {
                shared.is_cancelled.store(true, Ordering::SeqCst);
                tokio::time::timeout(CANCELLED_WITHIN, copying).await.unwrap_or(Err(Refused::Ended))
            }
        };
        if let Err(refused) = copied {
            let host = Arc::clone(self);
            blocking(move || {
                host.forget_staged(&new);
                Ok(())
            })
            .await?;
            return Err(why_not_cloned(&of, refused));
        }
        fail_point::after(Step::CreateImage);
        self.place_staged(claim, &name, staged, export).await
    }

    /// Makes the file of a copy, as large as the volume, under its unfinished name. Blocks.
    fn make_blank(&self, of: &VolumeRecord, order: &NewClone) -> Result<Blank, RequestError> {
        // An image that is served in place is in no store.
        let present = Some(of.image.store.as_str()).filter(|store| !store.is_empty());
        let store = self.stores.choose(order.store.as_deref().or(present))?;
        store.require_writable()?;
        let image = store.image_of(&order.name, order.format, of.image.format)?;
        let Some(path) = image.place.file().map(PathBuf::from) else {
            let text = "a copy of a volume is made in a store that is a folder; name one with --store";
            return Err(RequestError::Invalid(text.to_owned()));
        };
        let claim = self.journal.read(|state| store.claim(state))?;
        // N.B. Also if both share their blocks: as they are overwritten, each needs blocks of its own, and the volume that is
        // copied had room for its own before.
        store.require_space(allocated_bytes(of)?)?;
        if path.symlink_metadata().is_ok() {
            return Err(RequestError::TargetExists { path });
        }
        let new = new_path(&path);
        // The name is claimed and the store is ours, so this file is left over from a failed attempt.
        self.custody.delete(&new, &Owner::Housekeeping)?;
        fail_point::before(Step::CreateImage);
        let made = self.make_target(of, &image, &new);
        let (known, target) = made.inspect_err(|_| self.forget_staged(&new))?;
        let staged = Staged { image, size_bytes: of.size_bytes, known, _claim: claim };
        Ok(Blank { staged, new, target })
    }

    fn make_target(
        &self,
        of: &VolumeRecord,
        image: &ImageLocation,
        new: &Path,
    ) -> Result<(Option<Record>, MigrationTarget), RequestError> {
        let made = opening::create_file(new, image.format, of.size_bytes)?;
        if let Some(held) = made.held() {
            self.custody.note_made(new, held)?;
        }
        let known = self.known(&image.place, &made)?;
        let within = Within { from: &of.image, to: image, allocation: Allocation::Thin };
        let chunks = sharing::chunks(&self.stores, &within);
        let store = self.stores.impair(image, made);
        let (content, zeroes) = (TargetContent::Zero, ZeroMode::MayUnmap);
        Ok((known, MigrationTarget { store, content, zeroes, chunks }))
    }

    /// Ends the making of a copy; returns `None` if no copy of that name is being made.
    pub(super) async fn cancel_clone(&self, name: &str) -> Option<RemovedVolume> {
        let Some(Service::Creating(creation)) = self.volumes.service(name) else { return None };
        let copy: &Arc<Duplicated> = creation.copy.get()?;
        copy.is_cancelled.store(true, Ordering::SeqCst);
        loop {
            let changed = self.volumes.changed();
            match self.volumes.service(name) {
                Some(Service::Creating(present)) if Arc::ptr_eq(&present, &creation) => changed.await,
                // It was complete already.
                Some(_) => return None,
                None => break,
            }
        }
        Some(RemovedVolume {
            name: name.to_owned(),
            image: String::new(),
            image_fate: api::ImageFate::Deleted,
            kept_because: None,
            host: None,
        })
    }
}

fn why_not_cloned(of: &str, refused: Refused) -> RequestError {
    let volume = of.to_owned();
    match refused {
        Refused::Migrating(migration) => RequestError::AlreadyMigrating { volume, migration },
        Refused::Growing | Refused::Duplicating => RequestError::VolumeBusy(volume),
        Refused::Ended => RequestError::ShuttingDown,
        refused => {
            let reason = format!("it was not cloned, and nothing is left of the copy: {refused}");
            RequestError::VolumeUnavailable { volume, reason }
        }
    }
}
