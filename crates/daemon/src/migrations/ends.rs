//! Counts the outcomes of migrations since the daemon began.
//!
//! ```text
//!   registry ──ended──► task of the host ──► Ends: how many, how long, how long guests stood still
//! ```

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use api::{Migration, MigrationState};
use lane::Latencies;
use migration::journal::Side;

/// The directions of migrations as this host sees them, and their outcomes.
const DIRECTIONS: [&str; 3] = ["local", "outgoing", "incoming"];
const ENDS: [MigrationState; 4] =
    [MigrationState::Moved, MigrationState::Failed, MigrationState::Cancelled, MigrationState::HandedBack];

#[derive(Debug, Default)]
pub(crate) struct Ends {
    sums: Mutex<EndSums>,
}

#[derive(Clone, Debug)]
pub(crate) struct EndSums {
    pub(crate) outcomes: BTreeMap<(&'static str, &'static str), Outcomes>,
    pub(crate) switch_overs: Latencies,
    /// The downtimes of VMs that moved along.
    pub(crate) vm_downtimes: Latencies,
}

impl Default for EndSums {
    /// Combinations that have not occurred are exported as 0, so that the first occurrence is visible as an increase.
    fn default() -> Self {
        let kinds = DIRECTIONS.into_iter().flat_map(|direction| ENDS.map(|end| (direction, end.name())));
        Self {
            outcomes: kinds.map(|kind| (kind, Outcomes::default())).collect(),
            switch_overs: Latencies::default(),
            vm_downtimes: Latencies::default(),
        }
    }
}

/// Migrations with the same direction and outcome.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcomes {
    pub(crate) count: u64,
    /// The sum of their durations.
    pub(crate) seconds: f64,
}

impl Ends {
    pub(crate) fn add(&self, direction: &'static str, ended: &Migration) {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = sums.outcomes.entry((direction, ended.state.name())).or_default();
        outcome.count += 1;
        outcome.seconds += ended.seconds;
        if let Some(switch_over) = ended.switch_over {
            sums.switch_overs.add(milliseconds(switch_over.gate_closed_ms));
        }
        if let Some(downtime) = ended.machine.as_ref().and_then(|machine| machine.downtime.as_ref()) {
            sums.vm_downtimes.add(milliseconds(downtime.total_ms));
        }
    }

    pub(crate) fn sums(&self) -> EndSums {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

pub(crate) fn direction(side: &Side) -> &'static str {
    match side {
        Side::OneHost => "local",
        Side::Outgoing { .. } => "outgoing",
        Side::Incoming { .. } => "incoming",
    }
}

fn milliseconds(milliseconds: f64) -> Duration {
    Duration::try_from_secs_f64(milliseconds / 1000.0).unwrap_or_default()
}
