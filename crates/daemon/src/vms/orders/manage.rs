//! Operations on VMs that need volumes: add, start, stop, remove, describe.

use std::sync::Arc;
use std::time::Duration;

use api::{NewVm, RemovedVm, SetVm, StopVm, Vm, VmState};
use hypervisor::qemu::{Qemu, RECONNECT_SECONDS};
use hypervisor::{MigrationStatus, RunState};
use migration::journal::{Forwarding, MigrationState};
use migration::vm::cold::{Disk, may_start_with};

use crate::error::RequestError;
use crate::host::VmOrders;
use crate::host::blocking;
use crate::names;
use crate::vms::{Definition, Ending, Known, Life, Saved, Standing, VmError};

/// The longest shutdown timeout of a request: its client waits meanwhile.
pub(crate) const SHUT_DOWN_TIMEOUT: Duration = Duration::from_secs(3600);
/// How long a description waits for QEMU.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

impl VmOrders {
    /// Adds a VM. After an error there is no such VM.
    pub(crate) async fn add_vm(self: Arc<Self>, order: NewVm) -> Result<Vm, RequestError> {
        self.draining.refuse_new()?;
        let NewVm { name, definition } = order;
        if self.vms.adoptions()?.get(&name).is_some() {
            return Err(VmError::Exists(name).into());
        }
        names::check(&name).map_err(|reason| {
            RequestError::Invalid(format!("\"{name}\" cannot be the name of a VM: {reason}"))
        })?;
        let checked = Definition::parse(&definition).map_err(VmError::from)?;
        let volumes = checked.volumes();
        if let Some(missing) = volumes.iter().find(|volume| self.volumes.service(volume).is_none()) {
            return Err(RequestError::VolumeNotFound(missing.clone()));
        }
        let (host, added) = (Arc::clone(&self), name.clone());
        blocking(move || Ok(host.vms.add(&added, &definition)?)).await?;
        tracing::info!(vm = %name, "VM added");
        let mut vm = self.describe_vm(&name).await?;
        vm.message = short_wait(&checked);
        Ok(vm)
    }

    pub(crate) async fn stop_vm(self: Arc<Self>, name: String, how: StopVm) -> Result<Vm, RequestError> {
        self.refuse_adopted(&name)?;
        let was_awaited = self.starts.withdraw(&name);
        self.settle_boot(&name).await;
        if was_awaited {
            self.until_attempt_ends(&name).await;
        }
        if was_awaited
            && matches!(self.vms.get(&name)?.life, Life::Stopped | Life::Crashed(_) | Life::Suspended(_))
        {
            tracing::info!(vm = %name, "the VM is not started any more");
            return self.describe_vm(&name).await;
        }
        let wait = Duration::from_secs(how.wait_s.unwrap_or(StopVm::WAIT_S_DEFAULT));
        if wait > SHUT_DOWN_TIMEOUT {
            return Err(RequestError::Invalid("wait_s is too long: at most an hour".to_owned()));
        }
        let ending = if how.now { Ending::AtOnce } else { Ending::PowerButton(wait) };
        let was_suspended = self.vms.is_suspended(&name);
        self.vms.stop(&name, ending).await?;
        tracing::info!(vm = %name, "VM stopped");
        let mut vm = self.describe_vm(&name).await?;
        if was_suspended {
            vm.message = Some(
                "it was suspended, and its memory is deleted: its disks are as after a power cut".to_owned(),
            );
        }
        Ok(vm)
    }

    /// Changes a VM. Errors: [`VmError::NotFound`], [`VmError::Adopted`]; [`RequestError::Invalid`]: a value is out of range.
    pub(crate) async fn set_vm(self: Arc<Self>, name: String, change: SetVm) -> Result<Vm, RequestError> {
        self.refuse_adopted(&name)?;
        let known = self.vms.get(&name)?;
        let wanted = known.preferences.clone().changed(&change).map_err(RequestError::Invalid)?;
        if change.wait_for.is_some() && !known.can_be_watched(wanted.start.wait_for.as_ref()) {
            return Err(VmError::NoConsole(name).into());
        }
        // Otherwise the next daemon would start it, in the middle of a boot.
        let is_settled = change.start_at_boot.is_some();
        if is_settled {
            self.starts.withdraw(&name);
        }
        let (host, changed) = (Arc::clone(&self), name.clone());
        blocking(move || Ok(host.vms.prefer(&changed, wanted, is_settled)?)).await?;
        self.describe_vm(&name).await
    }

    /// Forgets a VM that is not running.
    pub(crate) async fn remove_vm(self: Arc<Self>, name: String) -> Result<RemovedVm, RequestError> {
        self.refuse_adopted(&name)?;
        self.refuse_moving(&name)?;
        let volumes = self.vms.get(&name)?.volumes;
        let (host, removed) = (Arc::clone(&self), name.clone());
        blocking(move || Ok(host.vms.remove(&removed)?)).await?;
        self.starts.withdraw(&name);
        tracing::info!(vm = %name, "VM removed");
        Ok(RemovedVm { name, volumes })
    }

    pub(crate) async fn describe_vms(&self) -> Vec<Vm> {
        let known = self.vms.list().into_iter().map(|known| self.describe_known(known));
        let mut vms = futures_util::future::join_all(known).await;
        vms.extend(self.describe_adopted().await);
        vms.sort_by(|one, other| one.name.cmp(&other.name));
        vms.into_iter().map(|vm| self.with_images(vm)).collect()
    }

    fn with_images(&self, mut vm: Vm) -> Vm {
        vm.images = self.journal.read(|state| {
            let record = |name: &String| state.volumes.values().find(|known| known.record.name == *name);
            let records = vm.volumes.iter().filter_map(record);
            records.map(|known| known.record.image.place.name().to_owned()).collect()
        });
        vm
    }

    pub(crate) fn refuse_adopted(&self, name: &str) -> Result<(), RequestError> {
        match self.vms.adoptions()?.get(name) {
            Some(_) => Err(VmError::Adopted(name.to_owned()).into()),
            None => Ok(()),
        }
    }

    /// Refuses a VM that is on its way, with the migration by which it moves.
    pub(crate) fn refuse_moving(&self, name: &str) -> Result<(), RequestError> {
        let known = self.vms.get(name)?;
        let moves_by = self.journal.read(|state| {
            let has_it =
                |moving: &MigrationState| known.volumes.iter().any(|volume| moving.names.contains(volume));
            let mut unfinished = state.unfinished();
            unfinished.find(|(_, moving)| has_it(moving)).map(|(migration, _)| migration)
        });
        match (known.standing, moves_by) {
            (Standing::Arriving | Standing::Leaving, Some(migration)) => {
                Err(VmError::Moving { vm: known.name, migration }.into())
            }
            // The list of VMs refuses a VM whose migration has just ended.
            _ => Ok(()),
        }
    }

    /// Refuses to start a VM with a disk that is at another host, unless it was ordered that it is served here from there.
    pub(crate) fn refuse_disk_elsewhere(&self, vm: &str, volume: &str) -> Result<(), RequestError> {
        let (disk, moved) = self.journal.read(|state| {
            let moved = state.moved.values().find(|moved| moved.volume.record.name == volume);
            match (state.volume_named(volume), moved) {
                (None, Some(moved)) if moved.forwarding == Forwarding::Always => {
                    (Disk::ServedFromThere, None)
                }
                (None, Some(moved)) => (Disk::Elsewhere, Some((moved.host_name.clone(), moved.migration))),
                _ => (Disk::Here, None),
            }
        });
        match moved.filter(|_| !may_start_with(disk)) {
            None => Ok(()),
            Some((host, migration)) => {
                let own = self.hosts.describe_identity().map(|own| own.name).unwrap_or_default();
                let (vm, volume) = (vm.to_owned(), volume.to_owned());
                Err(VmError::DiskElsewhere { vm, volume, host, migration, own }.into())
            }
        }
    }

    pub(crate) async fn describe_vm(&self, name: &str) -> Result<Vm, RequestError> {
        let vm = match self.describe_adopted_one(name).await {
            Some(vm) => vm,
            None => self.describe_known(self.vms.get(name)?).await,
        };
        Ok(self.with_images(vm))
    }

    async fn describe_known(&self, known: Known) -> Vm {
        let vm = self.with_hold(describe(known).await);
        self.with_awaited_start(vm)
    }

    /// Adds why Sterna keeps the guest from running: it resumes the guest by itself, also after an error of a disk.
    pub(crate) fn with_hold(&self, mut vm: Vm) -> Vm {
        if let (VmState::Paused | VmState::IoError, Some(why)) = (vm.state, self.vms.holds.why(&vm.name)) {
            (vm.state, vm.message) = (VmState::Paused, Some(why));
        }
        vm
    }
}

/// Returns a warning about disks that do not wait for the daemon long enough.
fn short_wait(definition: &Definition) -> Option<String> {
    let (disk, seconds) = definition.short_waits().into_iter().next()?;
    Some(format!(
        "its disk {disk} has reconnect-delay={seconds}, which is too short for a daemon that is down for 30 s: QEMU would report \
         an I/O error to the guest; write reconnect-delay={RECONNECT_SECONDS}"
    ))
}

async fn describe(known: Known) -> Vm {
    let (state, message) = state(&known).await;
    let alive = match &known.life {
        Life::Alive(alive) => Some(alive),
        Life::Stopped | Life::Starting | Life::Crashed(_) | Life::Suspended(_) => None,
    };
    Vm {
        state,
        message,
        volumes: known.volumes,
        images: Vec::new(),
        process: alive.and_then(|alive| u32::try_from(alive.process_id()).ok()),
        hypervisor: alive.map(|alive| format!("QEMU {}", alive.qemu.version())),
        monitor: known.monitor.display().to_string(),
        log: known.log.map(|log| log.display().to_string()),
        libvirt_domain: None,
        definition: Some(known.definition),
        whole_move: None,
        added_unix_ms: known.added_unix_ms,
        priority: known.preferences.priority,
        start: Some(known.preferences.start.described()),
        awaited_start: None,
        name: known.name,
    }
}

/// Returns a note about a running VM that waits for missing memory.
async fn lacks_memory(qemu: &Qemu, name: &str) -> Option<String> {
    let progress = tokio::time::timeout(ANSWER_TIMEOUT, qemu.memory_progress()).await.ok()?.ok()?;
    (progress.status == MigrationStatus::PostcopyPaused).then(|| {
        format!(
            "it waits for the rest of its memory, which only its former host has (--memory post-copy); if that host is lost for \
             good: sterna vm stop {name} --now, then sterna vm start {name}"
        )
    })
}

/// Returns the state of a VM whose hypervisor reports this one, and what to do about it.
pub(crate) fn shown(state: &RunState, name: &str) -> (VmState, Option<String>) {
    let (state, why) = match state {
        RunState::Running => return (VmState::Running, None),
        RunState::Paused => (VmState::Paused, "paused, and not by Sterna".to_owned()),
        RunState::IoError => (VmState::IoError, "a disk answered with an error".to_owned()),
        RunState::Shutdown => {
            let why =
                format!("its guest has shut down, and QEMU waits; to end it: sterna vm stop {name} --now");
            return (VmState::ShutDown, Some(why));
        }
        RunState::Other(other) if other == "guest-panicked" || other == "internal-error" => {
            let why =
                format!("QEMU says: {other}; it can only be reset, or ended: sterna vm stop {name} --now");
            return (VmState::Crashed, Some(why));
        }
        // QEMU's word is Sterna's for a VM whose memory is in a file.
        RunState::Other(other) if other == "suspended" => {
            let why = "its guest sleeps (ACPI S3); to wake it: its keyboard, its network card, or QMP: system_wakeup";
            return (VmState::Paused, Some(why.to_owned()));
        }
        other => return (VmState::Paused, Some(format!("QEMU says: {other}"))),
    };
    (state, Some(format!("{why}; to continue: sterna vm resume {name}")))
}

/// Returns where the memory of a suspended VM is, and how it goes on.
fn where_memory_is(saved: &Saved, name: &str) -> String {
    let paused = if saved.was_running { "" } else { ", and it stays paused then" };
    format!(
        "its memory is in {} ({} MiB, written by {}); to continue: sterna vm start {name}{paused}",
        saved.file.display(),
        saved.bytes.div_ceil(1 << 20),
        saved.hypervisor
    )
}

async fn state(known: &Known) -> (VmState, Option<String>) {
    let (state, message) = match &known.life {
        Life::Stopped => (VmState::Stopped, None),
        Life::Starting => (VmState::Starting, Some("its QEMU does not answer yet".to_owned())),
        Life::Crashed(message) => (VmState::Crashed, Some(message.clone())),
        Life::Suspended(saved) => (VmState::Suspended, Some(where_memory_is(saved, &known.name))),
        Life::Alive(alive) => match tokio::time::timeout(ANSWER_TIMEOUT, alive.qemu.status()).await {
            Ok(Ok(RunState::Running)) => (VmState::Running, lacks_memory(&alive.qemu, &known.name).await),
            Ok(Ok(halted)) => shown(&halted, &known.name),
            Ok(Err(error)) => (VmState::Running, Some(error.to_string())),
            Err(_) => (VmState::Running, Some("its QEMU does not answer".to_owned())),
        },
    };
    match (known.standing, &known.life) {
        (Standing::Arriving, _) if known.is_cold => (VmState::Arriving, message),
        (Standing::Leaving, _) if known.is_cold => (VmState::Leaving, message),
        (Standing::Arriving, Life::Alive(_) | Life::Starting) => (VmState::Arriving, message),
        (Standing::Leaving, Life::Alive(_) | Life::Starting) => (VmState::Leaving, message),
        _ => (state, message),
    }
}
