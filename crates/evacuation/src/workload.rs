//! What is to leave, where it could go, and on what terms.

use std::time::Duration;

macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl $name {
            /// Returns it as an index of a list.
            pub fn as_usize(self) -> usize {
                self.0 as usize
            }
        }
    };
}

index! {
    /// The number of a workload in [`Setup::workloads`].
    WorkloadIndex
}
index! {
    /// The number of a target in [`Setup::targets`].
    TargetIndex
}
index! {
    /// The number of a store in [`Setup::stores`].
    StoreIndex
}
index! {
    /// The number of a path in [`Setup::paths`].
    PathIndex
}

/// Everything that a planner begins with.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// What is to leave.
    pub workloads: Vec<Workload>,
    /// The hosts that it may go to.
    pub targets: Vec<Target>,
    /// The stores of these hosts.
    pub stores: Vec<Room>,
    /// The links and stores that transfers share.
    pub paths: Vec<Path>,
    /// The deadline, and what happens before it.
    pub terms: Terms,
}

/// The deadline of an evacuation, and what happens before it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms {
    /// The time by which everything is to have left; `None`: there is none.
    pub deadline: Option<Duration>,
    /// How long before the deadline VMs are stopped that will not have left; `None`: they go on running.
    pub stop_before: Option<Duration>,
}

/// A VM with its volumes, or a volume without a VM.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Whether it is a VM, and whether it runs.
    pub kind: Kind,
    /// A higher one goes first.
    pub priority: u8,
    /// What its guest writes, in bytes a second: disks and memory.
    pub writes_per_second: u64,
    /// Whether it may be handed over before all of it has been sent.
    pub may_post_copy: bool,
    /// Where it could go. Empty: nowhere.
    pub routes: Vec<Route>,
}

/// What a workload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A VM that runs.
    RunningVm {
        /// The memory that it needs at the target, in bytes.
        memory_bytes: u64,
    },
    /// A VM that does not run.
    StoppedVm,
    /// A volume that belongs to no VM.
    Volume,
}

/// A way for one workload to one store of one target.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// The host that it goes to.
    pub target: TargetIndex,
    /// The store there.
    pub store: StoreIndex,
    /// The paths that the transfer uses.
    pub way: Way,
    /// The bytes to send, memory included, without what is written meanwhile.
    pub bytes: u64,
    /// The bytes that it takes of the store.
    pub room_bytes: u64,
    /// What the target has of it already.
    pub origin: Origin,
}

/// What a target has of a workload before it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// A standby.
    Standby,
    /// An image that an earlier migration has left.
    KeptImage,
    /// Nothing.
    Nothing,
}

/// The paths of one route.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// Out of the host that is evacuated.
    pub out: PathIndex,
    /// Into the target.
    pub into: PathIndex,
    /// The target's store.
    pub store: PathIndex,
}

impl Way {
    /// Returns its paths.
    pub fn paths(self) -> [PathIndex; 3] {
        [self.out, self.into, self.store]
    }

    /// Returns whether both use a path.
    pub fn shares(self, other: Self) -> bool {
        self.out == other.out || self.into == other.into || self.store == other.store
    }
}

/// A host that workloads may go to.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Whether anything may go there now.
    pub state: TargetState,
    /// Whether it takes VMs.
    pub takes_vms: bool,
    /// Its free memory in bytes; `None`: unknown, and not checked.
    pub memory_free: Option<u64>,
}

/// Whether anything may go to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetState {
    /// It takes workloads.
    Open,
    /// It cannot be reached since this time. It may come back.
    Lost(Duration),
    /// It takes nothing: it is drained, or does not allow it.
    Closed,
}

/// The free room of a store.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Free bytes; `None`: unknown, and not checked.
    pub free_bytes: Option<u64>,
}

/// A link or a store that transfers share.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// Its rate in bytes a second, as it was measured earlier or is stated; `None`: unknown.
    pub rate: Option<f64>,
    /// The largest number of transfers at a time, which the administrator has set; at least one.
    pub transfers_max: u32,
}
