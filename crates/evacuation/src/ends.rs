//! The end of what does not leave: targets that are lost, workloads that nothing takes, VMs that are stopped.

use std::time::Duration;

use crate::forecast::Fate;
use crate::planner::{Cancelled, LOOK, Moment, Planner, State, Stays};
use crate::planted::{Bug, broken};
use crate::vocabulary::{Action, End, Why};
use crate::workload::{Kind, Target, TargetState, WorkloadIndex};

/// The number of tries of one route. The second one outlives a moment of a link or a restart of a daemon.
pub(crate) const TRIES_OF_ROUTE: u8 = 2;
/// The number of tries of one workload: a defect of its own would fail at each target.
const TRIES_OF_WORKLOAD: u32 = 6;
/// How long a lost target may take to come back before its workloads go elsewhere: a daemon that restarts.
pub(crate) const RESTART_MAX: Duration = Duration::from_secs(10);
/// How long a lost target may take to come back, if nothing else takes its workloads: a daemon or a switch that starts again.
const RETURN_MAX: Duration = Duration::from_secs(60);

impl Planner {
    /// Leaves targets that are lost: at once if another one takes the workload, otherwise after a while.
    pub(crate) fn leave_lost_targets(&mut self, now: Moment) {
        if broken(Bug::LostTargetAwaited) {
            return;
        }
        for index in self.moving.clone() {
            let State::Moving(moving) = &self.jobs[index.as_usize()].state else { continue };
            let workload = &self.workloads[index.as_usize()];
            let target = &self.targets[workload.routes[moving.route].target.as_usize()];
            let TargetState::Lost(since) = target.state else { continue };
            let lost_for = now.saturating_sub(since);
            let is_long = lost_for >= RETURN_MAX;
            if moving.is_final {
                if is_long {
                    self.exit(index, Stays::There);
                    self.jobs[index.as_usize()].state = State::Ended(End::Stays(Why::HandedOver));
                }
                continue;
            }
            let elsewhere = lost_for >= RESTART_MAX
                && (0..workload.routes.len())
                    .any(|route| self.is_usable(index, route) && self.has_room(index, route));
            if moving.cancelled.is_none() && (is_long || elsewhere) {
                self.cancel(index, Cancelled::Elsewhere);
            }
        }
    }

    /// Ends waiting workloads that nothing will take.
    pub(crate) fn end_hopeless(&mut self, now: Moment) {
        let is_quiet = self.moving.is_empty();
        let can_return = |target: &Target| match target.state {
            TargetState::Open | TargetState::Closed => false,
            TargetState::Lost(since) => {
                broken(Bug::LostTargetAwaited) || now.saturating_sub(since) < RETURN_MAX
            }
        };
        for number in 0..self.jobs.len() {
            let State::Waiting { .. } = self.jobs[number].state else { continue };
            let routes = &self.workloads[number].routes;
            let has_failed = self.jobs[number].tries() >= TRIES_OF_WORKLOAD
                || !routes.is_empty()
                    && (0..routes.len()).all(|route| self.jobs[number].tries_of(route) >= TRIES_OF_ROUTE);
            let may_return = || {
                let mut open = routes.iter().enumerate();
                open.any(|(route, known)| {
                    self.jobs[number].tries_of(route) < TRIES_OF_ROUTE
                        && can_return(&self.targets[known.target.as_usize()])
                })
            };
            let why = match self.assigned[number].fate {
                _ if has_failed => Some(Why::Failed),
                Fate::NoTarget if !may_return() => match self.jobs[number].tries() {
                    0 => Some(Why::NoTarget),
                    _ => Some(Why::Failed),
                },
                Fate::NoRoom if is_quiet && !may_return() => Some(Why::NoRoom),
                _ => None,
            };
            if let Some(why) = why {
                self.stay(number, why);
            }
        }
    }

    /// Ends a workload that stays, or stops it if VMs are to be stopped.
    pub(crate) fn stay(&mut self, number: usize, why: Why) {
        let workload = WorkloadIndex(u32::try_from(number).unwrap_or(u32::MAX));
        let is_running = matches!(self.workloads[number].kind, Kind::RunningVm { .. });
        let waits_for_its_stop = is_running && self.terms.stop_before.is_some() && why != Why::Aborted;
        if waits_for_its_stop && !self.is_stop_time() {
            return;
        }
        self.jobs[number].state = match waits_for_its_stop {
            true => {
                self.actions.push_back(Action::Stop { workload });
                State::Stopping(why)
            }
            false => State::Ended(End::Stays(why)),
        };
    }

    /// Returns whether VMs that will not have left are to be stopped by now.
    pub(crate) fn is_stop_time(&self) -> bool {
        let now = self.look_at.saturating_sub(LOOK);
        match (self.terms.deadline, self.terms.stop_before) {
            (Some(deadline), Some(before)) => {
                let before = if broken(Bug::StoppedTooLate) { Duration::ZERO } else { before };
                now >= deadline.saturating_sub(before)
            }
            (None, Some(_)) => true,
            (_, None) => false,
        }
    }
}
