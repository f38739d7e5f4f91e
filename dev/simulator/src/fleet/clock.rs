//! The clocks of hosts: each has its own beginning, rate and time of day.
//!
//! ```text
//!   virtual time ──► lane's clock = beginning + time × rate      monotonic, for deadlines
//!               └──► time of day  = day + time + corrections          may jump back and forth: only recorded
//! ```
//! Code that compares two hosts' times gets nonsense.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::Driver;
use block::executor::Unpark;

use crate::clock::Clock;
use crate::random::Random;

const UPTIME_MAX: Duration = Duration::from_secs(400 * 86_400);
/// The drift of clocks against virtual time, in millionths. Real ones drift by a few hundred; more is found sooner.
const DRIFTS_PPM: [i64; 8] = [0, 200, -200, 2_000, -2_000, 20_000, -20_000, 0];
/// A time of day, in milliseconds since 1970, from which those of hosts differ by hours.
const DAY_UNIX_MS: u64 = 1_800_000_000_000;
const APART_MAX_MS: u64 = 12 * 3_600_000;
const MILLION: i128 = 1_000_000;

pub(crate) struct HostClock {
    world: Rc<Clock>,
    beginning: Duration,
    drift_ppm: i64,
    /// The time of day at the simulation's beginning, with later corrections.
    day_unix_ms: Cell<u64>,
}

impl HostClock {
    pub(crate) fn draw(world: &Rc<Clock>, random: &mut Random) -> Rc<Self> {
        Rc::new(Self {
            world: Rc::clone(world),
            beginning: random.duration(Duration::from_secs(1), UPTIME_MAX),
            drift_ppm: random.pick(&DRIFTS_PPM),
            day_unix_ms: Cell::new(DAY_UNIX_MS + random.below(2 * APART_MAX_MS)),
        })
    }

    pub(crate) fn unix_ms(&self) -> u64 {
        self.day_unix_ms.get() + self.world.now().as_millis() as u64
    }

    pub(crate) fn jump(&self, random: &mut Random) {
        self.day_unix_ms.set(DAY_UNIX_MS + random.below(2 * APART_MAX_MS));
    }

    fn now(&self) -> Duration {
        let passed = self.world.now().as_nanos() as i128 * (MILLION + i128::from(self.drift_ppm)) / MILLION;
        self.beginning + Duration::from_nanos(passed as u64)
    }

    /// Returns the first virtual time at which this host's clock shows `local`.
    fn virtual_time(&self, local: Duration) -> Duration {
        let passed = local.saturating_sub(self.beginning).as_nanos() as i128;
        let rate = MILLION + i128::from(self.drift_ppm);
        // Rounded up, so that no deadline fires early.
        Duration::from_nanos(((passed * MILLION + rate - 1) / rate) as u64)
    }
}

/// The driver of a host's executor: it only notes that there is nothing to do.
pub(crate) struct HostDriver {
    clock: Rc<HostClock>,
    /// Set by a park that would wait: until when, in virtual time.
    pub(super) idle: Option<Option<Duration>>,
}

struct Nobody;

impl HostDriver {
    pub(crate) fn new(clock: &Rc<HostClock>) -> Self {
        Self { clock: Rc::clone(clock), idle: None }
    }
}

impl Driver for HostDriver {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn park(&mut self, deadline: Option<Duration>) {
        if deadline.is_none_or(|deadline| deadline > self.clock.now()) {
            self.idle = Some(deadline.map(|deadline| self.clock.virtual_time(deadline)));
        }
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::new(Nobody)
    }
}

impl Unpark for Nobody {
    fn unpark(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_met_at_the_first_instant_at_which_the_clock_shows_it() {
        for drift_ppm in DRIFTS_PPM {
            let world = Clock::new(Random::new(1));
            let (beginning, day_unix_ms) = (Duration::from_secs(77), Cell::new(0));
            let clock = HostClock { world: Rc::clone(&world), beginning, drift_ppm, day_unix_ms };
            for nanos in [1, 7, 999, 1_000_003, 12_345_678_901] {
                let deadline = clock.now() + Duration::from_nanos(nanos);
                let at = clock.virtual_time(deadline);
                world.at(at - Duration::from_nanos(1), || {});
                world.step(None);
                assert!(at == Duration::from_nanos(1) || clock.now() < deadline, "{drift_ppm}: {nanos}");
                world.at(at, || {});
                world.step(None);
                assert!(clock.now() >= deadline, "{drift_ppm}: {nanos}");
            }
        }
    }
}
