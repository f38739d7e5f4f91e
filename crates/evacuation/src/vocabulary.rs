//! What the planner is told, what it orders, and what becomes of workloads.

use crate::workload::{StoreIndex, TargetIndex, TargetState, WorkloadIndex};

/// How a workload is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// As it would be without an evacuation.
    Usual,
    /// It is handed over before all of it was sent, because the time is short.
    PostCopy,
}

/// What the planner learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A transfer has made progress.
    Progress {
        /// Its workload.
        workload: WorkloadIndex,
        /// The bytes that it has sent since it began.
        sent_bytes: u64,
        /// The bytes that are still to be sent.
        remaining_bytes: u64,
    },
    /// A workload is complete at its target.
    Left {
        /// The workload.
        workload: WorkloadIndex,
    },
    /// A transfer has ended, and its workload is here.
    Failed {
        /// The workload.
        workload: WorkloadIndex,
        /// Why it has ended.
        fault: Fault,
    },
    /// A transfer cannot be cancelled: it has been handed over, or is just being.
    CancelRefused {
        /// Its workload.
        workload: WorkloadIndex,
    },
    /// A VM is stopped.
    Stopped {
        /// The workload.
        workload: WorkloadIndex,
    },
    /// A VM could not be stopped, and runs.
    StopFailed {
        /// The workload.
        workload: WorkloadIndex,
    },
    /// A target is lost, is back, or takes nothing any more.
    Target {
        /// The target.
        target: TargetIndex,
        /// Its state from now on.
        state: TargetState,
    },
    /// The free room of a store has changed, apart from what this planner has booked.
    Room {
        /// The store.
        store: StoreIndex,
        /// Its free bytes; `None`: unknown.
        free_bytes: Option<u64>,
    },
    /// Nothing more is to leave.
    Abort,
}

/// Why a transfer has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It has failed, or was refused.
    Transfer,
    /// It was cancelled.
    Cancelled,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Begin to move a workload.
    Begin {
        /// The workload.
        workload: WorkloadIndex,
        /// The number of its route.
        route: usize,
        /// How it is sent.
        strategy: Strategy,
    },
    /// Pause the transfer of a workload, because a higher one needs its paths.
    Hold {
        /// The workload.
        workload: WorkloadIndex,
    },
    /// Let a transfer go on.
    Resume {
        /// The workload.
        workload: WorkloadIndex,
    },
    /// Cancel the transfer of a workload.
    Cancel {
        /// The workload.
        workload: WorkloadIndex,
    },
    /// Stop a VM.
    Stop {
        /// The workload.
        workload: WorkloadIndex,
    },
    /// Everything has ended.
    Finish,
}

/// What has become of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It is at this target.
    Left(TargetIndex),
    /// It is here, and was stopped.
    Stopped(Why),
    /// It is here, as it was.
    Stays(Why),
}

/// Why a workload has not left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// No target may take it.
    NoTarget,
    /// No target that may take it has room or memory for it.
    NoRoom,
    /// The deadline came first.
    TooLate,
    /// Its transfers have failed.
    Failed,
    /// The administrator has ended the evacuation, or its transfer.
    Aborted,
    /// It has been handed over to a target that is lost.
    HandedOver,
    /// It should have been stopped, and that has failed.
    NotStopped,
}

impl End {
    /// Returns whether the workload has left.
    pub fn has_left(self) -> bool {
        matches!(self, Self::Left(_))
    }
}
