//! The rules that each evacuation keeps.

use std::collections::BTreeMap;
use std::time::Duration;

use super::world::World;
use crate::planner::State;
use crate::workload::*;
use crate::{End, Strategy, Why};

/// How long a lower transfer may run beside a higher one that is late: rates are measured over some seconds, and transfers are held
/// one a second.
const LATE_SECONDS_MAX: u32 = 20;
/// A workload that needs no more than this share of the time left is certainly in time if it is alone.
const CERTAIN: f64 = 0.7;

pub(super) struct Checks {
    /// What each store and target has taken, by this check's own count.
    rooms: Vec<Option<u64>>,
    memory: Vec<Option<u64>>,
    left: BTreeMap<WorkloadIndex, Duration>,
    stopped: BTreeMap<WorkloadIndex, Duration>,
    begun: BTreeMap<WorkloadIndex, usize>,
    late: BTreeMap<(WorkloadIndex, WorkloadIndex), u32>,
    pub(super) aborted_at: Option<Duration>,
}

impl Checks {
    pub(super) fn new(setup: &Setup) -> Self {
        Self {
            rooms: setup.stores.iter().map(|store| store.free_bytes).collect(),
            memory: setup.targets.iter().map(|target| target.memory_free).collect(),
            left: BTreeMap::new(),
            stopped: BTreeMap::new(),
            begun: BTreeMap::new(),
            late: BTreeMap::new(),
            aborted_at: None,
        }
    }

    pub(super) fn left(&mut self, workload: WorkloadIndex, now: Duration) {
        self.left.insert(workload, now);
    }

    pub(super) fn stopped(&mut self, workload: WorkloadIndex, now: Duration) {
        self.stopped.insert(workload, now);
    }

    /// Checks a beginning.
    pub(super) fn begin(world: &mut World<'_>, index: WorkloadIndex, number: usize) -> Result<(), String> {
        let route = *world.route(index, number);
        let at = format!("{:?}: {index:?} begins to {:?}", world.now, route.target);
        if world.targets[route.target.as_usize()] != TargetState::Open {
            return Err(format!("{at}, which is {:?}", world.targets[route.target.as_usize()]));
        }
        if world.workload(index).is_vm() && !world.story.setup.targets[route.target.as_usize()].takes_vms {
            return Err(format!("{at}, which takes no VMs"));
        }
        if world.checks.aborted_at.is_some() {
            return Err(format!("{at} after the order to end"));
        }
        for path in route.way.paths() {
            let uses = |(other, transfer): &(&WorkloadIndex, &super::world::Transfer)| {
                world.route(**other, transfer.route).way.paths().contains(&path)
            };
            let users = world.transfers.iter().filter(uses).count() as u32;
            if users >= world.story.setup.paths[path.as_usize()].transfers_max {
                return Err(format!("{at}, although {path:?} has {users} transfers"));
            }
        }
        Self::check_room(world, index, &route).map_err(|fault| format!("{at}, {fault}"))?;
        Self::check_turn(world, index, number).map_err(|fault| format!("{at}, {fault}"))?;
        world.checks.begun.insert(index, number);
        Ok(())
    }

    fn check_room(world: &World<'_>, index: WorkloadIndex, route: &Route) -> Result<(), String> {
        let (mut room, mut memory) = (route.room_bytes, world.workload(index).memory_bytes());
        let there = world.transfers.iter().map(|(other, transfer)| (*other, transfer.route));
        let gone =
            world.checks.left.keys().filter_map(|other| Some((*other, *world.checks.begun.get(other)?)));
        for (other, number) in there.chain(gone) {
            let known = world.route(other, number);
            if known.store == route.store {
                room += known.room_bytes;
            }
            if known.target == route.target {
                memory += world.workload(other).memory_bytes();
            }
        }
        let fits = |free: Option<u64>, needed| free.is_none_or(|free| needed <= free);
        match (
            fits(world.checks.rooms[route.store.as_usize()], room),
            fits(world.checks.memory[route.target.as_usize()], memory),
        ) {
            (false, _) => Err("whose store has no room".to_owned()),
            (_, false) => Err("which has no memory".to_owned()),
            _ => Ok(()),
        }
    }

    /// Checks that no higher workload could have begun instead.
    fn check_turn(world: &World<'_>, index: WorkloadIndex, begun: usize) -> Result<(), String> {
        // In a site of hundreds of hosts this would take longer than the evacuation.
        if world.story.setup.workloads.len() > 1000 {
            return Ok(());
        }
        let priority = world.workload(index).priority;
        for (number, other) in world.story.setup.workloads.iter().enumerate() {
            let higher = WorkloadIndex(number as u32);
            let State::Waiting { not_before } = world.planner.jobs[number].state else { continue };
            if other.priority <= priority
                || not_before > world.now
                || world.checks.stopped.contains_key(&higher)
            {
                continue;
            }
            let could_begin = (0..other.routes.len()).any(|route| {
                let known = &other.routes[route];
                // The one that begins has just taken a place of each of its paths.
                let taken = world.route(index, begun).way.paths();
                let is_free = |path: PathIndex| {
                    world.planner.gauges[path.as_usize()].has_place() || taken.contains(&path)
                };
                let places = known.way.paths().into_iter().all(is_free);
                // It does not give up a standby or a kept image for a place.
                let assigned = world.planner.assigned[number].route.map(|route| other.routes[route].origin);
                places
                    && assigned.is_some_and(|assigned| known.origin <= assigned)
                    && world.planner.is_usable(higher, route)
                    && Self::check_room(world, higher, known).is_ok()
                    && Self::is_certain(world, higher, known)
            });
            // Paths may be kept free for a third one, which is higher still.
            let is_kept_free = world.transfers.iter().any(|(third, transfer)| {
                let is_higher = world.workload(*third).priority > other.priority;
                is_higher && !transfer.is_held
            });
            if could_begin && !is_kept_free {
                return Err(format!("and {higher:?} of a higher priority waits"));
            }
        }
        Ok(())
    }

    /// Returns whether a workload that begins now would certainly be in time if it were alone.
    fn is_certain(world: &World<'_>, index: WorkloadIndex, route: &Route) -> bool {
        let Some(deadline) = world.story.setup.terms.deadline else { return true };
        let rate = world.rate_alone(route);
        let seconds = world.workload(index).bytes_sent(route.bytes, rate, Strategy::Usual) / rate;
        seconds <= CERTAIN * deadline.saturating_sub(world.now).as_secs_f64()
    }

    /// Checks one second: no lower transfer runs beside a higher one that is late for its sake.
    pub(super) fn look(world: &mut World<'_>) -> Result<(), String> {
        let Some(deadline) = world.story.setup.terms.deadline else { return Ok(()) };
        if world.now >= deadline || world.story.setup.workloads.len() > 1000 {
            return Ok(());
        }
        let left = (deadline - world.now).as_secs_f64();
        let mut late = BTreeMap::new();
        for (index, transfer) in world.transfers.iter().filter(|(_, transfer)| transfer.rate > 0.0) {
            let route = world.route(*index, transfer.route);
            let is_late = transfer.remaining / transfer.rate > left;
            let could_be_in_time = transfer.remaining / world.rate_alone(route) <= CERTAIN * left;
            if !is_late || !could_be_in_time {
                continue;
            }
            for (lower, beside) in &world.transfers {
                let shares = world.route(*lower, beside.route).way.shares(route.way);
                let can_be_held = !beside.is_held && beside.rate > 0.0 && beside.strategy == Strategy::Usual;
                if world.workload(*lower).priority < world.workload(*index).priority && shares && can_be_held
                {
                    let before = world.checks.late.get(&(*index, *lower)).copied().unwrap_or(0);
                    late.insert((*index, *lower), before + 1);
                }
            }
        }
        world.checks.late = late;
        match world.checks.late.iter().find(|(_, seconds)| **seconds > LATE_SECONDS_MAX) {
            Some(((higher, lower), _)) => Err(format!(
                "{:?}: {higher:?} is late while {lower:?} of a lower priority uses its paths",
                world.now
            )),
            None => Ok(()),
        }
    }

    /// Checks the end.
    pub(super) fn end(world: &mut World<'_>) -> Result<(), String> {
        let terms = world.story.setup.terms;
        for number in 0..world.story.setup.workloads.len() {
            let index = WorkloadIndex(number as u32);
            let Some(end) = world.planner.end_of(index) else {
                return Err(format!("{index:?} has not ended"));
            };
            let has_left = world.checks.left.contains_key(&index);
            if end.has_left() != has_left {
                return Err(format!("{index:?} is said to be {end:?}"));
            }
            if world.story.is_calm()
                && matches!(end, End::Stays(Why::Failed | Why::Aborted | Why::HandedOver))
            {
                return Err(format!("{index:?} is {end:?} although nothing has happened"));
            }
            if let (Some(deadline), Some(before), End::Stopped(_)) = (terms.deadline, terms.stop_before, end)
            {
                // Cancelling its transfer takes two seconds, and noticing that it is late a few more.
                let latest = deadline.saturating_sub(before) + Duration::from_secs(4);
                let was_moving = world.checks.begun.contains_key(&index);
                let at = world.checks.stopped[&index];
                if at > latest && !was_moving {
                    return Err(format!("{index:?} was stopped at {at:?}, and the deadline is {deadline:?}"));
                }
            }
        }
        Self::check_priorities(world)
    }

    /// Checks that everything has left of the priorities that certainly fit into the time.
    fn check_priorities(world: &World<'_>) -> Result<(), String> {
        let setup = &world.story.setup;
        let Some(deadline) = setup.terms.deadline else { return Ok(()) };
        let is_simple = world.story.is_calm()
            && setup.targets.iter().all(|target| target.state == TargetState::Open && target.takes_vms)
            && setup.targets.iter().all(|target| target.memory_free.is_none());
        if !is_simple {
            return Ok(());
        }
        let slowest = world.capacities.iter().copied().fold(world.story.single, f64::min);
        for level in 0..4 {
            let at_least =
                || setup.workloads.iter().enumerate().filter(|(_, workload)| workload.priority >= level);
            let seconds: f64 = at_least()
                .filter_map(|(_, workload)| {
                    let bytes = workload.routes.iter().map(|route| route.bytes).max()?;
                    Some(1.0 + workload.bytes_sent(bytes, slowest, Strategy::Usual) / slowest)
                })
                .sum();
            let needed: u64 =
                at_least().flat_map(|(_, workload)| &workload.routes).map(|route| route.room_bytes).sum();
            let has_room =
                setup.stores.iter().all(|store| store.free_bytes.is_none_or(|free| free >= needed));
            // VMs that are to be stopped have less time.
            let time = deadline.saturating_sub(setup.terms.stop_before.unwrap_or_default()).as_secs_f64();
            if seconds > CERTAIN * time || !has_room {
                continue;
            }
            for (number, workload) in at_least().filter(|(_, workload)| !workload.routes.is_empty()) {
                let left = world.checks.left.get(&WorkloadIndex(number as u32));
                if left.is_none_or(|left| *left > deadline) {
                    return Err(format!("workload {number} of priority {} is late", workload.priority));
                }
            }
        }
        Ok(())
    }
}
