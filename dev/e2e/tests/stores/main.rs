//! Tests of stores: faulty ones, slow ones, and ones that two hosts share.
//!
//! They are one program, because to link a program takes longer than most of them run.

mod cloned;
mod duplicates;
mod faulty;
mod faulty_targets;
mod impaired;
mod resume_here;
mod shared;
mod shared_vm;
mod snapshots;
