//! The state machine of a session.

use std::collections::VecDeque;
use std::time::Duration;

use super::event::{Action, Answer, Event, Step, Undo, VmPlace};
use super::{Patience, Role};
use crate::failure::Failure;
use crate::journal::{FailureCode, MigrationState, Outcome, Stage};
use crate::orders;
use crate::planted::{Bug, broken};
use crate::vm::cold::Form;

/// One migration, as one host handles it.
#[derive(Debug)]
pub struct MigrationSession {
    role: Role,
    has_vm: bool,
    /// How the VM moves, if there is one.
    form: Form,
    patience: Patience,
    state: State,
    /// Whether *started* is durable.
    is_recorded: bool,
    undo: Option<Undo>,
    /// The stage in the journal, if a driver is to resume the migration.
    resumed: Option<Stage>,
    /// Whether a driver of this daemon has had the migration, and may have it still.
    has_begun: bool,
    is_cancelled: bool,
    is_answered: bool,
    actions: VecDeque<Action>,
}

#[derive(Clone, Debug, PartialEq)]
enum State {
    Doing {
        step: Step,
        until: Option<Duration>,
    },
    /// No driver has the migration; its stage is looked up, or will be.
    Interrupted {
        retry_at: Option<Duration>,
    },
    UnderWay,
    /// The failure is being made durable before any image is deleted, or will be tried again.
    Abandoning {
        outcome: Outcome,
        retry_at: Option<Duration>,
    },
    Undoing {
        outcome: Outcome,
    },
    /// The end is being made durable, or will be tried again.
    Ending {
        outcome: Outcome,
        retry_at: Option<Duration>,
    },
    /// The place of the VM is being recorded, or will be tried again.
    Noting {
        outcome: Outcome,
        retry_at: Option<Duration>,
    },
    Over,
}

impl MigrationSession {
    /// Makes the session of a migration that begins.
    pub fn new(role: Role, has_vm: bool, patience: Patience) -> Self {
        let state = State::Interrupted { retry_at: None };
        let mut session = Self::at(role, has_vm, patience, state);
        session.go_on(Duration::ZERO, None);
        session
    }

    /// Makes the session of a migration that is in the journal, but has no driver.
    pub fn resume(role: Role, has_vm: bool, patience: Patience) -> Self {
        let mut session = Self::at(role, has_vm, patience, State::Interrupted { retry_at: None });
        session.is_recorded = true;
        // No client waits for an answer.
        session.is_answered = true;
        session.actions.push_back(Action::Recall);
        session
    }

    /// Adds the order that the journal has for the migration.
    #[must_use]
    pub fn with_orders(mut self, recorded: &MigrationState) -> Self {
        self.is_cancelled = !orders::goes_on(recorded);
        self
    }

    /// Says how the VM of the migration moves.
    #[must_use]
    pub fn with_form(mut self, form: Form) -> Self {
        self.form = form;
        self
    }

    /// Returns whether a VM moves that may be paused for the move, and whose memory is lost with a daemon.
    fn has_live_vm(&self) -> bool {
        self.has_vm && self.form == Form::Live
    }

    fn at(role: Role, has_vm: bool, patience: Patience, state: State) -> Self {
        Self {
            role,
            has_vm,
            form: Form::Live,
            patience,
            state,
            is_recorded: false,
            undo: None,
            resumed: None,
            has_begun: false,
            is_cancelled: false,
            is_answered: false,
            actions: VecDeque::new(),
        }
    }

    /// Returns the current step; other requested steps are not needed.
    pub fn doing(&self) -> Option<Step> {
        match self.state {
            State::Doing { step, .. } => Some(step),
            _ => None,
        }
    }

    /// Returns whether a driver has the migration.
    pub fn is_under_way(&self) -> bool {
        self.state == State::UnderWay
    }

    /// Returns whether nothing is left to do.
    pub fn is_over(&self) -> bool {
        self.state == State::Over && self.actions.is_empty()
    }

    /// Handles an event. An event that does not fit is late, and changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: Event) {
        match (self.state.clone(), event) {
            (State::Doing { step, .. }, Event::Done(done, result)) if step == done => match result {
                Ok(()) => self.step_done(now, step),
                Err(failure) => self.step_failed(now, step, failure),
            },
            (State::Doing { step: Step::Record, .. }, Event::Undecided) => {
                // The journal may have recorded the reservation: the next start handles it.
                self.answer(Answer::Refused);
                self.state = State::Over;
            }
            (State::Doing { step, .. }, Event::Cancel) => {
                self.is_cancelled = true;
                // The offer alone may take as long as an absent host does; the other steps are short.
                if step == Step::Offer {
                    self.come_to_nothing(Outcome::Cancelled);
                }
            }
            (State::UnderWay, Event::Cancel) => self.actions.push_back(Action::Cancel),
            (State::Interrupted { .. }, Event::Cancel) => {
                self.is_cancelled = true;
                self.perhaps_give_up();
            }
            (State::Interrupted { retry_at: Some(_) }, Event::LookAgain) => {
                self.state = State::Interrupted { retry_at: None };
                self.actions.push_back(Action::Recall);
            }
            (State::Interrupted { .. }, Event::Recalled(stage)) => self.recalled(now, stage),
            (State::UnderWay, Event::DriverEnded(outcome)) => self.ended(outcome),
            (State::UnderWay, Event::DriverLost) => self.look_again(now),
            (State::Abandoning { outcome, retry_at: None }, Event::Abandoned(result)) => match result {
                Ok(()) => self.undo(Undo::Images, outcome),
                Err(_) => {
                    self.answer(Answer::Refused);
                    let retry_at = Some(now + self.patience.repeat_interval);
                    self.state = State::Abandoning { outcome, retry_at };
                }
            },
            (State::Undoing { outcome }, Event::Undone { left_over }) => {
                self.end(outcome.with_left_over(&left_over));
            }
            (State::Ending { outcome, retry_at: None }, Event::Ended(result)) => {
                if result.is_ok() || broken(Bug::EndNotRepeated) {
                    self.ended(outcome);
                } else {
                    self.answer(Answer::Refused);
                    let retry_at = Some(now + self.patience.repeat_interval);
                    self.state = State::Ending { outcome, retry_at };
                }
            }
            (State::Noting { outcome, retry_at: None }, Event::Noted(result)) => match result {
                Ok(()) => self.conclude(outcome),
                Err(_) => {
                    self.answer(Answer::Refused);
                    let retry_at = Some(now + self.patience.repeat_interval);
                    self.state = State::Noting { outcome, retry_at };
                }
            },
            _ => {}
        }
    }

    /// Handles everything that is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        match self.state.clone() {
            State::Doing { step: Step::Offer, until: Some(until) } if until <= now => {
                let seconds = self.patience.offer_max.as_secs();
                let detail = format!("the other host did not answer within {seconds} s");
                self.come_to_nothing(Outcome::Failed { code: FailureCode::HostRefused, detail });
            }
            State::Interrupted { retry_at: Some(at) } if at <= now => {
                self.state = State::Interrupted { retry_at: None };
                self.actions.push_back(Action::Recall);
            }
            State::Abandoning { outcome, retry_at: Some(at) } if at <= now => self.abandon(outcome),
            State::Ending { outcome, retry_at: Some(at) } if at <= now => self.end(outcome),
            State::Noting { outcome, retry_at: Some(at) } if at <= now => self.note(outcome),
            _ => {}
        }
    }

    /// Returns the next action for the caller.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns the time of the next call, and the reason for it.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        match self.state {
            State::Doing { until: Some(until), .. } => Some((until, "the other host to take the volumes")),
            State::Interrupted { retry_at: Some(at) } => Some((at, "a lane to continue it")),
            State::Abandoning { retry_at: Some(at), .. } | State::Ending { retry_at: Some(at), .. } => {
                Some((at, "the journal to record its end"))
            }
            State::Noting { retry_at: Some(at), .. } => Some((at, "a note of where the VM is")),
            _ => None,
        }
    }

    fn go_on(&mut self, now: Duration, done: Option<Step>) {
        let steps = self.role.steps(self.has_vm);
        let next = match done {
            None => steps.first(),
            Some(done) => steps.iter().skip_while(|step| **step != done).nth(1),
        };
        match next {
            Some(step) => self.begin(now, *step),
            None => self.state = State::UnderWay,
        }
    }

    fn begin(&mut self, now: Duration, step: Step) {
        match step {
            // **N.B.** The other host may have acted although its answer never comes.
            Step::Offer => self.undo = Some(Undo::Offer),
            Step::MakeImages if broken(Bug::ImagesNotUndone) => self.undo = None,
            Step::MakeImages => self.undo = Some(Undo::Images),
            _ => {}
        }
        self.actions.push_back(Action::Do(step));
        if step == Step::LetVmLeave && broken(Bug::VmLeavesUnnoted) {
            return self.begin(now, Step::ExamineVm);
        }
        let until = (step == Step::Offer).then(|| now + self.patience.offer_max);
        self.state = State::Doing { step, until };
    }

    fn step_done(&mut self, now: Duration, step: Step) {
        match step {
            Step::MakeRoom => self.undo = Some(Undo::Room),
            Step::Record => {
                self.is_recorded = true;
                // A recorded place is given back together with its image.
                self.undo = self.undo.map(|_| Undo::Images);
            }
            _ => {}
        }
        if step != Step::Begin && self.is_cancelled {
            return self.come_to_nothing(Outcome::Cancelled);
        }
        self.go_on(now, Some(step));
        if step == Step::Begin {
            self.begun();
        }
    }

    /// Ends a cancelled, unreleased migration that a restart cannot resume. The other host, or the image, may be gone for good.
    /// **N.B.** Only if no driver has had it since, and no VM moves live: it may be paused, and only a driver resumes it.
    fn perhaps_give_up(&mut self) {
        let undo = match self.role {
            Role::Source => Undo::Offer,
            Role::Local | Role::Target => Undo::Images,
        };
        let is_copying = matches!(self.resumed, Some(Stage::Copying));
        if self.is_cancelled && is_copying && !self.has_live_vm() && !self.has_begun {
            self.undo = Some(undo);
            self.come_to_nothing(Outcome::Cancelled);
        }
    }

    fn begun(&mut self) {
        self.has_begun = true;
        self.state = State::UnderWay;
        self.answer(Answer::Begun);
        let is_copying = matches!(self.resumed, Some(Stage::Copying));
        if self.role == Role::Source && self.has_live_vm() && is_copying {
            self.actions.push_back(Action::KeepVm);
        }
        if self.is_cancelled {
            self.actions.push_back(Action::Cancel);
        }
    }

    fn step_failed(&mut self, now: Duration, step: Step, failure: Failure) {
        match (&self.resumed, step) {
            // Nothing was promised: the source learns that there is no such migration, and begins another one.
            (Some(Stage::Copying), Step::Begin) if self.role == Role::Target => {
                self.undo = Some(Undo::Images);
                self.come_to_nothing(failure.into());
            }
            // The copy's missing set is not known, or the copy was changed. An unreachable copy is checked again later.
            (Some(Stage::Copying), Step::Begin)
                if self.role == Role::Local && failure.code == FailureCode::DaemonStopped =>
            {
                self.undo = Some(Undo::Images);
                self.come_to_nothing(failure.into());
            }
            (Some(_), Step::Begin) => self.look_again(now),
            _ => self.come_to_nothing(failure.into()),
        }
    }

    fn recalled(&mut self, now: Duration, stage: Option<Stage>) {
        match stage {
            Some(Stage::Ended(outcome)) => self.ended(outcome),
            Some(Stage::Discarding(outcome)) => self.undo(Undo::Images, outcome),
            Some(stage) => {
                self.resumed = Some(stage);
                self.perhaps_give_up();
                if matches!(self.state, State::Interrupted { .. }) {
                    self.begin(now, Step::Begin);
                }
            }
            None => self.state = State::Over,
        }
    }

    fn look_again(&mut self, now: Duration) {
        self.actions.push_back(Action::LetGo);
        let retry_at = (!broken(Bug::RetryForgotten)).then_some(now + self.patience.resume_interval);
        self.state = State::Interrupted { retry_at };
        self.perhaps_give_up();
    }

    /// Ends a migration that no driver has or will have.
    fn come_to_nothing(&mut self, outcome: Outcome) {
        match self.undo.take() {
            // **N.B.** A killed daemon must not resume with images of which some are deleted.
            Some(Undo::Images) if self.is_recorded && !broken(Bug::DiscardedBeforeNoted) => {
                self.abandon(outcome);
            }
            Some(undo) => self.undo(undo, outcome),
            None => self.end(outcome),
        }
    }

    fn abandon(&mut self, outcome: Outcome) {
        self.actions.push_back(Action::Abandon(outcome.clone()));
        self.state = State::Abandoning { outcome, retry_at: None };
    }

    fn undo(&mut self, undo: Undo, outcome: Outcome) {
        self.actions.push_back(Action::Undo(undo));
        self.state = State::Undoing { outcome };
    }

    fn end(&mut self, outcome: Outcome) {
        if self.is_recorded {
            self.actions.push_back(Action::End(outcome.clone()));
            self.state = State::Ending { outcome, retry_at: None };
        } else {
            self.conclude(outcome);
        }
    }

    fn ended(&mut self, outcome: Outcome) {
        if outcome == Outcome::TakenBack {
            // The migration that returned the volumes knows where everything is, including the VM.
            return self.conclude(outcome);
        }
        self.actions.push_back(Action::PlaceVolumes(outcome.clone()));
        self.note(outcome);
    }

    fn note(&mut self, outcome: Outcome) {
        if !self.has_vm || self.role == Role::Local {
            return self.conclude(outcome);
        }
        let is_at_target = matches!(outcome, Outcome::Moved { .. });
        let is_here = is_at_target == (self.role == Role::Target);
        let place = if is_here { VmPlace::Here } else { VmPlace::Elsewhere };
        self.actions.push_back(Action::Note(place));
        self.state = State::Noting { outcome, retry_at: None };
    }

    fn conclude(&mut self, outcome: Outcome) {
        if self.is_recorded {
            self.actions.push_back(Action::Conclude(outcome));
        }
        self.answer(Answer::Refused);
        self.state = State::Over;
    }

    fn answer(&mut self, answer: Answer) {
        if !std::mem::replace(&mut self.is_answered, true) {
            self.actions.push_back(Action::Answer(answer));
        }
    }
}
