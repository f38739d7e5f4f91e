//! Makes a volume that is a copy of another one at one instant, also while that is used.
//!
//! ```text
//!   claimed ─► IMAGE.sterna-new, locked ─► the lane copies and cuts (lane::duplicate) ─► in the journal ─► IMAGE ─► served
//! ```
//! Several volumes are copied together, and cut off at one instant ([`super::cutting`]): for snapshots.
//!
//! Until the journal has the new volume, a start deletes the unfinished image. The other volume is only read, and keeps its claim
//! meanwhile: it does not move, grow or go away.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use api::RemovedVolume;
use block::ZeroMode;
use futures_channel::mpsc;
use lane::{
    Company, CutLine, DuplicateOrder, Duplicated, LaneHandle, MigrationTarget, Refused, TargetContent,
    TimeLimits,
};
use migration::custody::Owner;
use migration::duplication::DuplicationEvent;
use migration::journal::{ExportSettings, ImageFormat, ImageLocation, Record, VolumeRecord};

use super::create::{Placed, Staged};
use super::cutting::{self, Lines};
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
        let (name, export) = (order.name.clone(), order.export.clone());
        let mut staged = self.copy_volumes(vec![(order, creation)]).await?;
        fail_point::after(Step::CreateImage);
        // There is one for each order.
        let staged = staged.pop().ok_or_else(|| RequestError::Internal("a copy is missing".to_owned()))?;
        self.place_staged(vec![Placed { claim, name, staged, export, taken: None }]).await
    }

    /// Makes the images of copies that are cut off at one instant, under their unfinished names. After an error nothing is left.
    pub(super) async fn copy_volumes(
        self: &Arc<Self>,
        orders: Vec<(NewClone, &Creation)>,
    ) -> Result<Vec<Staged>, RequestError> {
        let company = if orders.len() == 1 { Company::Alone } else { Company::Group };
        let mut parts = Vec::new();
        let mut claims = Vec::new();
        let mut needed = BTreeMap::<String, u64>::new();
        for (order, creation) in orders {
            let prepared = async {
                let (claim, volume) = self.claims.claim_to_clone(&order.of).await?;
                claims.push(claim);
                let record = self.claims.record(volume, &order.of)?;
                let lane = self.volumes.lane(&order.of).await?;
                let (host, from, of) = (Arc::clone(self), record.clone(), order.of.clone());
                // All of them must find room.
                let mut spaces = std::mem::take(&mut needed);
                let (blank, spaces) = blocking(move || {
                    let blank = host.make_blank(&from, &order, &mut spaces)?;
                    Ok((blank, spaces))
                })
                .await?;
                needed = spaces;
                Ok::<_, RequestError>((of, lane, record, blank, creation))
            };
            match prepared.await {
                Ok(part) => parts.push(part),
                Err(error) => {
                    let blanks = parts.into_iter().map(|(_, _, _, blank, _)| blank.new).collect();
                    self.forget_all_staged(blanks).await?;
                    return Err(error);
                }
            }
        }
        self.copy_parts(parts, company).await
    }

    async fn copy_parts(
        self: &Arc<Self>,
        parts: Vec<(String, LaneHandle, VolumeRecord, Blank, &Creation)>,
        company: Company,
    ) -> Result<Vec<Staged>, RequestError> {
        let impact = pacer::Impact::percent(self.limits.now().impact_percent);
        let (reports, reported) = mpsc::unbounded();
        let mut lines = Lines { reported, orders: Vec::new(), shared: Vec::new() };
        let (mut copies, mut staged, mut new) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (of, lane, record, blank, creation)) in parts.into_iter().enumerate() {
            let shared = creation.copy.get_or_init(Arc::default);
            creation.bytes_total.store(record.size_bytes, Ordering::Relaxed);
            lines.shared.push(Arc::clone(shared));
            let (ordering, orders) = mpsc::unbounded();
            lines.orders.push(ordering);
            new.push(blank.new);
            let disk = self.serving.disk_of(&blank.staged.image.place).await;
            staged.push(blank.staged);
            let order = disk.map(|target_disk| DuplicateOrder {
                image: record.image.clone(),
                target_disk,
                pacing: self.limits.now().mover.pacing(),
                impact,
                shared: Arc::clone(shared),
                company,
            });
            let (line, target) = (CutLine { index, reports: reports.clone(), orders }, blank.target);
            let reports = reports.clone();
            copies.push(async move {
                let copied = match order {
                    Ok(order) => lane
                        .duplicate(order, target, line)
                        .await
                        .map_err(|refused| why_not_cloned(&of, refused)),
                    Err(error) => Err(error),
                };
                if copied.is_err() {
                    // The other copies of the order end as well.
                    let _ = reports.unbounded_send(DuplicationEvent::Failed);
                }
                copied
            });
        }
        let shared = lines.shared.clone();
        let held_max = self.limits.now().mirror_wait_max.min(TimeLimits::default().switch_over_max);
        let copying = futures_util::future::join_all(copies);
        let conducting = cutting::conduct(lines, held_max);
        tokio::pin!(copying, conducting);
        let mut gives_up_at = None;
        let outcome = loop {
            let late = async {
                match gives_up_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => self.stopping.begins().await,
                }
            };
            tokio::select! {
                outcome = &mut copying => break outcome.into_iter().collect::<Result<Vec<()>, _>>(),
                () = &mut conducting => {}
                () = late => {
                    if gives_up_at.is_some() {
                        break Err(RequestError::ShuttingDown);
                    }
                    // N.B. A restart cannot go on with it, so that the order has to be repeated.
                    shared.iter().for_each(|shared| shared.is_cancelled.store(true, Ordering::SeqCst));
                    gives_up_at = Some(tokio::time::Instant::now() + CANCELLED_WITHIN);
                }
            }
        };
        if let Err(error) = outcome {
            self.forget_all_staged(new).await?;
            return Err(error);
        }
        Ok(staged)
    }

    /// Deletes images under their unfinished names.
    async fn forget_all_staged(self: &Arc<Self>, new: Vec<PathBuf>) -> Result<(), RequestError> {
        let host = Arc::clone(self);
        blocking(move || {
            new.iter().for_each(|new| host.forget_staged(new));
            Ok(())
        })
        .await
    }

    /// Makes the file of a copy, as large as the volume, under its unfinished name; adds what it needs to what each store must have
    /// room for. Blocks.
    fn make_blank(
        &self,
        of: &VolumeRecord,
        order: &NewClone,
        needed: &mut BTreeMap<String, u64>,
    ) -> Result<Blank, RequestError> {
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
        let bytes = needed.entry(image.store.clone()).or_default();
        *bytes += allocated_bytes(of)?;
        store.require_space(*bytes)?;
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
            snapshots: Vec::new(),
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
