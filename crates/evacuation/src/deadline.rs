//! What the deadline means for transfers: a higher one has its paths to itself if it would be late, and what will not have left
//! is stopped in time.

use crate::planner::{Cancelled, Moment, Moving, Planner, State};
use crate::planted::{Bug, broken};
use crate::vocabulary::{Action, Strategy, Why};
use crate::workload::{Kind, PathIndex, Way, Workload, WorkloadIndex};

/// A transfer that began this long ago has a measured rate that counts.
const MEASURED_AFTER: Moment = Moment::from_secs(3);
/// A transfer that has had its paths to itself for so long shows what it can do: its rate is a mean over some seconds.
const ALONE_AFTER: Moment = Moment::from_secs(5);
/// A higher transfer is in time if it needs no more than this share of what is left: rates change.
const MARGIN: f64 = 0.9;
/// How much faster than its own measured rate a transfer may become that has its paths to itself.
const HOPE_OF_RUNNING: f64 = 1.1;

impl Planner {
    /// Returns when a transfer will have ended by its present rate; `None`: unknown.
    pub(crate) fn ends_of(&self, moving: &Moving, now: Moment) -> Option<Moment> {
        if !moving.uses_paths() {
            return None;
        }
        let rate = moving.rate.filter(|rate| *rate > 0.0)?;
        Some(
            now.saturating_add(
                Moment::try_from_secs_f64(moving.remaining as f64 / rate).unwrap_or(Moment::MAX),
            ),
        )
    }

    /// Returns whether a transfer would be late even if it had its paths to itself.
    fn is_hopeless(&self, workload: &Workload, moving: &Moving, now: Moment) -> bool {
        let Some(deadline) = self.terms.deadline else { return false };
        let way = workload.routes[moving.route].way;
        let measured = moving.rate.filter(|_| now.saturating_sub(moving.shared_at) >= ALONE_AFTER);
        let rate = match measured {
            Some(rate) => rate * HOPE_OF_RUNNING,
            None => self.rate_max(way),
        };
        moving.remaining as f64 / rate > deadline.saturating_sub(now).as_secs_f64()
    }

    /// Returns the transfers that run and are not held, except hopeless ones, which use one of these paths.
    fn running_beside(&self, way: Way, now: Moment) -> Vec<(WorkloadIndex, &Moving)> {
        let moving = self.moving.iter().filter_map(|index| match &self.jobs[index.as_usize()].state {
            State::Moving(moving) if moving.uses_paths() => Some((*index, moving)),
            _ => None,
        });
        moving
            .filter(|(index, moving)| {
                let workload = &self.workloads[index.as_usize()];
                workload.routes[moving.route].way.shares(way) && !self.is_hopeless(workload, moving, now)
            })
            .collect()
    }

    pub(crate) fn priority(&self, index: WorkloadIndex) -> u8 {
        self.workloads[index.as_usize()].priority
    }

    /// Returns whether every higher transfer on these paths stays in time if one more runs beside it.
    pub(crate) fn leaves_time(&self, now: Moment, index: WorkloadIndex, way: Way) -> bool {
        let Some(deadline) = self.terms.deadline else { return true };
        if broken(Bug::LateIsNotProtected) {
            return true;
        }
        let left = deadline.saturating_sub(now).as_secs_f64();
        self.running_beside(way, now).into_iter().all(|(other, moving)| {
            if self.priority(other) <= self.priority(index) {
                return true;
            }
            let Some(rate) = moving.rate.filter(|_| now.saturating_sub(moving.began) >= MEASURED_AFTER)
            else {
                return false;
            };
            let theirs = self.way(other, moving.route).paths().into_iter();
            let running = theirs.map(|path| self.gauges[path.as_usize()].running()).max().unwrap_or(1).max(1);
            let shared = rate * f64::from(running) / f64::from(running + 1);
            moving.remaining as f64 / shared <= left * MARGIN
        })
    }

    /// Holds lower transfers, so that the paths of a workload that waits have places. Where the administrator's limit leaves none
    /// even then, a lower one is cancelled, and waits again.
    pub(crate) fn make_place(&mut self, now: Moment, index: WorkloadIndex, way: Way) {
        if self.terms.deadline.is_none() || broken(Bug::LateIsNotProtected) {
            return;
        }
        let full: Vec<_> =
            way.paths().into_iter().filter(|path| !self.gauges[path.as_usize()].has_place()).collect();
        let uses = |planner: &Self, other: WorkloadIndex, path: PathIndex| match &planner.jobs
            [other.as_usize()]
        .state
        {
            State::Moving(moving) => planner.way(other, moving.route).paths().contains(&path),
            _ => false,
        };
        let mut held: Vec<WorkloadIndex> = Vec::new();
        for path in full {
            if self.gauges[path.as_usize()].is_crowded() {
                return self.make_room_on(index, |planner, other| uses(planner, other, path));
            }
            // More may run than are allowed, since the number was lowered.
            let excess = self.gauges[path.as_usize()].excess();
            while held.iter().filter(|other| uses(self, **other, path)).count() < excess {
                let suits = |planner: &Self, other| uses(planner, other, path) && !held.contains(&other);
                let Some(lowest) = self.lowest_below(index, suits) else { return };
                held.push(lowest);
            }
        }
        for other in held {
            self.hold(now, other);
        }
    }

    /// Cancels the lowest transfer below a workload, one at a time.
    fn make_room_on(&mut self, index: WorkloadIndex, suits: impl Fn(&Self, WorkloadIndex) -> bool) {
        let below: Vec<(WorkloadIndex, &Moving)> = self
            .moving
            .iter()
            .filter_map(|other| match &self.jobs[other.as_usize()].state {
                State::Moving(moving)
                    if self.priority(*other) < self.priority(index) && suits(self, *other) =>
                {
                    Some((*other, moving))
                }
                _ => None,
            })
            .collect();
        if below.iter().any(|(_, moving)| moving.cancelled.is_some()) {
            return;
        }
        let can_end =
            below.into_iter().filter(|(_, moving)| !moving.is_final && moving.strategy == Strategy::Usual);
        // One that is held loses least of the time.
        let lowest = can_end.min_by_key(|(other, moving)| {
            (self.priority(*other), moving.uses_paths(), std::cmp::Reverse(*other))
        });
        if let Some((lowest, _)) = lowest {
            self.cancel(lowest, Cancelled::Elsewhere);
        }
    }

    /// Returns the running transfer of the lowest priority below that of a workload, which suits.
    fn lowest_below(
        &self,
        index: WorkloadIndex,
        suits: impl Fn(&Self, WorkloadIndex) -> bool,
    ) -> Option<WorkloadIndex> {
        let below = self.moving.iter().copied().filter(|other| {
            let can_be_held = matches!(&self.jobs[other.as_usize()].state, State::Moving(moving)
                if moving.uses_paths() && !moving.is_final && moving.cancelled.is_none() && moving.strategy == Strategy::Usual);
            can_be_held && self.priority(*other) < self.priority(index) && suits(self, *other)
        });
        below.min_by_key(|other| (self.priority(*other), std::cmp::Reverse(*other)))
    }

    fn hold(&mut self, now: Moment, index: WorkloadIndex) {
        self.set_held(now, index, true);
        self.actions.push_back(Action::Hold { workload: index });
    }

    /// Holds the lowest transfer beside each higher one that would be late.
    pub(crate) fn protect_higher(&mut self, now: Moment) {
        let Some(deadline) = self.terms.deadline.filter(|_| !broken(Bug::LateIsNotProtected)) else { return };
        for index in self.moving.clone() {
            let State::Moving(moving) = &self.jobs[index.as_usize()].state else { continue };
            let is_measured = now.saturating_sub(moving.began) >= MEASURED_AFTER;
            let is_late = self.ends_of(moving, now).is_some_and(|ends| ends > deadline);
            if !is_measured || !is_late || self.is_hopeless(&self.workloads[index.as_usize()], moving, now) {
                continue;
            }
            let way = self.way(index, moving.route);
            let shares = |planner: &Self, other: WorkloadIndex| match &planner.jobs[other.as_usize()].state {
                State::Moving(moving) => planner.way(other, moving.route).shares(way),
                _ => false,
            };
            if let Some(lowest) = self.lowest_below(index, shares) {
                self.hold(now, lowest);
            }
        }
    }

    /// Stops VMs that will not have left, the lowest priority first, and ends what waits when the deadline has come.
    pub(crate) fn heed_deadline(&mut self, now: Moment) {
        let Some(deadline) = self.terms.deadline else { return };
        let stops = self.terms.stop_before.is_some() && self.is_stop_time();
        for index in self.order.clone().into_iter().rev() {
            let number = index.as_usize();
            let is_running = matches!(self.workloads[number].kind, Kind::RunningVm { .. });
            match &self.jobs[number].state {
                State::Waiting { .. } if now >= deadline || (stops && is_running) => {
                    self.stay(number, Why::TooLate);
                }
                State::Moving(moving) if stops && is_running && moving.strategy == Strategy::Usual => {
                    let is_late = self.ends_of(moving, now).is_none_or(|ends| ends > deadline);
                    if is_late {
                        self.cancel(index, Cancelled::ToStop);
                    }
                }
                State::Moving(moving) if now >= deadline && moving.is_held => {
                    self.cancel(index, Cancelled::Elsewhere);
                }
                State::Moving(_) | State::Waiting { .. } | State::Stopping(_) | State::Ended(_) => {}
            }
        }
    }
}
