//! The handling of faults in either store: a pause, a retry, or the end of the migration.

use std::time::Duration;

use chronicle::{BlockRange, ByteRange};

use super::writes::{SourceSide, WriteState};
use super::{Engine, Link, Stage, Standing};
use crate::journal::FailureCode;
use crate::planted::{Bug, broken};
use crate::strategy::{TargetFault, VolumeAction};

/// The most consecutive faults of the target, with growing pauses, before the migration fails.
const TARGET_FAULTS_MAX: u32 = 5;
/// The most attempts to read blocks of the source before the migration fails.
const SOURCE_FAULTS_MAX: u32 = 3;
/// The pause after the first of several faults; each further fault doubles it.
const FAULT_PAUSE: Duration = Duration::from_millis(100);

/// A suspension of mirroring: guest writes only make blocks missing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Suspension {
    pub(super) reason: &'static str,
    /// When to try again; `None`: when the target has answered every request.
    pub(super) until: Option<Duration>,
}

#[derive(Debug, Default)]
pub(super) struct FaultCounts {
    /// The faults of the target since its last success.
    target: u32,
    /// The faults of the source since a chunk was last copied.
    source: u32,
}

impl FaultCounts {
    pub(super) fn target_works(&mut self) {
        self.target = 0;
    }

    pub(super) fn both_work(&mut self) {
        *self = Self::default();
    }
}

impl Engine {
    /// Turns the answer into a failure if the target has restarted since the request.
    pub(super) fn under_present_incarnation<T>(
        &self,
        restarts: u32,
        result: Result<T, TargetFault>,
    ) -> Result<T, TargetFault> {
        if restarts == self.restarts || broken(Bug::TargetRestart) { result } else { Err(TargetFault::Error) }
    }

    /// Returns when the migration fails because of a request that the target has left unanswered, and the reason of the wait.
    pub(in crate::strategy) fn gives_up_at(&self) -> Option<(Duration, &'static str)> {
        let since = self.oldest_unanswered()?;
        Some((since + self.settings.no_progress_max, "the target to answer a request"))
    }

    pub(in crate::strategy) fn give_up_if_stuck(&mut self, now: Duration) {
        if self.gives_up_at().is_some_and(|(at, _)| now >= at) {
            let seconds = self.settings.no_progress_max.as_secs();
            let detail = format!("the target has not answered a request for {seconds} s");
            self.fail(FailureCode::TargetHung, detail);
        }
    }

    /// Returns since when the target has owed an answer. Other answers do not count: a migration can neither end without this
    /// answer, nor take its absence for a failure (design §5.20).
    fn oldest_unanswered(&self) -> Option<Duration> {
        match self.link {
            _ if self.stage != Stage::Copying => return None,
            Link::Up => {}
            Link::Away { .. } => return None,
            // The time without a link does not count.
            Link::Returning { since } => return Some(since),
        }
        let late = self.writes.iter().filter(|write| matches!(write.state, WriteState::Late { .. }));
        let late = late.map(|write| write.arrived).min();
        let values = self.values.oldest();
        let telling = self.tellings.telling_since();
        let answers = [self.chunks.copying_since(), self.replica.flushing_since(), late, values, telling];
        answers.into_iter().flatten().min()
    }

    /// Handles that the target has lost data that was not durable, by a restart or a failed flush. Data under way may be lost,
    /// too, even if it is answered.
    pub(super) fn target_lost_the_volatile(&mut self) {
        self.restarts += 1;
        self.tellings.forget();
        self.flushes.bulk_is_applied();
        if !broken(Bug::TargetRestart) {
            self.replica.target_restarted();
        }
        // Reported even if the target lacks nothing, because it has forgotten its imminent promise.
        self.say(Standing::Behind);
    }

    pub(super) fn target_failed(&mut self, now: Duration, fault: TargetFault) {
        self.costs.tally.target_faults += 1;
        if self.stage != Stage::Copying {
            return;
        }
        if fault == TargetFault::NoSpace {
            self.fail(FailureCode::TargetFull, "the target's store is full".to_owned());
        } else if self.suspension.is_none() {
            self.faults.target += 1;
            if self.faults.target > TARGET_FAULTS_MAX {
                let detail = format!("the target's store failed {} times in a row", self.faults.target);
                self.fail(FailureCode::TargetFaulty, detail);
            } else {
                let pause = FAULT_PAUSE * (1 << (self.faults.target - 1));
                self.suspend("the target's store answered with an error", Some(now + pause));
            }
        }
    }

    pub(super) fn source_failed(&mut self, now: Duration, blocks: BlockRange) {
        self.costs.tally.source_faults += 1;
        if self.stage != Stage::Copying || self.suspension.is_some() {
            return;
        }
        self.faults.source += 1;
        if self.faults.source >= SOURCE_FAULTS_MAX {
            let ByteRange { offset, length } = self.byte_range(blocks);
            let detail = format!("{length} bytes at {offset} of the source cannot be read");
            self.fail(FailureCode::SourceUnreadable, detail);
        } else {
            self.suspend("the source could not be read", Some(now + FAULT_PAUSE));
        }
    }

    pub(super) fn suspend(&mut self, reason: &'static str, until: Option<Duration>) {
        if self.suspension.is_none() && self.stage == Stage::Copying {
            self.costs.tally.suspensions += 1;
            self.actions.push_back(VolumeAction::Suspended { reason });
        }
        self.suspension = Some(Suspension { reason, until });
        for blocks in self.chunks.abandon_waiting() {
            self.replica.mark_missing(blocks);
            self.paced.abandoned(self.byte_range(blocks).length);
        }
    }

    pub(in crate::strategy) fn resume(&mut self, now: Duration) {
        let owed = self.chunks.copying_since().is_some()
            || self.tellings.telling_since().is_some()
            || self.replica.is_flushing()
            || self.writes.has_late()
            || self.values.await_target();
        match self.link {
            Link::Away { .. } => return,
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

    /// Handles a lost link: guests do not wait for the target's answers, and no answer is overdue until the link is back.
    /// **N.B.** The wait before counts on then. A path that swallows large packets loses one connection after the other, and a
    /// deadline that began anew with each of them would never pass.
    pub(super) fn link_lost(&mut self, now: Duration) {
        let waited = match self.link {
            Link::Away { waited } => waited,
            Link::Up | Link::Returning { .. } => {
                self.oldest_unanswered().map_or(Duration::ZERO, |since| now.saturating_sub(since))
            }
        };
        self.link = Link::Away { waited };
        self.drain.interrupt();
        self.suspend("the link to the other host is down", None);
        self.answer_waiting();
    }

    pub(super) fn link_back(&mut self, now: Duration) {
        if let Link::Away { waited } = self.link {
            self.link = Link::Returning { since: now.saturating_sub(waited) };
        }
    }

    /// Notes an answer of the target. While a link returns, the wait for the others begins anew.
    pub(super) fn target_answered(&mut self, now: Duration) {
        if let Link::Returning { since } = &mut self.link {
            *since = now;
        }
    }

    pub(super) fn fail(&mut self, code: FailureCode, detail: String) {
        self.actions.push_back(VolumeAction::Failed { code, detail });
        self.stop();
    }

    /// Stops sending. The caller then submits the held writes.
    pub(super) fn stop(&mut self) {
        self.stage = Stage::Stopped;
        self.suspension = None;
        self.tokens_at = None;
        for blocks in self.chunks.abandon_waiting() {
            self.replica.mark_missing(blocks);
            self.paced.abandoned(self.byte_range(blocks).length);
        }
        self.answer_waiting();
    }

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
