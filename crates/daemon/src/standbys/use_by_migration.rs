//! A migration to the host that keeps a standby of its volumes: it begins with the standby's images, and only the rest is sent.
//!
//! ```text
//!   the offer's images are made ─► lent: *consumed*, its spools have ended, second names beside the targets, recorded as kept
//!                          ─► `images::replicas` takes the images, as when a volume comes home
//!   the migration has ended ─► used up, if the volumes are here; else given back: the standby receives again
//! ```
//! Images are lent only for all volumes of the standby together.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use migration::journal::{Outcome, Stage};
use migration::{HostId, MigrationId, VolumeId};
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::copy::{Input, LendingEnd};
use super::source::run::departure_of;
use super::{Kept, Standbys, lock};
use crate::error::RequestError;
use crate::files::folder_entries::with_suffix;
use crate::host::blocking;
use crate::images::replicas::{self, Facts};
use crate::stores::StoreKind;

/// How often it is asked whether a migration with lent images has ended.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

impl Standbys {
    /// Makes the images of standbys ones that a migration from the same host can begin with: kept images in the folders of the
    /// targets. After a failure the volumes are copied whole, and the standbys go on.
    pub(crate) async fn lend_to_migration(
        self: &Arc<Self>,
        peer: HostId,
        migration: MigrationId,
        targets: &[(VolumeId, PathBuf)],
    ) {
        for kept in self.kept_of(peer, targets) {
            match self.lend(&kept, migration).await {
                Ok(()) => {
                    tracing::info!(standby = %kept.config.name, "a migration begins with the images of a standby");
                }
                Err(reason) => {
                    tracing::warn!(standby = %kept.config.name, reason, "a migration cannot begin with a standby, and copies everything");
                }
            }
            // N.B. Also after an error: what was noted before it ends as well.
            self.await_end(kept, migration);
        }
    }

    /// Goes on with images that were lent when the daemon ended.
    pub(super) fn resume_lending(self: &Arc<Self>) {
        let Ok(book) = self.book() else { return };
        let kept: Vec<Arc<Kept>> = lock(&self.copies).values().cloned().collect();
        for kept in kept {
            match book.lent(&kept.config.id) {
                Ok(None) => {}
                Ok(Some(lent)) => self.await_end(kept, MigrationId(lent.migration)),
                Err(error) => {
                    tracing::error!(standby = %kept.config.name, %error, "it is not known to which migration a standby is lent");
                }
            }
        }
    }

    /// Returns the standbys all of whose volumes have targets in the folder of the standby's store.
    fn kept_of(&self, peer: HostId, targets: &[(VolumeId, PathBuf)]) -> Vec<Arc<Kept>> {
        let has_target = |volume: &str, folder: &Path| {
            targets.iter().any(|(known, path)| known.to_string() == volume && path.parent() == Some(folder))
        };
        let is_whole = |kept: &&Arc<Kept>| {
            kept.host() == peer
                && self.folder_of(&kept.config.store).is_ok_and(|folder| {
                    kept.config.volumes.iter().all(|known| has_target(&known.volume, &folder))
                })
        };
        lock(&self.copies).values().filter(is_whole).cloned().collect()
    }

    async fn lend(&self, kept: &Kept, migration: MigrationId) -> Result<(), String> {
        let paths = self.kept_paths(kept);
        let (answer, answered) = oneshot::channel();
        kept.copy.give(Input::Lend { migration: migration.0, to: paths.clone(), answer });
        answered.await.map_err(|_| "its keeper has ended".to_owned())??;
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
                recorded.map_err(|error| RequestError::storage("record", path, &error))?;
            }
            Ok(())
        });
        recorded.await.map_err(|error| error.message())
    }

    /// Waits for the end of the migration in the background, and takes the images back if it has failed.
    fn await_end(self: &Arc<Self>, kept: Arc<Kept>, migration: MigrationId) {
        let this = Arc::clone(self);
        tokio::spawn(async move {
            let mut reported = String::new();
            loop {
                if let Some(end) = this.lending_end(migration) {
                    match this.end_lending(&kept, end).await {
                        // A keeper that has ended: the standby is removed, or the daemon stops.
                        Ok(()) | Err(None) => return,
                        Err(Some(error)) if error != reported => {
                            tracing::warn!(standby = %kept.config.name, error, "a standby cannot go on yet after a migration");
                            reported = error;
                        }
                        Err(Some(_)) => {}
                    }
                }
                tokio::select! {
                    () = sleep(LOOK_AGAIN) => {}
                    () = this.stopping.begins() => return,
                }
            }
        });
    }

    /// Returns how a migration to this host has ended; `None`: it is under way.
    fn lending_end(&self, migration: MigrationId) -> Option<LendingEnd> {
        self.journal.read(|state| match state.migrations.get(&migration).map(|known| &known.stage) {
            Some(Stage::Ended(Outcome::Cancelled | Outcome::CancelledThere | Outcome::Failed { .. })) => {
                Some(LendingEnd::GivenBack)
            }
            // Guests may have written here, also if the volumes are back at their host.
            Some(Stage::Owned(_) | Stage::Ended(_)) => Some(LendingEnd::UsedUp),
            Some(_) => None,
            // N.B. An older journal was restored. Nothing is deleted, and nothing is written to what may be a volume's image: the
            // standby stays used until an administrator removes it.
            None => None,
        })
    }

    async fn end_lending(&self, kept: &Kept, end: LendingEnd) -> Result<(), Option<String>> {
        let paths = self.kept_paths(kept);
        let (data_dir, forgotten) = (self.data_dir.clone(), paths.clone());
        let forgotten = blocking(move || {
            forgotten.iter().try_for_each(|path| {
                replicas::forget(&data_dir, path)
                    .map_err(|error| RequestError::storage("forget", path, &error))
            })
        });
        forgotten.await.map_err(|error| Some(error.message()))?;
        let (answer, answered) = oneshot::channel();
        kept.copy.give(Input::EndLending { to: paths, end, answer });
        answered.await.map_err(|_| None)?.map_err(|error| Some(error.to_string()))
    }

    /// Returns the second names of the images, in the group's order.
    fn kept_paths(&self, kept: &Kept) -> Vec<PathBuf> {
        let Ok(store) = self.stores.get(&kept.config.store) else { return Vec::new() };
        let StoreKind::Folder { folder, .. } = store.kind() else { return Vec::new() };
        let path = |name: &str| {
            let image = folder.image_path(name, migration::journal::ImageFormat::Raw);
            with_suffix(&image, &format!(".standby-{}", kept.config.id))
        };
        kept.config.volumes.iter().map(|volume| path(&volume.name)).collect()
    }
}
