//! Workloads, the demo and the benchmarks: guests that know what they wrote, and their measurement.
//!
//! ```text
//!   demo ──► a daemon as child process, two stores in a temporary folder, a guest, a report
//!     │
//!     ├─ workload ──► a guest that is a thread: fills, works, checks every read, compares the whole disk
//!     └─ vm ──► a guest that is a VM in QEMU (`testbed::vm`), with a checker inside (`src/bin/guest_disk_check.rs`)
//! ```
//!
//! The benchmarks ([`mod@bench`]) start the daemon as the demo does, with fio as guest. Hosts and the links between them are
//! network namespaces ([`network`]). Daemons, links without namespaces and the NBD client are in `testbed`.
//!
//! The tests of other crates use `workload` and `network` as well. This crate knows the daemon only by its API.

pub mod bench;
pub mod demo;
pub mod network;
pub mod vm;
pub mod workload;
