//! Evacuations: everything that a host has leaves it, in order, against a deadline.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Empties this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewEvacuation {
    /// The hosts that may take something, each as `HOST` or `HOST:STORE`; empty: every host that is connected.
    #[serde(default)]
    pub to: Vec<String>,
    /// When everything is to have left, in milliseconds since 1970; `None`: there is no deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_unix_ms: Option<u64>,
    /// Whether VMs that will not have left are shut down before the deadline. Otherwise they go on running here.
    #[serde(default)]
    pub stop_rest: bool,
}

/// An evacuation: planned, running, or the last one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Evacuation {
    /// What it does at present.
    pub state: EvacuationState,
    /// The hosts that may take something, as `HOST` or `HOST:STORE`.
    pub to: Vec<String>,
    /// When it was ordered, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// When everything is to have left; `None`: there is no deadline.
    #[serde(default)]
    pub deadline_unix_ms: Option<u64>,
    /// Whether VMs that will not have left are shut down before the deadline.
    pub stop_rest: bool,
    /// When it ended; `None`: it has not.
    #[serde(default)]
    pub ended_unix_ms: Option<u64>,
    /// When the last workload will have left, by forecast; `None`: unknown, or it has ended.
    #[serde(default)]
    pub expected_unix_ms: Option<u64>,
    /// Whether it was aborted.
    #[serde(default)]
    pub aborted: bool,
    /// Whether something will not have left at the deadline, or not at all, by forecast.
    pub misses: bool,
    /// The VMs and volumes of the host, in the order of their turns.
    pub workloads: Vec<EvacuatedWorkload>,
}

/// What an evacuation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EvacuationState {
    /// A dry run: nothing was begun.
    Planned,
    /// It asks the other hosts what they can take.
    Asking,
    /// Workloads leave.
    Running,
    /// It was aborted, and waits for the end of its migrations.
    Aborting,
    /// It has ended.
    Ended,
}

/// A VM with its volumes, or a volume that belongs to no VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EvacuatedWorkload {
    /// Name of the VM or volume.
    pub name: String,
    /// Whether it is a VM.
    pub kind: WorkloadKind,
    /// Names of its volumes.
    pub volumes: Vec<String>,
    /// A VM's priority; a volume without a VM has the default.
    pub priority: u8,
    /// Whether it is a VM that ran when it was looked at.
    pub running: bool,
    /// What becomes of it.
    pub state: WorkloadState,
    /// Its bytes to send, memory included, as far as they are known beforehand.
    pub bytes: u64,
    /// The host and store where it is, or goes to, as `HOST:STORE`; `None`: it stays here.
    #[serde(default)]
    pub target: Option<String>,
    /// What its target had of it beforehand: `standby`, or `kept image`; `None`: nothing.
    #[serde(default)]
    pub origin: Option<String>,
    /// Whether it runs at its target before all of its memory is there, because the time is short.
    #[serde(default)]
    pub post_copy: bool,
    /// Its migration: the present one, or the last.
    #[serde(default)]
    pub migration: Option<String>,
    /// The share of it that has been sent, from 0 to 1; `None`: it is not moving.
    #[serde(default)]
    pub fraction: Option<f64>,
    /// When it will have left by forecast, in milliseconds since 1970; `None`: unknown, or it has ended.
    #[serde(default)]
    pub expected_unix_ms: Option<u64>,
    /// Whether it will not have left at the deadline, by forecast.
    #[serde(default)]
    pub late: bool,
    /// Why it stays, or why its last migration failed.
    #[serde(default)]
    pub reason: Option<String>,
}

/// The kind of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadKind {
    /// A VM with its volumes.
    Vm,
    /// A volume that belongs to no VM.
    Volume,
}

/// What becomes of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadState {
    /// It waits for its turn.
    Waiting,
    /// It is moving.
    Moving,
    /// Its migration is paused for one of a higher priority.
    Held,
    /// Its VM is being shut down.
    Stopping,
    /// It is at its target.
    Left,
    /// It is here, and was shut down.
    Stopped,
    /// It is here, as it was.
    Stays,
}

/// Changes this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetHost {
    /// Whether the host takes nothing new: no volumes and VMs, neither made here nor from other hosts.
    pub drained: bool,
}

impl WorkloadKind {
    /// Returns the kind's word in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Volume => "volume",
        }
    }
}

impl WorkloadState {
    /// Returns the state in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Waiting => "waits",
            Self::Moving => "moving",
            Self::Held => "held",
            Self::Stopping => "stopping",
            Self::Left => "left",
            Self::Stopped => "shut down",
            Self::Stays => "stays",
        }
    }
}

impl EvacuationState {
    /// Returns whether it has ended, or never begins.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Planned | Self::Ended)
    }
}

impl Evacuation {
    /// Returns whether everything has left, or would.
    pub fn leaves_nothing(&self) -> bool {
        match self.state {
            EvacuationState::Planned => !self.misses,
            _ => self.workloads.iter().all(|workload| workload.state == WorkloadState::Left),
        }
    }
}
