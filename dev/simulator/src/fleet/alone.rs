//! A single host: the faults of volumes that move between its stores, and a last start that shows the durable state.

use super::Fleet;
use super::place::Place;
use crate::faults::{Fault, Planned};
use crate::scenario::Scenario;
use crate::world::Stop;

const LAST_POWER_CUT_PERCENT: u64 = 70;

impl Fleet {
    pub(super) fn is_alone(&self) -> bool {
        self.hosts.len() == 1
    }

    pub(super) fn plan_faults(&self, scenario: &Scenario) {
        scenario.faults.iter().for_each(|planned| self.world.faults.plan(*planned));
    }

    pub(super) fn strike_alone(&self, plan: &Planned) {
        let host = self.host(Place::A);
        let phase = host.phase();
        let has_struck = match plan.fault {
            Fault::Kill => self.perhaps_crash(Some(host.place), Stop::Kill),
            Fault::PowerCut => self.perhaps_crash(Some(host.place), Stop::PowerCut),
            Fault::Cancel => {
                // Even if it is too late: then it must be refused.
                let has_driver = host.with_local(|_| ()).is_some();
                host.wish_to_cancel() || has_driver
            }
            Fault::TargetRestart => host.restart_a_target(),
            fault => {
                self.world.faults.open(plan, self.world.now());
                // Requests in flight may be struck as well as later ones.
                let disks: Vec<_> = host.images.borrow().values().cloned().collect();
                disks.iter().for_each(|disk| disk.afflict(fault));
                false
            }
        };
        if has_struck {
            self.world.struck_in(plan.fault, phase);
        }
    }

    /// Starts the daemon a last time, to check the durable state; returns whether that was done before.
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
