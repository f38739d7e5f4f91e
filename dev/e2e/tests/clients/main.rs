//! Tests of programs that use a volume or the API.
//!
//! They are one program, because to link a program takes longer than most of them run.

mod bad_luck;
mod fio;
mod interop;
mod proxmox;
mod python;
mod ranges;
