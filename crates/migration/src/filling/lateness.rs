//! Reads that wait no longer than they may for a reservoir that does not answer.
//!
//! A hypervisor that stops its guest at an error of a disk, and asks again when the guest goes on, is better off with an error
//! than with a request that nobody answers: its guest's clock stands still meanwhile, and its watchdogs do not bark. Of any other client
//! an error would be the end of a file system: it waits, for however long.

use std::collections::BTreeSet;
use std::time::Duration;

use chronicle::{BlockCount, BlockRange, LayeredBitmap};

use super::requests::Waiting;
use super::units::{within, without};
use super::{Filling, FillingAction, Refusal, RequestId};

/// What is waited for by who is to be stopped by an error.
const REASON: &str = "a guest's read to be failed, so that the guest is stopped";

/// How long reads may wait, and what is owed to those that waited so long.
#[derive(Debug)]
pub(super) struct Lateness {
    /// How long a read may wait for a reservoir that does not answer; `None`: for however long.
    wait_max: Option<Duration>,
    /// When the reservoir answered last.
    heard_at: Duration,
    /// When the next read has waited so long.
    due_at: Option<Duration>,
    /// What reads were refused for that waited so long. Who wanted it asks again: it is fetched as if he waited.
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

    /// These units have come, or never do.
    pub(super) fn settled(&mut self, units: BlockRange) {
        self.owed.remove(units);
    }

    pub(super) fn owed(&self) -> &LayeredBitmap {
        &self.owed
    }
}

impl Filling {
    /// Refuses the reads that have waited as long as they may.
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

    /// The reads that wait for what only the reservoir can bring, and since when. What waits for this host's own store is not late
    /// by anybody else's fault.
    fn reads_held_by_reservoir(&self) -> Vec<(RequestId, BlockRange, Duration)> {
        if self.background.waits_for_store() {
            return Vec::new();
        }
        let reads = self.waiting.iter().filter_map(|waiting| match waiting {
            Waiting::Read { request, units, since } => Some((*request, *units, *since)),
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
