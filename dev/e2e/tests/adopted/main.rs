//! Tests of VMs that others have started, and that Sterna adopts.
//!
//! They are one program, because to link a program takes longer than most of them run.

mod as_packaged;
mod attached;
mod by_hand;
mod domain_moves;
mod hostile_user;
mod libvirt;
