//! Single rules, step by step.

use std::time::Duration;

use crate::workload::*;
use crate::{Action, End, Event, Fate, Fault, Planner, Strategy, Why};

const MIB: u64 = 1 << 20;

/// A volume of so many MiB, which may go to these targets.
fn volume(priority: u8, mib: u64, targets: &[u32]) -> Workload {
    let route = |target: &u32| Route {
        target: TargetIndex(*target),
        store: StoreIndex(*target),
        way: Way { out: PathIndex(0), into: PathIndex(1 + target), store: PathIndex(3 + target) },
        bytes: mib * MIB,
        room_bytes: mib * MIB,
        origin: Origin::Nothing,
    };
    Workload {
        kind: Kind::Volume,
        priority,
        writes_per_second: 0,
        may_post_copy: false,
        routes: targets.iter().map(route).collect(),
    }
}

fn vm(priority: u8, mib: u64, targets: &[u32]) -> Workload {
    Workload { kind: Kind::RunningVm { memory_bytes: 0 }, ..volume(priority, mib, targets) }
}

/// Two targets behind one link of 100 MiB a second.
fn planner(workloads: Vec<Workload>, terms: Terms) -> Planner {
    let target = Target { state: TargetState::Open, takes_vms: true, memory_free: None };
    let path = Path { rate: Some(100.0 * MIB as f64), transfers_max: 8 };
    let mut planner = Planner::new(Setup {
        workloads,
        targets: vec![target; 2],
        stores: vec![Room { free_bytes: None }; 2],
        paths: vec![path; 5],
        terms,
    });
    planner.handle_timeout(Duration::ZERO);
    planner
}

fn within(seconds: u64) -> Terms {
    Terms { deadline: Some(Duration::from_secs(seconds)), stop_before: None }
}

fn actions(planner: &mut Planner) -> Vec<Action> {
    std::iter::from_fn(|| planner.poll_action()).collect()
}

fn begun(planner: &mut Planner) -> Vec<u32> {
    let begun = actions(planner).into_iter().filter_map(|action| match action {
        Action::Begin { workload, .. } => Some(workload.0),
        _ => None,
    });
    begun.collect()
}

#[test]
fn the_highest_begins_and_among_equals_the_longest() {
    let mut planner =
        planner(vec![volume(1, 10, &[0]), volume(1, 20, &[0]), volume(2, 5, &[0])], Terms::default());
    assert_eq!(begun(&mut planner), [2]);
    planner.handle_event(Duration::from_secs(1), Event::Left { workload: WorkloadIndex(2) });
    assert_eq!(begun(&mut planner), [1]);
}

#[test]
fn a_standby_goes_first_among_equals_and_to_its_host() {
    let mut with_standby = volume(1, 10, &[0, 1]);
    with_standby.routes[1].origin = Origin::Standby;
    let mut planner = planner(vec![volume(1, 20, &[0]), with_standby], Terms::default());
    let first = actions(&mut planner)[0];
    assert_eq!(first, Action::Begin { workload: WorkloadIndex(1), route: 1, strategy: Strategy::Usual });
}

#[test]
fn what_will_be_late_is_told_beforehand() {
    // 100 MiB a second for ten seconds.
    let mut planner =
        planner(vec![volume(2, 600, &[0]), volume(1, 300, &[0]), volume(0, 500, &[0])], within(10));
    let fates: Vec<Fate> = planner.forecast(Duration::ZERO).iter().map(|expected| expected.fate).collect();
    assert_eq!(fates, [Fate::Leaves, Fate::Leaves, Fate::Late]);
    let ends = planner.forecast(Duration::ZERO)[1].ends.unwrap().as_secs_f64();
    assert!((8.5..9.5).contains(&ends), "{ends}");
}

#[test]
fn a_vm_is_handed_over_early_if_only_that_is_in_time() {
    let writing = Workload { writes_per_second: 60 * MIB, ..vm(1, 600, &[0]) };
    let strategies = |may_post_copy| {
        let workload = Workload { may_post_copy, ..writing.clone() };
        let mut planner = planner(vec![workload], within(10));
        actions(&mut planner)
    };
    let begin = |strategy| Action::Begin { workload: WorkloadIndex(0), route: 0, strategy };
    assert_eq!(strategies(true), [begin(Strategy::PostCopy)]);
    assert_eq!(strategies(false), [begin(Strategy::Usual)]);
}

#[test]
fn a_vm_that_cannot_be_handed_over_early_is_tried_as_usual() {
    let writing = Workload { writes_per_second: 60 * MIB, may_post_copy: true, ..vm(1, 600, &[0]) };
    let mut planner = planner(vec![writing], within(36));
    let workload = WorkloadIndex(0);
    assert_eq!(actions(&mut planner), [Action::Begin { workload, route: 0, strategy: Strategy::Usual }]);
    planner.handle_event(Duration::from_secs(2), Event::Failed { workload, fault: Fault::Transfer });
    let mut begun = Vec::new();
    for second in 3..36 {
        planner.handle_timeout(Duration::from_secs(second));
        for action in actions(&mut planner) {
            if let Action::Begin { strategy, .. } = action {
                begun.push(strategy);
                if strategy == Strategy::PostCopy {
                    planner.handle_event(
                        Duration::from_secs(second),
                        Event::Failed { workload, fault: Fault::Transfer },
                    );
                }
            }
        }
    }
    assert_eq!(begun, [Strategy::PostCopy], "its route has failed twice");
    assert!(!planner.workloads[0].may_post_copy);
}

#[test]
fn a_workload_goes_elsewhere_when_its_target_is_lost() {
    let mut planner = planner(vec![volume(1, 1000, &[0, 1])], Terms::default());
    let Some(Action::Begin { workload, route, .. }) = planner.poll_action() else { panic!("nothing begins") };
    let lost = Duration::from_secs(5);
    let target = TargetIndex(route as u32);
    planner.handle_event(lost, Event::Target { target, state: TargetState::Lost(lost) });
    planner.handle_timeout(lost);
    // Its daemon may be restarting. Its place is free meanwhile.
    assert_eq!(actions(&mut planner), []);
    assert!(planner.forecast(lost)[0].ends.is_none());
    let now = lost + crate::ends::RESTART_MAX;
    planner.handle_timeout(now);
    assert_eq!(actions(&mut planner), [Action::Cancel { workload }]);
    planner.handle_event(now, Event::Failed { workload, fault: Fault::Cancelled });
    planner.handle_timeout(now + Duration::from_secs(1));
    assert_eq!(
        actions(&mut planner),
        [Action::Begin { workload, route: 1 - route, strategy: Strategy::Usual }]
    );
}

#[test]
fn what_keeps_failing_ends_with_the_reason() {
    let mut planner = planner(vec![volume(1, 1000, &[0])], Terms::default());
    let workload = WorkloadIndex(0);
    for second in 1..100 {
        let now = Duration::from_secs(second);
        if !begun(&mut planner).is_empty() {
            planner.handle_event(now, Event::Failed { workload, fault: Fault::Transfer });
        }
        planner.handle_timeout(now);
    }
    assert_eq!(planner.end_of(workload), Some(End::Stays(Why::Failed)));
    assert_eq!(planner.poll_timeout(), None);
}

#[test]
fn vms_that_stay_are_stopped_before_the_deadline_the_lowest_first() {
    let terms = Terms { deadline: Some(Duration::from_secs(30)), stop_before: Some(Duration::from_secs(10)) };
    let mut planner = planner(vec![vm(2, 10, &[]), vm(1, 10, &[]), volume(1, 10, &[])], terms);
    let mut stopped = Vec::new();
    for second in 1..=30 {
        planner.handle_timeout(Duration::from_secs(second));
        stopped.extend(actions(&mut planner).into_iter().map(|action| (second, action)));
    }
    let stop = |second, number| (second, Action::Stop { workload: WorkloadIndex(number) });
    assert_eq!(stopped, [stop(20, 1), stop(20, 0)]);
    assert_eq!(planner.end_of(WorkloadIndex(2)), Some(End::Stays(Why::NoTarget)));
    planner.handle_event(Duration::from_secs(31), Event::Stopped { workload: WorkloadIndex(0) });
    assert_eq!(planner.end_of(WorkloadIndex(0)), Some(End::Stopped(Why::TooLate)));
}

#[test]
fn an_abort_cancels_what_moves_and_begins_nothing() {
    let mut planner = planner(vec![volume(1, 1000, &[0]), volume(1, 900, &[0])], Terms::default());
    assert_eq!(begun(&mut planner), [0]);
    planner.handle_event(Duration::from_secs(1), Event::Abort);
    planner.handle_timeout(Duration::from_secs(1));
    assert_eq!(actions(&mut planner), [Action::Cancel { workload: WorkloadIndex(0) }]);
    planner.handle_event(
        Duration::from_secs(2),
        Event::Failed { workload: WorkloadIndex(0), fault: Fault::Cancelled },
    );
    assert_eq!(actions(&mut planner), [Action::Finish]);
}
