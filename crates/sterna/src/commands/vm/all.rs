//! `sterna vm start --all` and `sterna vm stop --all`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use api::{Client, StopVm, Vm, VmState};
use serde::Serialize;

use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format, vms};

/// Time between two looks at VMs that start.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// What became of the VMs.
#[derive(Debug, Serialize)]
struct Outcome {
    vms: Vec<Vm>,
    /// Why an order failed, by VM.
    failed: BTreeMap<String, String>,
}

/// Starts all VMs that start at a boot, in the daemon, and shows how each starts. One that fails is tried again by the daemon, so this does not
/// wait for it. If this is interrupted, the daemon continues.
pub(super) async fn start(client: &Client, format: Format) -> Result<Exit, CommandError> {
    let mut waited_for: BTreeSet<String> =
        client.start_all_vms().await?.into_iter().map(|vm| vm.name).collect();
    let mut outcome = Outcome { vms: Vec::new(), failed: BTreeMap::new() };
    if waited_for.is_empty() && format == Format::Text {
        output::say("no VM that starts at a boot is stopped; to let one: sterna vm set NAME --start-at-boot");
    }
    while !waited_for.is_empty() {
        for vm in client.vms().await? {
            if !waited_for.contains(&vm.name) {
                continue;
            }
            let has_failed = vm.awaited_start.as_ref().is_some_and(|awaited| awaited.failed_attempts > 0);
            if vm.awaited_start.is_some() && !has_failed {
                continue;
            }
            waited_for.remove(&vm.name);
            if has_failed {
                let why = vm.message.clone().unwrap_or_default();
                output::say(&format!("{}: {why}", vm.name));
                outcome.failed.insert(vm.name.clone(), why);
            } else if format == Format::Text {
                output::say(vms::started(&vm).trim_end());
            }
            outcome.vms.push(vm);
        }
        // Polling: the daemon has no other way to tell.
        tokio::time::sleep(LOOK_EVERY).await;
    }
    end(format, &outcome)
}

/// Stops all VMs of Sterna that run, from the highest order to the lowest. One that does not stop is named, and the others follow.
pub(super) async fn stop(client: &Client, how: StopVm, format: Format) -> Result<Exit, CommandError> {
    let mut outcome = Outcome { vms: Vec::new(), failed: BTreeMap::new() };
    for group in groups(client.vms().await?) {
        let names: Vec<&str> = group.iter().map(|vm| vm.name.as_str()).collect();
        if format == Format::Text {
            output::say(&format!("stopping {}", names.join(", ")));
        }
        let orders = group.iter().map(|vm| client.stop_vm(&vm.name, how));
        let stopped = futures_util::future::join_all(orders).await;
        for (vm, stopped) in group.into_iter().zip(stopped) {
            match stopped {
                Ok(vm) => {
                    if format == Format::Text {
                        output::say(vms::stopped(&vm).trim_end());
                    }
                    outcome.vms.push(vm);
                }
                Err(error) => {
                    let error = CommandError::from(error).to_string();
                    output::say(&error);
                    outcome.failed.insert(vm.name, error);
                }
            }
        }
    }
    end(format, &outcome)
}

fn end(format: Format, outcome: &Outcome) -> Result<Exit, CommandError> {
    output::print(format, outcome, |_| String::new())?;
    Ok(if outcome.failed.is_empty() { Exit::Success } else { Exit::Unexpected })
}

/// Returns the VMs that are to be stopped, those that stop together in one group, in the order of the groups.
fn groups(vms: Vec<Vm>) -> Vec<Vec<Vm>> {
    let mut groups: BTreeMap<u16, Vec<Vm>> = BTreeMap::new();
    for vm in vms {
        let is_up = !matches!(vm.state, VmState::Stopped | VmState::Suspended | VmState::Crashed)
            || vm.awaited_start.is_some();
        // A VM without these settings is adopted: Sterna does not start it.
        if let Some(start) = vm.start.as_ref().filter(|_| is_up) {
            groups.entry(start.order).or_default().push(vm);
        }
    }
    groups.into_values().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_start_last_stop_first_and_adopted_ones_run_on() {
        let vm = |name: &str, state: &str, start: serde_json::Value| -> Vm {
            serde_json::from_value(serde_json::json!({
                "name": name, "state": state, "volumes": [], "monitor": "/m", "added_unix_ms": 1, "start": start,
            }))
            .unwrap()
        };
        let order = |order: u16| serde_json::json!({ "at_boot": false, "order": order, "wait_max_s": 1 });
        let groups = groups(vec![
            vm("db", "running", order(10)),
            vm("web", "running", order(20)),
            vm("cache", "paused", order(20)),
            vm("off", "stopped", order(30)),
            // N.B. Its memory would be deleted.
            vm("asleep", "suspended", order(30)),
            vm("adopted", "running", serde_json::Value::Null),
        ]);
        let names: Vec<Vec<&str>> =
            groups.iter().map(|group| group.iter().map(|vm| vm.name.as_str()).collect()).collect();
        assert_eq!(names, [vec!["web", "cache"], vec!["db"]]);
    }
}
