//! The control plane that the halves of a driver talk to, on one of several hosts.

use std::rc::{Rc, Weak};
use std::time::Duration;

use futures_channel::oneshot;
use lane::{Control, ControlFault, LaneFuture, Report};
use migration::journal::{ImageLocation, Record};
use migration::recovery::Retirement;
use migration::{CommitFault, MigrationId, Phase};

use super::party::Party;
use super::place::Place;
use super::tally::Event;
use super::vm::SimVm;

/// How long dealing with an image takes.
const FILE_WORK: Duration = Duration::from_micros(300);

pub(super) struct PartyControl {
    party: Weak<Party>,
    incarnation: u64,
    /// The source of the migration, where its phases are entered.
    source: Place,
}

impl PartyControl {
    pub(super) fn new(party: &Rc<Party>, source: Place) -> Rc<Self> {
        Rc::new(Self { party: Rc::downgrade(party), incarnation: party.incarnation(), source })
    }

    fn vm(&self) -> Option<Rc<SimVm>> {
        self.party.upgrade()?.vm()
    }

    /// Deals with an image on a helper thread.
    fn file_work(
        &self,
        image: ImageLocation,
        work: impl FnOnce(&Party, &str) + 'static,
    ) -> LaneFuture<Result<(), ControlFault>> {
        let (done, dealt_with) = oneshot::channel();
        if let Some(party) = self.party.upgrade() {
            let (me, incarnation) = (Weak::clone(&self.party), self.incarnation);
            party.world.clock.after(FILE_WORK, move || {
                if let Some(party) = me.upgrade().filter(|party| party.incarnation() == incarnation) {
                    work(&party, image.place.name());
                    // The lane may be gone.
                    let _ = done.send(());
                }
            });
        }
        Box::pin(async move {
            match dealt_with.await {
                Ok(()) => Ok(()),
                // The daemon is gone, and whoever waits here with it.
                Err(_) => std::future::pending().await,
            }
        })
    }
}

impl Control for PartyControl {
    fn commit(&self, records: Vec<Record>) -> LaneFuture<Result<(), CommitFault>> {
        match self.party.upgrade() {
            Some(party) => party.journal().commit(records),
            None => Box::pin(std::future::ready(Err(CommitFault::Unknown))),
        }
    }

    fn retire(&self, image: ImageLocation, retirement: Retirement) -> LaneFuture<Result<(), ControlFault>> {
        self.file_work(image, move |party, path| match retirement {
            Retirement::Delete => party.delete_image(path),
            Retirement::Keep => party.keep_image(path),
        })
    }

    fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        self.file_work(image, Party::delete_image)
    }

    fn stop_vm(&self, migration: MigrationId, paused: oneshot::Sender<()>) -> LaneFuture<Result<(), String>> {
        let party = self.party.upgrade();
        let peer = party.and_then(|party| Some((party.place, party.peer_of(migration)?)));
        match (self.vm(), peer) {
            (Some(vm), Some((source, target))) => {
                let daemon = Weak::clone(&self.party);
                Box::pin(async move {
                    let party = daemon.upgrade().ok_or("the daemon is gone")?;
                    let other = party.fleet().map(|fleet| Rc::clone(fleet.party(target)));
                    let other = other.ok_or("the simulation is over")?;
                    let given_up = vm.given_up();
                    party.memory_leaves(&other).await?;
                    drop(party);
                    if vm.given_up() != given_up {
                        return Err("it was given up".to_owned());
                    }
                    vm.stop(&daemon, (source, target), paused).await
                })
            }
            _ => Box::pin(std::future::ready(Err("there is none".to_owned()))),
        }
    }

    fn run_vm(&self, _: MigrationId) -> LaneFuture<Result<(), String>> {
        match self.vm() {
            Some(vm) => vm.run_there(&self.party),
            None => Box::pin(std::future::ready(Err("there is none".to_owned()))),
        }
    }

    fn report(&self, _: Report) {}

    fn entered(&self, _: MigrationId, phase: Phase) {
        if let Some(party) = self.party.upgrade().filter(|party| party.place == self.source) {
            if let (Phase::Discarding, Some(vm)) = (phase, self.vm()) {
                vm.go_on(party.place);
            }
            party.world.note("phase", phase as u64, 0);
            party.world.say(|| format!("{}: phase {phase}", party.place));
            party.world.set_phase(Some(phase));
            party.set_phase(Some(phase));
            if let Some(fleet) = party.fleet() {
                if phase == Phase::TakingBack {
                    fleet.tally(Event::HandBack);
                }
                fleet.phase_entered(phase);
            }
        }
    }
}
