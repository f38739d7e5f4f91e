//! Handles the answers of the journal and of the target at the source, and measures the switch-over.

use std::time::Duration;

use chronicle::Generation;

use super::{DiscardStep, Peer, REPEAT, ReleaseFate, Source, SourceAction, State};
use crate::failure::CommitFault;
use crate::handover::message::{ToSource, ToTarget};
use crate::handover::phase::Phase;
use crate::handover::released::{Completeness, Handover, Step, handed_back_and_promoted};
use crate::identity::{CommitId, VolumeId};
use crate::journal::{FailureCode, Outcome, Record};
use crate::planted::{Bug, broken};

impl Source {
    pub(super) fn commit(&mut self, records: Vec<Record>) {
        self.last_commit = CommitId(self.last_commit.0 + 1);
        self.actions.push_back(SourceAction::Commit { commit: self.last_commit, records });
    }

    pub(super) fn committed(&mut self, now: Duration, result: Result<(), CommitFault>) {
        match (&mut self.state, result) {
            // If a VM moves, this is the early attempt's commit.
            (
                State::Copying { .. } | State::Settling { .. } | State::RunningHooks | State::MovingMemory,
                Ok(()),
            ) => {
                self.aborted = self.attempt;
                self.actions.push_back(SourceAction::Send(ToTarget::Abort(self.attempt)));
            }
            // The target learns of it when it asks; the next attempt supersedes this one in any case.
            (State::Copying { .. }, Err(_)) => {}
            (State::Releasing { gates_closing_at, began, .. }, Ok(())) => {
                let (gates_closing_at, began) = (*gates_closing_at, *began);
                self.summary.release_us = micros(now.saturating_sub(began));
                let is_hollow = self.manifests.iter().any(Option::is_some);
                let left = if is_hollow { Completeness::Hollow } else { Completeness::Whole };
                self.hand_over(now, gates_closing_at, left);
            }
            (State::Releasing { fate: ReleaseFate::Open, .. }, Err(CommitFault::NotWritten)) => {
                self.give_up_attempt(now);
            }
            // The journal refuses the release of a cancelled migration.
            (State::Releasing { .. }, Err(CommitFault::NotWritten))
                if self.pending_end == Some(Outcome::Cancelled) =>
            {
                self.give_up_attempt(now);
            }
            // Undecided: neither side may act before the journal has answered.
            (State::Releasing { fate, retry_at, .. }, Err(_)) => {
                *fate = ReleaseFate::PerhapsReleased;
                *retry_at = Some(now + REPEAT);
            }
            (State::Discarding { step, .. }, Ok(())) => {
                if let DiscardStep::Aborting { .. } = step {
                    self.aborted = self.attempt;
                    *step = DiscardStep::Telling { repeat_at: now + REPEAT, began: now };
                    self.say_discard();
                }
            }
            (State::Discarding { step: DiscardStep::Aborting { retry_at }, .. }, Err(_)) => {
                *retry_at = Some(now + REPEAT);
            }
            (State::Released { handover, .. }, result) => {
                handover.committed(now, result, &mut self.actions);
                self.enter_phase_of_handover();
            }
            (State::Ending { outcome, .. }, Ok(())) => {
                let outcome = outcome.clone();
                let summary = self.summary;
                self.state = State::Ended;
                self.actions.push_back(SourceAction::Enter(Phase::Ended));
                self.actions.push_back(SourceAction::End { outcome, summary });
            }
            (State::Ending { retry_at, .. }, Err(_)) => *retry_at = Some(now + REPEAT),
            _ => {}
        }
    }

    pub(super) fn received(&mut self, now: Duration, message: ToSource) {
        match (&mut self.state, message) {
            (State::Preparing { prepared, .. }, ToSource::Prepared(attempt))
                if attempt == self.attempt || broken(Bug::StaleAttempt) =>
            {
                *prepared = true;
                self.release_if_ready(now);
            }
            (State::Released { handover, .. }, message) => {
                let step = handover.received(now, message, &mut self.actions);
                self.after(now, step);
            }
            (
                State::Discarding { outcome, step: DiscardStep::Telling { .. } },
                ToSource::Discarded { left_over },
            ) => {
                let outcome = outcome.clone().with_left_over(&left_over);
                self.end(now, outcome);
            }
            (State::Discarding { outcome, step: DiscardStep::Telling { .. } }, ToSource::Unknown) => {
                let outcome = outcome.clone();
                self.end(now, outcome);
            }
            (
                State::Discarding { outcome, step: DiscardStep::Telling { .. } },
                ToSource::TakenByForce { generations },
            ) => {
                let outcome = match outcome {
                    // The source has its volumes back for good, whatever happens to the copy.
                    Outcome::HandedBack { detail } => handed_back_and_promoted(detail),
                    _ => promoted_elsewhere(&generations),
                };
                self.end(now, outcome);
            }
            (_, ToSource::Cancelled) => self.end_before_release(Outcome::CancelledThere),
            (_, ToSource::Unknown) => {
                let detail = "the other host has ended it, or does not know it".to_owned();
                self.end_before_release(Outcome::Failed { code: FailureCode::HostRefused, detail });
            }
            // The administrator of the target's host ended it: only a target that has promised nothing reports this unasked.
            (_, ToSource::Discarded { left_over }) => {
                let detail = "it was ended at the other host".to_owned();
                let outcome = Outcome::Failed { code: FailureCode::HostRefused, detail };
                self.end_before_release(outcome.with_left_over(&left_over));
            }
            (_, ToSource::TakenByForce { generations }) => {
                self.end_before_release(promoted_elsewhere(&generations));
            }
            // "Not released" is answered only for an attempt that is durably aborted (design §5.13).
            (_, ToSource::Query(attempt)) if attempt <= self.aborted || broken(Bug::AbortNotRecorded) => {
                self.actions.push_back(SourceAction::Send(ToTarget::Abort(attempt)));
            }
            _ => {}
        }
    }

    /// Passes the commit point.
    pub(super) fn hand_over(&mut self, now: Duration, gates_closing_at: Duration, left: Completeness) {
        self.actions.push_back(SourceAction::Enter(Phase::Committing));
        let generations = self.next_generations();
        let (migration, peer, attempt) = (self.settings.migration, self.settings.peer, self.attempt);
        let handover = Handover::new(now, (migration, peer), attempt, generations, left, &mut self.actions);
        self.state = State::Released { handover, gates_closing_at, began: now };
    }

    pub(super) fn tell(&mut self, now: Duration, outcome: Outcome) {
        self.actions.push_back(SourceAction::Enter(Phase::Discarding));
        let step = DiscardStep::Telling { repeat_at: now + REPEAT, began: now };
        self.state = State::Discarding { outcome, step };
        self.say_discard();
    }

    /// Says that the target's images are not needed, and why, if an administrator has cancelled.
    pub(super) fn say_discard(&mut self) {
        let is_cancelled = matches!(&self.state, State::Discarding { outcome: Outcome::Cancelled, .. });
        if is_cancelled && self.settings.peer != Peer::SameHost {
            self.actions.push_back(SourceAction::Send(ToTarget::Cancelled));
        }
        self.actions.push_back(SourceAction::Send(ToTarget::Discard));
    }

    pub(super) fn after(&mut self, now: Duration, step: Step) {
        match step {
            Step::Stay => {}
            Step::Entered => self.enter_phase_of_handover(),
            Step::Active { own } => {
                self.note_active(now, own);
                self.enter_phase_of_handover();
            }
            Step::Commit(records) => {
                self.enter_phase_of_handover();
                self.commit(records);
            }
            Step::Over(outcome) => self.end(now, outcome),
        }
    }

    pub(super) fn enter_phase_of_handover(&mut self) {
        self.actions.push_back(SourceAction::Enter(self.phase()));
    }

    pub(super) fn end(&mut self, now: Duration, outcome: Outcome) {
        // A handover of incomplete volumes lasts until the last block has arrived.
        let is_hollow = self.manifests.iter().any(Option::is_some);
        if is_hollow || !matches!(outcome, Outcome::Moved { .. }) {
            self.summary.total_us = micros(self.spent + now.saturating_sub(self.began));
        }
        self.summary.attempts = self.tries;
        self.summary.bytes_copied = self.costs.bytes_copied;
        self.summary.bytes_mirrored = self.costs.bytes_mirrored;
        self.summary.bytes_zero = self.costs.bytes_zero;
        self.state = State::Ending { outcome, retry_at: None };
        self.commit_end();
    }

    pub(super) fn commit_end(&mut self) {
        let State::Ending { outcome, .. } = &self.state else { return };
        let (migration, outcome, summary) = (self.settings.migration, outcome.clone(), self.summary);
        self.commit(vec![Record::MigrationEnded { migration, outcome, summary }]);
    }
}

// The parts of the switch-over; they add up to the time that the gates were closed.
impl Source {
    pub(super) fn note_prepared(&mut self, now: Duration) {
        if let State::Preparing { gates_closing_at, began, .. } = &self.state {
            self.summary.drain_us = micros(began.saturating_sub(*gates_closing_at));
            self.summary.prepare_us = micros(now.saturating_sub(*began));
        }
    }

    pub(super) fn note_active(&mut self, now: Duration, own: Duration) {
        if let State::Released { gates_closing_at, began, .. } = &self.state {
            let own = own.min(now.saturating_sub(*began));
            self.summary.own_us = micros(own);
            self.summary.start_us = micros(now.saturating_sub(*began).saturating_sub(own));
            self.summary.gate_closed_us = micros(now.saturating_sub(*gates_closing_at));
            self.summary.total_us = micros(self.spent + now.saturating_sub(self.began));
        }
    }
}

fn promoted_elsewhere(generations: &[(VolumeId, Generation)]) -> Outcome {
    let there = generations.iter().map(|(_, generation)| generation.0).max().unwrap_or_default();
    let detail = format!(
        "the copy at the other host was promoted by force and has generation {there}; this one is still served, and both are \
         branches of one history: decide which to keep"
    );
    Outcome::Failed { code: FailureCode::PromotedElsewhere, detail }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
