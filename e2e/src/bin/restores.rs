//! Puts journals back at random moments, and promotes copies by force, from a seed:
//! `cargo run -p e2e --bin restores -- --returns 53 --promotions 30 --seed 1`.
//!
//! It needs `target/release/sterna`, or what `STERNA_BIN` names.

use clap::Parser;
use e2e::restores::{play_promotions, play_returns};

/// Puts journals back and promotes copies, with lists of hosts that are lost and hosts that are silent, removed and killed.
#[derive(Debug, Parser)]
struct Arguments {
    /// Journals that are put back.
    #[arg(long, default_value_t = 53)]
    returns: u32,
    /// Copies that are promoted by force.
    #[arg(long, default_value_t = 30)]
    promotions: u32,
    /// Decides everything.
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
