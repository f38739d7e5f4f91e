//! One guest that is paused for a reason of ours, from before it is paused until it is known to run.
//!
//! ```text
//!   Free ── Hold ──► Noting ── Noted ──► Held ── LetRun ──► Looking ──► Acting ── Done ──┐
//!                      │                   │                  ▲  │         │ Refused     │
//!                      │ NotNoted          │ Gone             │  │ not yet ▼             │
//!                      ▼                   ▼                  │  └───────► Waiting ──────┤
//!                     Free ◄── Forgotten ── Forgetting ◄──────┴── seen to run ◄──────────┘
//! ```
//! **N.B.** The note is durable before anybody may pause the guest, and is removed only after the guest was seen to run, or is
//! not this host's to run any more: a daemon that is killed anywhere in between finds it, and goes on from [`Hold::found`].
//! There is no number of attempts after which a guest is left paused; from [`LOUD_AFTER`] on it is said why it does not run.

use std::collections::VecDeque;
use std::time::Duration;

use crate::planted::{Bug, broken};

/// Pause before the hypervisor is asked again.
const PAUSE_LEAST: Duration = Duration::from_millis(20);
/// The longest that it becomes at first, while it is about the guest's standing still for a moment.
const PAUSE_SOON: Duration = Duration::from_millis(160);
/// And after [`LOUD_AFTER`].
const PAUSE_MOST: Duration = Duration::from_secs(5);
/// How long a guest may take to run again before an administrator is told.
pub const LOUD_AFTER: Duration = Duration::from_secs(10);

/// What a guest is paused for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its disks are adopted.
    Adopt,
    /// Its disks are given back.
    Release,
    /// It moves to another host. Its hypervisor stops it for that, and we do not pause it: one that is paused was paused by
    /// somebody else.
    Move,
    /// It moves to another host, and we pause it so that the rest of its memory may follow later.
    MoveAhead,
    /// Somebody asked for it to run.
    Resume,
    /// What another host has of its disks may not come in time ([`stall`](super::stall)).
    Missing,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Something is to be done for which the guest is paused.
    Hold(Reason),
    /// The note is durable.
    Noted,
    /// The note could not be made durable.
    NotNoted,
    /// The reason is over, and the guest is to run here.
    LetRun,
    /// The reason is over, and the guest is to stay as it is: somebody else has paused it, or it has ended.
    LetStay,
    /// The guest is not this host's to run any more: it runs elsewhere, or its hypervisor has ended.
    Gone,
    /// What the hypervisor says.
    Seen(Seen),
    /// The hypervisor did what it was asked to.
    Done,
    /// The hypervisor did not, or does not answer.
    Refused(String),
    /// The note is gone.
    Forgotten,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make a note durable, then say [`Event::Noted`].
    Note(Reason),
    /// The guest may be paused from now on.
    MayPause,
    /// Ask the hypervisor what the guest does.
    Look,
    /// Have the hypervisor give up a move that is under way.
    Abandon,
    /// Have the hypervisor let the guest run.
    Continue,
    /// It must not be let run here: say why, and leave it.
    MustNotRun,
    /// Tell an administrator why the guest does not run yet.
    Tell(String),
    /// Remove the note, then say [`Event::Forgotten`].
    Forget,
}

/// What a hypervisor says of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Whether the guest runs.
    pub running: Running,
    /// How far a move of its memory is.
    pub memory: Memory,
    /// A disk of it is over nothing: what it would write there is lost.
    pub is_over_nothing: bool,
}

/// Whether a guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Running {
    /// It does.
    Yes,
    /// It stands, and can be let run.
    No,
    /// It was paused by an order, ours or that of somebody else.
    Paused,
    /// It is not paused: it has shut down, or crashed.
    Ended,
}

/// How far a move of a guest's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// None is under way.
    Still,
    /// It is under way, and can be given up.
    Moving,
    /// It is ending by itself, and cannot be given up.
    Ending,
    /// The guest may run, or have run, at the target without the rest of it.
    Ahead,
}

/// A guest, and what we owe it.
#[derive(Debug)]
pub struct Hold {
    phase: Phase,
    reason: Option<Reason>,
    then: Then,
    /// When it was to run first.
    since: Option<Duration>,
    /// Whether the hypervisor was asked to let it run since it was last seen not to.
    was_let_run: bool,
    failures: u32,
    is_told: bool,
    actions: VecDeque<Action>,
}

/// What is to become of it when the reason is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Runs,
    Stays,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Free,
    /// `is_over`: the reason was over before the note was durable.
    Noting {
        is_over: bool,
    },
    Held,
    Looking,
    Acting,
    Waiting {
        until: Duration,
    },
    Forgetting,
}

impl Hold {
    /// A guest that we owe nothing.
    pub fn free() -> Self {
        Self::at(Phase::Free)
    }

    /// A guest of which a note was found: it may be paused, for this reason.
    pub fn found(reason: Reason) -> Self {
        Self { reason: Some(reason), ..Self::at(Phase::Held) }
    }

    fn at(phase: Phase) -> Self {
        Self {
            phase,
            reason: None,
            then: Then::Runs,
            since: None,
            was_let_run: false,
            failures: 0,
            is_told: false,
            actions: VecDeque::new(),
        }
    }

    /// Whether nothing is owed to the guest.
    pub fn is_free(&self) -> bool {
        self.phase == Phase::Free
    }

    /// Takes what has happened. An event that does not fit is late, and changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: Event) {
        match &event {
            Event::LetRun => self.then = Then::Runs,
            Event::LetStay => self.then = Then::Stays,
            _ => {}
        }
        match (self.phase, event) {
            (Phase::Free, Event::Hold(reason)) => {
                self.reason = Some(reason);
                if broken(Bug::PausedBeforeNoted) {
                    self.actions.push_back(Action::MayPause);
                }
                self.enter(Phase::Noting { is_over: false }, Action::Note(reason));
            }
            (Phase::Noting { is_over: false }, Event::Noted) => self.enter(Phase::Held, Action::MayPause),
            // It was never paused: there is nothing but the note to be removed.
            (Phase::Noting { is_over: true }, Event::Noted) => self.enter(Phase::Forgetting, Action::Forget),
            (Phase::Noting { .. }, Event::NotNoted) | (Phase::Forgetting, Event::Forgotten) => self.be_free(),
            (Phase::Noting { .. }, Event::LetRun | Event::LetStay | Event::Gone) => {
                self.phase = Phase::Noting { is_over: true }
            }
            (Phase::Held, Event::LetRun | Event::LetStay) => {
                self.since = Some(now);
                self.enter(Phase::Looking, Action::Look);
            }
            // Somebody asks for it: at once.
            (Phase::Waiting { .. }, Event::LetRun | Event::LetStay) => {
                self.enter(Phase::Looking, Action::Look);
            }
            (Phase::Held | Phase::Looking | Phase::Acting | Phase::Waiting { .. }, Event::Gone) => {
                self.enter(Phase::Forgetting, Action::Forget);
            }
            (Phase::Looking, Event::Seen(seen)) => self.seen(now, &seen),
            // That it did it is seen, not believed.
            (Phase::Acting, Event::Done) => self.enter(Phase::Looking, Action::Look),
            (Phase::Looking | Phase::Acting, Event::Refused(reason)) => {
                self.was_let_run = false;
                self.wait(now, reason);
            }
            _ => {}
        }
    }

    /// Takes note of the time.
    pub fn handle_timeout(&mut self, now: Duration) {
        if matches!(self.phase, Phase::Waiting { until } if until <= now) {
            self.enter(Phase::Looking, Action::Look);
        }
    }

    /// What is to be done next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When it wants to be called again, and what it waits for.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        match self.phase {
            Phase::Waiting { until } => Some((until, "a paused guest to be let run")),
            _ => None,
        }
    }

    fn seen(&mut self, now: Duration, seen: &Seen) {
        let is_ours = self.reason != Some(Reason::Move) || broken(Bug::PausedByOthersRuns);
        let running = match seen.running {
            Running::Paused if is_ours => Running::No,
            running => running,
        };
        match (seen.memory, running) {
            // It is left as it is, as soon as nothing moves any more.
            (Memory::Still, _) if self.then == Then::Stays => self.enter(Phase::Forgetting, Action::Forget),
            // Somebody else has paused it, and lets it run.
            (Memory::Still | Memory::Ending, Running::Paused) => {
                self.enter(Phase::Forgetting, Action::Forget);
            }
            (Memory::Still | Memory::Ending | Memory::Ahead, Running::Yes) | (_, Running::Ended) => {
                self.enter(Phase::Forgetting, Action::Forget);
            }
            // N.B. it runs there, or has run: two would.
            (Memory::Ahead, Running::No | Running::Paused) => {
                self.enter(Phase::Forgetting, Action::MustNotRun);
            }
            (Memory::Moving, _) => self.enter(Phase::Acting, Action::Abandon),
            (Memory::Ending, Running::No) => {
                self.wait(now, "its hypervisor does not end the move of its memory".to_owned());
            }
            (Memory::Still, Running::No) if seen.is_over_nothing => {
                self.wait(
                    now,
                    "a disk of it is over nothing, and what it would write would be lost".to_owned(),
                );
            }
            // A disk that fails stops it again, say: it is let run time and again, and not all the time.
            (Memory::Still, Running::No) if std::mem::take(&mut self.was_let_run) => {
                self.wait(now, "it was let run and does not run: a disk of it may have failed".to_owned());
            }
            (Memory::Still, Running::No) => {
                self.was_let_run = true;
                if broken(Bug::ForgottenBeforeRunning) {
                    self.actions.push_back(Action::Forget);
                }
                self.enter(Phase::Acting, Action::Continue);
            }
        }
    }

    fn wait(&mut self, now: Duration, reason: String) {
        let since = self.since.unwrap_or(now);
        let is_late = now.saturating_sub(since) >= LOUD_AFTER;
        let most = if is_late { PAUSE_MOST } else { PAUSE_SOON };
        let pause = PAUSE_LEAST.saturating_mul(2_u32.saturating_pow(self.failures)).min(most);
        self.failures = self.failures.saturating_add(1);
        self.phase = Phase::Waiting { until: now.saturating_add(pause) };
        if !self.is_told && is_late {
            self.is_told = true;
            self.actions.push_back(Action::Tell(reason));
        }
    }

    fn be_free(&mut self) {
        *self = Self { actions: std::mem::take(&mut self.actions), ..Self::free() };
    }

    fn enter(&mut self, phase: Phase, action: Action) {
        self.phase = phase;
        self.actions.push_back(action);
        // What must not run is not ours any more, and its note says nothing to anybody.
        if self.actions.back() == Some(&Action::MustNotRun) {
            self.actions.push_back(Action::Forget);
        }
    }
}

#[cfg(test)]
mod tests;
