//! VMs: what they are, and whether they run.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Adds a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewVm {
    /// Its name: letters, digits, '.', '_' and '-'.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub name: String,
    /// Its definition in TOML: the command that starts it, its disks and its files.
    pub definition: String,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// What it does.
    pub state: VmState,
    /// Why it is so, or what QEMU said last; `None` if there is nothing to say.
    #[serde(default)]
    pub message: Option<String>,
    /// The volumes that are its disks, by name.
    pub volumes: Vec<String>,
    /// QEMU's process; `None` while there is none.
    #[serde(default)]
    pub process: Option<u32>,
    /// What runs it, with its version, such as `QEMU 10.0.2` or `libvirt 9.0.0`; `None` while it does not run.
    #[serde(default)]
    pub hypervisor: Option<String>,
    /// Absolute path of its monitor's socket, or of libvirt's. The daemon is connected to a monitor; QEMU serves one client at a
    /// time.
    pub monitor: String,
    /// What libvirt calls it; `None`: it is no domain of libvirt.
    #[serde(default)]
    pub libvirt_domain: Option<String>,
    /// Absolute path of the file with what QEMU says; `None`: Sterna has not started it.
    #[serde(default)]
    pub log: Option<String>,
    /// Its definition, as it was written, or as another host would be given it; `None`: it has none.
    #[serde(default)]
    pub definition: Option<String>,
    /// What a move to another host as a whole would make of it; `None`: Sterna has started it, or it cannot be asked.
    #[serde(default)]
    pub whole_move: Option<WholeMove>,
    /// When it was added here, in milliseconds since 1970.
    pub added_unix_ms: u64,
}

/// What a move to another host would make of a VM that somebody else has started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WholeMove {
    /// What keeps it from moving as a whole, and what to do; `None`: nothing.
    pub obstacle: Option<String>,
    /// What would not go along; its guest sees nothing of it.
    pub left_behind: Vec<String>,
}

/// What a VM does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// There is no QEMU.
    Stopped,
    /// QEMU does not answer yet.
    Starting,
    /// It runs.
    Running,
    /// QEMU is there, and the VM is paused; the message says how.
    Paused,
    /// QEMU has ended by itself; the message has its last words.
    Crashed,
    /// It comes from another host.
    Arriving,
    /// It goes to another host.
    Leaving,
    /// One that this program does not know: the daemon is newer.
    #[serde(other)]
    Unknown,
}

/// Stops a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopVm {
    /// Cut its power, rather than pressing its power button.
    #[serde(default)]
    pub now: bool,
    /// How long its guest may take to shut down, in seconds; then its power is cut. `None`: a minute.
    #[serde(default)]
    #[schema(maximum = 3600)]
    pub wait_s: Option<u64>,
}

impl StopVm {
    /// How long a guest may take to shut down if nothing else is said, in seconds.
    pub const WAIT_S_DEFAULT: u64 = 60;
}

/// Takes over disks of a VM that somebody else has started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptVm {
    /// Absolute path of its monitor's socket (QMP). Nobody else may be connected to it meanwhile. `None`: it is a domain of
    /// libvirt.
    #[serde(default)]
    #[schema(pattern = "^/")]
    pub monitor: Option<String>,
    /// Its disks, by the names of their devices or nodes, or by libvirt's (`vda`); none: all that can be written.
    #[serde(default)]
    pub disks: Vec<String>,
    /// The domain of libvirt (`qemu:///system`), by its name or UUID: libvirt copies its disks to new volumes. `None`: it is named
    /// by its monitor.
    #[serde(default)]
    pub libvirt: Option<String>,
    /// Absolute path of libvirt's socket; `None`: the usual one.
    #[serde(default)]
    pub libvirt_socket: Option<String>,
    /// The store of the new volumes of a domain of libvirt; `None`: the only one.
    #[serde(default)]
    pub store: Option<String>,
}

/// What has become of a VM that was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemovedVm {
    /// What it was called.
    pub name: String,
    /// The volumes that were its disks; they stay.
    pub volumes: Vec<String>,
}
