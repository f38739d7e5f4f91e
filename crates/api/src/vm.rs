//! VMs: their definitions, their states, and the orders for them.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Adds a VM without starting it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewVm {
    /// Its name: letters, digits, '.', '_' and '-'.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    pub name: String,
    /// Its definition in TOML: the command that starts it, its disks and its files.
    pub definition: String,
}

/// A VM of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Its name, unique at this host.
    pub name: String,
    /// Whether the VM runs at present.
    pub state: VmState,
    /// The reason of its state, or QEMU's last output; `None` if there is none.
    #[serde(default)]
    pub message: Option<String>,
    /// Names of the volumes that are its disks.
    pub volumes: Vec<String>,
    /// Paths of the images of these volumes that are at this host.
    #[serde(default)]
    pub images: Vec<String>,
    /// Number of QEMU's process; `None` while there is none.
    #[serde(default)]
    pub process: Option<u32>,
    /// Its hypervisor with the version, such as `QEMU 10.0.2` or `libvirt 9.0.0`; `None` while it does not run.
    #[serde(default)]
    pub hypervisor: Option<String>,
    /// Absolute path of its monitor's socket, or of libvirt's. The daemon is connected to a monitor; QEMU serves
    /// one client at a time.
    pub monitor: String,
    /// Name of its domain in libvirt; `None`: it is not a domain of libvirt.
    #[serde(default)]
    pub libvirt_domain: Option<String>,
    /// Absolute path of the file with QEMU's output; `None`: Sterna has not started it.
    #[serde(default)]
    pub log: Option<String>,
    /// Its definition as it was written, or, for an adopted VM, as another host would get it; `None`: it has none.
    #[serde(default)]
    pub definition: Option<String>,
    /// Whether it can move to another host as a whole; `None`: Sterna has started it, or its hypervisor does not answer.
    #[serde(default)]
    pub whole_move: Option<WholeMove>,
    /// When it was added here, in milliseconds since 1970.
    pub added_unix_ms: u64,
    /// Its priority in an evacuation: a higher one leaves first.
    #[serde(default = "SetVm::priority_default")]
    pub priority: u8,
    /// Whether and when it starts after a boot of its host; `None`: Sterna does not start it.
    #[serde(default)]
    pub start: Option<VmStart>,
    /// Its start that is still to come: after a boot of the host, or as ordered; `None`: there is none.
    #[serde(default)]
    pub awaited_start: Option<AwaitedStart>,
}

/// Whether and when a VM starts after a boot of its host. It moves with the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmStart {
    /// Whether it is started when the host has booted.
    pub at_boot: bool,
    /// VMs with a lower order start first, and stop last.
    pub order: u16,
    /// What VMs of a higher order wait for: `tcp:HOST:PORT` until something accepts connections there, or `console:TEXT` until a log
    /// in the VM's folder has this text; `None`: for its start alone.
    #[serde(default)]
    pub wait_for: Option<String>,
    /// The longest that VMs of a higher order wait for this one, in seconds.
    pub wait_max_s: u32,
}

/// A start of a VM that is still to come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AwaitedStart {
    /// How many attempts have failed.
    pub failed_attempts: u32,
    /// Why the last attempt failed; `None`: none has.
    #[serde(default)]
    pub reason: Option<String>,
}

/// Whether an adopted VM can move to another host as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WholeMove {
    /// The obstacle, with what to do about it; `None`: the VM can move.
    pub obstacle: Option<String>,
    /// Parts of its command that would stay behind; its guest does not notice them.
    pub left_behind: Vec<String>,
}

/// The state of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// There is no process of QEMU.
    Stopped,
    /// QEMU does not answer yet.
    Starting,
    /// The guest runs in QEMU.
    Running,
    /// The VM is paused; `message` says by whom.
    Paused,
    /// A disk answered with an error, and its guest is stopped.
    IoError,
    /// Its guest has shut down, and QEMU waits.
    ShutDown,
    /// QEMU has ended by itself, or its guest has; `message` has the reason.
    Crashed,
    /// Its memory is in a file, and there is no process of QEMU; `message` says where.
    Suspended,
    /// It is moving from another host to this one.
    Arriving,
    /// It is moving to another host.
    Leaving,
    /// A state that this program does not know, because the daemon is newer.
    #[serde(other)]
    Unknown,
}

impl VmState {
    /// Returns the state in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::IoError => "I/O error",
            Self::ShutDown => "shut down",
            Self::Crashed => "crashed",
            Self::Suspended => "suspended",
            Self::Arriving => "arriving",
            Self::Leaving => "leaving",
            Self::Unknown => "unknown",
        }
    }

    /// Returns the state as it is in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::IoError => "io_error",
            Self::ShutDown => "shut_down",
            other => other.words(),
        }
    }
}

/// Changes a VM. What is `None` stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetVm {
    /// Its priority in an evacuation: a higher one leaves first.
    #[serde(default)]
    #[schema(minimum = 0, maximum = 100)]
    pub priority: Option<u8>,
    /// Whether it is started when its host has booted.
    #[serde(default)]
    pub start_at_boot: Option<bool>,
    /// VMs with a lower order start first, and stop last.
    #[serde(default)]
    pub start_order: Option<u16>,
    /// What VMs of a higher order wait for: `tcp:HOST:PORT`, `console:TEXT`, or `nothing`.
    #[serde(default)]
    pub wait_for: Option<String>,
    /// The longest that they wait for it, in seconds.
    #[serde(default)]
    #[schema(maximum = 3600)]
    pub wait_max_s: Option<u32>,
}

impl SetVm {
    /// The priority of VMs that were given none, and of volumes without a VM.
    pub const PRIORITY_DEFAULT: u8 = 50;
    /// The highest priority.
    pub const PRIORITY_MAX: u8 = 100;
    /// The order of VMs that were given none.
    pub const START_ORDER_DEFAULT: u16 = 100;
    /// Seconds that others wait for a VM that was given no limit.
    pub const WAIT_MAX_S_DEFAULT: u32 = 120;
    /// The most seconds that others may wait for a VM.
    pub const WAIT_MAX_S_MAX: u32 = 3600;
    /// The value of `wait_for` with which others wait for nothing.
    pub const NOTHING: &'static str = "nothing";

    fn priority_default() -> u8 {
        Self::PRIORITY_DEFAULT
    }
}

/// Stops a VM that runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopVm {
    /// Cut its power at once, instead of pressing its power button.
    #[serde(default)]
    pub now: bool,
    /// Seconds that its guest may take to shut down; after that the order fails, and the VM runs on. `None`: 60.
    #[serde(default)]
    #[schema(maximum = 3600)]
    pub wait_s: Option<u64>,
}

impl StopVm {
    /// Default of the seconds that a guest may take to shut down.
    pub const WAIT_S_DEFAULT: u64 = 60;
}

/// Starts a VM; sent as the query of a POST.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct StartVm {
    /// Boot a suspended VM without its memory, as after a power cut, and delete the memory's file.
    #[serde(default)]
    pub discard_memory: bool,
}

/// Suspends a VM to disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SuspendVm {
    /// Seconds that writing its memory may take, while it is paused; after that the order fails, and the VM runs on. `None`: 600.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 3600)]
    pub timeout_s: Option<u64>,
}

impl SuspendVm {
    /// Default of the seconds that writing a VM's memory may take.
    pub const TIMEOUT_S_DEFAULT: u64 = 600;
}

/// Adopts disks of a running VM that Sterna has not started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptVm {
    /// Absolute path of its monitor's socket (QMP). No other client may be connected to it meanwhile. `None`: the VM
    /// is a domain of libvirt.
    #[serde(default)]
    #[schema(pattern = "^/")]
    pub monitor: Option<String>,
    /// Its disks, by the names of their devices or nodes, or by libvirt's names (`vda`); empty: all writable disks.
    #[serde(default)]
    pub disks: Vec<String>,
    /// Name or UUID of the domain of libvirt (`qemu:///system`), which copies its disks to new volumes. `None`: the VM
    /// is named by its monitor.
    #[serde(default)]
    pub libvirt: Option<String>,
    /// Absolute path of libvirt's socket; `None`: the default one.
    #[serde(default)]
    pub libvirt_socket: Option<String>,
    /// The store of the new volumes of a domain of libvirt; `None`: the only one.
    #[serde(default)]
    pub store: Option<String>,
}

/// A VM that was removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemovedVm {
    /// Name of the removed VM.
    pub name: String,
    /// Names of the volumes that were its disks; they stay.
    pub volumes: Vec<String>,
}
