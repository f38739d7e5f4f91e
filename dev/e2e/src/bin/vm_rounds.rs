//! Moves a VM between two hosts many times, while it works on its disk and its memory, with faults from a seed: `cargo run -p e2e
//! --bin vm-rounds -- --rounds 20 --seed 1`.
//!
//! It needs `target/release/sterna`, or the program in `STERNA_BIN`, and the guest image. With `--quiet` there are no faults. As
//! root the hosts are then network namespaces, and a client outside keeps one connection to the VM. Otherwise they are two
//! daemons without a client.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use clap::Parser;
use e2e::program;
use e2e::rounds::{Settings, play_vm_rounds};
use e2e::vm::GuestImage;
use lab::demo::{MovedVmOptions, Progress, run_vm};

/// Makes round trips of a whole VM between two hosts, with cut links, daemons that are killed or stopped, full disks.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of round trips.
    #[arg(long, default_value = "20")]
    rounds: NonZeroU32,
    /// Seed of the faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Size of the disk in MiB; half of it is filled.
    #[arg(long, default_value_t = 32)]
    disk_mib: u64,
    /// Folder for the daemons' logs after a failure.
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
    /// Make no faults, and keep a client outside connected.
    #[arg(long)]
    quiet: bool,
    /// Milliseconds of work between two moves with --quiet.
    #[arg(long, default_value_t = 1000)]
    rest_ms: u64,
}

fn main() -> anyhow::Result<()> {
    let Arguments { rounds, seed, disk_mib, logs, quiet, rest_ms } = Arguments::parse();
    if quiet {
        return play_quietly(rounds, disk_mib << 20, Duration::from_millis(rest_ms));
    }
    let settings = Settings { rounds: rounds.get(), seed, disk_bytes: disk_mib << 20, logs };
    play_vm_rounds(&settings, |trip| println!("{trip}"))?;
    println!("seed {seed}: {rounds} round trips of a VM, nothing lost");
    Ok(())
}

fn play_quietly(round_trips: NonZeroU32, disk_bytes: u64, margin: Duration) -> anyhow::Result<()> {
    let usual = MovedVmOptions::with_image(program::sterna()?, GuestImage::find(None)?, disk_bytes);
    let options = MovedVmOptions { round_trips, margin, ..usual };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(run_vm(options, &mut Progress::on_stderr()))?;
    print!("{report}");
    ensure!(report.is_good(), "something was wrong");
    Ok(())
}
