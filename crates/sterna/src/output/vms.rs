//! Text output of `sterna vm`.

use api::{RemovedVm, Vm, VmStart, VmState, WholeMove};

use super::{dash, lines, properties, table};

pub(crate) fn list(vms: &Vec<Vm>) -> String {
    if vms.is_empty() {
        return "no VMs; add one with: sterna vm add NAME --definition FILE\n".to_owned();
    }
    let mut table = table(&["VM", "STATE", "HYPERVISOR", "PROCESS", "PRIORITY", "VOLUMES"], &[3, 4]);
    for vm in vms {
        let process = vm.process.map_or_else(dash, |process| process.to_string());
        let hypervisor = vm.hypervisor.clone().unwrap_or_else(dash);
        let (state, priority) = (vm.state.words().to_owned(), vm.priority.to_string());
        let row = [vm.name.clone(), state, hypervisor, process, priority, volumes(&vm.volumes)];
        table.add_row(row);
    }
    lines(&table)
}

pub(crate) fn show(vm: &Vm) -> String {
    let mut rows = vec![("vm", vm.name.clone()), ("state", vm.state.words().to_owned())];
    rows.extend(vm.message.clone().map(|message| ("why", message)));
    rows.push(("volumes", volumes(&vm.volumes)));
    rows.extend(vm.images.iter().map(|image| ("image", image.clone())));
    rows.push(("priority", vm.priority.to_string()));
    rows.extend(vm.start.as_ref().map(|start| ("at boot", at_boot(start))));
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

/// Returns whether and when a VM starts after a boot.
fn at_boot(start: &VmStart) -> String {
    let wait = start.wait_for.as_ref();
    let wait = wait.map(|what| format!("; later ones wait for {what}, at most {} s", start.wait_max_s));
    let then = wait.unwrap_or_default();
    match start.at_boot {
        true => format!("starts, order {}{then}", start.order),
        false => "does not start".to_owned(),
    }
}

/// Returns the text about what is wanted of a VM.
pub(crate) fn set(vm: &Vm) -> String {
    let boot = vm.start.as_ref().map(|start| format!("; at a boot of its host it {}", at_boot(start)));
    format!("{} has the priority {}{}\n", vm.name, vm.priority, boot.unwrap_or_default())
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

pub(crate) fn suspended(vm: &Vm) -> String {
    let how = vm.message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
    format!("{} is {}{how}\n", vm.name, vm.state.words())
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
            // A VM that Sterna has started has a script, and any other one is started by its administrator.
            let then = vm
                .message
                .clone()
                .unwrap_or_else(|| format!("change what starts the VM, so that it uses {them}"));
            format!("{} runs without Sterna; its {is} {}; {then}\n", vm.name, vm.images.join(", "))
        }
    }
}

/// Returns how the guest of a VM learns the new size of its disk.
pub(crate) fn size_in_guest(vm: &Vm) -> String {
    match &vm.libvirt_domain {
        Some(domain) => format!("; to show it to the guest of {domain}: virsh blockresize"),
        None => {
            let otherwise = "if it does not, the daemon's log says why";
            format!("; the guest of {} sees that at once ({otherwise})", vm.name)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(more: &serde_json::Value) -> Vm {
        let mut vm = serde_json::json!({
            "name": "web1", "state": "running", "volumes": ["web1"], "images": ["/srv/web1.img"], "monitor": "/m",
            "added_unix_ms": 1,
        });
        let more = more.as_object().unwrap().clone();
        vm.as_object_mut().unwrap().extend(more);
        serde_json::from_value(vm).unwrap()
    }

    #[test]
    fn a_released_vm_has_a_script_or_is_changed_by_its_administrator() {
        let adopted = released(&vm(&serde_json::json!({})));
        assert!(adopted.contains("/srv/web1.img; change what starts the VM"), "{adopted}");
        let started = released(&vm(&serde_json::json!({ "message": "to start it again: /s/start" })));
        assert!(started.ends_with("/srv/web1.img; to start it again: /s/start\n"), "{started}");
    }

    #[test]
    fn a_new_size_is_seen_by_the_guest_or_shown_by_libvirt() {
        assert!(size_in_guest(&vm(&serde_json::json!({}))).contains("web1 sees that at once"));
        let domain = size_in_guest(&vm(&serde_json::json!({ "libvirt_domain": "d1" })));
        assert!(domain.ends_with("the guest of d1: virsh blockresize"), "{domain}");
    }
}
