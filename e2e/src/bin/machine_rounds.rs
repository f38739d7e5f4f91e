//! Moves a machine to another host and home, again and again, while it checks its disk and its memory and a client outside
//! keeps one connection: `cargo run -p e2e --bin machine-rounds -- --rounds 20`.
//!
//! It needs `target/release/sterna`, or what `STERNA_BIN` names, and the guest image. As root the hosts are network
//! namespaces; otherwise they are two daemons, and nobody is connected.

use std::num::NonZeroU32;
use std::time::Duration;

use anyhow::ensure;
use clap::Parser;
use e2e::{machine, program};
use lab::demo::{MovedMachineOptions, Progress, run_machine};

/// Makes round trips of a whole machine between two hosts.
#[derive(Debug, Parser)]
struct Arguments {
    /// How many times there and back.
    #[arg(long, default_value = "20")]
    rounds: NonZeroU32,
    /// Size of the disk in MiB; half of it is filled.
    #[arg(long, default_value_t = 128)]
    disk_mib: u64,
    /// How long it works between two moves, in milliseconds.
    #[arg(long, default_value_t = 1000)]
    rest_ms: u64,
}

fn main() -> anyhow::Result<()> {
    let Arguments { rounds, disk_mib, rest_ms } = Arguments::parse();
    let usual = MovedMachineOptions::with_image(program::sterna()?, machine::guest_image()?, disk_mib << 20);
    let options =
        MovedMachineOptions { round_trips: rounds, margin: Duration::from_millis(rest_ms), ..usual };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(run_machine(options, &mut Progress::on_stderr()))?;
    print!("{report}");
    ensure!(report.is_good(), "something was wrong");
    Ok(())
}
