//! Text output of `sterna evacuate`.

use api::{EvacuatedWorkload, Evacuation, EvacuationState, WorkloadState};
use console::units::{bytes, percent};

use super::{dash, lines, table};
use crate::moments::local;

/// Returns what goes or went where, and what stays and why.
pub(crate) fn show(evacuation: &Evacuation) -> String {
    if evacuation.workloads.is_empty() {
        return match evacuation.state {
            EvacuationState::Asking => "the other hosts are being asked what they can take\n".to_owned(),
            _ => "there is nothing at this host\n".to_owned(),
        };
    }
    let header = ["NAME", "KIND", "PRIORITY", "SIZE", "STATE", "WHERE", "LEFT BY", "NOTE"];
    let mut table = table(&header, &[2, 3]);
    for workload in &evacuation.workloads {
        let is_planned = evacuation.state == EvacuationState::Planned;
        table.add_row([
            workload.name.clone(),
            workload.kind.name().to_owned(),
            workload.priority.to_string(),
            bytes(workload.bytes),
            state(workload, is_planned),
            workload.target.clone().unwrap_or_else(|| "here".to_owned()),
            workload.expected_unix_ms.map_or_else(dash, local),
            note(workload),
        ]);
    }
    lines(&table) + &heading(evacuation)
}

fn state(workload: &EvacuatedWorkload, is_planned: bool) -> String {
    match (workload.state, workload.late, workload.fraction) {
        (_, true, None) if is_planned => "would be late".to_owned(),
        (WorkloadState::Waiting, _, _) if is_planned && workload.target.is_none() => "would stay".to_owned(),
        (WorkloadState::Waiting, _, _) if is_planned => "would leave".to_owned(),
        (state, true, _) => format!("{}, late", state.words()),
        (WorkloadState::Moving, false, Some(fraction)) => format!("moving, {}", percent(fraction)),
        (state, _, _) => state.words().to_owned(),
    }
}

fn note(workload: &EvacuatedWorkload) -> String {
    let origin = workload.origin.as_ref().map(|origin| format!("begins with its {origin}"));
    let early = workload.post_copy.then(|| "its memory follows it (post-copy)".to_owned());
    let all: Vec<String> = workload.reason.clone().into_iter().chain(origin).chain(early).collect();
    if all.is_empty() { dash() } else { all.join("; ") }
}

/// Returns the sentence about the whole below the table.
fn heading(evacuation: &Evacuation) -> String {
    let count = |wanted: fn(WorkloadState) -> bool| {
        evacuation.workloads.iter().filter(|workload| wanted(workload.state)).count()
    };
    let all = evacuation.workloads.len();
    match evacuation.state {
        EvacuationState::Planned => {
            let ends = evacuation
                .expected_unix_ms
                .map(|ends| format!("; the last would have left at {}", local(ends)));
            let first =
                if evacuation.misses { lost(evacuation) } else { "everything would leave".to_owned() };
            format!("{first}{}; nothing was begun\n", ends.unwrap_or_default())
        }
        EvacuationState::Ended => {
            let left = count(|state| state == WorkloadState::Left);
            let stopped = count(|state| state == WorkloadState::Stopped);
            let stay = all - left - stopped;
            let how = if evacuation.aborted { " (aborted)" } else { "" };
            format!(
                "the evacuation has ended{how}: {left} of {all} have left, {stopped} were shut down, {stay} stay as they were\n"
            )
        }
        EvacuationState::Asking | EvacuationState::Running | EvacuationState::Aborting => {
            format!("{}\n", summary(evacuation))
        }
    }
}

/// Returns how far it is, in a line.
pub(crate) fn summary(evacuation: &Evacuation) -> String {
    let count = |wanted: &[WorkloadState]| {
        evacuation.workloads.iter().filter(|workload| wanted.contains(&workload.state)).count()
    };
    let left = count(&[WorkloadState::Left]);
    let moving = count(&[WorkloadState::Moving, WorkloadState::Held]);
    let ends =
        evacuation.expected_unix_ms.map(|ends| format!("; the last will have left at {}", local(ends)));
    let all = evacuation.workloads.len();
    format!("{left} of {all} have left, {moving} are moving{}", ends.unwrap_or_default())
}

/// Returns what would be lost at the deadline, in a line.
pub(crate) fn lost(evacuation: &Evacuation) -> String {
    let is_lost = |workload: &&EvacuatedWorkload| {
        let stays = workload.target.is_none() && workload.reason.is_some();
        workload.late || stays && workload.state != WorkloadState::Left
    };
    let names: Vec<&str> =
        evacuation.workloads.iter().filter(is_lost).map(|workload| workload.name.as_str()).collect();
    let then = match (evacuation.deadline_unix_ms, evacuation.stop_rest) {
        (None, _) => "these stay here",
        (Some(_), true) => {
            "at the deadline these are still here, and VMs of them will be shut down before it"
        }
        (Some(_), false) => "at the deadline these are still here, and run on",
    };
    format!("{then}: {}", names.join(", "))
}

/// Returns what has happened to a workload, in a line.
pub(crate) fn news(workload: &EvacuatedWorkload) -> String {
    let why = workload.reason.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let target = workload.target.as_deref().unwrap_or("another host");
    let migration = workload.migration.as_ref().map(|id| format!(" ({id})")).unwrap_or_default();
    let name = &workload.name;
    match workload.state {
        WorkloadState::Waiting => format!("{name} waits"),
        WorkloadState::Moving => format!("{name} moves to {target}{migration}"),
        WorkloadState::Held => format!("{name} is held for one of a higher priority{migration}"),
        WorkloadState::Stopping => format!("{name} is being shut down"),
        WorkloadState::Left => format!("{name} is at {target}{migration}"),
        WorkloadState::Stopped => format!("{name} is shut down, and stays here{why}"),
        WorkloadState::Stays => format!("{name} stays here{why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evacuation(state: &str, workloads: &serde_json::Value) -> Evacuation {
        serde_json::from_value(serde_json::json!({
            "state": state, "to": ["b"], "started_unix_ms": 1, "deadline_unix_ms": 9, "stop_rest": true, "misses": true,
            "workloads": workloads,
        }))
        .unwrap()
    }

    fn workload(name: &str, more: &serde_json::Value) -> serde_json::Value {
        let mut workload = serde_json::json!({
            "name": name, "kind": "vm", "volumes": [name], "priority": 50, "running": true, "state": "waiting", "bytes": 1024,
        });
        workload.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        workload
    }

    #[test]
    fn a_dry_run_names_what_would_be_late_and_what_would_stay() {
        let workloads = serde_json::json!([
            workload("a", &serde_json::json!({ "target": "b:fast", "origin": "standby" })),
            workload("c", &serde_json::json!({ "late": true })),
            workload("d", &serde_json::json!({ "reason": "no target has room for it" })),
        ]);
        let text = show(&evacuation("planned", &workloads));
        assert!(text.contains("would leave") && text.contains("begins with its standby"), "{text}");
        assert!(text.contains("would be late") && text.contains("no target has room for it"), "{text}");
        assert!(text.contains("VMs of them will be shut down before it: c, d"), "{text}");
    }

    #[test]
    fn the_end_counts_what_left_and_what_stays() {
        let workloads = serde_json::json!([
            workload("a", &serde_json::json!({ "state": "left", "target": "b:fast" })),
            workload("c", &serde_json::json!({ "state": "stopped", "reason": "the deadline came first" })),
        ]);
        let text = show(&evacuation("ended", &workloads));
        assert!(text.contains("1 of 2 have left, 1 were shut down, 0 stay as they were"), "{text}");
        assert!(text.contains("the deadline came first"), "{text}");
    }
}
