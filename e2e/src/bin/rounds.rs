//! Moves a busy disk between two hosts, with bad luck from a seed: `cargo run -p e2e --bin rounds -- --rounds 50 --seed 1`.
//!
//! It needs `target/release/sterna`, or what `STERNA_BIN` names. What a seed decides is which mishap comes when; what it
//! meets is the VM's affair, so one that fails may have to be played a few times.

use std::path::PathBuf;

use clap::Parser;
use e2e::rounds::{Settings, play_rounds};

/// Makes round trips between two hosts, with cut links, killed daemons and cancelled migrations.
#[derive(Debug, Parser)]
struct Arguments {
    /// How many times there and back.
    #[arg(long, default_value_t = 50)]
    rounds: u32,
    /// Decides the mishaps.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Size of the disk in MiB.
    #[arg(long, default_value_t = 64)]
    disk_mib: u64,
    /// Keep the daemons' logs here if something is wrong.
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
