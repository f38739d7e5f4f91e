//! Runs evacuations of a virtual world by seed: shared links, failures, targets that are lost, stores that fill up.
//!
//! ```text
//!   seed ──► Story: a setup, and what happens when ──► World ⇄ Planner, second by second ──► checks
//! ```
//! A failure prints its seed. `EVACUATION_SEEDS=5000 cargo test -p evacuation campaign` runs more of them.

mod checks;
mod story;
mod world;

use self::story::{Size, Story};
use self::world::World;
use crate::planted::{Bug, plant};

const SEEDS: u64 = 3000;
/// Within so many seeds each planted bug is noticed.
const SEEDS_OF_A_BUG: u64 = 400;

fn run(seed: u64, size: Size) -> Result<(), String> {
    let story = Story::of(seed, size);
    let mut world = World::new(&story);
    world.run().map_err(|fault| format!("seed {seed}: {fault}"))
}

#[test]
fn evacuations_by_seed_keep_every_rule() {
    let seeds = std::env::var("EVACUATION_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(SEEDS);
    let faults: Vec<String> = (0..seeds).filter_map(|seed| run(seed, Size::Small).err()).take(5).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_campaign_notices_each_planted_bug() {
    for bug in Bug::ALL {
        plant(Some(bug));
        let noticed = (0..SEEDS_OF_A_BUG).find_map(|seed| run(seed, Size::Small).err());
        plant(None);
        assert!(noticed.is_some(), "{bug:?} is not noticed within {SEEDS_OF_A_BUG} seeds");
    }
}

#[test]
fn two_runs_of_one_seed_are_equal() {
    let actions = |seed| {
        let story = Story::of(seed, Size::Small);
        let mut world = World::new(&story);
        let _ = world.run();
        world.log
    };
    for seed in 0..20 {
        assert_eq!(actions(seed), actions(seed), "seed {seed}");
    }
}

#[test]
fn ten_thousand_vms_of_two_hundred_hosts_leave_for_twenty_targets() {
    let story = Story::of(1, Size::Site);
    let mut planner = crate::Planner::new(story.setup.clone());
    let began = std::time::Instant::now();
    planner.handle_timeout(crate::Moment::ZERO);
    let took = began.elapsed();
    let routes: usize = story.setup.workloads.iter().map(|workload| workload.routes.len() + 1).sum();
    // Each route is compared once.
    assert!(planner.steps() <= routes as u64, "{} steps for {routes} routes", planner.steps());
    assert!(took < std::time::Duration::from_secs(1), "planning took {took:?}");
    run(1, Size::Site).unwrap();
}
