//! What a lane asks of the control plane: the journal's thread commits, helper threads handle images.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use chronicle::StayId;
use lane::{Control, ControlFault, HooksFault, Keeper, LaneFuture, Report, VmFault};
use migration::journal::{ImageLocation, MigrationState, Moved, Record};
use migration::recovery::{self, Retirement};
use migration::{CommitFault, MigrationId, Phase, StayKey, VolumeId};
use tokio::sync::oneshot;

use crate::fail_point;
use crate::images;
use crate::images::replicas::{self, Facts};
use crate::journal::{Journal, step_of};
use crate::migrations::history::Histories;
use crate::migrations::registry::Migrations;
use crate::migrations::volume_hooks::VolumeHooks;
use crate::peers::Peers;
use crate::vms::moving::VmMoves;
use crate::volumes::chronicles::Chronicles;

/// The control plane as one lane sees it; made on another thread, used on the lane's.
pub(crate) struct LaneControl {
    /// Whose lane it is.
    pub(crate) volume: VolumeId,
    pub(crate) journal: Journal,
    pub(crate) migrations: Arc<Migrations>,
    pub(crate) histories: Arc<Histories>,
    pub(crate) chronicles: Chronicles,
    /// Where records of what is kept of volumes that have left are.
    pub(crate) data_dir: PathBuf,
    pub(crate) moving: Arc<VmMoves>,
    pub(crate) volume_hooks: Arc<VolumeHooks>,
    /// Which tell the hosts that volumes came from.
    pub(crate) peers: Weak<Peers>,
    /// Whose helper threads handle images.
    pub(crate) runtime: tokio::runtime::Handle,
}

impl LaneControl {
    /// As the lane takes it.
    pub(crate) fn into_control(self) -> Rc<dyn Control> {
        Rc::new(self)
    }

    /// The migration under way that leaves `image`.
    fn migration_from(&self, image: &ImageLocation) -> Option<MigrationId> {
        let leaves = |state: &MigrationState| state.volumes.iter().any(|moving| moving.source == *image);
        self.journal.read(|state| {
            let found = state.unfinished().find(|(_, migration)| leaves(migration));
            found.map(|(id, _)| id)
        })
    }

    /// What is to be known of an image that a volume of `migration` leaves for another host, and the stay that has ended.
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

    /// Runs work that may sleep; begins at once, and ends also when nobody waits.
    fn run(
        &self,
        image: &ImageLocation,
        operation: &'static str,
        work: impl FnOnce() -> Result<(), ControlFault> + Send + 'static,
    ) -> LaneFuture<Result<(), ControlFault>> {
        self.run_after(std::future::ready(()), image, operation, work)
    }

    /// As [`LaneControl::run`], when `condition` is met.
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
        let unasked = self.journal.read(|state| recovery::asked_by_itself(state, &records));
        let (migrations, committed) = (Arc::clone(&self.migrations), self.journal.commit(records));
        let peers = Weak::clone(&self.peers);
        Box::pin(async move {
            committed.await?;
            if has_filled {
                // A migration of the volume may wait for that.
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
            // The name under which it is kept would not say why.
            let detail = "no migration under way leaves it".to_owned();
            let fault = ControlFault { operation: "retire", path: image.place.name().to_owned(), detail };
            return Box::pin(std::future::ready(Err(fault)));
        };
        let (location, facts) = (image.clone(), self.facts(&image, migration));
        let (data_dir, chronicles) = (self.data_dir.clone(), self.chronicles.clone());
        // N.B. not before all of the VM's memory has gone: its hypervisor here has what is missing there.
        let gone = self.moving.memory_has_gone(migration);
        self.run_after(gone, &location, "retire", move || {
            images::retire(&image, retirement, migration)?;
            if let (Retirement::Keep, Some((facts, stay)), Some(path)) =
                (retirement, facts, image.place.file())
            {
                let kept = images::fenced_path(std::path::Path::new(path), migration);
                if !chronicles.vouches(stay) {
                    tracing::warn!(path = %kept.display(), "the image that is kept may lack what was written: a flush of it failed, or could not be recorded; the way home will be a whole copy");
                } else if let Err(error) = replicas::record(&data_dir, &kept, facts) {
                    tracing::warn!(path = %kept.display(), %error, "the way home will be a whole copy");
                }
            }
            Ok(())
        })
    }

    fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        if self.journal.read(|state| state.is_reservoir(image.place.name())) {
            return Box::pin(std::future::ready(Ok(())));
        }
        let location = image.clone();
        self.run(&location, "delete", move || images::discard(&image))
    }

    fn keeper(&self) -> Option<Rc<dyn Keeper>> {
        Some(self.chronicles.keeper())
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
