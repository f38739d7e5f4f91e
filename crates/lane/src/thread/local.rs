//! A migration to another store of the same host: both halves run on the volume's lane.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{BlockDevice, ZeroMode};
use chronicle::{Generation, ReplicaOf};
use migration::journal::Outcome;
use migration::{Carried, MigrationId};
use tracing::warn;

use super::Lane;
use crate::driver::{Chunks, GivesWay, LocalDriver, Plan, PlannedVolume, TargetContent, TimeLimits};
use crate::handle::{MigrationOrder, MigrationTarget, Rest};
use crate::refused::Refused;
use crate::resuming;

/// How long a lane lets its driver report progress before it ends.
const REPORT_TAKES: Duration = Duration::from_millis(1);

impl Lane {
    pub(super) async fn migrate(
        self: &Rc<Self>,
        order: &MigrationOrder,
        target: MigrationTarget,
    ) -> Result<(), Refused> {
        self.check_idle()?;
        let (source_bytes, target_bytes) = (self.volume.store().geometry().size, target.store.size());
        if source_bytes != target_bytes {
            return Err(Refused::SizeDiffers { target_bytes, source_bytes });
        }
        self.migration.opening.set(Some(order.migration));
        let store = target.store.into_device(&self.handle, &self.engine).await;
        self.migration.opening.set(None);
        let store = store.map_err(Refused::Target)?;
        let planned = self.plan_within(order, store, target.content, target.zeroes)?;
        self.begin_within(order, vec![PlannedVolume { chunks: target.chunks, ..planned }])
    }

    /// Returns this volume's part in a migration to another store of this host.
    ///
    /// # Errors
    /// [`Refused`]: the lane has another migration, or does not know the copy that a restart continues with.
    pub fn plan_within(
        &self,
        order: &MigrationOrder,
        target: Rc<dyn BlockDevice>,
        target_content: TargetContent,
        zeroes: ZeroMode,
    ) -> Result<PlannedVolume, Refused> {
        self.check_idle()?;
        let (migration, generation) = (order.migration, self.volume.generation());
        if order.resumed.is_some() && !self.volume.chronicler().copies(generation).contains(&migration) {
            return Err(Refused::CopyUnknown(migration));
        }
        let known = order.resumed.is_some().then_some((ReplicaOf::Migration(migration.0), generation));
        let carried = order.resumed.as_ref().map_or_else(Carried::default, |resumed| resumed.carried.clone());
        Ok(PlannedVolume {
            volume: Rc::clone(&self.volume),
            target,
            target_content,
            zeroes,
            chunks: Chunks::Copied,
            known,
            carried,
            source_image: order.source.clone(),
            target_image: order.target.clone(),
        })
    }

    /// Drives a migration to another store of this host, of the volumes that lanes of this thread have planned: this one's is the
    /// first. The other lanes [take part](Self::take_part_within).
    ///
    /// # Errors
    /// [`Refused::NotMigrating`]: the journal shows a later step than the one that is resumed.
    pub fn begin_within(
        self: &Rc<Self>,
        order: &MigrationOrder,
        volumes: Vec<PlannedVolume>,
    ) -> Result<(), Refused> {
        let plan = Plan {
            migration: order.migration,
            volumes,
            keep_source: order.keep_source,
            pacing: order.pacing.clone(),
            gives_way: GivesWay {
                disks: self.disks().and(Arc::clone(&order.target_disk)),
                impact: order.impact,
                budget: None,
                ends_by: order.time_left.map(|left| self.handle.now() + left),
            },
            limits: TimeLimits {
                switch_over_max: self.settings.limits.switch_over_max.max(order.downtime_max),
                ..self.settings.limits
            },
            strategy: order.strategy,
            moves: order.moves,
        };
        let control = self.begin_recording(order.migration);
        let (handle, buffers) = (self.handle.clone(), self.engine.buffers());
        let made = match &order.resumed {
            None => Some(LocalDriver::new(handle, control, buffers, plan)),
            Some(resumed) => {
                LocalDriver::resume(handle, control, buffers, plan, &resumed.recorded, resumed.spent)
            }
        };
        let Some((driver, source)) = made else { return Err(Refused::NotMigrating(order.migration)) };
        if order.resumed.as_ref().is_some_and(|resumed| resumed.rest == Rest::Pause) {
            // First of all: a migration that was paused before a restart must not run for a moment.
            source.pause();
        }
        self.migration.within.set(Some(order.migration));
        let run = self.measured_beside(Arc::clone(&order.target_disk), driver.run());
        self.drive(source, run);
        self.remember_copy(order.migration, None);
        Ok(())
    }

    /// Lets the volume take part in a migration to another store of this host that the lane `driven` drives.
    pub fn take_part_within(self: &Rc<Self>, migration: MigrationId, driven: &Rc<Self>) {
        let current = Rc::clone(&driven.migration);
        let is_over = move || current.driver.borrow().is_none().then_some(());
        let current = Rc::clone(&driven.migration);
        self.migration.within.set(Some(migration));
        self.follow(migration, async move { current.ended.wait_for(is_over).await });
        self.remember_copy(migration, None);
    }

    /// Measures guests for the target's disk, too, while the volume is copied there, and afterwards for the disk that it is on.
    fn measured_beside(
        &self,
        target: Arc<pacer::Store>,
        run: impl Future<Output = Outcome> + 'static,
    ) -> impl Future<Output = Outcome> + 'static {
        let (gauge, disk) = (Rc::clone(&self.gauge), Rc::clone(&self.disk));
        gauge.join(&target);
        async move {
            let outcome = run.await;
            let left = if matches!(outcome, Outcome::Moved { .. }) { disk.replace(target) } else { target };
            if !Arc::ptr_eq(&left, &disk.borrow()) {
                gauge.leave(&left);
            }
            outcome
        }
    }

    /// Measures guests for a disk that a copy is written to, until the copy is over.
    pub(crate) async fn measured_also_for<T>(
        &self,
        target: &Arc<pacer::Store>,
        run: impl Future<Output = T>,
    ) -> T {
        self.gauge.join(target);
        let result = run.await;
        if !Arc::ptr_eq(target, &self.disk.borrow()) {
            self.gauge.leave(target);
        }
        result
    }

    /// Returns the disk that the volume is on.
    pub(crate) fn disks(&self) -> pacer::Stores {
        pacer::Stores::default().and(Arc::clone(&self.disk.borrow()))
    }

    /// Keeps the missing set of the copy, perhaps of the replica `consumed`, while one is made.
    pub(super) fn remember_copy(
        self: &Rc<Self>,
        migration: MigrationId,
        consumed: Option<(ReplicaOf, Generation)>,
    ) {
        let lane = Rc::clone(self);
        let is_over = move || !lane.leaves_by(migration);
        let (handle, volume, rhythm) = (self.handle.clone(), Rc::clone(&self.volume), self.settings.rhythm);
        self.handle.spawn(resuming::remember(handle, volume, migration, rhythm, consumed, is_over));
    }

    /// Forgets copies of ended migrations: a killed daemon had no time for that.
    pub(super) fn forget_ended_copies(&self) {
        for of in self.settings.ended_copies.clone() {
            let volume = Rc::clone(&self.volume);
            self.handle.spawn(async move {
                if let Err(error) = volume.chronicler().forget(of).await {
                    warn!(volume = %volume.id(), %error, "cannot delete the progress record of an ended migration until the next \
                        start");
                }
            });
        }
    }

    /// Leaves the copy in another store of this host to the next daemon. For a copy at another host the regular record is enough.
    pub(super) async fn leave_copy(&self) {
        let within = self.migration.within.get().filter(|migration| self.leaves_by(*migration));
        let Some(migration) = within else { return };
        resuming::leave(&self.handle, &self.volume, migration).await;
        if let Some(driver) = self.driver() {
            driver.report();
            self.handle.sleep(REPORT_TAKES).await;
        }
    }
}
