//! Tests of volumes and VMs at a host that lacks some of their blocks: the rest comes, or the host that has it takes them back.
//!
//! They are one program, because to link a program takes longer than most of them run.

mod filling;
mod filling_vm;
mod taking_back;
mod taking_back_vm;
