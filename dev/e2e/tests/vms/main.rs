//! Tests of VMs that Sterna starts and moves.
//!
//! They are one program, because to link a program takes longer than most of them run.

mod bad_luck;
mod boot;
mod cold;
mod disks;
mod faults;
mod in_place;
mod memory;
mod snapshots;
mod standby;
mod suspend;
mod tpm;
mod unprivileged;
mod whole;
