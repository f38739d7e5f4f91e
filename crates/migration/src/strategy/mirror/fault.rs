//! What faults of either store lead to: a pause, another try, or the end of the migration.

use std::time::Duration;

use chronicle::{BlockRange, ByteRange};

use super::{Bulk, Link, Mirror, Stage, Standing, Suspension};
use crate::journal::FailureCode;
use crate::planted::{Bug, broken};
use crate::strategy::writes::{SourceSide, WriteState};
use crate::strategy::{TargetFault, VolumeAction};

/// Faults of the target in a row, with growing pauses between them, before the migration fails.
const TARGET_FAULTS_MAX: u32 = 5;
/// Tries at reading blocks of the source before the migration fails.
const SOURCE_FAULTS_MAX: u32 = 3;
/// Pause after the first fault in a row; each further one doubles it.
const FAULT_PAUSE: Duration = Duration::from_millis(100);

impl Mirror {
    /// What was submitted before the target restarted has failed, whatever the answer says.
    pub(super) fn under_present_incarnation<T>(
        &self,
        restarts: u32,
        result: Result<T, TargetFault>,
    ) -> Result<T, TargetFault> {
        if restarts == self.restarts || broken(Bug::TargetRestart) { result } else { Err(TargetFault::Error) }
    }

    /// Since when the target has owed an answer. What it answers meanwhile does not count: a migration can neither
    /// end without that answer nor take it for a failure (design §5.20).
    pub(super) fn oldest_unanswered(&self) -> Option<Duration> {
        match self.link {
            _ if self.stage != Stage::Copying => return None,
            Link::Up => {}
            Link::Away => return None,
            // What happened before counts for nothing.
            Link::Returning { since } => return Some(since),
        }
        let late = self.writes.iter().filter(|write| matches!(write.state, WriteState::Late { .. }));
        let late = late.map(|write| write.arrived).min();
        let values = self.values.oldest();
        [self.chunks.copying_since(), self.replica.flushing_since(), late, values].into_iter().flatten().min()
    }

    /// The target has lost what was not durable there, by a restart or by a flush that failed; what is under way may be lost,
    /// too, also if it is answered.
    pub(super) fn target_lost_the_volatile(&mut self) {
        self.restarts += 1;
        self.bulk = Bulk::Applied;
        if !broken(Bug::TargetRestart) {
            self.replica.target_restarted();
        }
        // Also if it lacks nothing: what it was about to promise it has forgotten.
        if self.said != Standing::Behind {
            self.said = Standing::Behind;
            self.actions.push_back(VolumeAction::Behind);
        }
    }

    pub(super) fn target_failed(&mut self, now: Duration, fault: TargetFault) {
        self.tally.target_faults += 1;
        if self.stage != Stage::Copying {
            return;
        }
        if fault == TargetFault::NoSpace {
            self.fail(now, FailureCode::TargetFull, "the target's store is full".to_owned());
        } else if self.suspension.is_none() {
            self.target_faults += 1;
            if self.target_faults > TARGET_FAULTS_MAX {
                let detail = format!("the target's store failed {} times in a row", self.target_faults);
                self.fail(now, FailureCode::TargetFaulty, detail);
            } else {
                let pause = FAULT_PAUSE * (1 << (self.target_faults - 1));
                self.suspend("the target's store answered with an error", Some(now + pause));
            }
        }
    }

    pub(super) fn source_failed(&mut self, now: Duration, blocks: BlockRange) {
        self.tally.source_faults += 1;
        if self.stage != Stage::Copying || self.suspension.is_some() {
            return;
        }
        self.source_faults += 1;
        if self.source_faults >= SOURCE_FAULTS_MAX {
            let ByteRange { offset, length } = self.byte_range(blocks);
            let detail = format!("{length} bytes at {offset} of the source cannot be read");
            self.fail(now, FailureCode::SourceUnreadable, detail);
        } else {
            self.suspend("the source could not be read", Some(now + FAULT_PAUSE));
        }
    }

    pub(super) fn suspend(&mut self, reason: &'static str, until: Option<Duration>) {
        if self.suspension.is_none() && self.stage == Stage::Copying {
            self.tally.suspensions += 1;
            self.actions.push_back(VolumeAction::Suspended { reason });
        }
        self.suspension = Some(Suspension { reason, until });
        for blocks in self.chunks.abandon_waiting() {
            self.replica.mark_missing(blocks);
        }
    }

    pub(super) fn resume(&mut self, now: Duration) {
        let owed = self.chunks.copying_since().is_some()
            || self.replica.is_flushing()
            || self.writes.has_late()
            || self.values.await_target();
        match self.link {
            Link::Away => return,
            Link::Returning { .. } if owed => return,
            Link::Returning { .. } => {
                self.link = Link::Up;
                self.suspension = self.suspension.map(|lost| Suspension { until: Some(now), ..lost });
            }
            Link::Up => {}
        }
        let Some(suspension) = self.suspension else { return };
        if self.writes.has_late() {
            return;
        }
        match suspension.until {
            None => self.suspension = Some(Suspension { until: Some(now + FAULT_PAUSE), ..suspension }),
            Some(until) if now >= until => {
                self.suspension = None;
                self.actions.push_back(VolumeAction::Resumed);
            }
            Some(_) => {}
        }
    }

    /// Guests wait no longer for the target's answers, and none is missed until it can be heard again.
    pub(super) fn link_lost(&mut self) {
        self.link = Link::Away;
        self.drain.interrupt();
        self.suspend("the link to the other host is away", None);
        self.answer_waiting();
    }

    pub(super) fn fail(&mut self, now: Duration, code: FailureCode, detail: String) {
        self.actions.push_back(VolumeAction::Failed { code, detail });
        self.stop(now);
    }

    pub(super) fn stop(&mut self, now: Duration) {
        self.stage = Stage::Stopped;
        self.suspension = None;
        self.tokens_at = None;
        for blocks in self.chunks.abandon_waiting() {
            self.replica.mark_missing(blocks);
        }
        self.answer_waiting();
        self.release_held(now);
    }

    /// Answers all writes that only the target is waited for.
    fn answer_waiting(&mut self) {
        let waiting =
            |state| matches!(state, WriteState::Mirrored { source: SourceSide::Answered { .. }, .. });
        let mirrored: Vec<_> =
            self.writes.iter().filter(|write| waiting(write.state)).map(|write| write.id).collect();
        for write in mirrored {
            self.answer_late(write);
        }
    }
}
