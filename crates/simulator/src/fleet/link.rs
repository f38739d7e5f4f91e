//! The link between two hosts: several connections, each with a delay of its own; it breaks, or swallows what it is given.
//!
//! ```text
//!            ┌ line of a migration ┐
//!   host ────┤                     ├──── host      two for each migration between both; all break together
//!            └ line of its clients ┘
//!   works ──cut──► broken: both ends are told ──mended──► works: both are told, what waited arrives in any order
//!        └─swallows──► broken, and nobody is told, until it is noticed
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

/// Connections of a link: each has a delay of its own, so what goes over one overtakes what goes over another.
const CONNECTIONS: u64 = 3;
/// How long it takes until a link that swallows everything is noticed to be dead.
const NOTICED_AFTER: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));

/// What a line between two hosts is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    /// What clients that stayed at the source of a migration ask of the volumes' owner, by that source and its number there.
    Clients(Place, MigrationId),
    /// A migration, by its source and its number there.
    Migration(Place, MigrationId),
    /// What the target of a migration lacks, by its source and its number there.
    Reservoir(Place, MigrationId),
}

/// How a link breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Break {
    /// Both ends are told.
    Cut,
    /// It swallows what it is given, and nobody is told for a while.
    Silent,
}

/// The link between two hosts.
pub(crate) struct Link {
    pub(super) world: Rc<World>,
    me: Weak<Self>,
    places: [Place; 2],
    random: RefCell<Random>,
    /// Delays of the connections.
    delays: [Duration; CONNECTIONS as usize],
    is_up: Cell<bool>,
    /// Grows with each break.
    breaks: Cell<u64>,
    lines: RefCell<BTreeMap<Subject, Rc<Line>>>,
}

impl Link {
    /// A link that works.
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

    /// The line for `subject`, made when it is asked for first.
    pub(crate) fn line(&self, subject: Subject) -> Rc<Line> {
        let mut lines = self.lines.borrow_mut();
        let number = lines.len() as u64;
        Rc::clone(lines.entry(subject).or_insert_with(|| Line::new(Weak::clone(&self.me), number)))
    }

    /// The lines that there have been so far.
    pub(crate) fn subjects(&self) -> Vec<Subject> {
        self.lines.borrow().keys().copied().collect()
    }

    /// Tells whether it connects this place.
    pub(crate) fn touches(&self, place: Place) -> bool {
        self.places.contains(&place)
    }

    /// Tells whether it connects these two.
    pub(crate) fn connects(&self, one: Place, other: Place) -> bool {
        one != other && self.touches(one) && self.touches(other)
    }

    /// The place at the other end.
    pub(crate) fn beyond(&self, place: Place) -> Place {
        self.places[1 - self.end_of(place)]
    }

    /// Tells whether what is sent arrives.
    pub(crate) fn is_up(&self) -> bool {
        self.is_up.get()
    }

    /// The number of the end at a place.
    pub(super) fn end_of(&self, place: Place) -> usize {
        usize::from(self.places[0] != place)
    }

    /// The link breaks for so long: what is on its way waits.
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

    /// The link works again.
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

    /// How long what is sent now takes.
    pub(super) fn delay(&self) -> Duration {
        let mut random = self.random.borrow_mut();
        let delay = random.pick(&self.delays);
        let tail = if random.percent(3) { 1 + random.below(20) as u32 } else { 1 };
        delay * tail + Duration::from_nanos(random.below(20_000))
    }

    /// How long it takes until a new process is known at the other end.
    pub(super) fn introduction(&self) -> Duration {
        self.delays[0]
    }

    /// Takes apart what holds each other.
    pub(crate) fn clear(&self) {
        self.lines.take().into_values().for_each(|line| line.clear());
    }
}
