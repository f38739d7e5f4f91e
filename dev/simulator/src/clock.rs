//! Virtual time: a heap of events that stands in for disks, links and administrators.
//!
//! ```text
//!   executors: tasks of daemons ──nothing to do──► step(): next event or deadline, whichever is first
//!        ▲                                                       │ the event runs; it wakes tasks
//!        └───────────────────────────────────────────────────────┘
//! ```
//! Events of the same instant run in an order drawn from the seed. No real time passes.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;
use std::time::Duration;

use crate::random::Random;

pub(crate) struct Clock {
    now: Cell<Duration>,
    events: RefCell<BinaryHeap<Reverse<Scheduled>>>,
    random: RefCell<Random>,
    sequence: Cell<u64>,
    steps: Cell<u64>,
    /// Set when there is neither an event nor a deadline: the simulation cannot continue.
    is_dead: Cell<bool>,
}

struct Scheduled {
    at: Duration,
    /// Draws the order among events of one instant.
    tie: u64,
    sequence: u64,
    run: Box<dyn FnOnce()>,
}

impl Clock {
    /// Makes a clock at zero; `random` orders the events of one instant.
    pub(crate) fn new(random: Random) -> Rc<Self> {
        Rc::new(Self {
            now: Cell::default(),
            events: RefCell::default(),
            random: RefCell::new(random),
            sequence: Cell::default(),
            steps: Cell::default(),
            is_dead: Cell::default(),
        })
    }

    pub(crate) fn now(&self) -> Duration {
        self.now.get()
    }

    /// Runs `event` at `at`, or as soon as possible if that has passed.
    pub(crate) fn at(&self, at: Duration, event: impl FnOnce() + 'static) {
        let sequence = self.sequence.get();
        self.sequence.set(sequence + 1);
        let tie = self.random.borrow_mut().next();
        let at = at.max(self.now());
        self.events.borrow_mut().push(Reverse(Scheduled { at, tie, sequence, run: Box::new(event) }));
    }

    pub(crate) fn after(&self, delay: Duration, event: impl FnOnce() + 'static) {
        self.at(self.now() + delay, event);
    }

    pub(crate) fn steps(&self) -> u64 {
        self.steps.get()
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.is_dead.get()
    }

    pub(crate) fn clear(&self) {
        let events = std::mem::take(&mut *self.events.borrow_mut());
        drop(events);
    }

    pub(crate) fn step(&self, deadline: Option<Duration>) {
        let next = self.events.borrow().peek().map(|Reverse(event)| event.at);
        self.steps.set(self.steps.get() + 1);
        match (next, deadline) {
            (None, None) => self.is_dead.set(true),
            (None, Some(deadline)) => self.advance(deadline),
            (Some(at), Some(deadline)) if deadline < at => self.advance(deadline),
            (Some(at), _) => {
                self.advance(at);
                let event = self.events.borrow_mut().pop();
                if let Some(Reverse(event)) = event {
                    (event.run)();
                }
            }
        }
    }

    fn advance(&self, to: Duration) {
        if to > self.now() {
            self.now.set(to);
        }
    }
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.tie, self.sequence).cmp(&(other.at, other.tie, other.sequence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_jumps_to_the_next_event_or_deadline() {
        let clock = Clock::new(Random::new(1));
        let seen = Rc::new(RefCell::new(Vec::new()));
        for seconds in [30, 10] {
            let (seen, inner) = (Rc::clone(&seen), Rc::clone(&clock));
            clock.at(Duration::from_secs(seconds), move || seen.borrow_mut().push(inner.now().as_secs()));
        }
        let deadline = Some(Duration::from_secs(20));
        clock.step(deadline);
        assert_eq!((clock.now(), &*seen.borrow()), (Duration::from_secs(10), &vec![10]));
        clock.step(deadline);
        assert_eq!((clock.now(), &*seen.borrow()), (Duration::from_secs(20), &vec![10]));
        clock.step(None);
        assert_eq!((clock.now(), &*seen.borrow()), (Duration::from_secs(30), &vec![10, 30]));
    }

    #[test]
    fn an_end_of_all_events_is_noticed() {
        let clock = Clock::new(Random::new(1));
        clock.step(Some(Duration::from_secs(1)));
        assert!(!clock.is_dead());
        clock.step(None);
        assert!(clock.is_dead());
    }
}
