//! Machines for guests that Sterna pauses, and for disks that change hands while their guest works.
//!
//! ```text
//!   Hold      note durable ─► may be paused ─► the reason is over ─► resume is sent ─► it runs ────► note removed
//!   Exchange  each disk:  its file ◄─► nothing ◄─► its volume's export; one way or back, until all are on one side
//!   Copied    each disk:  its file ◄─► a copy ◄─► its volume's export; by copies of the hypervisor, unnoticed by the guest
//!   shape     what a VM has ◄─ compared ─► what is known of it
//!   departure checked: at the order ─► before memory ─► after the stop; its run state is noted, and restored at the target
//!   cold      a stopped VM: kept at the target, durably ─► volumes copied ─► asked again ─► volumes handed over
//!   stall     noted ─► reads of missing blocks are refused, which stops it ─► they have arrived ─► resumed ─► note removed
//!   start     due ─► starting ─► started, or tried again ─► ready, or its time is over ─► VMs of the next order
//!   suspend   memory in a file ─► recorded ─► QEMU ended ─► suspended ─► a new QEMU loads it ─► record removed ─► it runs
//! ```
//! None of these performs I/O: they receive the observed state of the hypervisor, and return the next step. Each continues
//! until a guest runs, and can begin in any state that a killed daemon may leave.

pub mod cold;
pub mod copied;
pub mod departure;
pub mod exchange;
pub mod hold;
pub mod shape;
pub mod stall;
pub mod start;
pub mod suspend;
