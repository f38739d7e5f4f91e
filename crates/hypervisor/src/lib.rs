//! What runs virtual machines, as Sterna steers it. It knows no volumes and decides nothing about migrations.
//!
//! There is QEMU alone: [`qemu::Machine`] is one running process, reached over its machine protocol. Another hypervisor is
//! a module beside it; a trait over them is worth its price when there are two.

pub mod qemu;
