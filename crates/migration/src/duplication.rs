//! Decides when copies of volumes in use are cut off, so that they are the volumes at one instant. It has no I/O and no clock.
//!
//! ```text
//!               all equal               all gates closed, all equal            every copy cut
//!   Copying ──────────────────► Closing ────────────────────────────► Cutting ────────────────► Over
//!      ▲                           │                                     │
//!      └──── too long: gates open ─┘     any state: failed, cancelled, too long to cut ──► Over, without copies
//! ```
//! Until the cut each copy is a replica like the target of a migration, or is to be cloned at the cut. While all gates are closed, no
//! request is below any of them, and nothing is missing: so the copies have every acknowledged write of every volume, and no other.
//! The copies are cut off *before* the first gate opens: no later write to any volume reaches any copy. A client that writes to one
//! volume after a write to another one was acknowledged is never found with the second write alone. There is no handover: the
//! source owns the volumes all the time.

use std::collections::VecDeque;
use std::time::Duration;

/// The most times that gates are closed: guests notice each.
const TRIES_MAX: u32 = 10;
/// The pause before the next one.
const PAUSE: Duration = Duration::from_secs(1);

/// The machine of the copies of one order.
#[derive(Debug)]
pub struct Duplication {
    state: State,
    members: Vec<Member>,
    tries: u32,
    /// The longest time that gates may be closed before the copies are cut, and again until they are (design §5.7).
    held_max: Duration,
    actions: VecDeque<DuplicationAction>,
}

/// One volume of the order.
#[derive(Clone, Copy, Debug, Default)]
struct Member {
    is_synchronised: bool,
    /// Whether its gate is closed in the present try.
    is_closed: bool,
    is_cut: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The gates are open.
    Copying {
        not_before: Duration,
    },
    /// The gates begin to close, or are closed.
    Closing {
        until: Duration,
    },
    /// The gates are closed, and the copies are being cut off.
    Cutting {
        until: Duration,
    },
    Over,
}

/// An event of a copy. The first number is the volume's position in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DuplicationEvent {
    /// The copy is equal to the volume, and all copied data is durable; or it can be cloned while the gate is closed.
    Synchronised(usize),
    /// It is not, any more.
    Behind(usize),
    /// No request is below the gate that was ordered to close for the try with this number.
    GateClosed(usize, u32),
    /// The copy is cut off: no later write to the volume reaches it.
    Cut(usize),
    /// The copying of one volume cannot succeed.
    Failed,
    /// An administrator, or the end of the daemon, has ended it.
    Cancelled,
}

/// An action for every copy of the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DuplicationAction {
    /// Admit no request, and report when none is below the gate; with the number of the try.
    CloseGates(u32),
    /// Admit requests again.
    OpenGates,
    /// Complete the copy as it is now, remove the mirror, and report that.
    Cut,
    /// Stop the copying, and remove the mirror. **N.B.** Before a gate is opened that follows.
    Detach,
    /// The copies are the volumes at the instant of the cut. They are to be flushed.
    Complete,
    /// The copies are of no use.
    GiveUp(WhyGivenUp),
}

/// Why copies are of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyGivenUp {
    /// The copying of one volume has failed.
    Failed,
    /// It was cancelled.
    Cancelled,
    /// The requests of guests did not end in time, or they wrote more than the copies could follow, in every try; or to cut the
    /// copies off took too long.
    NeverStill,
}

impl Duplication {
    /// Makes the machine of an order for copies of so many volumes, whose copying begins. Gates are closed for up to `held_max`
    /// before the copies are cut, and for up to as long again until they are.
    pub fn new(members: usize, held_max: Duration) -> Self {
        Self {
            state: State::Copying { not_before: Duration::ZERO },
            members: vec![Member::default(); members],
            tries: 0,
            held_max,
            actions: VecDeque::new(),
        }
    }

    /// Handles an event. An event that does not fit changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: DuplicationEvent) {
        match event {
            DuplicationEvent::Synchronised(index) => {
                self.note(index, |member| member.is_synchronised = true);
            }
            DuplicationEvent::Behind(index) => self.note(index, |member| member.is_synchronised = false),
            DuplicationEvent::GateClosed(index, number) => {
                if matches!(self.state, State::Closing { .. }) && number == self.tries {
                    self.note(index, |member| member.is_closed = true);
                }
            }
            DuplicationEvent::Cut(index) => {
                if matches!(self.state, State::Cutting { .. }) {
                    self.note(index, |member| member.is_cut = true);
                }
            }
            DuplicationEvent::Failed => self.give_up(WhyGivenUp::Failed),
            DuplicationEvent::Cancelled => self.give_up(WhyGivenUp::Cancelled),
        }
        self.advance(now);
    }

    /// Handles everything that is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.advance(now);
    }

    /// Returns the next action for the caller.
    pub fn poll_action(&mut self) -> Option<DuplicationAction> {
        self.actions.pop_front()
    }

    /// Returns the latest time to call `handle_timeout`, and the reason for it.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        match self.state {
            State::Copying { not_before } if self.are_all(|member| member.is_synchronised) => {
                Some((not_before, "the next try to hold guests for a moment"))
            }
            State::Copying { .. } | State::Over => None,
            State::Closing { until } => Some((until, "requests of guests to end")),
            State::Cutting { until } => Some((until, "the copies to be cut off")),
        }
    }

    /// Returns whether nothing follows.
    pub fn is_over(&self) -> bool {
        self.state == State::Over && self.actions.is_empty()
    }

    fn note(&mut self, index: usize, change: impl FnOnce(&mut Member)) {
        if let Some(member) = self.members.get_mut(index) {
            change(member);
        }
    }

    fn are_all(&self, holds: impl Fn(&Member) -> bool) -> bool {
        self.members.iter().all(holds)
    }

    fn advance(&mut self, now: Duration) {
        let are_equal = self.are_all(|member| member.is_synchronised);
        match self.state {
            State::Copying { not_before } if are_equal && now >= not_before => {
                self.tries += 1;
                self.members.iter_mut().for_each(|member| member.is_closed = false);
                self.state = State::Closing { until: now + self.held_max };
                self.actions.push_back(DuplicationAction::CloseGates(self.tries));
            }
            State::Closing { .. } if are_equal && self.are_all(|member| member.is_closed) => {
                self.state = State::Cutting { until: now + self.held_max };
                self.actions.push_back(DuplicationAction::Cut);
            }
            State::Cutting { .. } if self.are_all(|member| member.is_cut) => {
                self.state = State::Over;
                self.actions.extend([DuplicationAction::OpenGates, DuplicationAction::Complete]);
            }
            State::Closing { until } if now >= until => {
                if self.tries >= TRIES_MAX {
                    return self.give_up(WhyGivenUp::NeverStill);
                }
                self.state = State::Copying { not_before: now + PAUSE };
                self.actions.push_back(DuplicationAction::OpenGates);
            }
            // N.B. A copy that is cut off follows its volume no more, so there is no next try.
            State::Cutting { until } if now >= until => self.give_up(WhyGivenUp::NeverStill),
            State::Copying { .. } | State::Closing { .. } | State::Cutting { .. } | State::Over => {}
        }
    }

    fn give_up(&mut self, why: WhyGivenUp) {
        if self.state == State::Over {
            return;
        }
        self.actions.push_back(DuplicationAction::Detach);
        if matches!(self.state, State::Closing { .. } | State::Cutting { .. }) {
            self.actions.push_back(DuplicationAction::OpenGates);
        }
        self.actions.push_back(DuplicationAction::GiveUp(why));
        self.state = State::Over;
    }
}

#[cfg(test)]
mod tests;
