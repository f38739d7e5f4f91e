//! The source's side of a migration past its commit point.
//!
//! ```text
//!   Committing ──Active──► [Filling ──Whole, GivenUp──►] Retiring ────► Ended(Moved)
//!       │
//!       └──HandedBack──► TakingBack ──► Discarding ──────────────────► Ended(HandedBack)
//! ```
//! A [`Handover`] exists only after a durable *released*, and has no way to abort: the types do not permit it. If a message is
//! lost, the source repeats COMMIT until the target reports that it is active, or hands the volumes back. Until then no host
//! serves them, and no third host ever will.
//!
//! *Filling* occurs if the volumes were handed over incomplete. Only the source's images have the missing blocks, so they stay
//! unchanged until the target reports that it is complete, however long that takes. The source also asks, because the report
//! may be lost and because the answer says how much is missing. If the missing blocks were given up at the target, only the
//! source's images have them, and these are kept.

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::Generation;

use crate::failure::CommitFault;
use crate::handover::message::{ToSource, ToTarget};
use crate::handover::phase::Phase;
use crate::handover::source::{Peer, SourceAction, UNTOLD};
use crate::identity::{Attempt, MigrationId, VolumeId};
use crate::journal::{MigrationState, Outcome, Record};
use crate::planted::{Bug, broken};

/// The pause before an unanswered message or a failed commit is repeated.
const REPEAT: Duration = Duration::from_millis(200);

/// The pause before the target is asked again whether it is complete.
const ASK_WHOLE: Duration = Duration::from_millis(500);

/// The left-over that is reported if missing blocks were given up.
const GIVEN_UP: &str =
    "the image is kept here, because missing blocks were given up at the other host, and only it has them";

/// Whether the target has all blocks when it takes the volumes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completeness {
    Whole,
    Hollow,
}

impl Completeness {
    pub(crate) fn of(recorded: &MigrationState) -> Self {
        if recorded.hollow_now().is_some() { Self::Hollow } else { Self::Whole }
    }
}

#[derive(Debug)]
pub(crate) struct Handover {
    peer: Peer,
    left: Completeness,
    migration: MigrationId,
    attempt: Attempt,
    generations: Vec<(VolumeId, Generation)>,
    state: State,
}

#[derive(Debug)]
enum State {
    Committing {
        repeat_at: Duration,
    },
    /// The target works, and reads its missing blocks here.
    Filling {
        ask_at: Duration,
        /// The missing units that the target last reported; `None` before its first report.
        units_missing: Option<u64>,
    },
    Retiring {
        after: Word,
    },
    TakingBack {
        generations: Vec<(VolumeId, Generation)>,
        detail: String,
        retry_at: Option<Duration>,
    },
    Discarding {
        detail: String,
        repeat_at: Duration,
        began: Duration,
    },
    Over,
}

/// The target's word that ends its reading here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Whole,
    GivenUp,
}

#[derive(Debug)]
pub(crate) enum Step {
    Stay,
    Entered,
    Active { own: Duration },
    Commit(Vec<Record>),
    Over(Outcome),
}

impl Handover {
    /// Makes the machine, after *released* has become durable.
    pub(crate) fn new(
        now: Duration,
        (migration, peer): (MigrationId, Peer),
        attempt: Attempt,
        generations: Vec<(VolumeId, Generation)>,
        left: Completeness,
        actions: &mut VecDeque<SourceAction>,
    ) -> Self {
        let state = State::Committing { repeat_at: now + REPEAT };
        let handover = Self { peer, left, migration, attempt, generations, state };
        actions.push_back(handover.commit_message());
        handover
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.state {
            State::Committing { .. } => Phase::Committing,
            State::Filling { .. } => Phase::Filling,
            State::Retiring { .. } => Phase::Retiring,
            State::TakingBack { .. } => Phase::TakingBack,
            State::Discarding { .. } => Phase::Discarding,
            State::Over => Phase::Ended,
        }
    }

    pub(crate) fn received(
        &mut self,
        now: Duration,
        message: ToSource,
        actions: &mut VecDeque<SourceAction>,
    ) -> Step {
        match (&self.state, message) {
            (State::Committing { .. }, ToSource::Active { attempt, own }) if attempt == self.attempt => {
                self.target_works(now, actions);
                Step::Active { own }
            }
            (State::Filling { .. }, ToSource::Whole(attempt)) if attempt == self.attempt => {
                self.retire(Word::Whole, actions);
                Step::Entered
            }
            (State::Filling { .. }, ToSource::GivenUp(attempt)) if attempt == self.attempt => {
                self.retire(Word::GivenUp, actions);
                Step::Entered
            }
            (State::Filling { ask_at, .. }, ToSource::Lacks { attempt, units })
                if attempt == self.attempt =>
            {
                self.state = State::Filling { ask_at: *ask_at, units_missing: Some(units) };
                Step::Stay
            }
            (State::Committing { .. }, ToSource::HandedBack { attempt, generations, detail })
                if attempt == self.attempt =>
            {
                self.state = State::TakingBack { generations, detail, retry_at: None };
                self.take_back()
            }
            // The target owned the volumes without our COMMIT; for the source that is the same.
            (State::Committing { .. }, ToSource::TakenByForce { .. }) => {
                self.target_works(now, actions);
                Step::Active { own: Duration::ZERO }
            }
            // A restarted target asks again.
            (State::Committing { .. }, ToSource::Query(attempt)) if attempt == self.attempt => {
                self.state = State::Committing { repeat_at: now + REPEAT };
                actions.push_back(self.commit_message());
                Step::Stay
            }
            // The copy that was handed back has been promoted: its host will never discard it.
            (State::Discarding { detail, .. }, ToSource::TakenByForce { .. }) => {
                let outcome = handed_back_and_promoted(detail);
                self.state = State::Over;
                Step::Over(outcome)
            }
            // The target's host does not know the migration, and holds nothing for it.
            (State::Discarding { detail, .. }, ToSource::Unknown) => {
                let outcome = Outcome::HandedBack { detail: detail.clone() };
                self.state = State::Over;
                Step::Over(outcome)
            }
            (State::Discarding { detail, .. }, ToSource::Discarded { left_over }) => {
                let outcome = Outcome::HandedBack { detail: detail.clone() }.with_left_over(&left_over);
                self.state = State::Over;
                Step::Over(outcome)
            }
            _ => Step::Stay,
        }
    }

    fn target_works(&mut self, now: Duration, actions: &mut VecDeque<SourceAction>) {
        match self.left {
            Completeness::Hollow if !broken(Bug::RetiredBeforeWhole) => {
                // Ask at once: after a restart of this host the target may have been complete for a long time.
                self.state = State::Filling { ask_at: now, units_missing: None };
            }
            Completeness::Whole | Completeness::Hollow => self.retire(Word::Whole, actions),
        }
    }

    fn retire(&mut self, after: Word, actions: &mut VecDeque<SourceAction>) {
        self.state = State::Retiring { after };
        actions.push_back(match after {
            // **N.B.** Nothing else has the blocks that were given up.
            Word::GivenUp => SourceAction::KeepImages,
            Word::Whole => SourceAction::Retire,
        });
    }

    pub(crate) fn retired(&mut self, left_over: String) -> Step {
        match self.state {
            State::Retiring { after } => {
                self.state = State::Over;
                Step::Over(Outcome::Moved { left_over: after.with(left_over) })
            }
            _ => Step::Stay,
        }
    }

    pub(crate) fn committed(
        &mut self,
        now: Duration,
        result: Result<(), CommitFault>,
        actions: &mut VecDeque<SourceAction>,
    ) {
        let State::TakingBack { detail, retry_at, generations } = &mut self.state else { return };
        if result.is_err() {
            *retry_at = Some(now + REPEAT);
            return;
        }
        let (detail, generations) = (std::mem::take(detail), std::mem::take(generations));
        self.state = State::Discarding { detail, repeat_at: now + REPEAT, began: now };
        actions.push_back(SourceAction::TakeBack(generations));
        actions.push_back(SourceAction::Send(ToTarget::Discard));
    }

    pub(crate) fn handle_timeout(&mut self, now: Duration, actions: &mut VecDeque<SourceAction>) -> Step {
        let commit = self.commit_message();
        match &mut self.state {
            State::Committing { repeat_at } if *repeat_at <= now => {
                *repeat_at = now + REPEAT;
                actions.push_back(commit);
                Step::Stay
            }
            State::Filling { ask_at, .. } if *ask_at <= now => {
                *ask_at = now + ASK_WHOLE;
                actions.push_back(SourceAction::Send(ToTarget::IsWhole(self.attempt)));
                Step::Stay
            }
            State::Discarding { detail, repeat_at, began } if *repeat_at <= now => {
                // The volumes are here: a target that is lost is not waited for.
                if self.peer.is_told_enough(now.saturating_sub(*began)) {
                    let outcome = Outcome::HandedBack { detail: detail.clone() }.with_left_over(UNTOLD);
                    self.state = State::Over;
                    return Step::Over(outcome);
                }
                *repeat_at = now + REPEAT;
                actions.push_back(SourceAction::Send(ToTarget::Discard));
                Step::Stay
            }
            State::TakingBack { retry_at, .. } if retry_at.is_some_and(|at| at <= now) => {
                *retry_at = None;
                self.take_back()
            }
            _ => Step::Stay,
        }
    }

    /// Returns the missing units as the target reported them; the inner `None` before a report. `None` if the target is complete.
    pub(crate) fn units_missing(&self) -> Option<Option<u64>> {
        match (&self.state, self.left) {
            (State::Committing { .. }, Completeness::Hollow) => Some(None),
            (State::Filling { units_missing, .. }, _) => Some(*units_missing),
            _ => None,
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        match &self.state {
            State::Committing { repeat_at } => Some((*repeat_at, "the target to take the volumes over")),
            State::Filling { ask_at, .. } => Some((*ask_at, "the target to fetch its missing blocks")),
            State::Discarding { repeat_at, .. } => Some((*repeat_at, "the target to delete its images")),
            State::TakingBack { retry_at, .. } => Some(((*retry_at)?, "the journal")),
            State::Retiring { .. } | State::Over => None,
        }
    }

    pub(crate) fn waits_for(&self) -> Option<&'static str> {
        match &self.state {
            State::Retiring { .. } => Some("the source's images to be deleted or kept"),
            State::TakingBack { retry_at: None, .. } => Some("the journal"),
            _ => None,
        }
    }

    fn take_back(&self) -> Step {
        match &self.state {
            State::TakingBack { generations, .. } => Step::Commit(vec![Record::HandedBack {
                migration: self.migration,
                generations: generations.clone(),
            }]),
            _ => Step::Stay,
        }
    }

    fn commit_message(&self) -> SourceAction {
        SourceAction::Send(ToTarget::Commit { attempt: self.attempt, generations: self.generations.clone() })
    }
}

impl Word {
    /// Adds what the administrator must know to the report of images left over.
    fn with(self, left_over: String) -> String {
        match (self, left_over.is_empty()) {
            (Self::Whole, _) => left_over,
            (Self::GivenUp, true) => GIVEN_UP.to_owned(),
            (Self::GivenUp, false) => format!("{GIVEN_UP}; {left_over}"),
        }
    }
}

/// Returns the outcome of a migration whose copy was handed back and then promoted, even across a restart of the source.
pub(crate) fn handed_back_and_promoted(detail: &str) -> Outcome {
    let detail = format!("{detail}; the copy at the other host was promoted, and is a branch of its own");
    Outcome::HandedBack { detail }
}
