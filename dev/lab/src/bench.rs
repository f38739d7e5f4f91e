//! Benchmarks: Sterna beside the raw disk, beside `qemu-storage-daemon`, and beside off-line copies.
//!
//! ```text
//!   nbd ─────► round ──► workload ──► raw file │ Sterna │ qemu-storage-daemon ──► fio ──► statistics
//!   link ────► link, round ──► TCP │ Sterna │ qemu-storage-daemon ──► compare ──► statistics
//!   VM ─► load, round ──► Sterna │ QEMU's own migration ──► statistics
//!   strategies ► experiment, x, round ──► a column for each strategy ──► compare ──► figures
//!   return ──► load, round ──► there, home ──► compare ──► statistics
//!   mirror ──► round ──► idle, load ──► Sterna │ cp │ qemu-img │ qemu-storage-daemon ──► compare ──► statistics
//!
//!   environment   the measured machine        tools     the programs, their versions and packages
//!   folder        a temporary folder          image     random data, holes, comparing, dropping caches
//!   server, qmp   a measured server           process   CPU time and bytes of a process
//!   guest         fio, with a request log     two_hosts a volume, and a host to move to
//!   migration     a measured migration: its times, and whether the copy is equal
//!   show          figures as text             page, chart   figures as a page of HTML
//! ```
//!
//! All contenders are measured in one run, in turns, round after round: changes in the VM's speed then affect all alike, and a
//! ratio is taken between neighbours. This module measures, and makes tables and pages; the program prints and writes them.
//! `docs/performance.md` says what the figures mean.

mod chart;
mod environment;
mod fio;
mod folder;
mod guest;
mod image;
pub mod link;
pub mod machine;
mod migration;
pub mod mirror;
pub mod nbd;
mod page;
mod process;
mod qmp;
pub mod return_home;
mod server;
mod show;
mod statistics;
pub mod strategies;
mod tools;
mod two_hosts;

pub use self::environment::{Environment, Versions};
pub use self::fio::{Job, Measured, Pattern};
pub use self::show::Table;
pub use self::statistics::Summary;

use std::future::Future;
use std::path::PathBuf;

use self::folder::BenchFolder;
use crate::demo::{Progress, Signals};

/// The options that all benchmarks share.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The program whose `serve` is measured: normally the running one.
    pub program: PathBuf,
    /// Where the temporary folder is made, on the disk that is measured; `None`: in the demo's usual place.
    pub parent: Option<PathBuf>,
    /// Size of an image in bytes.
    pub size_bytes: u64,
    /// Number of rounds, each of which measures everything.
    pub rounds: u32,
}

/// Does `work` in a temporary folder, which is removed before this returns; a signal ends it early.
async fn in_folder<T>(
    folder: BenchFolder,
    progress: &mut Progress,
    work: impl AsyncFnOnce(&BenchFolder, &mut Progress) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut signals = Signals::listen()?;
    let work: std::pin::Pin<Box<dyn Future<Output = anyhow::Result<T>> + '_>> =
        Box::pin(work(&folder, progress));
    let result = signals.unless(work).await;
    progress.end();
    let removed = folder.remove();
    let value = result?;
    removed.map(|()| value)
}
