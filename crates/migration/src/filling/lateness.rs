//! Limits how long reads wait for a reservoir that does not answer.
//!
//! Some hypervisors stop the guest at a disk error and repeat the request when the guest resumes. For these an error is better
//! than a request without an answer: the guest's clock stands still, and its watchdogs do not fire. For any other client an
//! error would break the file system, so its reads wait without limit.

use std::collections::BTreeSet;
use std::time::Duration;

use chronicle::{BlockCount, BlockRange, LayeredBitmap};

use super::requests::{Waiting, Way};
use super::units::{within, without};
use super::{Filling, FillingAction, Refusal, RequestId};

const REASON: &str = "a guest's read to be failed, so that the guest is stopped";

/// The limit on waits, and the units owed to reads that were refused.
#[derive(Debug)]
pub(super) struct Lateness {
    /// The longest wait of a read for a silent reservoir; `None`: without limit.
    wait_max: Option<Duration>,
    heard_at: Duration,
    due_at: Option<Duration>,
    /// The units of refused reads. The clients will ask again, so the units are fetched as if a guest waited.
    owed: LayeredBitmap,
}

impl Lateness {
    pub(super) fn new(units: BlockCount) -> Self {
        Self { wait_max: None, heard_at: Duration::ZERO, due_at: None, owed: LayeredBitmap::new(units) }
    }

    pub(super) fn limit(&mut self, wait_max: Option<Duration>) {
        self.wait_max = wait_max;
    }

    pub(super) fn reservoir_answers(&mut self, now: Duration) {
        self.heard_at = now;
    }

    pub(super) fn deadline(&self) -> Option<(Duration, &'static str)> {
        self.due_at.map(|at| (at, REASON))
    }

    /// Notes that these units have arrived, or never will.
    pub(super) fn settled(&mut self, units: BlockRange) {
        self.owed.remove(units);
    }

    pub(super) fn owed(&self) -> &LayeredBitmap {
        &self.owed
    }
}

impl Filling {
    pub(super) fn refuse_late(&mut self, now: Duration) {
        self.lateness.due_at = None;
        let Some(wait_max) = self.lateness.wait_max else { return };
        let mut late = BTreeSet::new();
        for (request, units, since) in self.reads_held_by_reservoir() {
            let due_at = since.max(self.lateness.heard_at) + wait_max;
            if due_at <= now {
                late.insert(request);
                for run in within(&self.missing, units) {
                    self.lateness.owed.insert(run);
                }
            } else {
                self.lateness.due_at = Some(self.lateness.due_at.map_or(due_at, |at| at.min(due_at)));
            }
        }
        self.progress.reads_late += late.len() as u64;
        self.waiting.retain(|waiting| !late.contains(&waiting.request()));
        self.actions
            .extend(late.into_iter().map(|request| FillingAction::Refuse { request, why: Refusal::Late }));
    }

    /// Returns the reads that only the reservoir can serve, and when each arrived. While this host's own store is at fault,
    /// these are the reads that pass by it.
    fn reads_held_by_reservoir(&self) -> Vec<(RequestId, BlockRange, Duration)> {
        let is_store_at_fault = self.background.store_is_failing();
        let reads = self.waiting.iter().filter_map(|waiting| match waiting {
            Waiting::Read { way: Way::ThroughStore, .. } if is_store_at_fault => None,
            Waiting::Read { request, units, since, .. } => Some((*request, *units, *since)),
            Waiting::Write { .. } => None,
        });
        reads.filter(|(_, units, _)| self.lacks_from_reservoir(*units)).collect()
    }

    fn lacks_from_reservoir(&self, units: BlockRange) -> bool {
        let stored = self.fetches.values().flat_map(|fetch| fetch.storing.iter().flatten());
        let local = stored.chain(self.overwrites.values());
        let lacking = within(&self.missing, units);
        !local
            .fold(lacking, |lacking, busy| lacking.into_iter().flat_map(|run| without(run, *busy)).collect())
            .is_empty()
    }
}
