//! One guest that Sterna pauses: from before the pause until the guest is known to run.
//!
//! ```text
//!   Free ── Hold ──► Noting ── Noted ──► Held ── LetRun ──► Looking ──► Acting ── Done ──┐
//!                      │                   │                  ▲  │         │ Refused     │
//!                      │ NotNoted          │ Gone             │  │ not yet ▼             │
//!                      ▼                   ▼                  │  └───────► Waiting ──────┤
//!                     Free ◄── Forgotten ── Forgetting ◄──────┴── seen to run ◄──────────┘
//! ```
//! **N.B.** The note is durable before the guest may be paused. It is removed only after the guest was seen running, or is not
//! this host's to run. A daemon killed in between finds the note, and continues from [`Hold::found`]. No number of attempts
//! leaves a guest paused; from [`LOUD_AFTER`] on the reason is reported.

use std::collections::VecDeque;
use std::time::Duration;

use crate::planted::{Bug, broken};

const PAUSE_LEAST: Duration = Duration::from_millis(20);
/// The longest pause at first, while the guest should be stopped only for a moment.
const PAUSE_SOON: Duration = Duration::from_millis(160);
/// The longest pause after [`LOUD_AFTER`].
const PAUSE_MOST: Duration = Duration::from_secs(5);
/// How long a guest may take to run again before the administrator is informed.
pub const LOUD_AFTER: Duration = Duration::from_secs(10);

/// The reason why a guest is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The guest's disks are being adopted.
    Adopt,
    /// The guest's disks are being given back.
    Release,
    /// The guest moves to another host, and its hypervisor stops it for that. If it is paused, another party has done that.
    Move,
    /// The guest moves to another host, and is paused so that the rest of its memory can follow later.
    MoveAhead,
    /// A client has asked for the guest to run.
    Resume,
    /// Blocks of its disks at another host may be late ([`stall`](super::stall)).
    Missing,
    /// Its memory is being written to a file ([`suspend`](super::suspend)).
    Suspend,
}

/// An event of a paused guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An operation begins for which the guest is paused.
    Hold(Reason),
    /// The note is durable.
    Noted,
    /// The note could not be made durable.
    NotNoted,
    /// The reason is over, and the guest is to run here.
    LetRun,
    /// The reason is over, and the guest stays as it is: another party has paused it, or it has ended.
    LetStay,
    /// The guest is not this host's to run: it runs at another host, or its hypervisor has ended.
    Gone,
    /// The hypervisor has reported the guest's state.
    Seen(Seen),
    /// The hypervisor has carried out the request.
    Done,
    /// The hypervisor has refused the request, or does not answer.
    Refused(String),
    /// The note is removed.
    Forgotten,
}

/// An action for a paused guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Make a note durable, then report [`Event::Noted`].
    Note(Reason),
    /// Permit the pause of the guest from now on.
    MayPause,
    /// Ask the hypervisor for the guest's state.
    Look,
    /// Let the hypervisor abandon a move that is under way.
    Abandon,
    /// Let the hypervisor resume the guest.
    Continue,
    /// The guest must not run here: report why, and leave it.
    MustNotRun,
    /// Inform the administrator why the guest does not run yet.
    Tell(String),
    /// Remove the note, then report [`Event::Forgotten`].
    Forget,
}

/// The reported state of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Whether the guest runs.
    pub running: Running,
    /// The state of a move of its memory.
    pub memory: Memory,
    /// Whether a disk is detached, so that writes would be lost.
    pub is_over_nothing: bool,
}

/// Whether a guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Running {
    /// The guest's processors run.
    Yes,
    /// The guest is stopped, and can be resumed.
    No,
    /// The guest was paused by an order, Sterna's or another party's.
    Paused,
    /// The guest has shut down, or crashed.
    Ended,
}

/// The state of a move of a guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// No move is under way.
    Still,
    /// A move is under way, and can be abandoned.
    Moving,
    /// A move is ending by itself, and cannot be abandoned.
    Ending,
    /// The guest may run, or have run, at the target without the rest of its memory.
    Ahead,
}

/// A guest, and the obligation to let it run.
#[derive(Debug)]
pub struct Hold {
    phase: Phase,
    reason: Option<Reason>,
    then: Then,
    /// When it was first to run.
    since: Option<Duration>,
    /// Whether the hypervisor was asked to resume it since it was last seen stopped.
    was_let_run: bool,
    failures: u32,
    is_told: bool,
    actions: VecDeque<Action>,
}

/// What happens to the guest once the reason is over.
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
    /// Returns a guest without obligation.
    pub fn free() -> Self {
        Self::at(Phase::Free)
    }

    /// Returns a guest with a note: it may be paused, for this reason.
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

    /// Returns whether there is no obligation to the guest.
    pub fn is_free(&self) -> bool {
        self.phase == Phase::Free
    }

    /// Handles an event. An event that does not fit is late, and changes nothing.
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
            // The guest was never paused: only the note has to be removed.
            (Phase::Noting { is_over: true }, Event::Noted) => self.enter(Phase::Forgetting, Action::Forget),
            (Phase::Noting { .. }, Event::NotNoted) | (Phase::Forgetting, Event::Forgotten) => self.be_free(),
            (Phase::Noting { .. }, Event::LetRun | Event::LetStay | Event::Gone) => {
                self.phase = Phase::Noting { is_over: true }
            }
            (Phase::Held, Event::LetRun | Event::LetStay) => {
                self.since = Some(now);
                self.enter(Phase::Looking, Action::Look);
            }
            // A client asks for it: look at once.
            (Phase::Waiting { .. }, Event::LetRun | Event::LetStay) => {
                self.enter(Phase::Looking, Action::Look);
            }
            (Phase::Held | Phase::Looking | Phase::Acting | Phase::Waiting { .. }, Event::Gone) => {
                self.enter(Phase::Forgetting, Action::Forget);
            }
            (Phase::Looking, Event::Seen(seen)) => self.seen(now, &seen),
            // Success is observed, not believed.
            (Phase::Acting, Event::Done) => self.enter(Phase::Looking, Action::Look),
            (Phase::Looking | Phase::Acting, Event::Refused(reason)) => {
                self.was_let_run = false;
                self.wait(now, reason);
            }
            _ => {}
        }
    }

    /// Handles everything that is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        if matches!(self.phase, Phase::Waiting { until } if until <= now) {
            self.enter(Phase::Looking, Action::Look);
        }
    }

    /// Returns the next action for the caller.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns the time of the next call, and the reason for it.
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
            // The guest stays as it is, as soon as no move is under way.
            (Memory::Still, _) if self.then == Then::Stays => self.enter(Phase::Forgetting, Action::Forget),
            // Another party has paused it, and will resume it.
            (Memory::Still | Memory::Ending, Running::Paused) => {
                self.enter(Phase::Forgetting, Action::Forget);
            }
            (Memory::Still | Memory::Ending | Memory::Ahead, Running::Yes) | (_, Running::Ended) => {
                self.enter(Phase::Forgetting, Action::Forget);
            }
            // **N.B.** The guest runs or has run at the target: two copies would run.
            (Memory::Ahead, Running::No | Running::Paused) => {
                self.enter(Phase::Forgetting, Action::MustNotRun);
            }
            (Memory::Moving, _) => self.enter(Phase::Acting, Action::Abandon),
            (Memory::Ending, Running::No) => {
                self.wait(now, "its hypervisor does not end the move of its memory".to_owned());
            }
            (Memory::Still, Running::No) if seen.is_over_nothing => {
                self.wait(now, "a disk of it has no backend, and its writes would be lost".to_owned());
            }
            // A failing disk, for example, stops it again: resume it with pauses in between.
            (Memory::Still, Running::No) if std::mem::take(&mut self.was_let_run) => {
                self.wait(now, "it was resumed and does not run: a disk of it may have failed".to_owned());
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
        // A guest that must not run is not Sterna's, and its note is useless.
        if self.actions.back() == Some(&Action::MustNotRun) {
            self.actions.push_back(Action::Forget);
        }
    }
}

#[cfg(test)]
mod tests;
