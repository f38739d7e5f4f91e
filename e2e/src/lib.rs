//! What the end-to-end tests share: a scene with a daemon, and the programs that work on its volumes.
//!
//! ```text
//!   test ──► Scene ──► `sterna serve` (a child process) ──► stores: folders, or file systems made for the test
//!              │           ▲ API                 ▲ NBD
//!              ├─ sterna ──┘                     │
//!              └─ fio, QEMU, libnbd's tools, the lab's guest
//! ```
//!
//! The tests know Sterna by what its users have: the program, its exit codes, its JSON, its sockets. They link nothing of
//! the daemon. A program that a test needs and does not find fails the test, with the name of the package.

pub mod by_hand;
pub mod file_system;
pub mod fio;
pub mod guest;
pub mod machine;
mod pair;
pub mod program;
pub mod qemu_nbd;
pub mod rounds;
mod scene;
pub mod switch_over;
pub mod tour;
pub mod vm;
mod wait;
mod wire;

pub use self::pair::{
    FAR, Pair, play_pair, play_pair_with_data_disks, play_pair_with_mounts, play_sharing_pair, share,
};
pub use self::program::{Outcome, Program};
pub use self::scene::{Scene, play, play_unstarted, play_with_mounts};
pub use self::wait::{DEADLINE, until};
pub use self::wire::{State as WireState, Wire};
