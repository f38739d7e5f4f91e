//! The migration of a lane: which one it is, its driver, and orders to it.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;

use block::Handle;
use block::engine::Engine;
use futures_channel::oneshot;
use futures_util::future::{Either, select};
use migration::MigrationId;
use migration::journal::Outcome;

use super::Lane;
use crate::control::Control;
use crate::driver::{SourceHandle, TargetHandle, TimeLimits};
use crate::duplicate::Duplicating;
use crate::filling::FillingStore;
use crate::handle::Aside;
use crate::peer::Service;
use crate::recorder::Recorder;
use crate::refused::Refused;
use crate::reservoir::Reservoir;
use crate::signal::Signal;
use crate::stack::Volume;

#[derive(Default)]
pub(super) struct CurrentMigration {
    pub(super) driver: RefCell<Option<SourceHandle>>,
    pub(super) coming: RefCell<Option<(MigrationId, TargetHandle)>>,
    /// The migration that another volume's lane drives for this one as well.
    pub(super) followed: Cell<Option<MigrationId>>,
    /// The latest migration to another store of this host.
    pub(super) within: Cell<Option<MigrationId>>,
    /// The migration whose target is being opened; it has no driver yet.
    pub(super) opening: Cell<Option<MigrationId>>,
    /// The service for the source's calls when the volume returns into the image that it left here, present or past.
    pub(super) came_by: RefCell<Option<Rc<Service>>>,
    /// Ends the driver and leaves the migration as it is.
    pub(super) set_aside: RefCell<Option<oneshot::Sender<Aside>>>,
    pub(super) recorder: RefCell<Option<Rc<Recorder>>>,
    pub(super) ended: Signal,
}

impl Lane {
    /// Returns the volume.
    pub fn volume(&self) -> &Rc<Volume> {
        &self.volume
    }

    /// Returns what the volume's next owner reads missing blocks from.
    pub fn reservoir(&self) -> &Rc<Reservoir> {
        &self.reservoir
    }

    /// Returns the store of a volume that arrived incomplete, or may.
    pub fn filling(&self) -> Option<Rc<FillingStore>> {
        self.filling.borrow().clone()
    }

    /// Notes the store that the volume is served from, which lacks blocks.
    pub fn lacks_blocks_of(&self, filling: Rc<FillingStore>) {
        self.filling.replace(Some(filling));
    }

    /// Returns the driver of the migration that this lane drives as its source.
    pub fn driver(&self) -> Option<SourceHandle> {
        self.migration.driver.borrow().clone()
    }

    /// Lets the volume take part in a migration that another lane drives, until `follows` has ended.
    pub(super) fn follow(&self, migration: MigrationId, follows: impl Future<Output = ()> + 'static) {
        self.migration.followed.set(Some(migration));
        let current = Rc::clone(&self.migration);
        self.handle.spawn(async move {
            follows.await;
            current.followed.set(None);
            current.ended.notify();
        });
    }

    /// Returns whether the volume leaves by this migration.
    pub(super) fn leaves_by(&self, migration: MigrationId) -> bool {
        let driven = self.migration.driver.borrow().as_ref().map(SourceHandle::migration);
        driven == Some(migration) || self.migration.followed.get() == Some(migration)
    }

    pub(super) fn begin_recording(&self, migration: MigrationId) -> Rc<dyn Control> {
        if let Some(recorder) = self.migration.recorder.take() {
            recorder.end();
        }
        let control = Rc::clone(&self.control);
        let recorder = Recorder::begin(control, self.handle.clone(), &self.pulse, migration);
        self.migration.recorder.replace(Some(Rc::clone(&recorder)));
        recorder
    }

    pub(super) fn drive(&self, driver: SourceHandle, run: impl Future<Output = Outcome> + 'static) {
        self.migration.driver.replace(Some(driver.clone()));
        let (set_aside, is_set_aside) = oneshot::channel();
        self.migration.set_aside.replace(Some(set_aside));
        let current = Rc::clone(&self.migration);
        let recorder = current.recorder.borrow().clone();
        self.handle.spawn(async move {
            if let Either::Right((asked, run)) = select(Box::pin(run), is_set_aside).await
                // N.B. The driver may have learned meanwhile that nothing is missing. Then its image is being deleted or
                // renamed.
                && !asked.is_ok_and(|aside| aside.is_at(driver.phase()))
            {
                run.await;
            }
            current.driver.replace(None);
            current.ended.notify();
            if let Some(recorder) = recorder {
                recorder.record_after().await;
            }
        });
    }

    /// Ends the driver of a migration at the step `aside`; a target that owns an incomplete volume continues to read here.
    ///
    /// # Errors
    /// [`Refused::TooLate`]: the migration is not at that step.
    pub async fn set_aside(&self, migration: MigrationId, aside: Aside) -> Result<(), Refused> {
        let current = &self.migration;
        let phase = current.driver.borrow().as_ref().map(|driver| (driver.migration(), driver.phase()));
        match phase {
            Some((driven, phase)) if driven == migration && aside.is_at(phase) => {
                if let Some(set_aside) = current.set_aside.take() {
                    // A driver that ends meanwhile is as good.
                    let _ = set_aside.send(aside);
                }
            }
            Some((driven, _)) if driven == migration => return Err(Refused::TooLate(migration)),
            _ => {}
        }
        current.ended.wait_for(|| (self.migration_under_way() != Some(migration)).then_some(())).await;
        Ok(())
    }

    /// Refuses a volume that is not here, or not all of it.
    pub(crate) fn check_whole(&self) -> Result<(), Refused> {
        if !self.volume.is_here() {
            return Err(Refused::NotHere);
        }
        let filling = self.filling.borrow();
        // N.B. A filling that has ended is still there.
        let lacks_blocks = filling.as_ref().is_some_and(|filling| filling.lacks_blocks());
        if lacks_blocks { Err(Refused::Incomplete) } else { Ok(()) }
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    pub(crate) fn engine(&self) -> &Rc<dyn Engine> {
        &self.engine
    }

    pub(crate) fn control(&self) -> &Rc<dyn Control> {
        &self.control
    }

    pub(crate) fn limits(&self) -> TimeLimits {
        self.settings.limits
    }

    /// Keeps migrations, copies and growth away until the result is dropped.
    pub(crate) fn begins_to_duplicate(&self) -> Duplicating<'_> {
        self.is_duplicating.set(true);
        Duplicating(&self.is_duplicating)
    }

    pub(crate) fn check_idle(&self) -> Result<(), Refused> {
        match self.migration_under_way() {
            Some(migration) => Err(Refused::Migrating(migration)),
            None if self.is_growing.get() => Err(Refused::Growing),
            None if self.is_duplicating.get() => Err(Refused::Duplicating),
            None => Ok(()),
        }
    }

    pub(super) fn migration_under_way(&self) -> Option<MigrationId> {
        let current = &self.migration;
        let leaving = current.driver.borrow().as_ref().map(SourceHandle::migration);
        let coming = current.coming.borrow().as_ref().map(|(migration, _)| *migration);
        leaving.or(coming).or(current.followed.get()).or(current.opening.get())
    }

    /// Cancels a migration before its commit point.
    ///
    /// # Errors
    /// [`Refused::NotMigrating`].
    pub fn cancel(&self, migration: MigrationId) -> Result<(), Refused> {
        match &*self.migration.coming.borrow() {
            Some((coming, driver)) if *coming == migration => {
                driver.cancel();
                Ok(())
            }
            _ => self.with_migration(migration, |driver| {
                driver.cancel();
                Ok(())
            }),
        }
    }

    pub(super) fn with_migration(
        &self,
        migration: MigrationId,
        ask: impl FnOnce(&SourceHandle) -> Result<(), Refused>,
    ) -> Result<(), Refused> {
        match &*self.migration.driver.borrow() {
            Some(driver) if driver.migration() == migration => ask(driver),
            _ => Err(Refused::NotMigrating(migration)),
        }
    }
}
