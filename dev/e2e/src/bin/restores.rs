//! Restores journals at random moments, and promotes copies by force, from a seed: `cargo run -p e2e --bin restores -- --returns
//! 53 --promotions 30 --seed 1`.
//!
//! It needs `target/release/sterna`, or the program in `STERNA_BIN`.

use clap::Parser;
use e2e::restores::{play_promotions, play_returns};

/// Restores journals and promotes copies, with lost lists of hosts, and with hosts that are silent, removed or killed.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of journals to restore.
    #[arg(long, default_value_t = 53)]
    returns: u32,
    /// Number of copies to promote by force.
    #[arg(long, default_value_t = 30)]
    promotions: u32,
    /// Seed of all random choices.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    let Arguments { returns, promotions, seed } = Arguments::parse();
    let shown = play_returns(seed, returns, |round| println!("{round}"))?;
    println!("seed {seed}: {returns} journals were put back: {shown:?}");
    let shown = play_promotions(seed, promotions, |round| println!("{round}"))?;
    println!("seed {seed}: {promotions} copies were promoted: {shown:?}");
    Ok(())
}
