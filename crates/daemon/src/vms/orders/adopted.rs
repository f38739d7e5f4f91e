//! Adopted VMs: their descriptions, and their move to another host.
//!
//! ```text
//!   the running QEMU: its command, its devices ──► a definition ──► a managed VM, for as long as it leaves
//!                                                      └─ what keeps it here, or stays behind: by name, before a byte moves
//! ```
//! From then on it moves like any other VM ([`crate::vms::orders::move_vm`]). The difference is in what
//! happens if it stays ([`crate::vms`]).

use std::time::Duration;

use api::{Vm, VmState, WholeMove};
use hypervisor::qemu::Qemu;
use hypervisor::qemu::command_line::derived::Running;

use crate::error::RequestError;
use crate::host::VmOrders;
use crate::vms::orders::manage::shown;
use crate::vms::orders::move_vm::check_memory;
use crate::vms::{Adopted, Derived, VmError, derive, launched, monitors};

/// How long a description waits for a VM's answers.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// The same right after an adoption, whose answer is to say what can be done with the VM.
pub(crate) const SETTLED_TIMEOUT: Duration = Duration::from_secs(15);

/// Connects to the monitor of an adopted VM that is to move. A stopped one does not move as a whole; the error says what to do.
pub(crate) async fn connect_to_move(adopted: &Adopted) -> Result<Qemu, RequestError> {
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

/// How thoroughly a description checks whether the VM can move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checks {
    /// The command of the VM, and what QEMU says of itself; a list describes many VMs.
    Brief,
    /// Everything that a dry run checks at this host.
    Thorough,
}

impl VmOrders {
    /// Describes an adopted VM briefly, and releases its monitor for others.
    pub(crate) async fn describe_briefly(&self, adopted: &Adopted) -> Vm {
        self.describe_within(adopted, ANSWER_TIMEOUT, Checks::Brief).await
    }

    /// Describes a VM that has just been adopted: says everything that would keep it here.
    pub(crate) async fn describe_thoroughly(&self, adopted: &Adopted) -> Vm {
        self.describe_within(adopted, SETTLED_TIMEOUT, Checks::Thorough).await
    }

    async fn describe_within(&self, adopted: &Adopted, answer_max: Duration, checks: Checks) -> Vm {
        let asked = async {
            let qemu = monitors::connect_to(adopted).await?;
            let state = qemu.status().await?;
            let found = match checks {
                Checks::Brief => self.obstacles_in_short(adopted, &qemu).await,
                Checks::Thorough => self.obstacles(adopted, &qemu).await,
            };
            Ok::<_, hypervisor::HypervisorError>((qemu.process(), qemu.version().to_string(), state, found))
        };
        let answer = tokio::time::timeout(answer_max, asked).await;
        let found = match answer {
            Ok(Ok((process, version, state, found))) => Ok((process, version, state, found)),
            Ok(Err(error)) if error.is_gone() => Err((VmState::Stopped, error.to_string())),
            Ok(Err(error)) => Err((VmState::Unknown, error.to_string())),
            Err(_) => {
                Err((VmState::Unknown, "its monitor serves another client, or does not answer".to_owned()))
            }
        };
        let mut vm = Vm {
            name: adopted.name.clone(),
            state: VmState::Unknown,
            message: None,
            volumes: adopted.disks.iter().map(|disk| disk.volume.clone()).collect(),
            images: Vec::new(),
            process: None,
            hypervisor: None,
            monitor: adopted.monitor.display().to_string(),
            log: None,
            libvirt_domain: None,
            definition: None,
            whole_move: None,
            added_unix_ms: adopted.added_unix_ms,
            priority: api::SetVm::PRIORITY_DEFAULT,
            start: None,
            awaited_start: None,
        };
        match found {
            Ok((process, version, state, (derived, obstacles))) => {
                (vm.state, vm.message) = shown(&state, &adopted.name);
                vm.process = process.and_then(|id| u32::try_from(id).ok());
                vm.hypervisor = Some(format!("QEMU {version}"));
                let Derived { text, left_behind } = derived.unwrap_or_default();
                let obstacles: Vec<String> = obstacles.iter().map(RequestError::message).collect();
                let obstacle = (!obstacles.is_empty()).then(|| obstacles.join("; "));
                vm.definition = Some(text).filter(|_| obstacle.is_none());
                let left_behind = if obstacle.is_none() { left_behind } else { Vec::new() };
                vm.whole_move = Some(WholeMove { obstacle, left_behind });
            }
            Err((state, why)) => (vm.state, vm.message) = (state, Some(why)),
        }
        vm
    }

    /// Returns the definition of an adopted VM, if there is one, and everything at this host that keeps the VM from moving.
    pub(crate) async fn obstacles_here(
        &self,
        adopted: &Adopted,
        qemu: &Qemu,
    ) -> (Option<Derived>, Vec<RequestError>) {
        let (derived, mut found) = apart(derived(adopted, qemu).await);
        found.extend(self.check_movable(&adopted.name, qemu, Some(adopted)).await.err());
        (derived, found)
    }

    /// Does the same, with what a host refuses that has this host's settings.
    pub(crate) async fn obstacles(
        &self,
        adopted: &Adopted,
        qemu: &Qemu,
    ) -> (Option<Derived>, Vec<RequestError>) {
        let (derived, mut found) = self.obstacles_here(adopted, qemu).await;
        let refusals = derived.iter().flat_map(|derived| self.vms.refusals_for_peers(&derived.text));
        found.extend(refusals.map(|reason| RequestError::VmUnmovable { vm: adopted.name.clone(), reason }));
        (derived, found)
    }

    /// Does the same, without comparing the VM's devices with its command.
    async fn obstacles_in_short(
        &self,
        adopted: &Adopted,
        qemu: &Qemu,
    ) -> (Option<Derived>, Vec<RequestError>) {
        let (derived, mut found) = apart(derived(adopted, qemu).await);
        found.extend(check_memory(&adopted.name, qemu).await.err());
        (derived, found)
    }
}

fn apart(derived: Result<Derived, RequestError>) -> (Option<Derived>, Vec<RequestError>) {
    match derived {
        Ok(derived) => (Some(derived), Vec::new()),
        Err(error) => (None, vec![error]),
    }
}

/// Returns the definition with which another host can run an adopted VM.
pub(crate) async fn derived(adopted: &Adopted, qemu: &Qemu) -> Result<Derived, RequestError> {
    let name = &adopted.name;
    let process = launched(name, qemu).await?;
    let running = Running::of(qemu).await.map_err(VmError::of(name))?;
    let unmovable = |error: crate::vms::DefinitionError| RequestError::VmUnmovable {
        vm: name.clone(),
        reason: error.to_string(),
    };
    derive(adopted, &process, &running).map_err(unmovable)
}
