//! Migrations to another store of the same host: the work of the daemon before and around the driver.
//!
//! ```text
//!   a place is reserved ──► *started* is durable ──► images are made ──► both halves run side by side ──► the end
//!         each step may fail; between any two the daemon may be killed or stopped, and the migration cancelled
//!   a restart ──► are the copies trusted? ──► both halves, with the missing set ──► the end
//! ```

mod again;
mod control;
mod images;
mod lane;

use std::rc::Rc;
use std::time::Duration;

use ::host::Work;
use migration::journal::{FailureCode, MigratingVolume, MigrationState, Outcome, Record, Side};
use migration::session::{MigrationSession, Role, Step, Undo};
use migration::{CommitFault, Failure, MigrationId, Phase};

pub(super) use self::control::LocalControl;
pub(super) use self::images::LocalImages;
pub(super) use self::lane::LocalHalves;
use super::host::SimHost;
use super::session::{Ends, PATIENCE, driver_ends};
use super::tally::Event as Tallied;
use crate::disk;
use crate::scenario::MigrationPlan;
use crate::world::Stop;

const FAILS_PERCENT: u64 = 3;
/// The percentage of migrations that are cancelled very early …
const CANCELLED_PERCENT: u64 = 6;
/// … or whose daemon is killed …
const KILLED_PERCENT: u64 = 6;
/// … at the latest by then.
const DISTURBED_WITHIN: Duration = Duration::from_millis(2);
const STEP: (Duration, Duration) = (Duration::from_micros(5), Duration::from_millis(1));

struct LocalMigration {
    host: Rc<SimHost>,
    plan: MigrationPlan,
    id: MigrationId,
    moving: Vec<MigratingVolume>,
    /// Whether it had a driver before, or a restart continues it.
    is_resumed: bool,
    ends: Option<Ends>,
}

impl SimHost {
    pub(super) fn begin_local(self: &Rc<Self>) {
        let number = self.local.begun.replace(self.local.begun.get() + 1);
        let plans = &self.manner.plans;
        let Some(plan) = plans.get(number % plans.len().max(1)).cloned() else { return };
        let id = self.next_migration();
        let (host, moving) = (Rc::clone(self), Vec::new());
        let work = LocalMigration { host, plan, id, moving, is_resumed: false, ends: None };
        self.perhaps_disturb_soon();
        self.draw_stop_within();
        self.run_session(MigrationSession::new(Role::Local, false, PATIENCE), work);
    }

    fn perhaps_disturb_soon(self: &Rc<Self>) {
        let mut random = self.random.borrow_mut();
        let (is_cancelled, is_killed) = (random.percent(CANCELLED_PERCENT), random.percent(KILLED_PERCENT));
        let delay = random.duration(Duration::ZERO, DISTURBED_WITHIN);
        drop(random);
        let (me, incarnation) = (self.weak(), self.incarnation());
        self.world.clock.after(delay, move || {
            let Some(host) = me.upgrade().filter(|host| host.incarnation() == incarnation) else { return };
            match host.fleet() {
                Some(fleet) if is_killed => fleet.crash(host.place, Stop::Kill),
                _ if is_cancelled => drop(host.wish_to_cancel()),
                _ => {}
            }
        });
    }

    fn local_ended(&self) {
        for disk in self.images.borrow().values() {
            disk.set_role(disk::Role::Bystander);
            disk.release_hung();
        }
        if !self.journal().is_closed() {
            self.check_left_over();
        }
    }
}

impl Work for LocalMigration {
    fn migration(&self) -> Option<MigrationId> {
        Some(self.id)
    }

    async fn record(&mut self) -> Result<(), CommitFault> {
        let (volumes, keep_source) = (self.moving.clone(), self.plan.keep_source);
        let started =
            Record::MigrationStarted { migration: self.id, volumes, keep_source, side: Side::OneHost };
        self.host.journal().commit(vec![started]).await
    }

    async fn perform(&mut self, step: Step) -> Result<(), Failure> {
        let takes = self.host.random.borrow_mut().duration(STEP.0, STEP.1);
        let waits = if step == Step::MakeRoom { self.plan.pause } else { Duration::ZERO };
        self.host.handle.sleep(waits + takes).await;
        match step {
            Step::MakeRoom => {
                self.host.perhaps_fails(FAILS_PERCENT, "there is no room")?;
                self.moving = self.host.choose_store();
                self.host.local.take(&self.moving);
                Ok(())
            }
            // Images exist only once they are in the journal: a restart finds them all.
            Step::MakeImages => {
                let some = self.host.random.borrow_mut().below(self.moving.len() as u64 + 1) as usize;
                let fails = self.host.perhaps_fails(FAILS_PERCENT, "an image cannot be made");
                let made = if fails.is_ok() { &self.moving[..] } else { &self.moving[..some] };
                self.host.make_local_images(made, &self.plan);
                fails
            }
            Step::Begin => {
                self.host.perhaps_fails(FAILS_PERCENT, "the lane does not take it")?;
                let recorded = match self.is_resumed {
                    true => Some(self.host.believe_copies(self.id, &self.moving).await?),
                    false => None,
                };
                self.begin(recorded.as_ref())?;
                self.is_resumed = true;
                Ok(())
            }
            Step::Record | Step::Offer | Step::LetVmLeave | Step::ExamineVm => Ok(()),
        }
    }

    async fn undo(&mut self, undo: Undo) -> String {
        let mut left_over = Vec::new();
        let control = LocalControl::new(&self.host);
        for target in self.moving.iter().map(|moving| &moving.target) {
            let was_empty = self.host.local.give_back(target.place.name());
            let discards = undo == Undo::Images && !was_empty;
            if discards && control.discard(target.clone()).await.is_err() {
                left_over.push(target.place.name());
            }
        }
        left_over.join(", ")
    }

    async fn driver_ends(&mut self) -> Option<Outcome> {
        driver_ends(&mut self.ends).await
    }

    async fn cancel(&mut self) {
        self.host.cancel_driver();
    }

    async fn conclude(&mut self, outcome: Outcome) {
        self.host.world.say(|| format!("{}: {} within ended: {outcome:?}", self.host.place, self.id));
        self.host.world.note("migration ended", self.id.0, 0);
        self.host.check_cancelled(self.id);
        if matches!(outcome, Outcome::Moved { .. }) {
            self.host.local.has_moved.set(true);
            self.host.tally(Tallied::Within);
        }
        self.host.local_ended();
    }
}

impl LocalMigration {
    fn begin(&mut self, recorded: Option<&MigrationState>) -> Result<(), Failure> {
        let ends = self.host.drive_locally(self.id, &self.plan, &self.moving, recorded);
        self.ends =
            Some(ends.ok_or_else(|| Failure {
                code: FailureCode::Internal,
                detail: "no lane takes it".to_owned(),
            })?);
        self.host.world.note("migration", self.id.0, self.moving.len() as u64);
        self.host.entered_locally(self.id, Phase::Copying);
        Ok(())
    }
}
