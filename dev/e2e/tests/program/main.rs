//! Tests of the real binary, as users, scripts and crashes use it.
//!
//! They are one test program, so that shared code is compiled, and checked for unused items, once.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod access;
mod adoption;
mod adoption_faults;
mod audit;
mod chains;
mod crash;
mod devices;
mod errors;
mod forecast;
mod full;
mod hosts;
mod identity;
mod journal;
mod life;
mod log;
mod machines;
mod metrics;
mod notices;
mod observe;
mod operations;
mod pacing;
mod ports;
mod qcow2;
mod qemu;
mod queue;
mod reload;
mod remote;
mod replicas;
mod resize;
mod restored;
mod scene;
mod ssh;
mod store_files;
mod take_over;
mod watch;
