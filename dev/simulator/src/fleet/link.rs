//! The link between two hosts: several connections with different delays; it breaks, or swallows messages.
//!
//! ```text
//!            ┌ line of a migration ┐
//!   host ────┤                     ├──── host      two for each migration between both; all break together
//!            └ line of its clients ┘
//!   works ──cut──► broken: both ends learn of it ──mended──► works: both learn of it, held messages arrive in any order
//!        └─swallows──► broken, unnoticed for a while
//! ```

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

use migration::MigrationId;

use super::line::Line;
use super::place::Place;
use crate::random::Random;
use crate::world::World;

/// Connections of a link: with different delays, so that messages overtake each other.
const CONNECTIONS: u64 = 3;
/// The time until a link that swallows everything is noticed to be dead.
const NOTICED_AFTER: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// Requests of clients that stayed at a migration's source, by that source and its number there.
    Clients(Place, MigrationId),
    /// A migration, by its source and its number there.
    Migration(Place, MigrationId),
    /// The missing blocks of a migration's target, by its source and its number there.
    Reservoir(Place, MigrationId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Break {
    Cut,
    Silent,
}

pub(crate) struct Link {
    pub(super) world: Rc<World>,
    me: Weak<Self>,
    places: [Place; 2],
    random: RefCell<Random>,
    delays: [Duration; CONNECTIONS as usize],
    is_up: Cell<bool>,
    breaks: Cell<u64>,
    lines: RefCell<BTreeMap<Subject, Rc<Line>>>,
}

impl Link {
    pub(crate) fn new(world: &Rc<World>, mut random: Random, places: [Place; 2]) -> Rc<Self> {
        let round_trip = random.pick(&[
            Duration::from_micros(100),
            Duration::from_micros(500),
            Duration::from_millis(5),
            Duration::from_millis(40),
        ]);
        let delays = [0; CONNECTIONS as usize].map(|_| random.duration(round_trip / 4, round_trip));
        Rc::new_cyclic(|me| Self {
            world: Rc::clone(world),
            me: Weak::clone(me),
            places,
            random: RefCell::new(random),
            delays,
            is_up: Cell::new(true),
            breaks: Cell::default(),
            lines: RefCell::default(),
        })
    }

    pub(crate) fn line(&self, subject: Subject) -> Rc<Line> {
        let mut lines = self.lines.borrow_mut();
        let number = lines.len() as u64;
        Rc::clone(lines.entry(subject).or_insert_with(|| Line::new(Weak::clone(&self.me), number)))
    }

    pub(crate) fn subjects(&self) -> Vec<Subject> {
        self.lines.borrow().keys().copied().collect()
    }

    pub(crate) fn touches(&self, place: Place) -> bool {
        self.places.contains(&place)
    }

    pub(crate) fn connects(&self, one: Place, other: Place) -> bool {
        one != other && self.touches(one) && self.touches(other)
    }

    pub(crate) fn beyond(&self, place: Place) -> Place {
        self.places[1 - self.end_of(place)]
    }

    pub(crate) fn is_up(&self) -> bool {
        self.is_up.get()
    }

    pub(super) fn end_of(&self, place: Place) -> usize {
        usize::from(self.places[0] != place)
    }

    pub(crate) fn break_for(&self, how: Break, away: Duration) {
        if !self.is_up.replace(false) {
            return;
        }
        self.world.note("link", how as u64, self.places[0].index() as u64 + self.places[1].index() as u64);
        self.world.say(|| format!("link {:?}: {how:?} for {away:?}", self.places));
        let number = self.breaks.get() + 1;
        self.breaks.set(number);
        let noticed = match how {
            Break::Cut => Duration::ZERO,
            Break::Silent => self.random.borrow_mut().duration(NOTICED_AFTER.0, NOTICED_AFTER.1),
        };
        let while_broken = |what: fn(&Self)| {
            let me = Weak::clone(&self.me);
            move || {
                if let Some(link) = me.upgrade().filter(|link| !link.is_up() && link.breaks.get() == number) {
                    what(&link);
                }
            }
        };
        match how {
            Break::Cut => self.notice(),
            Break::Silent => self.world.clock.after(noticed, while_broken(Self::notice)),
        }
        self.world.clock.after(away, while_broken(Self::mend));
    }

    pub(crate) fn mend(&self) {
        if !self.is_up.replace(true) {
            self.world.note("link", 9, 0);
            self.world.say(|| format!("link {:?}: works again", self.places));
            self.each_line(Line::mended);
        }
    }

    fn notice(&self) {
        self.each_line(Line::lost);
    }

    fn each_line(&self, what: impl Fn(&Line)) {
        let lines: Vec<_> = self.lines.borrow().values().cloned().collect();
        lines.iter().for_each(|line| what(line));
    }

    pub(super) fn delay(&self) -> Duration {
        let mut random = self.random.borrow_mut();
        let delay = random.pick(&self.delays);
        let tail = if random.percent(3) { 1 + random.below(20) as u32 } else { 1 };
        delay * tail + Duration::from_nanos(random.below(20_000))
    }

    pub(super) fn introduction(&self) -> Duration {
        self.delays[0]
    }

    pub(crate) fn clear(&self) {
        self.lines.take().into_values().for_each(|line| line.clear());
    }
}
