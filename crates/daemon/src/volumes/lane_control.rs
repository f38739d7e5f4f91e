//! The control plane's answers to a lane: the journal's thread commits, helper threads handle images.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use chronicle::StayId;
use lane::{Control, ControlFault, HooksFault, Keeper, LaneFuture, Report, VmFault};
use migration::custody::{self, Owner};
use migration::journal::{ImageLocation, MigrationState, Moved, Record};
use migration::recovery::{self, Retirement};
use migration::{CommitFault, MigrationId, Phase, StayKey, VolumeId};
use tokio::sync::oneshot;

use crate::custody::Custody;
use crate::fail_point;
use crate::images::replicas::{self, Facts};
use crate::images::{far, half_made};
use crate::journal::{Journal, step_of};
use crate::migrations::history::Histories;
use crate::migrations::registry::Migrations;
use crate::migrations::volume_hooks::VolumeHooks;
use crate::peers::Peers;
use crate::vms::moving::VmMoves;
use crate::volumes::chronicles::Chronicles;

/// The control plane as one lane uses it. It is made on another thread, and used on the lane's.
pub(crate) struct LaneControl {
    pub(crate) volume: VolumeId,
    pub(crate) journal: Journal,
    pub(crate) migrations: Arc<Migrations>,
    pub(crate) histories: Arc<Histories>,
    pub(crate) chronicles: Chronicles,
    /// The folder of records about kept images.
    pub(crate) data_dir: PathBuf,
    /// Deletes and renames images.
    pub(crate) custody: Custody,
    pub(crate) moving: Arc<VmMoves>,
    pub(crate) volume_hooks: Arc<VolumeHooks>,
    /// Sends messages to the hosts that volumes came from.
    pub(crate) peers: Weak<Peers>,
    /// The runtime whose helper threads handle images.
    pub(crate) runtime: tokio::runtime::Handle,
}

impl LaneControl {
    pub(crate) fn into_control(self) -> Rc<dyn Control> {
        Rc::new(self)
    }

    /// Returns the running migration that leaves `image`.
    fn migration_from(&self, image: &ImageLocation) -> Option<MigrationId> {
        let leaves = |state: &MigrationState| state.volumes.iter().any(|moving| moving.source == *image);
        self.journal.read(|state| {
            let found = state.unfinished().find(|(_, migration)| leaves(migration));
            found.map(|(id, _)| id)
        })
    }

    /// Returns the images that another host reads once these records are durable, and the residencies that end then.
    fn reservoirs_left_by(&self, records: &[Record]) -> Vec<(StayKey, ImageLocation)> {
        self.journal.read(|state| {
            let released = records.iter().filter_map(|record| match record {
                Record::Released { migration, .. } => Some(*migration),
                _ => None,
            });
            let volumes = released.flat_map(|migration| state.leaves_behind(migration, records));
            let known = volumes.filter_map(|volume| state.volumes.get(&volume));
            known
                .map(|known| {
                    let stay = StayKey { volume: known.record.volume, stay: known.stay };
                    (stay, known.record.image.clone())
                })
                .collect()
        })
    }

    /// Returns the record of an image that a volume of `migration` leaves for another host, and the residency that has ended.
    fn facts(&self, image: &ImageLocation, migration: MigrationId) -> Option<(Facts, StayKey)> {
        if !replicas::is_replica(image) {
            return None;
        }
        self.journal.read(|state| {
            let left = |moved: &&Moved| moved.migration == migration && moved.volume.record.image == *image;
            let volume = &state.moved.values().find(left)?.volume;
            let record = &volume.record;
            let facts = Facts {
                volume: record.volume.to_string(),
                departure: migration.0,
                generation: record.generation.0,
                size_bytes: record.size_bytes,
            };
            Some((facts, StayKey { volume: record.volume, stay: volume.stay }))
        })
    }

    /// Runs work that may block; it begins at once, and runs to its end even if no task waits.
    fn run(
        &self,
        image: &ImageLocation,
        operation: &'static str,
        work: impl FnOnce() -> Result<(), ControlFault> + Send + 'static,
    ) -> LaneFuture<Result<(), ControlFault>> {
        self.run_after(std::future::ready(()), image, operation, work)
    }

    /// Does the same as [`LaneControl::run`], once `condition` is met.
    fn run_after(
        &self,
        condition: impl Future<Output = ()> + Send + 'static,
        image: &ImageLocation,
        operation: &'static str,
        work: impl FnOnce() -> Result<(), ControlFault> + Send + 'static,
    ) -> LaneFuture<Result<(), ControlFault>> {
        let (done, ended) = oneshot::channel();
        let runtime = self.runtime.clone();
        self.runtime.spawn(async move {
            condition.await;
            runtime.spawn_blocking(move || {
                // The lane may have ended meanwhile.
                let _ = done.send(work());
            });
        });
        let path = image.place.name().to_owned();
        Box::pin(async move {
            let stopped =
                |_| Err(ControlFault { operation, path, detail: "the daemon is stopping".to_owned() });
            ended.await.unwrap_or_else(stopped)
        })
    }
}

impl Control for LaneControl {
    fn commit(&self, records: Vec<Record>) -> LaneFuture<Result<(), CommitFault>> {
        records.iter().filter_map(step_of).for_each(fail_point::in_lane);
        let has_filled = records.iter().any(|record| matches!(record, Record::Filled { .. }));
        let (journal, runtime) = (self.journal.clone(), self.runtime.clone());
        let ending: Vec<Record> =
            records.iter().filter(|record| custody::completes(record)).cloned().collect();
        let unasked = self.journal.read(|state| recovery::asked_by_itself(state, &records));
        let left = self.reservoirs_left_by(&records);
        let migrations = Arc::clone(&self.migrations);
        // Commits are queued in the order of their calls.
        let (chronicles, queued) =
            (self.chronicles.clone(), left.is_empty().then(|| self.journal.commit(records.clone())));
        let peers = Weak::clone(&self.peers);
        Box::pin(async move {
            match queued {
                Some(committed) => committed.await?,
                None => {
                    // N.B. The attributes first: after a restart the other host reads the image only if they are unchanged.
                    let noted = runtime.spawn_blocking(move || {
                        left.iter().for_each(|(stay, image)| chronicles.close_image(*stay, image));
                    });
                    drop(noted.await);
                    journal.commit(records).await?;
                }
            }
            if !ending.is_empty() {
                // N.B. The mark is removed before the lane is answered: guests write to the image after that, and a marked image
                // may be deleted.
                let unmarked = runtime.spawn_blocking(move || half_made::unmark_completed(&journal, &ending));
                // If a mark remains, `retention` tries again.
                drop(unmarked.await);
            }
            if has_filled {
                // A migration of the volume may wait for this.
                migrations.turn();
            }
            if let Some(peers) = peers.upgrade() {
                for (source, migration, asked) in unasked {
                    peers.answer_unasked(source, migration, &asked);
                }
            }
            Ok(())
        })
    }

    fn retire(&self, image: ImageLocation, retirement: Retirement) -> LaneFuture<Result<(), ControlFault>> {
        let Some(migration) = self.migration_from(&image) else {
            // The kept image's name needs a migration.
            let detail = "no migration under way leaves it".to_owned();
            let fault = ControlFault { operation: "retire", path: image.place.name().to_owned(), detail };
            return Box::pin(std::future::ready(Err(fault)));
        };
        let (location, facts) = (image.clone(), self.facts(&image, migration));
        let (data_dir, chronicles) = (self.data_dir.clone(), self.chronicles.clone());
        let custody = self.custody.clone();
        // N.B. Retired only once all of the VM's memory is sent: the hypervisor here has pages that the target lacks.
        let gone = self.moving.memory_has_gone(migration);
        self.run_after(gone, &location, "retire", move || {
            let kept = custody.retire(&image, retirement, migration)?;
            if let (Some((facts, stay)), Some(kept)) = (facts, kept) {
                if !chronicles.vouches(stay) {
                    tracing::warn!(path = %kept.display(), "the kept image may lack writes: a flush of it failed, or could not \
                        be recorded; the return will copy everything");
                } else if let Err(error) = replicas::record(&data_dir, &kept, facts) {
                    tracing::warn!(path = %kept.display(), %error, "the return will copy everything");
                }
            }
            Ok(())
        })
    }

    fn confirm(&self, image: &ImageLocation) -> Option<LaneFuture<Result<(), ControlFault>>> {
        let (custody, place) = (self.custody.clone(), image.place.clone());
        Some(self.run(image, "confirm", move || Ok(custody.confirm_filled(&place)?)))
    }

    fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        let is_it = |state: &MigrationState| state.volumes.iter().any(|moving| moving.target == image);
        let (filled_by, is_read) = self.journal.read(|state| {
            let found = state.migrations.iter().rev().find(|(_, migration)| is_it(migration));
            (found.map(|(id, _)| *id), state.is_reservoir(image.place.name()))
        });
        let (Some(migration), false) = (filled_by, is_read) else {
            // Another host reads it, or it belongs to no migration.
            return Box::pin(std::future::ready(Ok(())));
        };
        let (location, custody) = (image.clone(), self.custody.clone());
        let owner = Owner::Migration(migration);
        self.run(&location, "delete", move || Ok(custody.discard(&image, &owner)?))
    }

    fn keeper(&self) -> Option<Rc<dyn Keeper>> {
        Some(self.chronicles.keeper())
    }

    fn store_starts_alone(&self) -> bool {
        let place = self.journal.read(|state| {
            let here = state.volumes.get(&self.volume).map(|known| &known.record);
            here.map(|record| record.image.place.clone())
        });
        // An unknown place is not trusted.
        place.is_none_or(|place| far::starts_alone(&place))
    }

    fn store_closed(&self, stay: StayId) {
        let known = self.journal.read(|state| {
            let known = state.volumes.get(&self.volume)?;
            (known.stay == stay).then(|| known.record.image.clone())
        });
        if let Some(image) = known {
            self.chronicles.close_image(StayKey { volume: self.volume, stay }, &image);
        }
    }

    fn stop_vm(
        &self,
        migration: MigrationId,
        paused: futures_channel::oneshot::Sender<()>,
    ) -> LaneFuture<Result<(), VmFault>> {
        let stopped = self.moving.stop(migration, paused);
        Box::pin(async move { stopped.await.map_err(|fault| VmFault::new(fault.to_string())) })
    }

    fn run_hooks(&self, migration: MigrationId) -> LaneFuture<Result<(), HooksFault>> {
        let run = self.volume_hooks.run(migration);
        Box::pin(async move { run.await.map_err(|fault| HooksFault::new(fault.to_string())) })
    }

    fn run_vm(&self, migration: MigrationId) -> LaneFuture<Result<(), VmFault>> {
        let runs = self.moving.run(migration);
        Box::pin(async move { runs.await.map_err(|fault| VmFault::new(fault.to_string())) })
    }

    fn entered(&self, migration: MigrationId, phase: Phase) {
        self.moving.entered(migration, phase);
        self.volume_hooks.entered(migration, phase);
    }

    fn report(&self, report: Report) {
        match report {
            Report::Recorded { migration, recorded } => {
                self.histories.record(migration, recorded, &self.runtime);
            }
            Report::RecordingEnded { migration } => self.histories.recording_ended(migration, &self.runtime),
            Report::Ended { migration, .. } => {
                self.histories.migration_ended(migration, &self.runtime);
                self.migrations.report(report);
            }
            Report::DataPath { migration, volume, way } => {
                self.migrations.note_way(&self.journal, &self.runtime, migration, volume, way);
            }
            Report::Progress { .. } => self.migrations.report(report),
        }
    }
}
