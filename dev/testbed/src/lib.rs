//! The test bed of the program's tests, the demo and the benchmarks.
//!
//! ```text
//!   Host ──► Folder: configuration, stores, sockets, log
//!     └────► Daemon: `sterna serve` as a child that is signalled, killed and started again
//!   Link ──► a TCP proxy between two hosts that is cut, silent, slow or late
//!   Vm ──► a guest in QEMU, with a checker inside (`lab/src/bin/guest_disk_check.rs`)
//!   nbd_client ──► a client of a volume
//! ```
//!
//! It uses Sterna as users do: by the program, its exit codes, its JSON and its sockets. It links nothing of the daemon. A
//! missing program is an error with the name of the package.
//!
//! Most functions block the caller. Waits of the demo and the benchmarks have an `async` form.

mod daemon;
pub mod file_system;
mod folder;
mod host;
mod link;
mod loop_device;
pub mod nbd_client;
mod own_address;
pub mod program;
pub mod vm;
mod wait;

pub use self::daemon::{Daemon, KILLED, with_tail};
pub use self::folder::Folder;
pub use self::host::Host;
pub use self::link::{Link, LinkState};
pub use self::loop_device::LoopDevice;
pub use self::own_address::own_address;
pub use self::program::{Outcome, Program, signal};
pub use self::wait::{DEADLINE, until};
