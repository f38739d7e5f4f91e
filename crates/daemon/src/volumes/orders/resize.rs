//! Grows volumes. `lane::growth` does it while guests work; this file checks requests and reports the result.
//!
//! ```text
//!   request ──► checks ──► lane: begun, durably ─► images larger ─► resized, durably ─► shown
//!   start of a volume whose growth was interrupted ──► image larger, or as before ──► resized, durably ──► served
//! ```

use std::sync::Arc;

use lane::{Refused, StoreRole};
use migration::VolumeId;
use migration::journal::{ExportAccess, MigrationState, Place, Side, VolumeRecord};

use crate::error::{RequestError, SnapshotError};
use crate::host::{VolumeOrders, blocking};
use crate::images::SIZE_STEP_BYTES;

impl VolumeOrders {
    /// Grows a volume, and the target store of its migration. After an error it has its old size.
    pub(crate) async fn resize_volume(
        self: Arc<Self>,
        name: String,
        order: api::ResizeVolume,
    ) -> Result<api::Volume, RequestError> {
        let size = order.size_bytes;
        self.claims.settled(&name).await;
        let (_claim, volume) = self.volumes.claim(&name)?;
        self.claims.refuse_suspended(&name)?;
        self.claims.check_whole(volume, &name)?;
        let record = self.claims.record(volume, &name)?;
        if self.journal.read(|state| state.snapshots.contains_key(&volume)) {
            return Err(SnapshotError::OfSnapshot(name).into());
        }
        check_new_size(&record, size)?;
        if size != record.size_bytes {
            if !order.beyond_store {
                self.check_fits_store(&record, size).await?;
            }
            let lane = self.volumes.lane(&name).await?;
            lane.grow(size).await.map_err(|refused| self.why_not_grown(&record, size, refused))?;
            tracing::info!(volume = %name, from = record.size_bytes, to = size, "volume resized");
            self.show_growth(&name, size).await;
        }
        self.views.describe_volume(&name).await
    }

    /// Refuses a size that no amount of room in the store's file system could hold: a volume never shrinks.
    async fn check_fits_store(
        self: &Arc<Self>,
        record: &VolumeRecord,
        size: u64,
    ) -> Result<(), RequestError> {
        // A device, or an export, says itself how large a volume can be.
        if record.image.place.file().is_none() {
            return Ok(());
        }
        let (host, store) = (Arc::clone(self), record.image.store.clone());
        // A volume that is served in place has no store. A store that does not answer is no reason to refuse.
        let looked = blocking(move || Ok(host.stores.get(&store)?.space().ok().flatten())).await;
        match looked.ok().flatten() {
            Some(space) if size > space.total => Err(RequestError::BeyondStore {
                volume: record.name.clone(),
                asked: size,
                store: record.image.store.clone(),
                total: space.total,
            }),
            _ => Ok(()),
        }
    }

    fn why_not_grown(&self, record: &VolumeRecord, needed: u64, refused: Refused) -> RequestError {
        let volume = record.name.clone();
        // Images of other hosts do not grow with their volume.
        if let Refused::NotGrown { store: StoreRole::Target, .. } = refused
            && let Some(migration) = self.departure_of(record.volume)
        {
            return RequestError::AlreadyMigrating { volume, migration };
        }
        let reason = match refused {
            Refused::Shrinks { size_bytes } => {
                return RequestError::Shrinks { volume, size: size_bytes, asked: needed };
            }
            Refused::NotRecorded(fault) => return fault.into(),
            Refused::Growing => return RequestError::VolumeBusy(volume),
            Refused::Migrating(migration) | Refused::HandingOver(migration) => {
                return RequestError::AlreadyMigrating { volume, migration };
            }
            Refused::NoRoom { store, capacity_bytes } => {
                let (place, which) = self.place_of(record, store);
                let advice = match place {
                    Place::File(_) => "no image of this kind can be as large",
                    Place::Device(_) => "make the device larger first",
                    Place::Nbd(_) => "have its server make the export larger first",
                };
                format!("{which} has room for {capacity_bytes} bytes: {advice}")
            }
            Refused::NotGrown { store, error } => {
                let (_, which) = self.place_of(record, store);
                format!("{which} cannot grow: {error}")
            }
            refused => refused.to_string(),
        };
        RequestError::CannotGrow { volume, needed, reason }
    }

    fn place_of(&self, record: &VolumeRecord, store: StoreRole) -> (Place, String) {
        let target = match store {
            StoreRole::Owner => None,
            StoreRole::Target => self.target_of(record.volume),
        };
        match target {
            None => (record.image.place.clone(), record.image.place.to_string()),
            Some((migration, place)) => {
                let which = format!(
                    "{place}, the target of {migration} (cancel that with: sterna migration cancel {migration}),"
                );
                (place, which)
            }
        }
    }

    fn departure_of(&self, volume: VolumeId) -> Option<migration::MigrationId> {
        self.journal.read(|state| {
            let leaves = |migration: &MigrationState| {
                matches!(migration.side, Side::Outgoing { .. })
                    && migration.volumes.iter().any(|moving| moving.volume == volume)
            };
            state.unfinished().find(|(_, migration)| leaves(migration)).map(|(id, _)| id)
        })
    }

    fn target_of(&self, volume: VolumeId) -> Option<(migration::MigrationId, Place)> {
        self.journal.read(|state| {
            state.unfinished().find_map(|(id, migration)| {
                let moving = migration.volumes.iter().find(|moving| moving.volume == volume)?;
                Some((id, moving.target.place.clone()))
            })
        })
    }
}

fn check_new_size(record: &VolumeRecord, size: u64) -> Result<(), RequestError> {
    let volume = record.name.clone();
    if size < record.size_bytes {
        return Err(RequestError::Shrinks { volume, size: record.size_bytes, asked: size });
    }
    if size == record.size_bytes {
        return Ok(());
    }
    if !size.is_multiple_of(SIZE_STEP_BYTES) {
        let next = size.checked_next_multiple_of(SIZE_STEP_BYTES).unwrap_or(SIZE_STEP_BYTES);
        let detail =
            format!("the size {size} is no multiple of {SIZE_STEP_BYTES} bytes; the next one is {next}");
        return Err(RequestError::Invalid(detail));
    }
    if record.export.access == ExportAccess::ReadOnly {
        let reason = "it is served read-only; remove it, and add it again to be written".to_owned();
        return Err(RequestError::CannotGrow { volume, needed: size, reason });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use chronicle::Generation;
    use migration::VolumeId;
    use migration::journal::{ExportAccess, ExportSettings, ImageLocation, VolumeRecord};

    use super::check_new_size;

    #[test]
    fn sizes_are_multiples_of_a_block_and_never_smaller_and_what_is_read_only_stays() {
        let record = |access| VolumeRecord {
            volume: VolumeId([1; 16]),
            name: "v".into(),
            size_bytes: 8192 + 512,
            block_size_bytes: 65536,
            image: ImageLocation::raw_file("", "/v.img"),
            generation: Generation(0),
            export: ExportSettings { access, ..ExportSettings::default() },
        };
        let check = |size| check_new_size(&record(ExportAccess::ReadWrite), size);
        assert!(check(8192 + 512).is_ok() && check(12_288).is_ok());
        let shrunk = check(8192).unwrap_err();
        assert!(shrunk.to_string().contains("never shrink"), "{shrunk}");
        let odd = check(8192 + 1024).unwrap_err();
        assert!(odd.to_string().ends_with("the next one is 12288"), "{odd}");
        assert!(check(u64::MAX).is_err());
        let read_only = check_new_size(&record(ExportAccess::ReadOnly), 12_288).unwrap_err();
        assert!(read_only.to_string().contains("read-only"), "{read_only}");
    }
}
