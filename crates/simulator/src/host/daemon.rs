//! The life of one daemon: what it does from its start until it serves.

use std::collections::BTreeSet;
use std::rc::{Rc, Weak};

use block::filter::Aligner;
use lane::Volume;
use migration::journal::State;
use migration::planted::{Bug, broken};
use migration::recovery::{self, Step};

use super::{Ending, Host, Serving, volume_id};
use crate::checker::journal::unrecovered;
use crate::control::SimControl;
use crate::disk::SimDisk;
use crate::guest::Connection;
use crate::probe::Probe;
use crate::world::Stop;

impl Host {
    pub(super) async fn run_daemon(self: Rc<Self>) {
        let state = self.journal.open();
        if !broken(Bug::GhostWrites) {
            self.wait_for_locks(&state).await;
        }
        let control = self.control();
        for step in recovery::recover(&state) {
            let done = match step {
                Step::Commit(records) => self.journal.commit(records).await.is_ok(),
                Step::Discard(image) => lane::Control::discard(&*control, image).await.is_ok(),
                Step::Retire(image, retirement) => {
                    lane::Control::retire(&*control, image, retirement).await.is_ok()
                }
                // Both sides are on this host.
                Step::Resume(_) => true,
            };
            if !done {
                self.give_up_soon();
                return;
            }
        }
        let state = self.journal.acknowledged();
        let images = self.images.borrow().keys().cloned().collect();
        if let Some(wrong) = unrecovered(&state, &images, &self.excused.borrow()) {
            self.world.violated("journal", || wrong);
            return;
        }
        self.check_contents(&state);
        self.serve(&state);
        if self.ending.get() == Ending::LastRestart {
            self.world.stop(Stop::Finished);
        }
    }

    /// A store whose lock is held still has requests of the dead daemon in flight (hard case 12).
    pub(super) async fn wait_for_locks(&self, state: &State) {
        let owners = state.volumes.values().map(|volume| volume.record.image.place.name());
        let moving = state.unfinished().flat_map(|(_, migration)| &migration.volumes);
        let paths: BTreeSet<&str> = owners
            .chain(moving.flat_map(|moving| [moving.source.place.name(), moving.target.place.name()]))
            .collect();
        for path in paths {
            let disk = self.images.borrow().get(path).cloned();
            if let Some(disk) = disk {
                disk.idle().await;
            }
        }
    }

    pub(super) fn check_contents(&self, state: &State) {
        for (index, guest) in self.guests.iter().enumerate() {
            let Some(disk) = self.owner_of(state, index) else { continue };
            let found = disk.with_medium(|medium| medium.current().to_vec());
            if self.power_was_cut.get() {
                guest.check_after_power_cut(&found);
            } else {
                guest.check(&found);
            }
        }
        self.power_was_cut.set(false);
    }

    pub(super) fn owner_of(&self, state: &State, index: usize) -> Option<Rc<SimDisk>> {
        let image = &state.volumes.get(&volume_id(index))?.record.image;
        self.images.borrow().get(image.place.name()).cloned()
    }

    pub(super) fn serve(&self, state: &State) {
        let mut volumes = Vec::new();
        for (index, guest) in self.guests.iter().enumerate() {
            let Some(disk) = self.owner_of(state, index) else { continue };
            let Some(known) = state.volumes.get(&volume_id(index)) else { continue };
            let (block_size, generation) = (self.scenario.volumes[index].block_size, known.record.generation);
            let aligner = Aligner::new(self.buffers.clone(), self.handle.clone());
            let volume = Volume::new(volume_id(index), block_size, generation, disk, aligner);
            let device = Rc::new(Probe::new(volume.device(), &self.world, self.scenario.limits));
            volumes.push(volume);
            let handle = self.handle.clone();
            guest.connect(Connection { device, handle, caller: Rc::default() });
        }
        *self.serving.borrow_mut() = Some(Serving { volumes, migration: None, session: None });
        self.world.note("serves", self.incarnation.get(), 0);
        self.next_migration();
    }

    pub(crate) fn control(&self) -> Rc<SimControl> {
        let random = self.random.borrow_mut().fork();
        Rc::new(SimControl::new(Weak::clone(&self.me), &self.world, random, self.incarnation.get()))
    }

    /// Tells whether the daemon of this number still lives.
    pub(crate) fn is_alive(&self, incarnation: u64) -> bool {
        self.incarnation.get() == incarnation
    }
}
