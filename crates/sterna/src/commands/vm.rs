//! `sterna vm …`

mod all;

use std::path::Path;

use api::{AdoptVm, Client, NewSnapshot, NewVm, RevertVolumes, SetVm, StartVm, StopVm, SuspendVm};

use crate::args::{RevertArguments, VmCommand, YesNo};
use crate::commands::{CommandError, absolute, snapshots};
use crate::exit::Exit;
use crate::output::{self, Format, vms};

pub(super) async fn run(client: &Client, command: VmCommand, format: Format) -> Result<Exit, CommandError> {
    match command {
        VmCommand::Add(order) => {
            let definition = read(&order.definition)?;
            let vm = client.add_vm(&NewVm { name: order.name, definition }).await?;
            output::print(format, &vm, vms::added)?;
        }
        VmCommand::Start(order) => {
            let Some(name) = order.name else { return all::start(client, format).await };
            let how = StartVm { discard_memory: order.discard_memory };
            output::print(format, &client.start_vm(&name, how).await?, vms::started)?;
        }
        VmCommand::Suspend(order) => {
            let how = SuspendVm { timeout_s: order.timeout };
            if format == Format::Text {
                let timeout_s = how.timeout_s.unwrap_or(SuspendVm::TIMEOUT_S_DEFAULT);
                let name = &order.name;
                output::say(&format!(
                    "writing the memory of {name} to a file; it is paused for {timeout_s} s at most"
                ));
            }
            output::print(format, &client.suspend_vm(&order.name, how).await?, vms::suspended)?;
        }
        VmCommand::Stop(order) => {
            let how = StopVm { now: order.now, wait_s: order.wait };
            let Some(name) = order.name else { return all::stop(client, how, format).await };
            if format == Format::Text && !how.now {
                let wait_s = how.wait_s.unwrap_or(StopVm::WAIT_S_DEFAULT);
                output::say(&format!("pressing the power button of {name}; waiting {wait_s} s at most"));
            }
            output::print(format, &client.stop_vm(&name, how).await?, vms::stopped)?;
        }
        VmCommand::Adopt(order) => {
            let named = order.name.or_else(|| order.libvirt.clone()).unwrap_or_default();
            let adopt = AdoptVm {
                monitor: order.qmp.as_deref().map(absolute).transpose()?,
                disks: order.disk,
                libvirt: order.libvirt,
                libvirt_socket: order.libvirt_socket.as_deref().map(absolute).transpose()?,
                store: order.store,
            };
            output::print(format, &client.adopt_vm(&named, &adopt).await?, vms::adopted)?;
        }
        VmCommand::Release(order) => {
            let vm = client.release_vm(&order.name).await?;
            output::print(format, &vm, vms::released)?;
        }
        VmCommand::Resume(order) => {
            output::print(format, &client.resume_vm(&order.name).await?, vms::started)?;
        }
        VmCommand::Snapshot(order) => {
            let vm = Some(order.name);
            snapshots::take(client, NewSnapshot { vm, ..snapshots::order(order.how) }, format).await?;
        }
        VmCommand::Revert(order) => {
            let RevertArguments { name, snapshot, keep_current } = order;
            let order = RevertVolumes { volumes: Vec::new(), vm: Some(name), snapshot, keep_current };
            snapshots::revert(client, &order, format).await?;
        }
        VmCommand::Set(order) => {
            let change = SetVm {
                priority: order.priority,
                start_at_boot: order.start_at_boot.map(|wanted| wanted == YesNo::Yes),
                start_order: order.order,
                wait_for: order.wait_for,
                wait_max_s: order.wait_max,
            };
            output::print(format, &client.set_vm(&order.name, &change).await?, vms::set)?;
        }
        VmCommand::List => output::print(format, &client.vms().await?, vms::list)?,
        VmCommand::Show(order) => output::print(format, &client.vm(&order.name).await?, vms::show)?,
        VmCommand::Remove(order) => {
            let removed = client.remove_vm(&order.name).await?;
            output::print(format, &removed, vms::removed)?;
        }
    }
    Ok(Exit::Success)
}

fn read(path: &Path) -> Result<String, CommandError> {
    std::fs::read_to_string(path).map_err(|source| CommandError::File { path: path.to_owned(), source })
}
