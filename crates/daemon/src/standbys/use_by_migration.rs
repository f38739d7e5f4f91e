//! A migration of a volume to the host that keeps its standby: it begins with the standby's image, and only the rest is sent.
//!
//! ```text
//!   an offer for the volume ─► the machine: *used* durable, its spools have ended ─► images moved beside the target, recorded as kept
//!                          ─► `images::replicas` takes the image, as when a volume comes home
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use migration::{HostId, VolumeId};
use tokio::sync::oneshot;

use super::copy::Input;
use super::source::run::departure_of;
use super::{Kept, Standbys, lock};
use crate::files::folder_entries::with_suffix;
use crate::host::blocking;
use crate::images::replicas::{self, Facts};
use crate::stores::StoreKind;

impl Standbys {
    /// Makes the image of a volume's standby one that a migration from the same host can begin with: a kept image in the folder of
    /// `target`. Does nothing if there is none there. After a failure the volume is copied whole.
    pub(crate) async fn give_to_migration(&self, peer: HostId, volume: VolumeId, target: &Path) {
        let Some(kept) = self.kept_of(peer, volume, target) else { return };
        match self.give(&kept).await {
            Ok(()) => tracing::info!(standby = %kept.config.name, "a migration uses the images of a standby"),
            Err(reason) => {
                tracing::warn!(standby = %kept.config.name, reason, "a migration cannot use a standby, and copies everything");
            }
        }
    }

    fn kept_of(&self, peer: HostId, volume: VolumeId, target: &Path) -> Option<Arc<Kept>> {
        let has = |kept: &&Arc<Kept>| {
            kept.host() == peer
                && kept.config.volumes.iter().any(|known| known.volume == volume.to_string())
                && self.folder_of(&kept.config.store).is_ok_and(|folder| target.parent() == Some(&*folder))
        };
        lock(&self.copies).values().find(has).cloned()
    }

    async fn give(&self, kept: &Kept) -> Result<(), String> {
        let (answer, answered) = oneshot::channel();
        kept.copy.give(Input::Consume { answer });
        let at = answered.await.map_err(|_| "it has ended, or its files cannot be used".to_owned())??;
        let paths: Vec<PathBuf> =
            kept.config.volumes.iter().filter_map(|volume| self.kept_path(kept, &volume.name)).collect();
        let (answer, answered) = oneshot::channel();
        kept.copy.give(Input::Release { to: paths.clone(), answer });
        let moved = answered.await.map_err(|_| "its keeper has ended".to_owned())?;
        moved.map_err(|error| error.to_string())?;
        if at.is_none() {
            return Err("it never had everything".to_owned());
        }
        let Some(standby) = super::parse(&kept.config.id) else { return Ok(()) };
        let volumes: Vec<_> = kept.config.volumes.clone();
        let data_dir = self.data_dir.clone();
        let recorded = blocking(move || {
            for (volume, path) in volumes.iter().zip(&paths) {
                let facts = Facts {
                    volume: volume.volume.clone(),
                    departure: departure_of(standby),
                    generation: 0,
                    size_bytes: std::fs::metadata(path).map_or(volume.size_bytes, |found| found.len()),
                };
                let recorded = replicas::record(&data_dir, path, facts);
                recorded.map_err(|error| crate::error::RequestError::storage("record", path, &error))?;
            }
            Ok(())
        });
        recorded.await.map_err(|error| error.message())
    }

    fn kept_path(&self, kept: &Kept, volume: &str) -> Option<PathBuf> {
        let StoreKind::Folder { folder, .. } = self.stores.get(&kept.config.store).ok()?.kind() else {
            return None;
        };
        let image = folder.image_path(volume, migration::journal::ImageFormat::Raw);
        Some(with_suffix(&image, &format!(".standby-{}", kept.config.id)))
    }
}
