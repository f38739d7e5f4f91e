//! The control plane that the halves of a conductor talk to, on one of two hosts.

use std::rc::{Rc, Weak};
use std::time::Duration;

use futures_channel::oneshot;
use lane::{Control, ControlFault, LaneFuture, Report};
use migration::journal::{ImageLocation, Record};
use migration::recovery::Retirement;
use migration::{CommitFault, MigrationId, Phase};

use super::machine::SimMachine;
use super::party::{Party, Place};

/// How long dealing with an image takes.
const FILE_WORK: Duration = Duration::from_micros(300);

pub(super) struct PairControl {
    party: Weak<Party>,
    incarnation: u64,
}

impl PairControl {
    pub(super) fn new(party: &Rc<Party>) -> Rc<Self> {
        Rc::new(Self { party: Rc::downgrade(party), incarnation: party.incarnation() })
    }

    fn machine(&self) -> Option<Rc<SimMachine>> {
        self.party.upgrade()?.machine()
    }

    /// Deletes an image on a helper thread.
    fn delete(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        let (done, deleted) = oneshot::channel();
        if let Some(party) = self.party.upgrade() {
            let (me, incarnation) = (Weak::clone(&self.party), self.incarnation);
            party.world.clock.after(FILE_WORK, move || {
                if let Some(party) = me.upgrade().filter(|party| party.incarnation() == incarnation) {
                    party.delete_image(image.place.name());
                    // The lane may be gone.
                    let _ = done.send(());
                }
            });
        }
        Box::pin(async move {
            match deleted.await {
                Ok(()) => Ok(()),
                // The daemon is gone, and whoever waits here with it.
                Err(_) => std::future::pending().await,
            }
        })
    }
}

impl Control for PairControl {
    fn commit(&self, records: Vec<Record>) -> LaneFuture<Result<(), CommitFault>> {
        match self.party.upgrade() {
            Some(party) => party.journal().commit(records),
            None => Box::pin(std::future::ready(Err(CommitFault::Unknown))),
        }
    }

    fn retire(&self, image: ImageLocation, _: Retirement) -> LaneFuture<Result<(), ControlFault>> {
        self.delete(image)
    }

    fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        self.delete(image)
    }

    fn stop_machine(&self, _: MigrationId, paused: oneshot::Sender<()>) -> LaneFuture<Result<(), String>> {
        match self.machine() {
            Some(machine) => machine.stop(&self.party, paused),
            None => Box::pin(std::future::ready(Err("there is none".to_owned()))),
        }
    }

    fn run_machine(&self, _: MigrationId) -> LaneFuture<Result<(), String>> {
        match self.machine() {
            Some(machine) => machine.run_there(&self.party),
            None => Box::pin(std::future::ready(Err("there is none".to_owned()))),
        }
    }

    fn report(&self, _: Report) {}

    fn entered(&self, _: MigrationId, phase: Phase) {
        if let Some(party) = self.party.upgrade().filter(|party| party.place == Place::A) {
            if let (Phase::Discarding, Some(machine)) = (phase, self.machine()) {
                machine.go_on();
            }
            party.world.note("phase", phase as u64, 0);
            party.world.say(|| format!("phase {phase}"));
            party.world.set_phase(Some(phase));
        }
    }
}
