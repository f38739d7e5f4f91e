//! What the tests of the program, the demo and the benchmarks run on.
//!
//! ```text
//!   Host ──► Folder: configuration, stores, sockets, log
//!     └────► Daemon: `sterna serve` as a child that is signalled, killed and started again
//!   Link ──► a TCP proxy between two hosts that is cut, silent, slow or late
//!   Vm ──► a guest in QEMU, with a checker inside (`lab/src/bin/guest_disk_check.rs`)
//!   nbd_client ──► a client of a volume
//! ```
//!
//! Who uses it knows Sterna by what its users have: the program, its exit codes, its JSON, its sockets. It links nothing of
//! the daemon. A program that is needed and not found is an error with the name of the package.
//!
//! Most of this blocks its caller. What the demo and the benchmarks wait for has an `async` form.

mod daemon;
pub mod file_system;
mod folder;
mod host;
mod link;
pub mod nbd_client;
mod own_address;
pub mod program;
pub mod vm;
mod wait;

pub use self::daemon::{Daemon, KILLED, with_tail};
pub use self::folder::Folder;
pub use self::host::Host;
pub use self::link::{Link, LinkState};
pub use self::own_address::own_address;
pub use self::program::{Outcome, Program};
pub use self::wait::{DEADLINE, until};
