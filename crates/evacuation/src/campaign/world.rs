//! The virtual world: transfers share the capacity of their paths; cancelling and stopping take time.

use std::collections::BTreeMap;
use std::time::Duration;

use super::checks::Checks;
use super::story::{Random, Story, Turn};
use crate::workload::*;
use crate::{Action, Event, Fault, Planner, Strategy};

const SECOND: Duration = Duration::from_secs(1);
/// After this everything must have ended: each story is much shorter.
const END_MAX: Duration = Duration::from_secs(40_000);

/// A transfer as it really is.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub(super) route: usize,
    pub(super) strategy: Strategy,
    pub(super) sent: f64,
    pub(super) remaining: f64,
    pub(super) rate: f64,
    pub(super) is_held: bool,
    /// When a cancellation takes effect.
    cancelled_at: Option<Duration>,
}

pub(super) struct World<'a> {
    pub(super) story: &'a Story,
    pub(super) planner: Planner,
    pub(super) now: Duration,
    pub(super) transfers: BTreeMap<WorkloadIndex, Transfer>,
    pub(super) capacities: Vec<f64>,
    pub(super) targets: Vec<TargetState>,
    stopping: BTreeMap<WorkloadIndex, Duration>,
    random: Random,
    pub(super) log: Vec<(Duration, Action)>,
    is_finished: bool,
    turns: usize,
    pub(super) checks: Checks,
}

impl<'a> World<'a> {
    pub(super) fn new(story: &'a Story) -> Self {
        Self {
            story,
            planner: Planner::new(story.setup.clone()),
            now: Duration::ZERO,
            transfers: BTreeMap::new(),
            capacities: story.capacities.clone(),
            targets: story.setup.targets.iter().map(|target| target.state).collect(),
            stopping: BTreeMap::new(),
            random: Random(story.seed ^ 0x77),
            log: Vec::new(),
            is_finished: false,
            turns: 0,
            checks: Checks::new(&story.setup),
        }
    }

    /// Runs to the end; the error is the rule that was broken.
    pub(super) fn run(&mut self) -> Result<(), String> {
        while !self.is_finished {
            if self.now > END_MAX {
                return Err("it does not end".to_owned());
            }
            self.take_turns();
            self.move_bytes()?;
            if self.planner.poll_timeout().is_some_and(|(at, _)| at <= self.now) {
                self.planner.handle_timeout(self.now);
            }
            self.act()?;
            Checks::look(self)?;
            self.now += SECOND;
        }
        Checks::end(self)
    }

    pub(super) fn workload(&self, index: WorkloadIndex) -> &Workload {
        &self.story.setup.workloads[index.as_usize()]
    }

    pub(super) fn route(&self, index: WorkloadIndex, route: usize) -> &Route {
        &self.workload(index).routes[route]
    }

    /// Returns the rate that a transfer would have if it had its paths to itself.
    pub(super) fn rate_alone(&self, route: &Route) -> f64 {
        let paths = route.way.paths().into_iter().map(|path| self.capacities[path.as_usize()]);
        paths.fold(self.story.single, f64::min)
    }

    fn tell(&mut self, event: Event) -> Result<(), String> {
        self.planner.handle_event(self.now, event);
        self.act()
    }

    fn take_turns(&mut self) {
        while let Some((at, turn)) = self.story.turns.get(self.turns).copied() {
            if at > self.now {
                return;
            }
            self.turns += 1;
            let state = match turn {
                Turn::Lost(target) => (target, TargetState::Lost(self.now)),
                Turn::Back(target) => (target, TargetState::Open),
                Turn::Closed(target) => (target, TargetState::Closed),
                Turn::Capacity(path, factor) => {
                    self.capacities[path.as_usize()] = self.story.capacities[path.as_usize()] * factor;
                    continue;
                }
                Turn::Abort => {
                    self.checks.aborted_at = Some(self.now);
                    self.planner.handle_event(self.now, Event::Abort);
                    continue;
                }
            };
            // One that was drained stays so.
            if self.targets[state.0.as_usize()] != TargetState::Closed {
                self.targets[state.0.as_usize()] = state.1;
                self.planner.handle_event(self.now, Event::Target { target: state.0, state: state.1 });
            }
        }
    }

    fn is_stuck(&self, index: WorkloadIndex, transfer: &Transfer) -> bool {
        let target = self.route(index, transfer.route).target;
        transfer.is_held || matches!(self.targets[target.as_usize()], TargetState::Lost(_))
    }

    /// Lets a second pass for all transfers.
    fn move_bytes(&mut self) -> Result<(), String> {
        let mut users = vec![0_u32; self.capacities.len()];
        for (index, transfer) in &self.transfers {
            if !self.is_stuck(*index, transfer) {
                for path in self.route(*index, transfer.route).way.paths() {
                    users[path.as_usize()] += 1;
                }
            }
        }
        for index in self.transfers.keys().copied().collect::<Vec<_>>() {
            let transfer = self.transfers[&index].clone();
            let way = self.route(index, transfer.route).way;
            let shares = way.paths().into_iter();
            let shares = shares
                .map(|path| self.capacities[path.as_usize()] / f64::from(users[path.as_usize()].max(1)));
            let rate = match self.is_stuck(index, &transfer) {
                true => 0.0,
                false => shares.fold(self.story.single, f64::min),
            };
            let moved = rate.min(transfer.remaining);
            if let Some(known) = self.transfers.get_mut(&index) {
                known.rate = rate;
                known.sent += moved;
                known.remaining -= moved;
            }
            self.after_a_second(index, rate > 0.0)?;
        }
        for (index, at) in self.stopping.clone() {
            if self.now >= at {
                self.stopping.remove(&index);
                // One guest in twenty ignores its power button.
                let stops = !self.random.chance(5);
                self.tell(if stops {
                    Event::Stopped { workload: index }
                } else {
                    Event::StopFailed { workload: index }
                })?;
            }
        }
        Ok(())
    }

    fn after_a_second(&mut self, workload: WorkloadIndex, is_moving: bool) -> Result<(), String> {
        let Some(transfer) = self.transfers.get(&workload).cloned() else { return Ok(()) };
        let is_doomed = self.story.doomed == Some(workload) && self.now.as_secs().is_multiple_of(7);
        if is_moving && (is_doomed || self.random.unit() < self.story.failing) {
            self.transfers.remove(&workload);
            return self.tell(Event::Failed { workload, fault: Fault::Transfer });
        }
        if transfer.remaining <= 0.0 && is_moving {
            self.transfers.remove(&workload);
            self.checks.left(workload, self.now);
            return self.tell(Event::Left { workload });
        }
        if transfer.cancelled_at.is_some_and(|at| self.now >= at) {
            self.transfers.remove(&workload);
            return self.tell(Event::Failed { workload, fault: Fault::Cancelled });
        }
        let (sent_bytes, remaining_bytes) = (transfer.sent as u64, transfer.remaining as u64);
        self.tell(Event::Progress { workload, sent_bytes, remaining_bytes })
    }

    fn act(&mut self) -> Result<(), String> {
        while let Some(action) = self.planner.poll_action() {
            self.log.push((self.now, action));
            match action {
                Action::Begin { workload, route, strategy } => {
                    Checks::begin(self, workload, route)?;
                    let known = self.route(workload, route);
                    let alone = self.rate_alone(known);
                    let bytes = self.workload(workload).bytes_sent(known.bytes, alone, strategy);
                    let transfer = Transfer {
                        route,
                        strategy,
                        sent: 0.0,
                        remaining: bytes,
                        rate: 0.0,
                        is_held: false,
                        cancelled_at: None,
                    };
                    self.transfers.insert(workload, transfer);
                }
                Action::Hold { workload } => self.set_held(workload, true),
                Action::Resume { workload } => self.set_held(workload, false),
                Action::Cancel { workload } => self.cancel(workload)?,
                Action::Stop { workload } => {
                    self.checks.stopped(workload, self.now);
                    self.stopping.insert(workload, self.now + Duration::from_secs(self.story.stop_seconds));
                }
                Action::Finish => self.is_finished = true,
            }
        }
        Ok(())
    }

    fn set_held(&mut self, workload: WorkloadIndex, is_held: bool) {
        if let Some(transfer) = self.transfers.get_mut(&workload) {
            transfer.is_held = is_held;
        }
    }

    fn cancel(&mut self, workload: WorkloadIndex) -> Result<(), String> {
        let at = self.now + Duration::from_secs(self.random.below(3));
        let Some(transfer) = self.transfers.get_mut(&workload) else { return Ok(()) };
        // What is nearly there is being handed over.
        if transfer.remaining < transfer.rate && !transfer.is_held {
            return self.tell(Event::CancelRefused { workload });
        }
        transfer.cancelled_at = Some(at);
        Ok(())
    }
}
