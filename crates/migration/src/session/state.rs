//! The machine of a session.

use std::collections::VecDeque;
use std::time::Duration;

use super::event::{Action, Answer, Event, Step, Undo, VmPlace};
use super::{Patience, Role};
use crate::failure::Failure;
use crate::journal::{FailureCode, MigrationState, Outcome, Stage};
use crate::orders;
use crate::planted::{Bug, broken};

/// One migration, as one host sees to it.
#[derive(Debug)]
pub struct MigrationSession {
    role: Role,
    has_vm: bool,
    patience: Patience,
    state: State,
    /// *Started* is durable.
    is_recorded: bool,
    /// What is to be undone if it comes to nothing.
    undo: Option<Undo>,
    /// How far the journal says that it is, if a driver is to go on with what was interrupted.
    resumed: Option<Stage>,
    /// A driver of this daemon has had it, and may have it still.
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
    /// No driver goes on with it; it is looked how far it is, or will be.
    Interrupted {
        retry_at: Option<Duration>,
    },
    /// A driver has it.
    UnderWay,
    /// It comes to nothing: that is made durable before any image is deleted, or will be tried again.
    Abandoning {
        outcome: Outcome,
        retry_at: Option<Duration>,
    },
    /// It comes to nothing, and what was done is undone.
    Undoing {
        outcome: Outcome,
    },
    /// It comes to nothing, and that is made durable, or will be tried again.
    Ending {
        outcome: Outcome,
        retry_at: Option<Duration>,
    },
    /// Where the VM is is noted, or will be tried again.
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

    /// Makes the session of a migration that is in the journal, and that no driver has.
    pub fn resume(role: Role, has_vm: bool, patience: Patience) -> Self {
        let mut session = Self::at(role, has_vm, patience, State::Interrupted { retry_at: None });
        session.is_recorded = true;
        // Nobody waits for it.
        session.is_answered = true;
        session.actions.push_back(Action::Recall);
        session
    }

    /// With what was ordered of it, as the journal says.
    #[must_use]
    pub fn with_orders(mut self, recorded: &MigrationState) -> Self {
        self.is_cancelled = !orders::goes_on(recorded);
        self
    }

    fn at(role: Role, has_vm: bool, patience: Patience, state: State) -> Self {
        Self {
            role,
            has_vm,
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

    /// The step that is being done; what else was asked for is not wanted any more.
    pub fn doing(&self) -> Option<Step> {
        match self.state {
            State::Doing { step, .. } => Some(step),
            _ => None,
        }
    }

    /// Whether a driver has the migration.
    pub fn is_under_way(&self) -> bool {
        self.state == State::UnderWay
    }

    /// Whether nothing is left to do.
    pub fn is_over(&self) -> bool {
        self.state == State::Over && self.actions.is_empty()
    }

    /// Takes what has happened. What does not fit is late, and changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: Event) {
        match (self.state.clone(), event) {
            (State::Doing { step, .. }, Event::Done(done, result)) if step == done => match result {
                Ok(()) => self.step_done(now, step),
                Err(failure) => self.step_failed(now, step, failure),
            },
            (State::Doing { step: Step::Record, .. }, Event::Undecided) => {
                // What was taken may be in the journal's books: the next start sees to it.
                self.answer(Answer::Refused);
                self.state = State::Over;
            }
            (State::Doing { step, .. }, Event::Cancel) => {
                self.is_cancelled = true;
                // It may take as long as a host takes that is not there; the others are done soon.
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

    /// Does what is due.
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

    /// What is to be done next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When it wants to be called again, and what it waits for.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        match self.state {
            State::Doing { until: Some(until), .. } => Some((until, "the other host to take the volumes")),
            State::Interrupted { retry_at: Some(at) } => Some((at, "a lane to go on with it")),
            State::Abandoning { retry_at: Some(at), .. } | State::Ending { retry_at: Some(at), .. } => {
                Some((at, "the journal to take that it has ended"))
            }
            State::Noting { retry_at: Some(at), .. } => Some((at, "a note of where the VM is")),
            _ => None,
        }
    }

    /// Begins with the step after `done`.
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
            // N.B. what was asked of the other host may be done although its answer does not come.
            Step::Offer => self.undo = Some(Undo::Offer),
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
                // A place that is in the journal is given back as its image is.
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

    /// What a restart cannot go on with, and nothing was released of, ends if somebody wishes that: the other host, or the image,
    /// may be gone for good. **N.B.** Only if no driver has had it since, and no VM goes along: it may stand still, and it is a
    /// driver that lets it go on.
    fn perhaps_give_up(&mut self) {
        let undo = match self.role {
            Role::Source => Undo::Offer,
            Role::Local | Role::Target => Undo::Images,
        };
        let is_copying = matches!(self.resumed, Some(Stage::Copying));
        if self.is_cancelled && is_copying && !self.has_vm && !self.has_begun {
            self.undo = Some(undo);
            self.come_to_nothing(Outcome::Cancelled);
        }
    }

    fn begun(&mut self) {
        self.has_begun = true;
        self.state = State::UnderWay;
        self.answer(Answer::Begun);
        let is_copying = matches!(self.resumed, Some(Stage::Copying));
        if self.role == Role::Source && self.has_vm && is_copying {
            self.actions.push_back(Action::KeepVm);
        }
        if self.is_cancelled {
            self.actions.push_back(Action::Cancel);
        }
    }

    fn step_failed(&mut self, now: Duration, step: Step, failure: Failure) {
        match (&self.resumed, step) {
            // Nothing was promised: its source is told that there is no such migration, and begins another one.
            (Some(Stage::Copying), Step::Begin) if self.role == Role::Target => {
                self.undo = Some(Undo::Images);
                self.come_to_nothing(failure.into());
            }
            // What the copy lacks is not known, or somebody has touched it. What is only out of reach is looked at again.
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
        self.state = State::Interrupted { retry_at: Some(now + self.patience.resume_interval) };
        self.perhaps_give_up();
    }

    /// No driver has it, and none will.
    fn come_to_nothing(&mut self, outcome: Outcome) {
        match self.undo.take() {
            // N.B. a killed daemon must not find that it goes on with images of which some are gone.
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

    /// It has ended, durably.
    fn ended(&mut self, outcome: Outcome) {
        if outcome == Outcome::TakenBack {
            // Where everything is, the VM included, the migration says that has brought it back.
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
