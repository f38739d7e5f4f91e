//! Phases bring the faults that were planned for them; and what a phase must follow from is checked.

use migration::{MigrationId, Phase, VolumeIndex};

use super::{Host, Running};
use crate::faults::{Fault, Planned};
use crate::world::Stop;

impl Host {
    /// A migration has entered a phase: the faults planned for that begin.
    pub(crate) fn entered(&self, id: MigrationId, phase: Phase) {
        self.world.note("phase", id.0, phase as u64);
        self.world.say(|| format!("migration {id}: {phase}"));
        self.world.set_phase(Some(phase));
        if let Some(running) =
            self.serving.borrow_mut().as_mut().and_then(|serving| serving.migration.as_mut())
            && let Some(wrong) = running.phases.enter(phase)
        {
            self.world.violated("journal", || wrong);
        }
        let incarnation = self.incarnation.get();
        for planned in self.world.faults.due(phase) {
            if planned.delay.is_zero() {
                self.begin_fault(&planned);
            } else {
                self.later(planned.delay, move |host| {
                    if host.is_alive(incarnation) {
                        host.begin_fault(&planned);
                    }
                });
            }
        }
    }

    /// Takes a report of progress.
    pub(crate) fn progressed(&self, progress: &migration::Progress) {
        let mut serving = self.serving.borrow_mut();
        let Some(running) = serving.as_mut().and_then(|serving| serving.migration.as_mut()) else { return };
        if let Some(wrong) = running.progress.report(self.world.now(), progress) {
            self.world.violated("progress", || wrong);
        }
    }

    pub(super) fn begin_fault(&self, planned: &Planned) {
        match planned.fault {
            Fault::Kill => self.world.stop(Stop::Kill),
            Fault::PowerCut => self.world.stop(Stop::PowerCut),
            Fault::Cancel => self.cancel(),
            Fault::TargetRestart => self.restart_target(),
            fault => {
                self.world.faults.open(planned, self.world.now());
                // What is in flight may be struck as well as what comes later.
                let disks: Vec<_> = self.images.borrow().values().cloned().collect();
                disks.iter().for_each(|disk| disk.afflict(fault));
            }
        }
    }

    pub(super) fn restart_target(&self) {
        let Some((driver, targets)) =
            self.running(|running| (running.driver.clone(), running.targets.clone()))
        else {
            return;
        };
        let index = self.random.borrow_mut().index(targets.len());
        let Some(disk) = targets.get(index) else { return };
        // Once guests write to it, it is no target any more, and what they did not flush may be lost.
        if disk.serves_guests() {
            return;
        }
        self.world.struck(Fault::TargetRestart);
        driver.target_restarted(VolumeIndex(index as u32));
        disk.restart();
    }

    pub(super) fn running<T>(&self, look: impl FnOnce(&Running) -> T) -> Option<T> {
        self.serving.borrow().as_ref().and_then(|serving| serving.migration.as_ref()).map(look)
    }
}
