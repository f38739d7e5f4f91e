//! Which workload goes where, and when it will have left: the waiting ones in their order, over the paths as they were measured.
//!
//! ```text
//!   each path: free from this moment on      each store, each target: free room
//!        └── in order: the route that ends first, whose room suffices ──► booked
//! ```

use crate::planner::{Moment, Planner, State};
use crate::planted::{Bug, broken};
use crate::vocabulary::Strategy;
use crate::workload::{Kind, Origin, Route, StoreIndex, TargetIndex, Way, Workload, WorkloadIndex};

/// The rate, in bytes a second, by which targets are compared while none is known. No forecast is made of it.
const RATE_TO_COMPARE: f64 = 100e6;
/// What guests write is sent again, up to this share of the rate: beyond it mirroring holds them back.
const WRITES_SHARE_MAX: f64 = 0.75;
/// How much faster than it was measured a path may turn out to be.
const HOPE: f64 = 1.25;

/// What is expected of one workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// The workload.
    pub workload: WorkloadIndex,
    /// Whether it leaves.
    pub fate: Fate,
    /// Where it goes; `None`: nowhere.
    pub target: Option<TargetIndex>,
    /// The store there.
    pub store: Option<StoreIndex>,
    /// How it is sent.
    pub strategy: Strategy,
    /// When it will have left; `None`: no rate is known, or it does not leave.
    pub ends: Option<Moment>,
}

/// Whether a workload will leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It leaves, before the deadline as far as that is known.
    Leaves,
    /// It has left, or was stopped, or stays for good.
    Over,
    /// It does not leave before the deadline.
    Late,
    /// No target may take it.
    NoTarget,
    /// No target that may take it has room or memory for it.
    NoRoom,
}

/// What an assignment is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To tell what will happen. What comes too late at its turn will take no room from others.
    Telling,
    /// To begin workloads. A higher one that may yet be in time keeps its room.
    Beginning,
}

/// Where one waiting workload is to go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Assigned {
    pub(crate) fate: Fate,
    /// The number of its route; `None`: none is possible.
    pub(crate) route: Option<usize>,
    pub(crate) strategy: Strategy,
    pub(crate) ends: Option<Moment>,
    /// Whether it would be late even if it had its paths to itself.
    pub(crate) is_hopeless: bool,
}

impl Assigned {
    pub(crate) const NOWHERE: Self =
        Self { fate: Fate::Over, route: None, strategy: Strategy::Usual, ends: None, is_hopeless: false };
}

/// What is booked while workloads are assigned.
struct Ledger {
    /// When each path is free, in seconds.
    free_at: Vec<f64>,
    rooms: Vec<Option<u64>>,
    memory: Vec<Option<u64>>,
}

impl Ledger {
    fn has_room(&self, route: &Route, memory_bytes: u64) -> bool {
        let fits = |free: Option<u64>, needed: u64| free.is_none_or(|free| free >= needed);
        fits(self.rooms[route.store.as_usize()], route.room_bytes)
            && fits(self.memory[route.target.as_usize()], memory_bytes)
    }

    fn book(&mut self, route: &Route, memory_bytes: u64, until: [f64; 3]) {
        for (path, until) in route.way.paths().into_iter().zip(until) {
            self.free_at[path.as_usize()] = until;
        }
        if broken(Bug::RoomNotCounted) {
            return;
        }
        take(&mut self.rooms[route.store.as_usize()], route.room_bytes);
        take(&mut self.memory[route.target.as_usize()], memory_bytes);
    }
}

pub(crate) fn take(free: &mut Option<u64>, bytes: u64) {
    *free = free.map(|free| free.saturating_sub(bytes));
}

impl Workload {
    pub(crate) fn memory_bytes(&self) -> u64 {
        match self.kind {
            Kind::RunningVm { memory_bytes } => memory_bytes,
            Kind::StoppedVm | Kind::Volume => 0,
        }
    }

    pub(crate) fn is_vm(&self) -> bool {
        self.kind != Kind::Volume
    }

    /// Returns the bytes that are sent at this rate, with what the guest writes meanwhile.
    pub(crate) fn bytes_sent(&self, bytes: u64, rate: f64, strategy: Strategy) -> f64 {
        match strategy {
            Strategy::PostCopy => bytes as f64,
            Strategy::Usual => {
                let share = (self.writes_per_second as f64 / rate).min(WRITES_SHARE_MAX);
                bytes as f64 / (1.0 - share)
            }
        }
    }
}

impl Planner {
    /// Returns what is expected of each workload, by its number.
    pub fn forecast(&mut self, now: Moment) -> Vec<Expected> {
        let assigned = self.assign(now, Purpose::Telling);
        let jobs = assigned.into_iter().enumerate();
        jobs.map(|(number, assigned)| {
            let workload = WorkloadIndex(u32::try_from(number).unwrap_or(u32::MAX));
            self.expected(workload, assigned, now)
        })
        .collect()
    }

    fn expected(&self, workload: WorkloadIndex, assigned: Assigned, now: Moment) -> Expected {
        let known = &self.workloads[workload.as_usize()];
        let (route, fate, ends, strategy) = match &self.jobs[workload.as_usize()].state {
            State::Moving(moving) => {
                let ends = self.ends_of(moving, now);
                let is_late = ends.zip(self.terms.deadline).is_some_and(|(ends, deadline)| ends > deadline);
                let fate = if is_late { Fate::Late } else { Fate::Leaves };
                (Some(moving.route), fate, ends, moving.strategy)
            }
            _ => (assigned.route, assigned.fate, assigned.ends, assigned.strategy),
        };
        let route = route.and_then(|route| known.routes.get(route));
        Expected {
            workload,
            fate,
            target: route.map(|route| route.target),
            store: route.map(|route| route.store),
            strategy,
            ends,
        }
    }

    /// Assigns a route to each waiting workload, in order. Entries of others are [`Assigned::NOWHERE`].
    pub(crate) fn assign(&mut self, now: Moment, purpose: Purpose) -> Vec<Assigned> {
        let mut ledger = self.ledger(now);
        let mut all = vec![Assigned::NOWHERE; self.jobs.len()];
        let mut steps = 0;
        for index in self.order.iter().copied() {
            if let State::Waiting { not_before } = self.jobs[index.as_usize()].state {
                steps += self.workloads[index.as_usize()].routes.len() as u64 + 1;
                all[index.as_usize()] = self.place(index, (now, now.max(not_before)), purpose, &mut ledger);
            }
        }
        self.steps += steps;
        all
    }

    fn ledger(&self, now: Moment) -> Ledger {
        let mut free_at = vec![now.as_secs_f64(); self.gauges.len()];
        for index in &self.moving {
            let State::Moving(moving) = &self.jobs[index.as_usize()].state else { continue };
            let workload = &self.workloads[index.as_usize()];
            let route = &workload.routes[moving.route];
            let (rates, _) = self.rates(route.way);
            for (path, rate) in route.way.paths().into_iter().zip(rates) {
                let bytes = workload.bytes_sent(moving.remaining, rate, moving.strategy);
                free_at[path.as_usize()] += bytes / rate;
            }
        }
        Ledger {
            free_at,
            rooms: self.rooms.clone(),
            memory: self.targets.iter().map(|target| target.memory_free).collect(),
        }
    }

    /// Chooses a route for a workload and books it.
    fn place(
        &self,
        index: WorkloadIndex,
        (now, start): (Moment, Moment),
        purpose: Purpose,
        ledger: &mut Ledger,
    ) -> Assigned {
        let workload = &self.workloads[index.as_usize()];
        let memory_bytes = workload.memory_bytes();
        let mut best: Option<Choice> = None;
        let mut has_target = false;
        for (number, route) in workload.routes.iter().enumerate() {
            if !self.is_usable(index, number) {
                continue;
            }
            has_target = true;
            if !ledger.has_room(route, memory_bytes) {
                continue;
            }
            let choice = Choice {
                is_hopeless: self.is_hopeless_alone(workload, route, now),
                ..self.choice(index, number, start, ledger)
            };
            if best.as_ref().is_none_or(|best| choice.is_before(best)) {
                best = Some(choice);
            }
        }
        let Some(best) = best else {
            let fate = if has_target { Fate::NoRoom } else { Fate::NoTarget };
            return Assigned { fate, ..Assigned::NOWHERE };
        };
        let deadline = self.terms.deadline.map(|deadline| deadline.as_secs_f64());
        let is_late = best.is_known && deadline.is_some_and(|deadline| best.ends > deadline);
        let is_hopeless = best.is_hopeless;
        let keeps_room = match purpose {
            Purpose::Telling => !is_late,
            Purpose::Beginning => !is_hopeless,
        };
        if keeps_room {
            ledger.book(&workload.routes[best.route], memory_bytes, best.until);
        }
        Assigned {
            fate: if is_late { Fate::Late } else { Fate::Leaves },
            route: Some(best.route),
            strategy: best.strategy,
            ends: best.is_known.then(|| Moment::try_from_secs_f64(best.ends).unwrap_or(Moment::MAX)),
            is_hopeless,
        }
    }

    fn choice(&self, index: WorkloadIndex, number: usize, start: Moment, ledger: &Ledger) -> Choice {
        let workload = &self.workloads[index.as_usize()];
        let route = &workload.routes[number];
        let (rates, is_known) = self.rates(route.way);
        let slowest = rates.into_iter().fold(f64::INFINITY, f64::min);
        let began = route.way.paths().map(|path| ledger.free_at[path.as_usize()].max(start.as_secs_f64()));
        let ends_by = |strategy| {
            let bytes = workload.bytes_sent(route.bytes, slowest, strategy);
            let until = [0, 1, 2].map(|path| began[path] + bytes / rates[path]);
            (until, until.into_iter().fold(0.0, f64::max))
        };
        let usual = ends_by(Strategy::Usual);
        let deadline = self.terms.deadline.map(|deadline| deadline.as_secs_f64());
        // N.B. What guests write to their memory is not known beforehand, so there must be time for twice as much.
        let twice = usual.1 + (usual.1 - start.as_secs_f64()).max(0.0);
        let is_short = is_known && deadline.is_some_and(|deadline| twice > deadline);
        let (strategy, (until, ends)) = match is_short && workload.may_post_copy {
            true => (Strategy::PostCopy, ends_by(Strategy::PostCopy)),
            false => (Strategy::Usual, usual),
        };
        let tries = self.jobs[index.as_usize()].tries_of(number);
        Choice {
            is_hopeless: false,
            route: number,
            tries,
            origin: route.origin,
            strategy,
            until,
            ends,
            is_known,
        }
    }

    /// Returns the expected rate of each path of a way, and whether it is known.
    pub(crate) fn rates(&self, way: Way) -> ([f64; 3], bool) {
        let known = way.paths().map(|path| self.gauges[path.as_usize()].rate());
        let usual = known[0].or(known[1]).or(known[2]);
        let rates = known.map(|rate| rate.or(usual).unwrap_or(RATE_TO_COMPARE));
        (rates, usual.is_some())
    }

    /// Returns whether a workload that has not begun would be late even if it had its paths to itself.
    pub(crate) fn is_hopeless_alone(&self, workload: &Workload, route: &Route, now: Moment) -> bool {
        let Some(deadline) = self.terms.deadline else { return false };
        let rate = self.rate_max(route.way) * HOPE;
        let strategy = if workload.may_post_copy { Strategy::PostCopy } else { Strategy::Usual };
        let seconds = workload.bytes_sent(route.bytes, rate, strategy) / rate;
        seconds > deadline.saturating_sub(now).as_secs_f64()
    }

    /// Returns the highest rate that one transfer may be hoped to reach on a way; infinite: unknown. **N.B.** What was measured on a
    /// path may have been limited by another one, so only the highest of the three is a bound.
    pub(crate) fn rate_max(&self, way: Way) -> f64 {
        let rates = way.paths().into_iter().filter_map(|path| self.gauges[path.as_usize()].rate_max());
        rates.reduce(f64::max).unwrap_or(f64::INFINITY)
    }
}

/// A route that a workload could take.
struct Choice {
    /// Whether the workload would be late on it even if it had its paths to itself.
    is_hopeless: bool,
    route: usize,
    tries: u8,
    origin: Origin,
    strategy: Strategy,
    /// When each of its paths would be free again, in seconds.
    until: [f64; 3],
    ends: f64,
    /// Whether that rests on a known rate.
    is_known: bool,
}

impl Choice {
    /// Returns whether it is better: it may be in time, it has failed less often, it leads to a standby, it ends sooner.
    fn is_before(&self, other: &Self) -> bool {
        let key = |choice: &Self| (choice.is_hopeless, choice.tries, choice.origin != Origin::Standby);
        key(self).cmp(&key(other)).then(self.ends.total_cmp(&other.ends)).is_lt()
    }
}
