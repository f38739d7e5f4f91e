//! The machine: which workload begins now, and what becomes of each.
//!
//! ```text
//!                 ┌──────────── failed, cancelled to go elsewhere ───────────┐
//!                 ▼                                                          │
//!   ┌────────► Waiting ── its turn ──► Moving ◄──► held for a higher one ────┤
//!   │             │                       │ left ──► Ended: Left             │
//!   │             │ stop time             └── cancelled before the deadline ─┤
//!   │             ▼                                                          ▼
//!   │          Stopping ── stopped ──► Ended: Stopped        Ended: Stays, with the reason
//! ```

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use crate::ends::TRIES_OF_ROUTE;
use crate::forecast::{Assigned, take};
use crate::gauge::Gauge;
use crate::planted::{Bug, broken};
use crate::vocabulary::{Action, End, Event, Fault, Strategy, Why};
use crate::workload::{Origin, Setup, Target, TargetIndex, TargetState, Terms, Way, Workload, WorkloadIndex};

/// The time since the evacuation began.
pub type Moment = Duration;

/// How often paths are measured and waiting workloads are looked at.
pub(crate) const LOOK: Duration = Duration::from_secs(1);
/// The pause after a failure, for each failure so far: long enough for a daemon to start again.
const PAUSE: Duration = Duration::from_secs(5);

/// Decides about one evacuation.
#[derive(Clone, Debug)]
pub struct Planner {
    pub(crate) terms: Terms,
    pub(crate) workloads: Vec<Workload>,
    pub(crate) jobs: Vec<Job>,
    /// The workloads in the order of their turns.
    pub(crate) order: Vec<WorkloadIndex>,
    /// The workloads that are moving.
    pub(crate) moving: BTreeSet<WorkloadIndex>,
    pub(crate) targets: Vec<Target>,
    /// The free room of each store, less what was begun.
    pub(crate) rooms: Vec<Option<u64>>,
    pub(crate) gauges: Vec<Gauge>,
    /// Where each waiting workload is to go.
    pub(crate) assigned: Vec<Assigned>,
    /// When waiting workloads are to be assigned again.
    pub(crate) assign_at: Moment,
    pub(crate) look_at: Moment,
    pub(crate) actions: VecDeque<Action>,
    pub(crate) is_aborted: bool,
    has_finished: bool,
    /// How many routes were compared.
    pub(crate) steps: u64,
}

/// What is known of one workload.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) state: State,
    /// Failures of each route that has failed.
    tries: Vec<(usize, u8)>,
}

#[derive(Clone, Debug)]
pub(crate) enum State {
    Waiting { not_before: Moment },
    Moving(Moving),
    Stopping(Why),
    Ended(End),
}

/// A transfer.
#[derive(Clone, Debug)]
pub(crate) struct Moving {
    pub(crate) route: usize,
    pub(crate) strategy: Strategy,
    pub(crate) began: Moment,
    pub(crate) sent: u64,
    pub(crate) remaining: u64,
    /// Its rate in bytes a second; `None`: it was not measured yet.
    pub(crate) rate: Option<f64>,
    /// The moment and the bytes from which its rate is measured.
    mark: (Moment, u64),
    /// When it last shared a path with another one, as far as its rate shows that.
    pub(crate) shared_at: Moment,
    pub(crate) is_held: bool,
    /// Whether its target is lost, so that it uses no path.
    pub(crate) is_stalled: bool,
    pub(crate) cancelled: Option<Cancelled>,
    /// Whether it cannot be cancelled any more.
    pub(crate) is_final: bool,
}

/// Why a transfer is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cancelled {
    /// Its target is lost.
    Elsewhere,
    /// Its VM is to be stopped before the deadline.
    ToStop,
    /// The evacuation is aborted.
    ForGood,
}

impl Moving {
    /// Returns whether it uses its paths now.
    pub(crate) fn uses_paths(&self) -> bool {
        !self.is_held && !self.is_stalled
    }
}

impl Job {
    pub(crate) fn tries_of(&self, route: usize) -> u8 {
        self.tries.iter().find(|(number, _)| *number == route).map_or(0, |(_, tries)| *tries)
    }

    pub(crate) fn tries(&self) -> u32 {
        self.tries.iter().map(|(_, tries)| u32::from(*tries)).sum()
    }

    fn note_failure(&mut self, route: usize) {
        match self.tries.iter_mut().find(|(number, _)| *number == route) {
            Some((_, tries)) => *tries = tries.saturating_add(1),
            None => self.tries.push((route, 1)),
        }
    }
}

impl Planner {
    /// Returns the planner of an evacuation that begins at the moment zero.
    pub fn new(setup: Setup) -> Self {
        let Setup { workloads, targets, stores, paths, terms } = setup;
        let waiting = State::Waiting { not_before: Moment::ZERO };
        Self {
            terms,
            order: in_order(&workloads),
            jobs: vec![Job { state: waiting, tries: Vec::new() }; workloads.len()],
            assigned: vec![Assigned::NOWHERE; workloads.len()],
            workloads,
            moving: BTreeSet::new(),
            targets,
            rooms: stores.iter().map(|store| store.free_bytes).collect(),
            gauges: paths.into_iter().map(Gauge::new).collect(),
            assign_at: Moment::ZERO,
            look_at: Moment::ZERO,
            actions: VecDeque::new(),
            is_aborted: false,
            has_finished: false,
            steps: 0,
        }
    }

    /// Notes that a workload is moving already, by one of its routes: an earlier run has begun it.
    pub fn adopt(&mut self, now: Moment, workload: WorkloadIndex, route: usize) {
        self.enter(now, workload, route, Strategy::Usual);
    }

    /// Takes an event.
    pub fn handle_event(&mut self, now: Moment, event: Event) {
        match event {
            Event::Progress { workload, sent_bytes, remaining_bytes } => {
                self.note_progress(now, workload, sent_bytes, remaining_bytes);
            }
            Event::Left { workload } => {
                self.has_left(workload);
                self.begin_in_turn(now);
            }
            Event::Failed { workload, fault } => self.has_failed(now, workload, fault),
            Event::CancelRefused { workload } => {
                if let State::Moving(moving) = &mut self.jobs[workload.as_usize()].state {
                    (moving.is_final, moving.cancelled) = (true, None);
                }
            }
            Event::Stopped { workload } => self.has_stopped(workload, true),
            Event::StopFailed { workload } => self.has_stopped(workload, false),
            Event::Target { target, state } => {
                self.targets[target.as_usize()].state = state;
                self.assign_at = now;
                self.stall(now, target, matches!(state, TargetState::Lost(_)));
            }
            Event::Room { store, free_bytes } => {
                self.rooms[store.as_usize()] = free_bytes;
                self.assign_at = now;
            }
            Event::Abort => self.abort(),
        }
        self.finish_if_over();
    }

    /// Measures paths, and decides what begins, is held, is stopped. To be called at [`Self::poll_timeout`], and first of all.
    pub fn handle_timeout(&mut self, now: Moment) {
        if now < self.look_at {
            return;
        }
        self.look_at = now + LOOK;
        self.gauges.iter_mut().for_each(|gauge| gauge.look(now));
        self.leave_lost_targets(now);
        self.heed_deadline(now);
        self.protect_higher(now);
        self.begin_in_turn(now);
        self.end_hopeless(now);
        self.finish_if_over();
    }

    /// Returns the next thing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns when [`Self::handle_timeout`] is to be called, and why; `None`: everything has ended.
    pub fn poll_timeout(&self) -> Option<(Moment, &'static str)> {
        (!self.has_finished).then_some((self.look_at, "measure the paths, and look who may begin"))
    }

    /// Returns what has become of a workload; `None`: it waits, moves, or is being stopped.
    pub fn end_of(&self, workload: WorkloadIndex) -> Option<End> {
        match self.jobs[workload.as_usize()].state {
            State::Ended(end) => Some(end),
            _ => None,
        }
    }

    /// Returns whether a transfer is held for a workload of a higher priority.
    pub fn is_held(&self, workload: WorkloadIndex) -> bool {
        matches!(&self.jobs[workload.as_usize()].state, State::Moving(moving) if moving.is_held)
    }

    /// Returns how many routes were compared so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns whether a route may be used: its target is open and suits the workload, and it has not failed too often.
    pub(crate) fn is_usable(&self, workload: WorkloadIndex, route: usize) -> bool {
        let known = &self.workloads[workload.as_usize()];
        let target = &self.targets[known.routes[route].target.as_usize()];
        let is_open = target.state == TargetState::Open || broken(Bug::ClosedTargetTaken);
        is_open
            && (target.takes_vms || !known.is_vm())
            && self.jobs[workload.as_usize()].tries_of(route) < TRIES_OF_ROUTE
    }

    pub(crate) fn way(&self, workload: WorkloadIndex, route: usize) -> Way {
        self.workloads[workload.as_usize()].routes[route].way
    }

    pub(crate) fn enter(&mut self, now: Moment, index: WorkloadIndex, number: usize, strategy: Strategy) {
        let memory_bytes = self.workloads[index.as_usize()].memory_bytes();
        let route = self.workloads[index.as_usize()].routes[number];
        take(&mut self.rooms[route.store.as_usize()], route.room_bytes);
        take(&mut self.targets[route.target.as_usize()].memory_free, memory_bytes);
        for path in route.way.paths() {
            self.gauges[path.as_usize()].enter(now);
        }
        self.moving.insert(index);
        self.jobs[index.as_usize()].state = State::Moving(Moving {
            route: number,
            strategy,
            began: now,
            sent: 0,
            remaining: route.bytes,
            rate: None,
            mark: (now, 0),
            shared_at: now,
            is_held: false,
            is_stalled: false,
            cancelled: None,
            is_final: false,
        });
    }

    /// Notes that a transfer has ended. If its workload is here, the target has its room again.
    pub(crate) fn exit(&mut self, index: WorkloadIndex, stays: Stays) -> Option<Moving> {
        let State::Moving(moving) = self.jobs[index.as_usize()].state.clone() else { return None };
        let memory_bytes = self.workloads[index.as_usize()].memory_bytes();
        let route = self.workloads[index.as_usize()].routes[moving.route];
        for path in route.way.paths() {
            let gauge = &mut self.gauges[path.as_usize()];
            if moving.uses_paths() { gauge.leave() } else { gauge.leave_idle() }
        }
        if stays == Stays::Here {
            let give = |free: &mut Option<u64>, bytes| *free = free.map(|free| free.saturating_add(bytes));
            give(&mut self.rooms[route.store.as_usize()], route.room_bytes);
            give(&mut self.targets[route.target.as_usize()].memory_free, memory_bytes);
        }
        self.moving.remove(&index);
        Some(moving)
    }

    pub(crate) fn set_held(&mut self, now: Moment, index: WorkloadIndex, is_held: bool) {
        self.change_moving(now, index, |moving| moving.is_held = is_held);
    }

    /// Notes that transfers to a target are stalled, so that others have their places, or go on.
    fn stall(&mut self, now: Moment, target: TargetIndex, is_stalled: bool) {
        for index in self.moving.clone() {
            let State::Moving(moving) = &self.jobs[index.as_usize()].state else { continue };
            if self.workloads[index.as_usize()].routes[moving.route].target == target {
                self.change_moving(now, index, |moving| moving.is_stalled = is_stalled);
            }
        }
    }

    /// Changes whether a transfer uses its paths.
    fn change_moving(&mut self, now: Moment, index: WorkloadIndex, change: impl FnOnce(&mut Moving)) {
        let State::Moving(moving) = &mut self.jobs[index.as_usize()].state else { return };
        let before = moving.uses_paths();
        change(moving);
        let after = moving.uses_paths();
        if before == after {
            return;
        }
        // A pause is no part of its rate.
        moving.mark = (now, moving.sent);
        let route = moving.route;
        for path in self.way(index, route).paths() {
            let gauge = &mut self.gauges[path.as_usize()];
            if after { gauge.resume(now) } else { gauge.pause() }
        }
    }

    fn note_progress(&mut self, now: Moment, index: WorkloadIndex, sent: u64, remaining: u64) {
        let State::Moving(moving) = &mut self.jobs[index.as_usize()].state else { return };
        let way = self.workloads[index.as_usize()].routes[moving.route].way;
        if way.paths().into_iter().any(|path| self.gauges[path.as_usize()].running() > 1) {
            moving.shared_at = now;
        }
        let grown = sent.saturating_sub(moving.sent);
        (moving.sent, moving.remaining) = (moving.sent.max(sent), remaining);
        let elapsed = now.saturating_sub(moving.mark.0);
        if elapsed >= LOOK && moving.uses_paths() {
            let rate = moving.sent.saturating_sub(moving.mark.1) as f64 / elapsed.as_secs_f64();
            moving.rate = Some(moving.rate.map_or(rate, |before| (before + rate) / 2.0));
            moving.mark = (now, moving.sent);
        }
        for path in way.paths() {
            self.gauges[path.as_usize()].sent(grown);
        }
    }

    fn has_left(&mut self, index: WorkloadIndex) {
        let State::Moving(moving) = &self.jobs[index.as_usize()].state else { return };
        let (route, rest) = (moving.route, moving.remaining);
        for path in self.way(index, route).paths() {
            // Its last bytes were not reported.
            self.gauges[path.as_usize()].sent(rest);
        }
        let target = self.workloads[index.as_usize()].routes[route].target;
        self.exit(index, Stays::There);
        self.jobs[index.as_usize()].state = State::Ended(End::Left(target));
    }

    fn has_failed(&mut self, now: Moment, index: WorkloadIndex, fault: Fault) {
        let Some(moving) = self.exit(index, Stays::Here) else { return };
        let is_aborted = self.is_aborted || moving.cancelled == Some(Cancelled::ForGood);
        if moving.strategy == Strategy::PostCopy {
            // Its target, or its hypervisor, may not be able to do that.
            self.workloads[index.as_usize()].may_post_copy = false;
        }
        let job = &mut self.jobs[index.as_usize()];
        self.assign_at = now;
        job.state = match (fault, moving.cancelled) {
            _ if is_aborted => State::Ended(End::Stays(Why::Aborted)),
            (_, Some(Cancelled::ToStop)) => {
                self.actions.push_back(Action::Stop { workload: index });
                State::Stopping(Why::TooLate)
            }
            (Fault::Cancelled, None) => State::Ended(End::Stays(Why::Aborted)),
            (Fault::Cancelled, Some(_)) => State::Waiting { not_before: now },
            (Fault::Transfer, _) => {
                job.note_failure(moving.route);
                State::Waiting { not_before: now + PAUSE * job.tries() }
            }
        };
        if broken(Bug::FailureForgotten) && fault == Fault::Transfer {
            self.jobs[index.as_usize()].state = State::Waiting { not_before: Moment::MAX };
        }
    }

    fn has_stopped(&mut self, index: WorkloadIndex, is_stopped: bool) {
        if let State::Stopping(why) = self.jobs[index.as_usize()].state {
            let end = if is_stopped { End::Stopped(why) } else { End::Stays(Why::NotStopped) };
            self.jobs[index.as_usize()].state = State::Ended(end);
        }
    }

    fn abort(&mut self) {
        self.is_aborted = true;
        for number in 0..self.jobs.len() {
            if let State::Waiting { .. } = self.jobs[number].state
                && !broken(Bug::BegunAfterAbort)
            {
                self.jobs[number].state = State::Ended(End::Stays(Why::Aborted));
            }
        }
        for index in self.moving.clone() {
            self.cancel(index, Cancelled::ForGood);
        }
    }

    pub(crate) fn cancel(&mut self, index: WorkloadIndex, purpose: Cancelled) {
        let State::Moving(moving) = &mut self.jobs[index.as_usize()].state else { return };
        if moving.is_final {
            return;
        }
        if moving.cancelled.replace(purpose).is_none() {
            self.actions.push_back(Action::Cancel { workload: index });
        }
    }

    fn finish_if_over(&mut self) {
        let is_over =
            self.moving.is_empty() && self.jobs.iter().all(|job| matches!(job.state, State::Ended(_)));
        if is_over && !self.has_finished {
            self.has_finished = true;
            self.actions.push_back(Action::Finish);
        }
    }
}

/// Where a workload is after its transfer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stays {
    Here,
    There,
}

/// Returns the workloads in the order of their turns: by priority; those with a standby first; the longest first.
fn in_order(workloads: &[Workload]) -> Vec<WorkloadIndex> {
    let mut order: Vec<WorkloadIndex> = (0..workloads.len() as u32).map(WorkloadIndex).collect();
    order.sort_by_key(|index| {
        let workload = &workloads[index.as_usize()];
        let has_standby = workload.routes.iter().any(|route| route.origin == Origin::Standby);
        let bytes = workload.routes.iter().map(|route| route.bytes).min().unwrap_or(0);
        let priority = if broken(Bug::PriorityIgnored) { 0 } else { workload.priority };
        (std::cmp::Reverse(priority), !has_standby, std::cmp::Reverse(bytes), *index)
    });
    order
}
