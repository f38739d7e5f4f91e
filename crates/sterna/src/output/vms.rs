//! Text output of `sterna vm`.

use api::{RemovedVm, Vm, VmState, WholeMove};

use super::{dash, lines, properties, table};

pub(crate) fn list(vms: &Vec<Vm>) -> String {
    if vms.is_empty() {
        return "no VMs; add one with: sterna vm add NAME --definition FILE\n".to_owned();
    }
    let mut table = table(&["VM", "STATE", "HYPERVISOR", "PROCESS", "VOLUMES"], &[3]);
    for vm in vms {
        let process = vm.process.map_or_else(dash, |process| process.to_string());
        let hypervisor = vm.hypervisor.clone().unwrap_or_else(dash);
        let row = [vm.name.clone(), vm.state.words().to_owned(), hypervisor, process, volumes(&vm.volumes)];
        table.add_row(row);
    }
    lines(&table)
}

pub(crate) fn show(vm: &Vm) -> String {
    let mut rows = vec![("vm", vm.name.clone()), ("state", vm.state.words().to_owned())];
    rows.extend(vm.message.clone().map(|message| ("why", message)));
    rows.push(("volumes", volumes(&vm.volumes)));
    rows.extend(vm.images.iter().map(|image| ("image", image.clone())));
    rows.push(("process", vm.process.map_or_else(dash, |process| process.to_string())));
    rows.push(("hypervisor", vm.hypervisor.clone().unwrap_or_else(dash)));
    match &vm.libvirt_domain {
        Some(domain) => {
            rows.push(("domain", domain.clone()));
            rows.push(("libvirt", vm.monitor.clone()));
        }
        None => rows.push(("monitor", vm.monitor.clone())),
    }
    rows.extend(vm.log.clone().map(|log| ("log", log)));
    if let Some(whole) = &vm.whole_move {
        let possible = || "can move to another host as a whole".to_owned();
        rows.push(("move", whole.obstacle.clone().unwrap_or_else(possible)));
        rows.extend(whole.left_behind.iter().map(|what| ("stays behind", what.clone())));
    }
    properties(&rows)
}

/// Returns the text about an added VM, with warnings.
pub(crate) fn added(vm: &Vm) -> String {
    let warning = vm.message.as_ref().map(|message| format!("warning: {message}\n")).unwrap_or_default();
    format!("added {}; start it: sterna vm start {}\n{warning}", vm.name, vm.name)
}

pub(crate) fn started(vm: &Vm) -> String {
    let process = vm.process.map(|process| format!(" (process {process})")).unwrap_or_default();
    format!("{} is {}{process}\n", vm.name, vm.state.words())
}

pub(crate) fn stopped(vm: &Vm) -> String {
    let how = vm.message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
    format!("{} is stopped{how}\n", vm.name)
}

/// Returns the text about adopted disks.
pub(crate) fn adopted(vm: &Vm) -> String {
    let mut text = format!("{} is adopted; its disks are served as: {}\n", vm.name, volumes(&vm.volumes));
    if vm.libvirt_domain.is_some() {
        text += &vm.message.as_ref().map(|message| format!("note: {message}\n")).unwrap_or_default();
        return text + &format!("to move them: sterna migrate {} --to STORE\n", vm.volumes.join(", "));
    }
    match &vm.whole_move {
        None => {}
        Some(WholeMove { obstacle: Some(obstacle), .. }) => {
            text += &format!("its disks can be moved; it cannot move as a whole: {obstacle}\n");
        }
        Some(WholeMove { obstacle: None, left_behind }) => {
            text += &format!("to move it to another host: sterna migrate {} --to HOST\n", vm.name);
            left_behind.iter().for_each(|what| text += &format!("  it would leave behind: {what}\n"));
        }
    }
    text
}

/// Returns the text about released disks.
pub(crate) fn released(vm: &Vm) -> String {
    let message = vm.message.as_ref().map(|message| format!("; {message}")).unwrap_or_default();
    match vm.state {
        // The VM has ended, so its disks were not given back.
        VmState::Unknown => format!("removed {}{message}\n", vm.name),
        _ if vm.libvirt_domain.is_some() => {
            format!("{} uses files again, which its definition in libvirt names{message}\n", vm.name)
        }
        _ if vm.images.is_empty() => format!("{} is released{message}\n", vm.name),
        _ => {
            let (is, them) = if vm.images.len() == 1 { ("disk is", "it") } else { ("disks are", "them") };
            let images = vm.images.join(", ");
            let then = format!("change what starts the VM, so that it names {them}");
            format!("{} runs without Sterna; its {is} {images}: {then}{message}\n", vm.name)
        }
    }
}

pub(crate) fn removed(removed: &RemovedVm) -> String {
    match removed.volumes.as_slice() {
        [] => format!("removed {}\n", removed.name),
        names => format!("removed {}; its volumes are kept: {}\n", removed.name, volumes(names)),
    }
}

fn volumes(names: &[String]) -> String {
    if names.is_empty() { dash() } else { names.join(", ") }
}
