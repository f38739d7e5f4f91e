//! Decides when a copy of a volume in use is cut off, so that it is the volume at one instant. It has no I/O and no clock.
//!
//! ```text
//!               synchronised                gate closed, still synchronised
//!   Copying ──────────────────► Closing ─────────────────────────────────────► Cut
//!      ▲                           │
//!      └──── too long: gate opens ─┘     any state: failed, cancelled ──► Over
//! ```
//! Until the cut the copy is a replica like the target of a migration. At the cut no request is below the gate, and nothing is
//! missing: so the copy has every acknowledged write, and no other. Then the mirror is removed, *before* the gate opens: no later
//! write reaches the copy. There is no handover: the source owns the volume all the time.

use std::collections::VecDeque;
use std::time::Duration;

/// The most times that a gate is closed: guests notice each.
const TRIES_MAX: u32 = 10;
/// The pause before the next one.
const PAUSE: Duration = Duration::from_secs(1);

/// The machine of one copy.
#[derive(Debug)]
pub struct Duplication {
    state: State,
    is_synchronised: bool,
    tries: u32,
    /// The longest time that the gate may be closed (design §5.7).
    held_max: Duration,
    actions: VecDeque<DuplicationAction>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The gate is open.
    Copying {
        not_before: Duration,
    },
    /// The gate begins to close, or is closed.
    Closing {
        until: Duration,
        is_closed: bool,
    },
    Over,
}

/// An event of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DuplicationEvent {
    /// The copy is equal to the volume, and all copied data is durable.
    Synchronised,
    /// It is not, any more.
    Behind,
    /// No request is below the gate that was ordered to close for the try with this number.
    GateClosed(u32),
    /// The copying cannot succeed.
    Failed,
    /// An administrator, or the end of the daemon, has ended it.
    Cancelled,
}

/// An action for a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DuplicationAction {
    /// Admit no request, and report when none is below the gate; with the number of the try.
    CloseGate(u32),
    /// Admit requests again.
    OpenGate,
    /// Stop the copying, and remove the mirror. **N.B.** Before a gate is opened that follows.
    Detach,
    /// The copy is the volume at the instant of the cut. It is to be flushed.
    Complete,
    /// The copy is of no use.
    GiveUp(WhyGivenUp),
}

/// Why a copy is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyGivenUp {
    /// The copying has failed.
    Failed,
    /// It was cancelled.
    Cancelled,
    /// The requests of guests did not end in time, or they wrote more than the copy could follow, in every try.
    NeverStill,
}

impl Duplication {
    /// Makes the machine of a copy whose copying begins. A gate is closed for up to `held_max`.
    pub fn new(held_max: Duration) -> Self {
        Self {
            state: State::Copying { not_before: Duration::ZERO },
            is_synchronised: false,
            tries: 0,
            held_max,
            actions: VecDeque::new(),
        }
    }

    /// Handles an event. An event that does not fit changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: DuplicationEvent) {
        match event {
            DuplicationEvent::Synchronised => self.is_synchronised = true,
            DuplicationEvent::Behind => self.is_synchronised = false,
            DuplicationEvent::GateClosed(number) => {
                if let State::Closing { is_closed, .. } = &mut self.state
                    && number == self.tries
                {
                    *is_closed = true;
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
            State::Copying { not_before } if self.is_synchronised => {
                Some((not_before, "the next try to hold guests for a moment"))
            }
            State::Copying { .. } | State::Over => None,
            State::Closing { until, .. } => Some((until, "requests of guests to end")),
        }
    }

    /// Returns whether nothing follows.
    pub fn is_over(&self) -> bool {
        self.state == State::Over && self.actions.is_empty()
    }

    fn advance(&mut self, now: Duration) {
        match self.state {
            State::Copying { not_before } if self.is_synchronised && now >= not_before => {
                self.tries += 1;
                self.state = State::Closing { until: now + self.held_max, is_closed: false };
                self.actions.push_back(DuplicationAction::CloseGate(self.tries));
            }
            State::Closing { is_closed: true, .. } if self.is_synchronised => {
                self.state = State::Over;
                let order =
                    [DuplicationAction::Detach, DuplicationAction::OpenGate, DuplicationAction::Complete];
                self.actions.extend(order);
            }
            State::Closing { until, .. } if now >= until => {
                if self.tries >= TRIES_MAX {
                    return self.give_up(WhyGivenUp::NeverStill);
                }
                self.state = State::Copying { not_before: now + PAUSE };
                self.actions.push_back(DuplicationAction::OpenGate);
            }
            State::Copying { .. } | State::Closing { .. } | State::Over => {}
        }
    }

    fn give_up(&mut self, why: WhyGivenUp) {
        if self.state == State::Over {
            return;
        }
        self.actions.push_back(DuplicationAction::Detach);
        if matches!(self.state, State::Closing { .. }) {
            self.actions.push_back(DuplicationAction::OpenGate);
        }
        self.actions.push_back(DuplicationAction::GiveUp(why));
        self.state = State::Over;
    }
}

#[cfg(test)]
mod tests {
    use super::DuplicationAction::{CloseGate, Complete, Detach, GiveUp, OpenGate};
    use super::DuplicationEvent::{Behind, Cancelled, Failed, GateClosed, Synchronised};
    use super::*;

    const HELD_MAX: Duration = Duration::from_millis(500);

    struct Scene {
        machine: Duplication,
        now: Duration,
    }

    impl Scene {
        fn new() -> Self {
            Self { machine: Duplication::new(HELD_MAX), now: Duration::from_secs(7) }
        }

        fn tell(&mut self, event: DuplicationEvent) -> Vec<DuplicationAction> {
            self.machine.handle_event(self.now, event);
            std::iter::from_fn(|| self.machine.poll_action()).collect()
        }

        /// Waits for the machine's deadline.
        fn wait(&mut self) -> Vec<DuplicationAction> {
            let (at, _) = self.machine.poll_timeout().unwrap();
            self.now = self.now.max(at);
            self.machine.handle_timeout(self.now);
            std::iter::from_fn(|| self.machine.poll_action()).collect()
        }
    }

    #[test]
    fn the_copy_is_cut_off_before_the_gate_opens_and_only_while_it_is_equal() {
        let mut scene = Scene::new();
        assert_eq!(scene.tell(Synchronised), [CloseGate(1)]);
        // A write that was below the gate has only reached the source.
        assert_eq!(scene.tell(Behind), []);
        assert_eq!(scene.tell(GateClosed(1)), []);
        assert_eq!(scene.tell(Synchronised), [Detach, OpenGate, Complete]);
        assert!(scene.machine.is_over());
        for late in [Behind, Synchronised, GateClosed(1), Failed, Cancelled] {
            assert_eq!(scene.tell(late), []);
        }
    }

    #[test]
    fn guests_are_not_held_for_longer_than_agreed_and_not_for_ever() {
        let mut scene = Scene::new();
        assert_eq!(scene.tell(Synchronised), [CloseGate(1)]);
        let begun = scene.now;
        assert_eq!(scene.wait(), [OpenGate]);
        assert_eq!(scene.now - begun, HELD_MAX);
        // A late report is of the former try.
        assert_eq!(scene.tell(GateClosed(1)), []);
        for number in 2..=TRIES_MAX {
            assert_eq!(scene.wait(), [CloseGate(number)]);
            assert_eq!(scene.tell(GateClosed(number - 1)), []);
            if number < TRIES_MAX {
                assert_eq!(scene.wait(), [OpenGate]);
            }
        }
        assert_eq!(scene.wait(), [Detach, OpenGate, GiveUp(WhyGivenUp::NeverStill)]);
        assert!(scene.machine.is_over());
    }

    #[test]
    fn whatever_ends_it_early_leaves_no_mirror_and_no_closed_gate() {
        for (event, why) in [(Failed, WhyGivenUp::Failed), (Cancelled, WhyGivenUp::Cancelled)] {
            let mut scene = Scene::new();
            assert_eq!(scene.tell(event), [Detach, GiveUp(why)]);
            let mut scene = Scene::new();
            assert_eq!(scene.tell(Synchronised), [CloseGate(1)]);
            assert_eq!(scene.tell(event), [Detach, OpenGate, GiveUp(why)]);
            assert!(scene.machine.is_over());
        }
    }
}
