//! A host alone: what strikes volumes that move between its stores, and in the end a last start that shows what is durable.

use super::Fleet;
use super::place::Place;
use crate::faults::{Fault, Planned};
use crate::scenario::Scenario;
use crate::world::Stop;

/// In how many of a hundred cases the last start is one after a power cut.
const LAST_POWER_CUT_PERCENT: u64 = 70;

impl Fleet {
    /// Tells whether there is no other host.
    pub(super) fn is_alone(&self) -> bool {
        self.hosts.len() == 1
    }

    /// Plans the faults of a scenario.
    pub(super) fn plan_faults(&self, scenario: &Scenario) {
        scenario.faults.iter().for_each(|planned| self.world.faults.plan(*planned));
    }

    /// Strikes the migration between stores of a host.
    pub(super) fn strike_alone(&self, plan: &Planned) {
        let host = self.host(Place::A);
        let phase = host.phase();
        let has_struck = match plan.fault {
            Fault::Kill => self.perhaps_crash(Some(host.place), Stop::Kill),
            Fault::PowerCut => self.perhaps_crash(Some(host.place), Stop::PowerCut),
            Fault::Cancel => {
                // Also when it is too late: that must be refused.
                let has_driver = host.with_local(|_| ()).is_some();
                host.wish_to_cancel() || has_driver
            }
            Fault::TargetRestart => host.restart_a_target(),
            fault => {
                self.world.faults.open(plan, self.world.now());
                // What is in flight may be struck as well as what comes later.
                let disks: Vec<_> = host.images.borrow().values().cloned().collect();
                disks.iter().for_each(|disk| disk.afflict(fault));
                false
            }
        };
        if has_struck {
            self.world.struck_in(plan.fault, phase);
        }
    }

    /// Starts the daemon a last time, to look at what is durable; tells whether that has been done.
    pub(super) fn has_started_a_last_time(&self) -> bool {
        if !self.is_alone() || self.operators.is_last_start.replace(true) {
            return true;
        }
        self.world.faults.end();
        let is_power_cut = self.random.borrow_mut().percent(LAST_POWER_CUT_PERCENT);
        self.crash(Place::A, if is_power_cut { Stop::PowerCut } else { Stop::Kill });
        false
    }
}
