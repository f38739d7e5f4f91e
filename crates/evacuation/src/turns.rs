//! Whose turn it is: the waiting workloads in their order, as far as their paths have places.

use std::time::Duration;

use crate::forecast::Purpose;
use crate::gauge::Gauge;
use crate::planner::{Moment, Planner, State};
use crate::planted::{Bug, broken};
use crate::vocabulary::Action;
use crate::workload::{Way, WorkloadIndex};

/// Waiting workloads are assigned anew after this time, and a second more for each thousand of them.
const ASSIGN_AGAIN: Duration = Duration::from_secs(2);

impl Planner {
    pub(crate) fn begin_in_turn(&mut self, now: Moment) {
        let is_over = self.terms.deadline.is_some_and(|deadline| now >= deadline);
        if is_over || (self.is_aborted && !broken(Bug::BegunAfterAbort)) {
            return;
        }
        if now >= self.assign_at {
            self.assigned = self.assign(now, Purpose::Beginning);
            let waiting = (self.jobs.len() - self.moving.len()) as u32;
            self.assign_at = now + ASSIGN_AGAIN + Duration::from_millis(waiting.into());
        }
        let is_hopeless =
            |planner: &Self, index: WorkloadIndex| planner.assigned[index.as_usize()].is_hopeless;
        // Only a deadline is a reason to hold transfers.
        let lowest = self.moving.iter().map(|index| self.priority(*index)).min();
        let lowest = lowest.filter(|_| self.terms.deadline.is_some());
        let order = std::mem::take(&mut self.order);
        for index in order.iter().copied().filter(|index| !is_hopeless(self, *index)).collect::<Vec<_>>() {
            if !self.has_any_place() && lowest.is_none_or(|lowest| self.priority(index) <= lowest) {
                break;
            }
            self.begin_or_resume(now, index);
        }
        // What will be late at best gets what is left over: paths that nothing else uses.
        for index in order.iter().copied().filter(|index| is_hopeless(self, *index)).collect::<Vec<_>>() {
            let route = self.assigned[index.as_usize()].route;
            if route.is_some_and(|route| self.is_unused(self.way(index, route))) {
                self.begin_or_resume(now, index);
            }
        }
        self.order = order;
    }

    fn has_any_place(&self) -> bool {
        self.gauges.iter().any(Gauge::has_place)
    }

    fn is_unused(&self, way: Way) -> bool {
        way.paths().into_iter().all(|path| self.gauges[path.as_usize()].running() == 0)
    }

    /// Begins a waiting workload, or lets a held one go on, if its paths have places and no higher one needs them.
    fn begin_or_resume(&mut self, now: Moment, index: WorkloadIndex) {
        let (route, is_held) = match &self.jobs[index.as_usize()].state {
            State::Waiting { not_before } if *not_before <= now => {
                (self.assigned[index.as_usize()].route, false)
            }
            State::Moving(moving) if moving.is_held && moving.cancelled.is_none() => {
                (Some(moving.route), true)
            }
            _ => return,
        };
        let Some(route) = route.filter(|route| is_held || self.is_usable(index, *route)) else { return };
        let route = if is_held { route } else { self.with_place(index, route) };
        let way = self.way(index, route);
        let is_full = |planner: &Self| match is_held {
            true => !way.paths().into_iter().all(|path| planner.gauges[path.as_usize()].may_resume()),
            false => !planner.has_places(way),
        };
        if !is_held && !self.has_room(index, route) {
            self.assign_at = now;
            return;
        }
        if !self.leaves_time(now, index, way) {
            return;
        }
        if is_full(self) {
            self.make_place(now, index, way);
        }
        if is_full(self) {
            return;
        }
        if is_held {
            self.set_held(now, index, false);
            self.actions.push_back(Action::Resume { workload: index });
        } else {
            let strategy = self.assigned[index.as_usize()].strategy;
            self.enter(now, index, route, strategy);
            self.actions.push_back(Action::Begin { workload: index, route, strategy });
        }
    }

    pub(crate) fn has_places(&self, way: Way) -> bool {
        way.paths().into_iter().all(|path| self.gauges[path.as_usize()].has_place())
    }

    /// Returns the assigned route, or one that needs no more bytes and has places at once.
    pub(crate) fn with_place(&self, index: WorkloadIndex, assigned: usize) -> usize {
        let routes = &self.workloads[index.as_usize()].routes;
        let is_as_good = |route: &usize| {
            routes[*route].origin <= routes[assigned].origin
                && self.is_usable(index, *route)
                && self.has_room(index, *route)
        };
        let has_place = |route: &usize| self.has_places(routes[*route].way);
        match has_place(&assigned) {
            true => assigned,
            false => {
                (0..routes.len()).find(|route| has_place(route) && is_as_good(route)).unwrap_or(assigned)
            }
        }
    }

    pub(crate) fn has_room(&self, index: WorkloadIndex, route: usize) -> bool {
        let workload = &self.workloads[index.as_usize()];
        let route = &workload.routes[route];
        let fits = |free: Option<u64>, needed: u64| free.is_none_or(|free| free >= needed);
        broken(Bug::RoomNotCounted)
            || fits(self.rooms[route.store.as_usize()], route.room_bytes)
                && fits(self.targets[route.target.as_usize()].memory_free, workload.memory_bytes())
    }
}
