//! Repeatedly adopts, moves and releases a VM that was started by hand, with disturbances from a seed:
//! `cargo run -p e2e --bin adopted-rounds -- --scenes 10 --seed 1`.

use anyhow::Context as _;
use clap::Parser;

/// Plays scenes of rounds with a QEMU whose second monitor is used without Sterna.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of scenes, each with a new host and VM.
    #[arg(long, default_value_t = 10)]
    scenes: u64,
    /// Rounds of a scene.
    #[arg(long, default_value_t = 10)]
    rounds: u32,
    /// Seed of the first scene. Each later scene has the next number.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    let Arguments { scenes, rounds, seed } = Arguments::parse();
    let (mut done, mut refused) = (0, 0);
    for seed in seed..seed + scenes {
        let mut host = e2e::host()?;
        host.start()?;
        let played =
            e2e::adopted_rounds::play(&mut host, rounds, seed, |round| println!("seed {seed} {round}"));
        let played = played.map_err(|error| host.with_log(error)).with_context(|| format!("seed {seed}"))?;
        (done, refused) = (done + played.0, refused + played.1);
    }
    println!(
        "{scenes} scenes of {rounds} rounds, {done} orders done, {refused} refused by name, nothing lost"
    );
    Ok(())
}
