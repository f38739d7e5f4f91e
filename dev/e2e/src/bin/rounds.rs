//! Moves a busy disk between two hosts, with faults from a seed: `cargo run -p e2e --bin rounds -- --rounds 50 --seed 1`.
//!
//! It needs `target/release/sterna`, or the program in `STERNA_BIN`. The seed decides the faults and their times, but not the
//! timing of the machine. So a failing seed may have to be played a few times.

use std::path::PathBuf;

use clap::Parser;
use e2e::rounds::{Settings, play_rounds};

/// Makes round trips between two hosts, with cut links, killed daemons and cancelled migrations.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of round trips.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Seed of the faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Size of the disk in MiB.
    #[arg(long, default_value_t = 64)]
    disk_mib: u64,
    /// Folder for the daemons' logs after a failure.
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let Arguments { rounds, seed, disk_mib, logs } = Arguments::parse();
    let settings = Settings { rounds, seed, disk_bytes: disk_mib << 20, logs };
    play_rounds(&settings, |trip| println!("{trip}"))?;
    println!("seed {seed}: {rounds} round trips, nothing lost");
    Ok(())
}
