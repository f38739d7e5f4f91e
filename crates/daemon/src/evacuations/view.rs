//! Descriptions of evacuations.

use std::collections::BTreeMap;
use std::time::Duration;

use evacuation::{Expected, Fate, Moment, Origin, Planner, Strategy};

use super::record::{Entry, Kind, Record, State};
use super::survey::Survey;

/// A forecast beyond this is none: a migration is paused, or nothing moves.
const EXPECTED_MAX: Duration = Duration::from_secs(30 * 86_400);

/// What is known of a workload besides the record.
#[derive(Clone, Debug, Default)]
pub(super) struct Live {
    fraction: Option<f64>,
    expected_unix_ms: Option<u64>,
    fate: Option<Fate>,
    is_held: bool,
}

impl Live {
    /// `began_unix_ms`: the moment zero of the forecast.
    pub(super) fn new(expected: &Expected, began_unix_ms: u64, fraction: Option<f64>, is_held: bool) -> Self {
        let ends = expected.ends.filter(|ends| *ends < EXPECTED_MAX);
        let ends = ends.map(|ends| u64::try_from(ends.as_millis()).unwrap_or(u64::MAX));
        Self {
            fraction,
            expected_unix_ms: ends.map(|ends| began_unix_ms.saturating_add(ends)),
            fate: Some(expected.fate),
            is_held,
        }
    }
}

/// Returns what a dry run has found.
pub(super) fn planned(mut record: Record, survey: Survey) -> api::Evacuation {
    let Survey { setup, entries, routes, adopted, .. } = survey;
    let origins: Vec<Vec<Origin>> = setup
        .workloads
        .iter()
        .map(|workload| workload.routes.iter().map(|route| route.origin).collect())
        .collect();
    let places: Vec<Vec<_>> = setup
        .workloads
        .iter()
        .map(|workload| workload.routes.iter().map(|route| (route.target, route.store)).collect())
        .collect();
    let mut planner = Planner::new(setup);
    for (workload, route, _) in adopted {
        planner.adopt(Moment::ZERO, workload, route);
    }
    let mut live = BTreeMap::new();
    for (expected, mut entry) in planner.forecast(Moment::ZERO).iter().zip(entries) {
        let number = expected.workload.as_usize();
        let route =
            places[number].iter().position(|place| Some(*place) == expected.target.zip(expected.store));
        entry.target = route
            .and_then(|route| routes[number].get(route).cloned())
            .filter(|_| expected.fate == Fate::Leaves);
        entry.origin =
            route.and_then(|route| origins[number].get(route)).and_then(|origin| origin_word(*origin));
        entry.is_post_copy = expected.strategy == Strategy::PostCopy;
        if expected.fate == Fate::NoRoom {
            entry.reason = Some("no target has room for it".to_owned());
        }
        live.insert(record.workloads.len(), Live::new(expected, record.started_unix_ms, None, false));
        record.workloads.push(entry);
    }
    let mut shown = shown(&record, &live, false);
    shown.state = api::EvacuationState::Planned;
    shown
}

fn origin_word(origin: Origin) -> Option<String> {
    match origin {
        Origin::Standby => Some("standby".to_owned()),
        Origin::KeptImage => Some("kept image".to_owned()),
        Origin::Nothing => None,
    }
}

/// Describes an evacuation.
pub(super) fn shown(record: &Record, live: &BTreeMap<usize, Live>, is_asking: bool) -> api::Evacuation {
    let state = match (record.ended_unix_ms, record.is_aborted, is_asking) {
        (Some(_), _, _) => api::EvacuationState::Ended,
        (None, true, _) => api::EvacuationState::Aborting,
        (None, false, true) => api::EvacuationState::Asking,
        (None, false, false) => api::EvacuationState::Running,
    };
    let none = Live::default();
    let workloads: Vec<api::EvacuatedWorkload> = record
        .workloads
        .iter()
        .enumerate()
        .map(|(place, entry)| workload(entry, live.get(&place).unwrap_or(&none)))
        .collect();
    let expected = workloads.iter().map(|workload| match workload.state {
        api::WorkloadState::Left | api::WorkloadState::Stopped | api::WorkloadState::Stays => Some(0),
        _ => workload.expected_unix_ms,
    });
    let expected_unix_ms = expected.collect::<Option<Vec<u64>>>().and_then(|all| all.into_iter().max());
    let is_lost = |workload: &api::EvacuatedWorkload| {
        matches!(workload.state, api::WorkloadState::Stopped | api::WorkloadState::Stays)
            || workload.late
            || workload.state == api::WorkloadState::Waiting
                && workload.target.is_none()
                && workload.reason.is_some()
    };
    api::Evacuation {
        state,
        to: record.order.to.clone(),
        started_unix_ms: record.started_unix_ms,
        deadline_unix_ms: record.order.deadline_unix_ms,
        stop_rest: record.order.stop_rest,
        ended_unix_ms: record.ended_unix_ms,
        expected_unix_ms: expected_unix_ms.filter(|expected| *expected > 0 && record.ended_unix_ms.is_none()),
        aborted: record.is_aborted,
        misses: workloads.iter().any(is_lost),
        workloads,
    }
}

fn workload(entry: &Entry, live: &Live) -> api::EvacuatedWorkload {
    let state = match entry.state {
        State::Waiting => api::WorkloadState::Waiting,
        State::Moving if live.is_held => api::WorkloadState::Held,
        State::Moving => api::WorkloadState::Moving,
        State::Stopping => api::WorkloadState::Stopping,
        State::Left => api::WorkloadState::Left,
        State::Stopped => api::WorkloadState::Stopped,
        State::Stays => api::WorkloadState::Stays,
    };
    let is_over = entry.state.is_over();
    api::EvacuatedWorkload {
        name: entry.name.clone(),
        kind: match entry.kind {
            Kind::Vm => api::WorkloadKind::Vm,
            Kind::Volume => api::WorkloadKind::Volume,
        },
        volumes: entry.volumes.clone(),
        priority: entry.priority,
        running: entry.is_running,
        state,
        bytes: entry.bytes,
        target: entry.target.clone(),
        origin: entry.origin.clone(),
        post_copy: entry.is_post_copy,
        migration: entry.migration.clone(),
        fraction: live.fraction.filter(|_| !is_over),
        expected_unix_ms: live.expected_unix_ms.filter(|_| !is_over),
        late: !is_over && live.fate == Some(Fate::Late),
        reason: entry.reason.clone(),
    }
}
