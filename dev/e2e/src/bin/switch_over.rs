//! Prints the duration of switch-overs on this machine: `cargo run -p e2e --release --bin switch-over -- --rounds 20`.
//!
//! It needs `target/release/sterna`, or the program in `STERNA_BIN`.

use clap::Parser;
use e2e::host;
use e2e::switch_over::{Settings, measure};

/// Moves a busy disk to and fro and prints how long its client was held at each switch-over.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of migrations to make.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// Size of the disk in MiB.
    #[arg(long, default_value_t = 256)]
    disk_mib: u64,
}

fn main() -> anyhow::Result<()> {
    let Arguments { rounds, disk_mib } = Arguments::parse();
    let mut scene = host()?;
    scene.start()?;
    let rounds = measure(&scene, Settings { rounds, disk_bytes: disk_mib << 20 })?;
    println!("{rounds}");
    Ok(())
}
