//! One seed: builds its world, runs it to its end, and says what was found.

use std::rc::Rc;
use std::time::Duration;

use block::Executor;

use crate::coverage::Struck;
use crate::driver::{Clock, VirtualDriver};
use crate::fleet::tally::Tally;
use crate::host::Host;
use crate::random::Random;
use crate::scenario::{Hosts, Options, Scenario};
use crate::trace::{Audience, Trace};
use crate::world::{Stop, Violation, World};

/// A simulation that has not ended by then never will: all faults pass within seconds.
const TIME_MAX: Duration = Duration::from_secs(600);
/// A simulation takes some ten thousand steps; one that takes so many runs in circles.
const STEPS_MAX: u64 = 3_000_000;
/// So many turns of the executor at one instant are a task that wakes itself for ever.
const STEPS_AT_AN_INSTANT_MAX: u64 = 20_000;

/// What a simulation has shown.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finding {
    /// The rule that was broken; `None` if all were kept.
    pub(crate) violation: Option<Violation>,
    /// Guest requests that were answered.
    pub(crate) operations: u64,
    /// How often a daemon was hit before it served anything.
    pub(crate) recoveries_hit: u64,
    /// Which faults struck in which phases.
    pub(crate) struck: Struck,
    /// What happened between hosts besides.
    pub(crate) tally: Tally,
    /// What happened, as a number: the same for the same seed.
    pub(crate) hash: u64,
}

/// Runs the simulation of `seed` with as many hosts as are wanted.
pub(crate) fn simulate_hosts(seed: u64, options: &Options, audience: Audience) -> Finding {
    let finding = match options.hosts {
        Hosts::One => simulate(seed, options, audience),
        Hosts::Between(hosts) => crate::fleet::simulate(seed, hosts, options, audience),
    };
    let violation = finding.violation.or_else(|| crate::paused::play(seed));
    Finding { violation, ..finding }
}

/// Runs the simulation of `seed` with one host.
pub(crate) fn simulate(seed: u64, options: &Options, audience: Audience) -> Finding {
    let mut random = Random::new(seed);
    let world = World::new(&mut random, Trace::new(audience));
    let scenario = Scenario::draw(&mut random, options);
    world.say(|| format!("{scenario:#?}"));
    let mut executor = Executor::new(VirtualDriver(Rc::clone(&world.clock)));
    let host = Host::new(&world, &mut random, scenario, executor.handle());
    host.boot();
    loop {
        let watched = Rc::clone(&world);
        executor.run_until(move || watched.is_stopped() || why_stuck(&watched.clock).is_some());
        match world.take_stop() {
            Some((how @ (Stop::Kill | Stop::PowerCut), phase)) => {
                executor.drop_tasks();
                host.crashed(how, phase);
            }
            Some((Stop::Finished | Stop::Violated, _)) => break,
            None => {
                let why = why_stuck(&world.clock).unwrap_or("it stopped by itself");
                world.violated("patience", || format!("{why}: {}", host.unfinished()));
            }
        }
        if world.violation().is_some() {
            break;
        }
    }
    executor.drop_tasks();
    world.clock.clear();
    let struck = world.struck.borrow().clone();
    Finding {
        violation: world.violation(),
        operations: host.operations(),
        recoveries_hit: host.recoveries_hit(),
        struck,
        tally: Tally::default(),
        hash: world.trace.hash(),
    }
}

/// Why a simulation will never end; `None` while it may.
fn why_stuck(clock: &Clock) -> Option<&'static str> {
    if clock.is_dead() {
        Some("nothing will ever happen again")
    } else if clock.steps_at_this_instant() > STEPS_AT_AN_INSTANT_MAX {
        Some("it runs in circles")
    } else if clock.now() > TIME_MAX || clock.steps() > STEPS_MAX {
        Some("it does not end")
    } else {
        None
    }
}
