//! Adopts a VM whose disks are already volumes of this daemon: its QEMU is a client of their exports. The VM is not paused and
//! nothing of it moves; the daemon records which volumes it uses.
//! **N.B.** A monitor may lie, and a true path may belong to another mount namespace. So the kernel is asked: the process that
//! listens at the monitor must have a connection to the volume's own socket, accepted by the volume's lane.

use std::path::PathBuf;

use api::Vm;
use hypervisor::qemu::{LocalDisk, Qemu};
use lane::ClientProcess;

use crate::error::{RequestError, with_causes};
use crate::host::VmOrders;
use crate::journal::now_unix_ms;
use crate::vms::orders::exchange::name_of;
use crate::vms::{Adopted, AdoptedDisk, VmError};
use crate::volumes::registry::Service;

impl VmOrders {
    /// Returns the disks of a VM that use volumes of this daemon, with the volumes; `None`: there are none, or the order named
    /// others. Fails if the VM has other disks as well, or if another VM has one of the volumes.
    pub(crate) async fn volumes_under(
        &self,
        name: &str,
        qemu: &Qemu,
        wanted: &[String],
    ) -> Result<Option<Vec<(String, LocalDisk)>>, RequestError> {
        let refuse = |why: String| RequestError::from(VmError::Disk { vm: name.to_owned(), why });
        let mut bound: Vec<(String, LocalDisk)> = Vec::new();
        for (volume, _, service) in self.volumes.list() {
            if !matches!(service, Service::Serving(_)) {
                continue;
            }
            let disk =
                qemu.disk_over(&self.exports.export_named(&volume)).await.map_err(VmError::of(name))?;
            bound.extend(disk.map(|disk| (volume, disk)));
        }
        let is_wanted =
            |disk: &LocalDisk| wanted.iter().any(|wanted| *wanted == disk.device || *wanted == disk.node);
        bound.retain(|(_, disk)| wanted.is_empty() || is_wanted(disk));
        if bound.is_empty() {
            return Ok(None);
        }
        let is_bound = |device: &str| bound.iter().any(|(_, disk)| disk.device == device);
        let others = qemu.local_disks().await.map_err(VmError::of(name))?;
        for other in others.iter().filter(|_| wanted.is_empty()) {
            let (device, is_apart) = match other {
                Ok(disk) => (&disk.device, disk.options.is_read_only || disk.is_firmware()),
                Err(staying) => (&staying.device, staying.is_firmware()),
            };
            if !is_apart && !is_bound(device) {
                return Err(refuse(format!(
                    "some of its disks are volumes already, and {device} is none; name those that are (--disk), or attach that one over a \
                     volume as well"
                )));
            }
        }
        if let Some(missing) = wanted
            .iter()
            .find(|wanted| !bound.iter().any(|(_, disk)| **wanted == disk.device || **wanted == disk.node))
        {
            return Err(refuse(format!(
                "some of the disks that are named are volumes already, and {missing} is none; name either those or the others"
            )));
        }
        for (volume, disk) in &bound {
            self.prove_client(name, qemu, volume).await.map_err(|error| {
                tracing::warn!(vm = name, volume, disk = disk.device, %error, "a monitor names a volume as a disk without proof");
                error
            })?;
        }
        for (volume, _) in &bound {
            let user = self.vms.user_of(volume);
            let user = match user {
                Some(user) => Some(user),
                None => {
                    self.vms.adoptions()?.find(|adopted| adopted.uses(volume)).map(|adopted| adopted.name)
                }
            };
            if let Some(vm) = user {
                return Err(RequestError::VolumeOfVm { volume: volume.clone(), vm });
            }
        }
        Ok(Some(bound))
    }

    /// Checks with the kernel, not the monitor, that the process behind a monitor is a client of a volume at this moment.
    async fn prove_client(&self, name: &str, qemu: &Qemu, volume: &str) -> Result<(), RequestError> {
        let unavailable = |error: lane::Refused| RequestError::VolumeUnavailable {
            volume: volume.to_owned(),
            reason: with_causes(&error),
        };
        let clients = self.volumes.lane(volume).await?.status().await.map_err(unavailable)?.client_processes;
        if is_among(&clients, qemu.process(), qemu.user()) {
            return Ok(());
        }
        let why = format!(
            "its monitor says that a disk is the volume \"{volume}\", and the process that listens at the monitor has no connection to that \
             volume's socket, {}: QEMU itself must make the monitor's socket (-qmp unix:PATH,server=on,wait=off), run where the daemon \
             sees its process, and be connected; one that has lost its connection connects again when its guest uses the disk",
            self.exports.export_named(volume).socket.display()
        );
        Err(VmError::Disk { vm: name.to_owned(), why }.into())
    }

    /// Records that volumes belong to a VM.
    pub(crate) async fn bind_vm(
        self: &std::sync::Arc<Self>,
        name: String,
        (monitor, monitor_user): (PathBuf, Option<u32>),
        disks: Vec<(String, LocalDisk)>,
    ) -> Result<Vm, RequestError> {
        let mut bound = Vec::new();
        for (index, (volume, disk)) in disks.into_iter().enumerate() {
            let number = disk.number().unwrap_or_else(|| u32::try_from(index).unwrap_or(u32::MAX));
            let record = self.claims.record_named(&volume)?;
            let mut kept = AdoptedDisk::of(&disk, volume, number);
            kept.file = PathBuf::from(record.image.place.name());
            kept.format = name_of(record.image.format).to_owned();
            bound.push(kept);
        }
        let added_unix_ms = now_unix_ms();
        let adopted = Adopted {
            name,
            monitor,
            monitor_user,
            user: None,
            disks: bound,
            added_unix_ms,
            libvirt: None,
            is_bound: true,
        };
        self.remember_adopted(adopted.clone()).await?;
        tracing::info!(vm = %adopted.name, disks = adopted.disks.len(), "adopting a VM whose disks are volumes already");
        Ok(self.describe_thoroughly(&adopted).await)
    }
}

/// Returns whether a process is one of these clients. A process number alone is no proof, because numbers are reused.
fn is_among(clients: &[ClientProcess], process: Option<i32>, user: Option<u32>) -> bool {
    let asked = process.zip(user).map(|(id, user)| ClientProcess { id, user });
    asked.is_some_and(|asked| clients.contains(&asked))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_a_client_by_its_number_and_its_user() {
        let clients = [ClientProcess { id: 7, user: 0 }, ClientProcess { id: 8, user: 24_005 }];
        assert!(is_among(&clients, Some(8), Some(24_005)));
        for (process, user) in
            [(Some(7), Some(24_005)), (Some(9), Some(24_005)), (None, Some(0)), (Some(7), None)]
        {
            assert!(!is_among(&clients, process, user), "{process:?} {user:?}");
        }
        assert!(!is_among(&[], None, None));
    }
}
