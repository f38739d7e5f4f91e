//! The lanes of a migration within one host: their plans, their reports, and their faults.

use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, ZeroMode};
use chronicle::ReplicaOf;
use lane::resuming;
use lane::{GivesWay, LocalDriver, Plan, PlannedVolume, SourceHandle, TargetContent};
use migration::journal::{MigratingVolume, MigrationState};
use migration::source::Moves;
use migration::{Carried, MigrationId, Phase, Progress, VolumeIndex};

use super::control::LocalControl;
use crate::checker::journal::PhaseWatch;
use crate::checker::progress::ProgressWatch;
use crate::disk::{Role, SimDisk};
use crate::faults::Fault;
use crate::fleet::host::SimHost;
use crate::scenario::MigrationPlan;

pub(in crate::fleet) struct LocalHalves {
    pub(super) id: MigrationId,
    pub(in crate::fleet) driver: SourceHandle,
    targets: Vec<Rc<SimDisk>>,
    phases: PhaseWatch,
    progress: ProgressWatch,
}

impl SimHost {
    pub(super) fn drive_locally(
        self: &Rc<Self>,
        id: MigrationId,
        plan: &MigrationPlan,
        moving: &[MigratingVolume],
        recorded: Option<&MigrationState>,
    ) -> Option<LocalDriver> {
        let images = self.images.borrow();
        let volumes = self.with_serving(|serving| serving.volumes.clone())?;
        let (mut planned, mut targets, mut remembered) = (Vec::new(), Vec::new(), Vec::new());
        for (volume, moving) in volumes.into_iter().zip(moving) {
            let volume = volume?;
            let source = images.get(moving.source.place.name())?;
            let target = images.get(moving.target.place.name())?;
            source.set_role(Role::Source);
            target.set_role(Role::Target);
            target.set_volume(&volume);
            targets.push(Rc::clone(target));
            let known = recorded.map(|_| (ReplicaOf::Migration(id.0), volume.generation()));
            remembered.push(Rc::clone(&volume));
            planned.push(PlannedVolume {
                volume,
                target: Rc::clone(target) as Rc<dyn BlockDevice>,
                target_content: if known.is_some() { TargetContent::Unknown } else { TargetContent::Zero },
                zeroes: ZeroMode::MayUnmap,
                known,
                carried: Carried::default(),
                source_image: moving.source.clone(),
                target_image: moving.target.clone(),
            });
        }
        self.world.copies_by(plan.strategy);
        let plan_of_lane = Plan {
            migration: id,
            volumes: planned,
            keep_source: plan.keep_source,
            pacing: plan.pacing.clone(),
            gives_way: GivesWay::default(),
            limits: self.manner.limits,
            strategy: plan.strategy,
            moves: Moves::Volumes,
        };
        let control = LocalControl::new(self);
        let handle = self.handle.clone();
        let (driver, source) = match recorded {
            None => LocalDriver::new(handle, control, &self.buffers, plan_of_lane),
            Some(recorded) => {
                LocalDriver::resume(handle, control, &self.buffers, plan_of_lane, recorded, Duration::ZERO)?
            }
        };
        if let Some((delay, rate)) = plan.bandwidth_change {
            let changed = source.clone();
            self.world.clock.after(delay, move || changed.set_bandwidth(rate));
        }
        let (phases, progress) = (PhaseWatch::default(), ProgressWatch::default());
        let halves = LocalHalves { id, driver: source, targets, phases, progress };
        self.with_serving(|serving| serving.local.replace(Some(halves)));
        remembered.into_iter().for_each(|volume| self.remember_copy(id, volume));
        Some(driver)
    }

    fn remember_copy(self: &Rc<Self>, id: MigrationId, volume: Rc<lane::Volume>) {
        let me = self.weak();
        let is_over = move || {
            let made = me.upgrade().and_then(|host| host.with_local(|halves| halves.id));
            made != Some(id)
        };
        let handle = self.handle.clone();
        self.handle.spawn(resuming::remember(handle, volume, id, self.manner.rhythm, None, is_over));
    }

    pub(super) fn entered_locally(&self, id: MigrationId, phase: Phase) {
        self.world.note("phase", id.0, phase as u64);
        self.world.say(|| format!("{}: {id} within: {phase}", self.place));
        self.world.set_phase(Some(phase));
        self.set_phase(Some(phase));
        if let Some(wrong) = self.with_local(|halves| halves.phases.enter(phase)).flatten() {
            self.world.violated("journal", || wrong);
        }
        if phase == Phase::Closing {
            self.check_goes_on(id);
            self.check_not_paused();
        }
        if let Some(fleet) = self.fleet() {
            fleet.phase_entered(phase);
        }
    }

    pub(super) fn progressed_locally(&self, progress: &Progress) {
        let now = self.world.now();
        if let Some(wrong) = self.with_local(|halves| halves.progress.report(now, progress)).flatten() {
            self.world.violated("progress", || wrong);
        }
    }

    pub(super) fn local_driver_ended(&self) {
        self.with_serving(|serving| serving.local.replace(None));
        self.world.set_phase(None);
        self.set_phase(None);
    }

    pub(in crate::fleet) fn restart_a_target(&self) -> bool {
        let found = self.with_local(|halves| (halves.driver.clone(), halves.targets.clone()));
        let Some((driver, targets)) = found else { return false };
        let index = self.random.borrow_mut().index(targets.len());
        // Once guests write to it, it is no target, and their unflushed writes may be lost.
        let Some(disk) = targets.get(index).filter(|disk| !disk.serves_guests()) else { return false };
        self.world.struck(Fault::TargetRestart);
        driver.target_restarted(VolumeIndex(index as u32));
        disk.restart();
        true
    }

    pub(in crate::fleet) fn with_local<T>(&self, look: impl FnOnce(&mut LocalHalves) -> T) -> Option<T> {
        self.serving.borrow().as_ref().and_then(|serving| serving.local.borrow_mut().as_mut().map(look))
    }
}
