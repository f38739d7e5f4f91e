//! Adopted VMs: their descriptions, and their move to another host.
//!
//! ```text
//!   the running QEMU: its command, its devices ──► a definition ──► a managed VM, for as long as it leaves
//!                                                      └─ what keeps it here, or stays behind: by name, before a byte moves
//! ```
//! From then on it moves like any other VM ([`crate::host::vms::move_vm`]). The difference is in what
//! happens if it stays ([`crate::vms`]).

use std::sync::Arc;
use std::time::Duration;

use api::{MigrateVolume, Migration, Vm, VmState, WholeMove};
use hypervisor::qemu::Qemu;
use hypervisor::qemu::command_line::derived::Running;

use crate::error::RequestError;
use crate::host::Host;
use crate::host::vms::manage::shown;
use crate::vms::{Adopted, Derived, VmError, derive, launched, monitors};

/// How long a description waits for a VM's answers.
pub(in crate::host) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// The same right after an adoption, whose answer is to say what can be done with the VM.
pub(in crate::host) const SETTLED_TIMEOUT: Duration = Duration::from_secs(15);

impl Host {
    /// Begins to move an adopted VM to another host, with its disks. After an error the VM runs here, adopted as before, and
    /// nothing is left at the target.
    pub(in crate::host) async fn migrate_adopted(
        self: &Arc<Self>,
        adopted: Adopted,
        order: MigrateVolume,
    ) -> Result<Migration, RequestError> {
        let name = adopted.name.clone();
        let qemu = connect_to_move(&adopted).await?;
        let derived = derived(&adopted, &qemu).await?;
        for what in &derived.left_behind {
            tracing::info!(vm = %name, %what, "files of the VM are left over");
        }
        self.vms.take_in(&adopted, qemu, derived.text).await?;
        let begun = self.migrate_vm(name.clone(), order).await;
        if begun.is_err() {
            self.vms.let_go_unless_leaving(&name).await?;
        }
        begun
    }
}

/// Connects to the monitor of an adopted VM that is to move. A stopped one does not move as a whole; the error says what to do.
pub(in crate::host) async fn connect_to_move(adopted: &Adopted) -> Result<Qemu, RequestError> {
    let name = &adopted.name;
    monitors::connect_to(adopted).await.map_err(|error| {
        if !error.is_gone() {
            return VmError::of(name)(error).into();
        }
        let volumes: Vec<_> = adopted.disks.iter().map(|disk| format!("volume:{}", disk.volume)).collect();
        let reason = format!(
            "its QEMU has ended, and Sterna does not know the command that starts it: move its disks (sterna migrate {} --to HOST), \
             and start it over them at that host",
            volumes.join(" ")
        );
        RequestError::VmUnmovable { vm: name.clone(), reason }
    })
}

/// Describes an adopted VM within this time, and releases its monitor for others.
pub(in crate::host) async fn describe(adopted: &Adopted, answer_max: Duration) -> Vm {
    let asked = async {
        let qemu = monitors::connect_to(adopted).await?;
        let state = qemu.status().await?;
        let derived = match derived(adopted, &qemu).await {
            Ok(derived) => unblocked(&adopted.name, &qemu).await.map(|()| derived),
            Err(error) => Err(error),
        };
        Ok::<_, hypervisor::HypervisorError>((qemu.process(), qemu.version().to_string(), state, derived))
    };
    let answer = tokio::time::timeout(answer_max, asked).await;
    let (state, message) = match &answer {
        Ok(Ok((_, _, state, _))) => shown(state, &adopted.name),
        Ok(Err(error)) if error.is_gone() => (VmState::Stopped, Some(error.to_string())),
        Ok(Err(error)) => (VmState::Unknown, Some(error.to_string())),
        Err(_) => {
            (VmState::Unknown, Some("its monitor serves another client, or does not answer".to_owned()))
        }
    };
    let (process, hypervisor, derived) = match answer.ok().and_then(Result::ok) {
        Some((process, version, _, derived)) => (process, Some(format!("QEMU {version}")), Some(derived)),
        None => (None, None, None),
    };
    let (definition, whole_move) = match derived {
        Some(Ok(Derived { text, left_behind })) => {
            (Some(text), Some(WholeMove { obstacle: None, left_behind }))
        }
        Some(Err(error)) => {
            (None, Some(WholeMove { obstacle: Some(error.message()), left_behind: Vec::new() }))
        }
        None => (None, None),
    };
    Vm {
        name: adopted.name.clone(),
        state,
        message,
        volumes: adopted.disks.iter().map(|disk| disk.volume.clone()).collect(),
        images: Vec::new(),
        process: process.and_then(|id| u32::try_from(id).ok()),
        hypervisor,
        monitor: adopted.monitor.display().to_string(),
        log: None,
        libvirt_domain: None,
        definition,
        whole_move,
        added_unix_ms: adopted.added_unix_ms,
    }
}

/// Checks whether QEMU can migrate the VM in its present state: some devices cannot be migrated.
async fn unblocked(name: &str, qemu: &Qemu) -> Result<(), RequestError> {
    let reasons = qemu.migration_blockers().await.map_err(VmError::of(name))?;
    if reasons.is_empty() {
        return Ok(());
    }
    Err(RequestError::VmUnmovable { vm: name.to_owned(), reason: reasons.join("; ") })
}

/// Returns the definition with which another host can run an adopted VM.
pub(in crate::host) async fn derived(adopted: &Adopted, qemu: &Qemu) -> Result<Derived, RequestError> {
    let name = &adopted.name;
    let process = launched(name, qemu).await?;
    let running = Running::of(qemu).await.map_err(VmError::of(name))?;
    let unmovable = |error: crate::vms::DefinitionError| RequestError::VmUnmovable {
        vm: name.clone(),
        reason: error.to_string(),
    };
    derive(adopted, &process, &running).map_err(unmovable)
}
