//! Shared parts of the end-to-end tests: hosts with daemons, and programs that use their volumes.
//!
//! ```text
//!   test ──► Host ──► `sterna serve` (a child process) ──► stores: folders, or file systems made for the test
//!              │           ▲ API                 ▲ NBD
//!              ├─ sterna ──┘                     │
//!              └─ fio, QEMU, libnbd's tools, the lab's guest
//! ```
//!
//! The tests use Sterna as users do: by the program, its exit codes, its JSON and its sockets. They link nothing of the daemon. A
//! missing program fails the test, with the name of its package.

pub mod adopted_rounds;
pub mod blocks;
pub mod browser;
pub mod by_hand;
pub mod domain_rounds;
pub mod fio;
pub mod guest;
pub mod http;
pub mod libvirt;
mod pair;
pub mod pictures;
mod play;
pub mod qemu_nbd;
pub mod qmp;
pub mod remote_user;
pub mod restores;
pub mod rounds;
pub mod switch_over;
pub mod terminal;
pub mod throw_away_root;
pub mod tour;
pub mod trio;
pub mod vm;

pub use testbed::{DEADLINE, Host, LinkState, Outcome, Program, file_system, program, until};

pub use self::pair::{
    FAR, Pair, play_pair, play_pair_with_data_disks, play_pair_with_mounts, play_sharing_pair, share,
};
pub use self::play::{may_mount, play, play_unstarted, play_with_mounts};

/// Makes a host whose daemon is the program under test. VMs of tests have kernels and consoles in folders of their own.
///
/// # Errors
/// If there is no program to test, or the folder cannot be made.
pub fn host() -> anyhow::Result<Host> {
    let host = Host::new(program::sterna()?)?;
    host.configure("[machines]\nfolders = ['/']\nallow = ['-gdb tcp']\n")?;
    Ok(host)
}
