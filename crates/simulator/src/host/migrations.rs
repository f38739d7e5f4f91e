//! Migrations: targets are made, the product's driver runs, what it reports is checked.

use std::rc::Rc;

use block::{BlockDevice, ZeroMode};
use lane::{LocalDriver, Plan, PlannedVolume, TargetContent};
use migration::MigrationId;
use migration::journal::{ImageLocation, MigratingVolume, State};

use super::{Host, Running, Serving};
use crate::checker::journal::{PhaseWatch, unrecovered};
use crate::checker::owner::permission;
use crate::checker::progress::ProgressWatch;
use crate::disk::{DiskSettings, Role, SimDisk};
use crate::scenario::MigrationPlan;

/// Names of the stores.
const STORES: [&str; 3] = ["a", "b", "c"];

impl Host {
    /// Plans the next migration, or the end.
    pub(super) fn next_migration(&self) {
        let Some(plan) = self.scenario.migrations.get(self.migrations_begun.get()) else {
            self.end_when_done();
            return;
        };
        let incarnation = self.incarnation.get();
        self.later(plan.pause, move |host| {
            if host.is_alive(incarnation)
                && let Some(host) = host.me.upgrade()
            {
                host.begin_local();
            }
        });
    }

    pub(super) fn choose_targets(&self, state: &State) -> Vec<MigratingVolume> {
        let here = state.volumes.values().next().map_or("a", |volume| volume.record.image.store.as_str());
        let others: Vec<_> = STORES.into_iter().filter(|store| *store != here).collect();
        let store = self.random.borrow_mut().pick(&others);
        let volumes = state.volumes.values().enumerate();
        volumes
            .map(|(index, volume)| {
                let number = self.images_made.get();
                self.images_made.set(number + 1);
                let path = format!("/{store}/{index}.{number}");
                let target = ImageLocation::raw_file(store, path);
                MigratingVolume { volume: volume.record.volume, source: volume.record.image.clone(), target }
            })
            .collect()
    }

    pub(super) fn make_targets(&self, moving: &[MigratingVolume], plan: &MigrationPlan) {
        let mut random = self.random.borrow_mut();
        for (volume, moving) in self.scenario.volumes.iter().zip(moving) {
            let settings = DiskSettings {
                size_bytes: volume.disk.size_bytes,
                sector_bytes: random.pick(&[512, 4096]),
                latency: plan.target_latency,
                tail_percent: random.pick(&[0, 2, 10, 30]),
            };
            let number = self.disks_made.get();
            self.disks_made.set(number + 1);
            let disk = SimDisk::new(&self.world, number, settings, random.fork());
            disk.set_permission(self.journal.look(|state, _| permission(state, moving.target.place.name())));
            self.rooms.borrow_mut().remove(moving.target.place.name());
            self.images.borrow_mut().insert(moving.target.place.name().to_owned(), disk);
        }
    }

    pub(super) fn drive(
        &self,
        id: MigrationId,
        plan: &MigrationPlan,
        moving: &[MigratingVolume],
        serving: &Serving,
    ) -> (Running, LocalDriver) {
        let images = self.images.borrow();
        let mut targets = Vec::new();
        let planned = serving.volumes.iter().zip(moving).filter_map(|(volume, moving)| {
            let (source, target) =
                (images.get(moving.source.place.name())?, images.get(moving.target.place.name())?);
            source.set_role(Role::Source);
            target.set_role(Role::Target);
            target.set_volume(volume);
            targets.push(Rc::clone(target));
            Some(PlannedVolume {
                volume: Rc::clone(volume),
                target: Rc::clone(target) as Rc<dyn BlockDevice>,
                target_content: TargetContent::Zero,
                zeroes: ZeroMode::MayUnmap,
                source_image: moving.source.clone(),
                target_image: moving.target.clone(),
            })
        });
        let plan_of_lane = Plan {
            migration: id,
            volumes: planned.collect(),
            keep_source: plan.keep_source,
            pacing: plan.pacing.clone(),
            limits: self.scenario.limits,
            acknowledgement: plan.acknowledgement,
            moves: migration::source::Moves::Volumes,
        };
        let control = self.control();
        let (driver, source) = LocalDriver::new(self.handle.clone(), control, &self.buffers, plan_of_lane);
        if let Some((delay, rate)) = plan.bandwidth_change {
            let changed = source.clone();
            self.world.clock.after(delay, move || changed.set_bandwidth(rate));
        }
        let (phases, progress) = (PhaseWatch::default(), ProgressWatch::default());
        (Running { driver: source, targets, phases, progress }, driver)
    }

    /// The driver has ended what it had.
    pub(super) fn driver_ended(&self) {
        if let Some(serving) = self.serving.borrow_mut().as_mut() {
            serving.migration = None;
        }
        self.world.set_phase(None);
    }

    /// Nobody sees to a migration any more.
    pub(super) fn migration_ended(&self) {
        if let Some(serving) = self.serving.borrow_mut().as_mut() {
            serving.session = None;
        }
        for disk in self.images.borrow().values() {
            disk.set_role(Role::Bystander);
            disk.release_hung();
        }
        if self.journal.is_closed() {
            return;
        }
        let state = self.journal.acknowledged();
        let images = self.images.borrow().keys().chain(&*self.rooms.borrow()).cloned().collect();
        if let Some(wrong) = unrecovered(&state, &images, &self.excused.borrow()) {
            self.world.violated("journal", || wrong);
        }
        self.next_migration();
    }
}
