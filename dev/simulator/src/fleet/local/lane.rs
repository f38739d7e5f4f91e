//! The lanes of a migration within one host: their orders, their reports, and their faults.

use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, ZeroMode};
use futures_channel::oneshot;
use lane::{MigrationOrder, Rest, ResumedMigration, SourceHandle, TargetContent};
use migration::journal::{MigratingVolume, MigrationState};
use migration::source::Moves;
use migration::{Carried, MigrationId, Phase, Progress, VolumeIndex};

use super::control::LocalControl;
use crate::checker::journal::PhaseWatch;
use crate::checker::progress::ProgressWatch;
use crate::disk::{Role, SimDisk};
use crate::faults::Fault;
use crate::fleet::host::SimHost;
use crate::fleet::session::Ends;
use crate::scenario::MigrationPlan;

pub(in crate::fleet) struct LocalHalves {
    pub(in crate::fleet) driver: SourceHandle,
    targets: Vec<Rc<SimDisk>>,
    phases: PhaseWatch,
    progress: ProgressWatch,
}

impl SimHost {
    /// Has the lanes of the volumes drive a migration within this host; returns its end, or `None` if they do not.
    pub(super) fn drive_locally(
        self: &Rc<Self>,
        id: MigrationId,
        plan: &MigrationPlan,
        moving: &[MigratingVolume],
        recorded: Option<&MigrationState>,
    ) -> Option<Ends> {
        let (mut orders, mut planned, mut targets, mut lanes) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (lane, moving) in self.lanes().into_iter().zip(moving) {
            let lane = lane?;
            let images = self.images.borrow();
            let source = images.get(moving.source.place.name())?;
            let target = images.get(moving.target.place.name())?;
            source.set_role(Role::Source);
            target.set_role(Role::Target);
            target.set_volume(lane.volume());
            let order = order_within(id, plan, moving, recorded);
            let content = if recorded.is_some() { TargetContent::Unknown } else { TargetContent::Zero };
            let device = Rc::clone(target) as Rc<dyn BlockDevice>;
            planned.push(lane.lane.plan_within(&order, device, content, ZeroMode::MayUnmap).ok()?);
            targets.push(Rc::clone(target));
            orders.push(order);
            lanes.push(lane);
        }
        self.world.copies_by(plan.strategy);
        let (first, others) = lanes.split_first()?;
        first.control.begins(Some(LocalControl::new(self)));
        first.lane.begin_within(orders.first()?, planned).ok()?;
        others.iter().for_each(|lane| lane.lane.take_part_within(id, &first.lane));
        let driver = first.lane.driver()?;
        if let Some((delay, rate)) = plan.bandwidth_change {
            let changed = driver.clone();
            self.world.clock.after(delay, move || changed.set_bandwidth(rate));
        }
        let (phases, progress) = (PhaseWatch::default(), ProgressWatch::default());
        let halves = LocalHalves { driver, targets, phases, progress };
        let (ended, ends) = oneshot::channel();
        self.with_serving(|serving| {
            serving.local.replace(Some(halves));
            serving.ends.insert(id, ended);
        });
        Some(ends)
    }

    pub(in crate::fleet) fn entered_locally(&self, id: MigrationId, phase: Phase) {
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

    pub(in crate::fleet) fn progressed_locally(&self, progress: &Progress) {
        let now = self.world.now();
        if let Some(wrong) = self.with_local(|halves| halves.progress.report(now, progress)).flatten() {
            self.world.violated("progress", || wrong);
        }
    }

    pub(in crate::fleet) fn local_driver_ended(&self) {
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

fn order_within(
    id: MigrationId,
    plan: &MigrationPlan,
    moving: &MigratingVolume,
    recorded: Option<&MigrationState>,
) -> MigrationOrder {
    let resumed = recorded.map(|recorded| {
        let (recorded, spent, carried) = (recorded.clone(), Duration::ZERO, Carried::default());
        Box::new(ResumedMigration { recorded, spent, carried, rest: Rest::Resume })
    });
    MigrationOrder {
        migration: id,
        source: moving.source.clone(),
        target: moving.target.clone(),
        target_disk: pacer::Store::new(),
        keep_source: plan.keep_source,
        pacing: plan.pacing.clone(),
        impact: None,
        time_left: None,
        strategy: plan.strategy,
        downtime_max: Duration::ZERO,
        moves: Moves::Volumes,
        resumed,
    }
}
