//! Guests, copies and a disk in virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use pacer::{Gauge, Impact, Mover, MoverClass, RequestClass, Store, Stores, Terms, Ticket};

use super::disk::{Disk, From, Request, Trouble};
use super::{Impact as Ordered, LASTS, SETTLED, Scenario, Seen};
use crate::random::Random;

const CHUNK_BYTES: u64 = 512 << 10;
const DEPTH: usize = 8;
/// A guest that waits longer than this, and many times longer than guests among themselves explain, waits far too long.
const STUCK: Duration = Duration::from_millis(25);
const STUCK_QUEUES: u32 = 8;
const NEIGHBOUR_DEPTH: usize = 2;
const NEIGHBOUR_BYTES: u64 = 64 << 10;
const SPAN: Duration = Duration::from_secs(2);

/// How a guest asks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Shape {
    /// It waits for an answer before the next request, with so many at a time.
    Closed { depth: usize, bytes: u64, writes_percent: u64 },
    /// It asks at a rate, half of what the disk does.
    Open { bytes: u64 },
    /// It asks seldom.
    Seldom { every: Duration },
    /// It waits for answers, in bursts.
    Bursts { depth: usize, lasts: Duration, every: Duration },
}

impl Shape {
    pub(crate) fn draw(random: &mut Random) -> Self {
        let bytes = random.pick(&[4096, 4096, 16 << 10, 64 << 10]);
        match random.below(10) {
            0..6 => {
                let depth = random.pick(&[1, 4, 16, 32]);
                Self::Closed { depth, bytes, writes_percent: random.pick(&[0, 30, 100]) }
            }
            6 | 7 => Self::Open { bytes },
            _ => Self::Bursts {
                depth: random.pick(&[1, 4, 16]),
                lasts: Duration::from_millis(200),
                every: Duration::from_millis(random.between(400, 1500)),
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ended(u64),
    GuestAsks(usize),
    CopyAsks(usize),
    NeighbourAsks,
    ImpactChanges,
}

struct Copy {
    mover: Mover,
    in_flight: usize,
    moved: u64,
    asks_at: Option<Duration>,
}

pub(crate) struct World<'a> {
    scenario: &'a Scenario,
    now: Duration,
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    order: u64,
    disk: Disk,
    random: Random,
    gauges: &'a [Gauge],
    in_flight: BTreeMap<u64, (Request, Option<Ticket<'a>>)>,
    copies: Vec<Copy>,
    neighbour_in_flight: usize,
    seen: Seen,
    span: (Duration, u64),
    stuck_since: Option<Duration>,
}

impl<'a> World<'a> {
    pub(crate) fn run(seed: u64, scenario: &Scenario, copies: usize) -> Seen {
        let store = Store::new();
        let gauges: Vec<Gauge> = scenario.shapes.iter().map(|_| Gauge::default()).collect();
        gauges.iter().for_each(|gauge| gauge.join(&store));
        World::new(seed, scenario, &store, &gauges, copies).simulate()
    }

    fn new(
        seed: u64,
        scenario: &'a Scenario,
        store: &Arc<Store>,
        gauges: &'a [Gauge],
        copies: usize,
    ) -> Self {
        let mut random = Random::new(seed);
        let at_first =
            scenario.before.map_or(Ordered::Percent(scenario.impact_percent), |(before, _)| before);
        let disks = Stores::default().and(Arc::clone(store));
        let copies = (0..copies).map(|index| {
            let mover = Mover::new(Duration::ZERO, disks.clone(), terms(index, at_first));
            Copy { mover, in_flight: 0, moved: 0, asks_at: None }
        });
        let mut world = Self {
            scenario,
            now: Duration::from_millis(1),
            events: BinaryHeap::new(),
            order: 0,
            disk: Disk::new(scenario, random.fork()),
            random,
            gauges,
            in_flight: BTreeMap::new(),
            copies: copies.collect(),
            neighbour_in_flight: 0,
            seen: Seen { moved_least: u64::MAX, ..Seen::default() },
            span: (SETTLED, 0),
            stuck_since: None,
        };
        (0..gauges.len()).for_each(|guest| world.at(world.now, Event::GuestAsks(guest)));
        // Copies begin a little later: guests are there before.
        (0..world.copies.len()).for_each(|copy| world.at(Duration::from_millis(50), Event::CopyAsks(copy)));
        if let Some((_, changed)) = scenario.before {
            world.at(changed, Event::ImpactChanges);
        }
        if matches!(scenario.trouble, Trouble::Neighbour { .. }) {
            world.at(world.now, Event::NeighbourAsks);
        }
        world
    }

    fn simulate(mut self) -> Seen {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            if at >= LASTS {
                break;
            }
            self.now = at;
            self.watch();
            match event {
                Event::Ended(id) => self.ended(id),
                Event::GuestAsks(guest) => self.guest_asks(guest),
                Event::CopyAsks(copy) => {
                    self.copies[copy].asks_at = None;
                    self.copy_asks(copy);
                }
                Event::NeighbourAsks => self.neighbour_asks(),
                Event::ImpactChanges => self.change_impact(),
            }
            while let Some((request, ends)) = self.disk.begin(self.now) {
                self.at(ends, Event::Ended(request.id));
            }
        }
        self.seen.moved = self.copies.iter().map(|copy| copy.moved).collect();
        self.seen
    }

    fn at(&mut self, at: Duration, event: Event) {
        self.order += 1;
        self.events.push(Reverse((at, self.order, event)));
    }

    fn submit(&mut self, from: From, bytes: u64, is_write: bool) {
        self.order += 1;
        let request = Request { id: self.order, from, bytes, is_write, arrived: self.now };
        let gauges = self.gauges;
        let ticket = if let From::Guest(guest) = from { Some(gauges[guest].arrived(self.now)) } else { None };
        self.in_flight.insert(request.id, (request, ticket));
        self.disk.submit(request);
    }

    fn ended(&mut self, id: u64) {
        self.disk.ended();
        let Some((request, ticket)) = self.in_flight.remove(&id) else { return };
        match request.from {
            From::Guest(guest) => {
                let class = match request.is_write {
                    true => RequestClass::write(request.bytes),
                    false => RequestClass::read(request.bytes),
                };
                if let Some(ticket) = ticket {
                    ticket.ended(self.now, class);
                }
                self.seen.served += u64::from(self.now >= SETTLED);
                if !matches!(self.scenario.shapes[guest], Shape::Open { .. } | Shape::Seldom { .. }) {
                    self.at(self.now, Event::GuestAsks(guest));
                }
            }
            From::Copy(copy) => {
                let it = &mut self.copies[copy];
                it.in_flight -= 1;
                it.mover.ended(self.now, request.bytes);
                if self.now >= SETTLED {
                    it.moved += request.bytes;
                    self.seen.moved_settled += request.bytes;
                    self.span.1 += request.bytes;
                }
                (0..self.copies.len()).for_each(|copy| self.copy_asks(copy));
            }
            From::Neighbour => {
                self.neighbour_in_flight -= 1;
                self.neighbour_asks();
            }
        }
    }

    fn guest_asks(&mut self, guest: usize) {
        match self.scenario.shapes[guest] {
            Shape::Closed { depth, bytes, writes_percent } => {
                for _ in self.in_flight_of(guest)..depth {
                    let is_write = self.random.percent(writes_percent);
                    self.submit(From::Guest(guest), bytes, is_write);
                }
            }
            Shape::Open { bytes } => {
                self.submit(From::Guest(guest), bytes, false);
                let slowed = if matches!(self.scenario.trouble, Trouble::Slows { .. }) { 3.0 } else { 1.0 };
                let channels = self.scenario.channels as f64;
                let takes = self.scenario.overhead.as_secs_f64() / channels
                    + bytes as f64 / self.scenario.bytes_per_second;
                let guests = self.scenario.shapes.len() as f64;
                let pause = takes * 2.0 * slowed * guests * (0.5 + self.random.below(1000) as f64 / 1000.0);
                self.at(self.now + Duration::from_secs_f64(pause), Event::GuestAsks(guest));
            }
            Shape::Seldom { every } => {
                if self.in_flight_of(guest) == 0 {
                    self.submit(From::Guest(guest), 4096, false);
                }
                let pause = every.mul_f64(0.5 + self.random.below(1000) as f64 / 1000.0);
                self.at(self.now + pause, Event::GuestAsks(guest));
            }
            Shape::Bursts { depth, lasts, every } => {
                let into = self.now.as_nanos() % every.as_nanos();
                if into >= lasts.as_nanos() {
                    if self.in_flight_of(guest) == 0 {
                        let left = Duration::from_nanos((every.as_nanos() - into) as u64);
                        self.at(self.now + left, Event::GuestAsks(guest));
                    }
                    return;
                }
                for _ in self.in_flight_of(guest)..depth {
                    self.submit(From::Guest(guest), 4096, false);
                }
            }
        }
    }

    fn in_flight_of(&self, guest: usize) -> usize {
        self.in_flight.values().filter(|(request, _)| request.from == From::Guest(guest)).count()
    }

    fn copy_asks(&mut self, index: usize) {
        loop {
            let now = self.now;
            let copy = &mut self.copies[index];
            if copy.in_flight >= DEPTH || copy.asks_at.is_some_and(|at| at > now) {
                return;
            }
            let bytes = CHUNK_BYTES.min(copy.mover.chunk_bytes_max(now).unwrap_or(CHUNK_BYTES));
            let start = copy.mover.next_start(now, bytes);
            if start > now {
                copy.asks_at = Some(start);
                self.at(start, Event::CopyAsks(index));
                return;
            }
            copy.mover.began(now, bytes);
            copy.in_flight += 1;
            if self.stuck_since.is_some() {
                self.seen.begun_beside_stuck += bytes;
            }
            self.submit(From::Copy(index), bytes, index == 2);
        }
    }

    fn change_impact(&mut self) {
        let ordered = Ordered::Percent(self.scenario.impact_percent);
        for index in 0..self.copies.len() {
            self.copies[index].mover.set_terms(self.now, terms(index, ordered));
            self.copies[index].asks_at = None;
            self.copy_asks(index);
        }
    }

    fn neighbour_asks(&mut self) {
        if !self.scenario.trouble.is_on(self.now) {
            self.at(self.now + Duration::from_millis(10), Event::NeighbourAsks);
            return;
        }
        while self.neighbour_in_flight < NEIGHBOUR_DEPTH {
            self.neighbour_in_flight += 1;
            self.submit(From::Neighbour, NEIGHBOUR_BYTES, false);
        }
    }

    /// Notes the least that was moved in any span, and how long guests wait far too long.
    fn watch(&mut self) {
        if self.now >= self.span.0 + SPAN {
            self.seen.moved_least = self.seen.moved_least.min(self.span.1);
            self.span = (self.now, 0);
        }
        let too_long = STUCK + self.scenario.queue_of_guests() * STUCK_QUEUES;
        let is_stuck = matches!(self.scenario.trouble, Trouble::Pauses { .. })
            && self.scenario.trouble.is_on(self.now)
            && self.in_flight.values().any(|(request, _)| {
                matches!(request.from, From::Guest(_)) && self.now.saturating_sub(request.arrived) > too_long
            });
        match (is_stuck, self.stuck_since) {
            (true, None) => self.stuck_since = Some(self.now),
            (false, Some(since)) => {
                self.seen.stuck_for += self.now - since;
                self.stuck_since = None;
            }
            _ => {}
        }
    }
}

/// Returns the terms of a copy; the second is filling.
fn terms(index: usize, ordered: Ordered) -> Option<Terms> {
    let class = if index == 1 { MoverClass::Filling } else { MoverClass::Migration };
    let Ordered::Percent(percent) = ordered else { return None };
    Impact::percent(percent).map(|impact| Terms { class, impact })
}
