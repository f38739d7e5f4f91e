//! Adopts, moves and releases a domain of libvirt many times, with random actions of others from a seed: `cargo run -p e2e --bin
//! domain-rounds -- --rounds 50 --seed 1`, as root.

use anyhow::Context as _;
use clap::Parser;

/// Plays rounds of orders with a domain of libvirt, disturbed by actions of administrators and backup tools.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of rounds to play.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// Seed of the random events.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    let Arguments { rounds, seed } = Arguments::parse();
    let mut host = e2e::host()?;
    host.start()?;
    let played = e2e::domain_rounds::play(&mut host, rounds, seed, |round| println!("{round}"));
    let played = played.map_err(|error| host.with_log(error))?;
    let (done, refused) = played.context("this machine lacks root or libvirt")?;
    println!("seed {seed}: {rounds} rounds, {done} orders done, {refused} refused by name, nothing lost");
    Ok(())
}
