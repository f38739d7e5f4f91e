//! How virtual machines are printed for people.

use api::{RemovedVm, Vm, VmState};

use super::{dash, lines, properties, table};

/// The machines as a table.
pub(crate) fn list(vms: &Vec<Vm>) -> String {
    if vms.is_empty() {
        return "no machines; add one with: sterna vm add NAME --definition FILE\n".to_owned();
    }
    let mut table = table(&["VM", "STATE", "PROCESS", "VOLUMES"], &[2]);
    for vm in vms {
        let process = vm.process.map_or_else(dash, |process| process.to_string());
        table.add_row([vm.name.clone(), state(vm.state).to_owned(), process, volumes(&vm.volumes)]);
    }
    lines(&table)
}

/// One machine, a line for each property.
pub(crate) fn show(vm: &Vm) -> String {
    let mut rows = vec![("vm", vm.name.clone()), ("state", state(vm.state).to_owned())];
    rows.extend(vm.message.clone().map(|message| ("why", message)));
    rows.push(("volumes", volumes(&vm.volumes)));
    rows.push(("process", vm.process.map_or_else(dash, |process| process.to_string())));
    rows.push(("hypervisor", vm.hypervisor.clone().unwrap_or_else(dash)));
    rows.push(("monitor", vm.monitor.clone()));
    rows.extend(vm.log.clone().map(|log| ("log", log)));
    properties(&rows)
}

/// That a machine was started.
pub(crate) fn started(vm: &Vm) -> String {
    let process = vm.process.map(|process| format!(" (process {process})")).unwrap_or_default();
    format!("{} is {}{process}\n", vm.name, state(vm.state))
}

/// That a machine's disks were adopted.
pub(crate) fn adopted(vm: &Vm) -> String {
    format!("{} goes on; its disks are served as: {}\n", vm.name, volumes(&vm.volumes))
}

/// What has become of a machine.
pub(crate) fn removed(removed: &RemovedVm) -> String {
    match removed.volumes.as_slice() {
        [] => format!("{} is no longer known here\n", removed.name),
        names => format!("{} is no longer known here; its volumes stay: {}\n", removed.name, volumes(names)),
    }
}

fn volumes(names: &[String]) -> String {
    if names.is_empty() { dash() } else { names.join(", ") }
}

fn state(state: VmState) -> &'static str {
    match state {
        VmState::Stopped => "stopped",
        VmState::Starting => "starting",
        VmState::Running => "running",
        VmState::Paused => "paused",
        VmState::Crashed => "crashed",
        VmState::Arriving => "arriving",
        VmState::Leaving => "leaving",
        VmState::Unknown => "unknown",
    }
}
