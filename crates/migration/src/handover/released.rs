//! The source's side of a migration past its commit point.
//!
//! ```text
//!   Committing ──Active──► [Filling ──Whole──►] Retiring ─────────────► Ended(Moved)
//!       │
//!       └──HandedBack──► TakingBack ──► Discarding ──────────────────► Ended(HandedBack)
//! ```
//! A [`Handover`] is made only by a durable *released*, and has no way to abort: what would abort a migration does not
//! compile here. What each side may assume when a message is lost: the source repeats COMMIT until it hears that the
//! target is active, or that it gives the volumes back; until then nobody serves them, and nobody else ever will.
//!
//! *Filling* is gone through if the volumes were handed over with blocks missing: the source's images are all that has these,
//! and stay as they are until the target says that it has everything, however long it takes. The target says so by itself; it is
//! asked besides, because its word may be lost, and because it answers how much is missing.

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::Generation;

use crate::failure::CommitFault;
use crate::handover::message::{ToSource, ToTarget};
use crate::handover::phase::Phase;
use crate::handover::source::SourceAction;
use crate::identity::{Attempt, MigrationId, VolumeId};
use crate::journal::{MigrationState, Outcome, Record};
use crate::planted::{Bug, broken};

/// Pause before a message that has not been answered, or a commit that was not taken, is repeated.
const REPEAT: Duration = Duration::from_millis(200);

/// Pause before a target is asked again whether it has everything.
const ASK_WHOLE: Duration = Duration::from_millis(500);

/// Whether the target has everything when it takes the volumes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completeness {
    Whole,
    /// Blocks are missing there.
    Hollow,
}

impl Completeness {
    /// That of a try that is released.
    pub(crate) fn of(recorded: &MigrationState) -> Self {
        if recorded.hollow_now().is_some() { Self::Hollow } else { Self::Whole }
    }
}

/// The machine of a source that has released its volumes.
#[derive(Debug)]
pub(crate) struct Handover {
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
    /// The target works, and reads here what it lacks.
    Filling {
        ask_at: Duration,
        /// What it lacks, as it has said; `None`: it has not.
        units_missing: Option<u64>,
    },
    Retiring,
    TakingBack {
        generations: Vec<(VolumeId, Generation)>,
        detail: String,
        retry_at: Option<Duration>,
    },
    Discarding {
        detail: String,
        repeat_at: Duration,
    },
    Over,
}

/// What a step of the handover leads to.
#[derive(Debug)]
pub(crate) enum Step {
    Stay,
    /// It is in another phase.
    Entered,
    /// The guest works at the target.
    Active {
        own: Duration,
    },
    /// Records are to be made durable.
    Commit(Vec<Record>),
    Over(Outcome),
}

impl Handover {
    /// Makes the machine, after *released* has become durable.
    pub(crate) fn new(
        now: Duration,
        migration: MigrationId,
        attempt: Attempt,
        generations: Vec<(VolumeId, Generation)>,
        left: Completeness,
        actions: &mut VecDeque<SourceAction>,
    ) -> Self {
        let state = State::Committing { repeat_at: now + REPEAT };
        let handover = Self { left, migration, attempt, generations, state };
        actions.push_back(handover.commit_message());
        handover
    }

    pub(crate) fn phase(&self) -> Phase {
        match self.state {
            State::Committing { .. } => Phase::Committing,
            State::Filling { .. } => Phase::Filling,
            State::Retiring => Phase::Retiring,
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
                self.retire(actions);
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
            // It owned them without hearing from us; as far as we are concerned that is the same.
            (State::Committing { .. }, ToSource::TakenByForce { .. }) => {
                self.target_works(now, actions);
                Step::Active { own: Duration::ZERO }
            }
            // A target that has restarted asks again what it has been told.
            (State::Committing { .. }, ToSource::Query(attempt)) if attempt == self.attempt => {
                self.state = State::Committing { repeat_at: now + REPEAT };
                actions.push_back(self.commit_message());
                Step::Stay
            }
            // The copy that was handed back has been promoted: nobody there will ever discard it.
            (State::Discarding { detail, .. }, ToSource::TakenByForce { .. }) => {
                let outcome = handed_back_and_promoted(detail);
                self.state = State::Over;
                Step::Over(outcome)
            }
            // That host knows nothing of it any more, and holds nothing for it.
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

    /// The volumes are in use at the target.
    fn target_works(&mut self, now: Duration, actions: &mut VecDeque<SourceAction>) {
        match self.left {
            Completeness::Hollow if !broken(Bug::RetiredBeforeWhole) => {
                // It is asked at once: after a restart of this host it may have had everything for long.
                self.state = State::Filling { ask_at: now, units_missing: None };
            }
            Completeness::Whole | Completeness::Hollow => self.retire(actions),
        }
    }

    fn retire(&mut self, actions: &mut VecDeque<SourceAction>) {
        self.state = State::Retiring;
        actions.push_back(SourceAction::Retire);
    }

    pub(crate) fn retired(&mut self, left_over: String) -> Step {
        match self.state {
            State::Retiring => {
                self.state = State::Over;
                Step::Over(Outcome::Moved { left_over })
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
        self.state = State::Discarding { detail, repeat_at: now + REPEAT };
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
            State::Discarding { repeat_at, .. } if *repeat_at <= now => {
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

    /// What the target lacks, as it has said it; `None`: it lacks nothing. The inner `None`: that is not known.
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
            State::Filling { ask_at, .. } => Some((*ask_at, "the target to fetch what it lacks")),
            State::Discarding { repeat_at, .. } => Some((*repeat_at, "the target to delete its images")),
            State::TakingBack { retry_at, .. } => Some(((*retry_at)?, "the journal")),
            State::Retiring | State::Over => None,
        }
    }

    pub(crate) fn waits_for(&self) -> Option<&'static str> {
        match &self.state {
            State::Retiring => Some("the source's images to be dealt with"),
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

/// How a migration ends whose copy was handed back and then promoted, also if the source was restarted in between.
pub(crate) fn handed_back_and_promoted(detail: &str) -> Outcome {
    let detail = format!("{detail}; the copy at the other host was promoted, and is a branch of its own");
    Outcome::HandedBack { detail }
}
