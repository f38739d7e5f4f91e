//! Moves two busy volumes among three hosts while daemons are killed, ended and stopped, from a seed: `cargo run -p e2e --bin
//! tour -- --steps 100 --seed 1`.
//!
//! It needs `target/release/sterna`, or the program in `STERNA_BIN`. The seed decides the steps, but not the timing of the
//! machine. So a failing seed may have to be played a few times.

use clap::Parser;
use e2e::tour::play_tour;

/// Moves two volumes among three hosts under guests that know what they wrote.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of steps: migrations, kills and pauses.
    #[arg(long, default_value_t = 100)]
    steps: u32,
    /// Seed of the steps.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    let Arguments { steps, seed } = Arguments::parse();
    play_tour(seed, steps, |step| println!("{step}"))?;
    println!("seed {seed}: {steps} steps, nothing lost");
    Ok(())
}
