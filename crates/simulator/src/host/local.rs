//! Volumes move to another store of this host: what the daemon does before and around the driver.

use std::rc::Rc;
use std::time::Duration;

use futures_channel::{mpsc, oneshot};
use lane::Control as _;
use migration::journal::{MigratingVolume, Outcome, Record, Side};
use migration::session::{Action, Event, MigrationSession, Role, Step, Undo};
use migration::{Failure, MigrationId, Phase};

use super::Host;
use crate::faults::Fault;
use crate::scenario::MigrationPlan;
use crate::session::{PATIENCE, Work, driver_ends, ended, perhaps_fails, recorded, run};
use crate::world::Stop;

/// In how many of a hundred cases a step cannot be done.
const FAILS_PERCENT: u64 = 3;
/// In how many of a hundred migrations somebody cancels within their first moments …
const CANCELLED_PERCENT: u64 = 6;
/// … or the daemon is killed …
const KILLED_PERCENT: u64 = 6;
/// … how soon at the latest.
const DISTURBED_WITHIN: Duration = Duration::from_millis(2);
/// How long a step takes.
const STEP: (Duration, Duration) = (Duration::from_micros(5), Duration::from_millis(1));

/// A migration to another store of this host.
struct LocalMigration {
    host: Rc<Host>,
    plan: MigrationPlan,
    id: MigrationId,
    moving: Vec<MigratingVolume>,
    /// What the driver ends with, once there is one.
    ends: Option<oneshot::Receiver<Outcome>>,
}

impl Host {
    /// Begins the next migration.
    pub(super) fn begin_local(self: &Rc<Self>) {
        let number = self.migrations_begun.get();
        self.migrations_begun.set(number + 1);
        let plan = self.scenario.migrations[number].clone();
        let id = MigrationId(self.journal.acknowledged().next_migration);
        let work = LocalMigration { host: Rc::clone(self), plan, id, moving: Vec::new(), ends: None };
        let (wishes, heard) = mpsc::unbounded();
        if let Some(serving) = self.serving.borrow_mut().as_mut() {
            serving.session = Some(wishes);
        }
        self.perhaps_disturb_soon();
        let session = MigrationSession::new(Role::Local, false, PATIENCE);
        let (me, handle) = (Rc::clone(self), self.handle.clone());
        self.handle.spawn(async move {
            run(&handle, session, work, heard).await;
            me.migration_ended();
        });
    }

    fn perhaps_disturb_soon(&self) {
        let mut random = self.random.borrow_mut();
        let (is_cancelled, is_killed) = (random.percent(CANCELLED_PERCENT), random.percent(KILLED_PERCENT));
        let delay = random.duration(Duration::ZERO, DISTURBED_WITHIN);
        drop(random);
        let incarnation = self.incarnation.get();
        self.later(delay, move |host| {
            if is_killed && host.is_alive(incarnation) {
                host.world.stop(Stop::Kill);
            } else if is_cancelled && host.is_alive(incarnation) {
                host.cancel();
            }
        });
    }

    /// Somebody wishes that what is under way ends.
    pub(super) fn cancel(&self) {
        if let Some(driver) = self.running(|running| running.driver.clone()) {
            self.world.struck(Fault::Cancel);
            driver.cancel();
        } else if let Some(serving) = self.serving.borrow().as_ref() {
            // A session that is over has nobody to hear it.
            let _ = serving.session.as_ref().map(|session| session.unbounded_send(Event::Cancel));
        }
    }
}

impl Work for LocalMigration {
    async fn carry_out(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Do(Step::Record) => Some(self.record().await),
            Action::Do(step) => Some(Event::Done(step, self.perform(step).await)),
            Action::Recall => {
                let stage = |state: &migration::journal::State| {
                    state.migrations.get(&self.id).map(|known| known.stage.clone())
                };
                Some(Event::Recalled(self.host.journal.look(|state, _| stage(state))))
            }
            Action::Undo(undo) => Some(Event::Undone { left_over: self.undo(undo).await }),
            Action::End(outcome) => {
                Some(Event::Ended(self.host.journal.commit(ended(self.id, outcome)).await))
            }
            Action::Cancel => {
                self.host.cancel();
                None
            }
            Action::Conclude(outcome) => {
                self.host.world.say(|| format!("migration {} ended: {outcome:?}", self.id));
                self.host.world.note("migration ended", self.id.0, 0);
                None
            }
            // The volume is where it is served, a start discards by itself, and no VM goes along.
            Action::PlaceVolumes(_)
            | Action::Answer(_)
            | Action::LetGo
            | Action::Abandon(_)
            | Action::KeepVm
            | Action::Note(_) => None,
        }
    }

    async fn driver_ends(&mut self) -> Event {
        driver_ends(&mut self.ends).await
    }
}

impl LocalMigration {
    async fn record(&mut self) -> Event {
        let (volumes, keep_source) = (self.moving.clone(), self.plan.keep_source);
        let started =
            Record::MigrationStarted { migration: self.id, volumes, keep_source, side: Side::OneHost };
        recorded(self.host.journal.commit(vec![started]).await)
    }

    async fn perform(&mut self, step: Step) -> Result<(), Failure> {
        let takes = self.host.random.borrow_mut().duration(STEP.0, STEP.1);
        self.host.handle.sleep(takes).await;
        match step {
            Step::MakeRoom => {
                self.perhaps_fails("there is no room")?;
                self.moving = self.host.choose_targets(&self.host.journal.acknowledged());
                let rooms = self.moving.iter().map(|moving| moving.target.place.name().to_owned());
                self.host.rooms.borrow_mut().extend(rooms);
                Ok(())
            }
            // Images exist only once the journal knows of them: a restart finds them all.
            Step::MakeImages => {
                let some = self.host.random.borrow_mut().below(self.moving.len() as u64 + 1) as usize;
                let fails = self.perhaps_fails("an image cannot be made");
                let made = if fails.is_ok() { &self.moving[..] } else { &self.moving[..some] };
                self.host.make_targets(made, &self.plan);
                fails
            }
            Step::Begin => {
                self.perhaps_fails("the lane does not take it")?;
                self.begin();
                Ok(())
            }
            Step::Record | Step::Offer | Step::LetVmLeave | Step::ExamineVm => Ok(()),
        }
    }

    fn perhaps_fails(&self, what: &str) -> Result<(), Failure> {
        perhaps_fails(&mut self.host.random.borrow_mut(), FAILS_PERCENT, what)
    }

    fn begin(&mut self) {
        let host = Rc::clone(&self.host);
        let driver = {
            let mut serving = host.serving.borrow_mut();
            let Some(serving) = serving.as_mut() else { return };
            let (running, driver) = host.drive(self.id, &self.plan, &self.moving, serving);
            serving.migration = Some(running);
            driver
        };
        host.world.note("migration", self.id.0, self.moving.len() as u64);
        host.entered(self.id, Phase::Copying);
        let (ending, ends) = oneshot::channel();
        self.ends = Some(ends);
        let handle = host.handle.clone();
        handle.spawn(async move {
            let outcome = driver.run().await;
            host.driver_ended();
            // The session may have gone with the daemon.
            let _ = ending.send(outcome);
        });
    }

    /// Gives the places back that were taken; returns what could not be deleted.
    async fn undo(&self, undo: Undo) -> String {
        let mut left_over = Vec::new();
        let control = self.host.control();
        for target in self.moving.iter().map(|moving| &moving.target) {
            let was_empty = self.host.rooms.borrow_mut().remove(target.place.name());
            if undo == Undo::Images && !was_empty && control.discard(target.clone()).await.is_err() {
                left_over.push(target.place.name());
            }
        }
        left_over.join(", ")
    }
}
