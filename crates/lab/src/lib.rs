//! Workloads and the demo: guests that know what they wrote.
//!
//! ```text
//!   demo ──► a daemon as child process, two stores in a temporary folder, a guest, a report
//!     │
//!     ├─ workload ──► a guest that is a thread: fills, works, checks every read, compares the whole disk
//!     │     └─ nbd_client
//!     └─ vm ──► a guest that is a machine in QEMU, with a checker inside (`src/bin/guest_disk_check.rs`)
//! ```
//!
//! The tests of other crates use `nbd_client` and `workload` as well: whoever serves a disk can be judged by them. This
//! crate knows the daemon by its API alone.

pub mod demo;
pub mod nbd_client;
pub mod vm;
pub mod workload;
