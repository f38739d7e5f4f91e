//! Decides in which order, to which target and how the workloads of a host leave it, against a deadline. It has no I/O and no
//! clock.
//!
//! ```text
//!   workloads, targets, stores, paths ──► Planner ──► Action: begin, hold, resume, cancel, stop
//!   Event: progress, left, failed,  ────►    │
//!          a target is lost or back          ├──► forecast: what leaves when, and what would not
//!                                            └──► outcome of each workload
//! ```
//!
//! The rules, from \[XNBD\] §2 and §6 (Hirofuchi et al., evacuation of VMs upon a disaster):
//!
//! - A workload of a higher priority goes before those of a lower one. Among equals those with a standby go first, because they
//!   need little time; then the longest.
//! - A workload that could not arrive before the deadline even if it had its links to itself does not hold up others.
//! - While a workload of a higher priority would be late, no lower one uses its paths: it is held, or not begun.
//! - Another workload begins while the summed rate of a path grows with it ([`Gauge`](gauge)). So the number is measured, not set.
//! - Whatever happens, each workload ends: it left, it was stopped, or it stays for a reason that is named.

mod deadline;
mod ends;
mod forecast;
mod gauge;
mod planner;
mod turns;
mod vocabulary;
mod workload;

#[cfg(test)]
mod campaign;
mod planted;
#[cfg(test)]
mod tests;

pub use self::forecast::{Expected, Fate};
pub use self::planner::{Moment, Planner};
pub use self::vocabulary::{Action, End, Event, Fault, Strategy, Why};
pub use self::workload::{
    Kind, Origin, Path, PathIndex, Room, Route, Setup, StoreIndex, Target, TargetIndex, TargetState, Terms,
    Way, Workload, WorkloadIndex,
};
