//! A disk in virtual time: some channels, a queue, and its own troubles.

use std::collections::VecDeque;
use std::time::Duration;

use super::Scenario;
use crate::random::Random;

/// How long a guest's request waits at most where the disk prefers copies.
const EXPIRES: Duration = Duration::from_millis(300);

/// What a disk does by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Trouble {
    None,
    /// It stands still now and then.
    Pauses {
        every: Duration,
        lasts: Duration,
    },
    /// Writes are fast until its cache is full.
    Cache {
        bytes: u64,
        drain: f64,
    },
    /// Requests that no gauge sees, some of the time.
    Neighbour {
        every: Duration,
        lasts: Duration,
    },
    /// Everything takes longer in spells, as on a machine whose processors others use.
    Spells {
        seed: u64,
        every: Duration,
        factor: f64,
    },
    /// It becomes slow for good.
    Slows {
        at: Duration,
        factor: f64,
    },
}

impl Trouble {
    pub(crate) fn draw(random: &mut Random) -> Self {
        let ms = Duration::from_millis;
        match random.below(12) {
            0..4 => Self::None,
            10 | 11 => Self::Spells {
                seed: random.next(),
                every: ms(random.between(5, 200)),
                factor: random.between(15, 30) as f64 / 10.0,
            },
            4 | 5 => {
                Self::Pauses { every: ms(random.between(700, 2500)), lasts: ms(random.between(30, 250)) }
            }
            6 => Self::Cache {
                bytes: random.between(8 << 20, 64 << 20),
                drain: random.between(20, 60) as f64 * 1e6,
            },
            7 => Self::Neighbour {
                every: ms(random.between(1500, 4000)),
                lasts: ms(random.between(300, 1500)),
            },
            _ => Self::Slows { at: ms(random.between(2000, 3000)), factor: 3.0 },
        }
    }

    /// Returns whether something that comes and goes is there at this time.
    pub(crate) fn is_on(self, now: Duration) -> bool {
        match self {
            Self::Pauses { every, lasts } | Self::Neighbour { every, lasts } => {
                now.as_nanos() % every.as_nanos() >= (every - lasts).as_nanos()
            }
            _ => false,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    Guest(usize),
    Copy(usize),
    Neighbour,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) from: From,
    pub(crate) bytes: u64,
    pub(crate) is_write: bool,
    pub(crate) arrived: Duration,
}

pub(crate) struct Disk {
    scenario: Scenario,
    random: Random,
    queue: VecDeque<Request>,
    busy: usize,
    dirty: f64,
    dirty_at: Duration,
}

impl Disk {
    pub(crate) fn new(scenario: &Scenario, random: Random) -> Self {
        let queue = VecDeque::new();
        Self { scenario: scenario.clone(), random, queue, busy: 0, dirty: 0.0, dirty_at: Duration::ZERO }
    }

    pub(crate) fn submit(&mut self, request: Request) {
        self.queue.push_back(request);
    }

    /// Begins the next request, if a channel is free. Returns it, and when it ends.
    pub(crate) fn begin(&mut self, now: Duration) -> Option<(Request, Duration)> {
        if self.busy == self.scenario.channels {
            return None;
        }
        let request = self.queue.remove(self.next(now)?)?;
        self.busy += 1;
        let ends = self.standstill_ends(now) + self.takes(now, &request);
        Some((request, ends))
    }

    pub(crate) fn ended(&mut self) {
        self.busy -= 1;
    }

    fn next(&self, now: Duration) -> Option<usize> {
        let oldest = self.queue.front()?;
        if !self.scenario.copies_first || now.saturating_sub(oldest.arrived) >= EXPIRES {
            return Some(0);
        }
        let of_copies = self.queue.iter().position(|request| matches!(request.from, From::Copy(_)));
        Some(of_copies.unwrap_or(0))
    }

    fn standstill_ends(&self, now: Duration) -> Duration {
        match self.scenario.trouble {
            Trouble::Pauses { every, .. } if self.scenario.trouble.is_on(now) => {
                let periods = now.as_nanos() / every.as_nanos() + 1;
                Duration::from_nanos((periods * every.as_nanos()) as u64)
            }
            _ => now,
        }
    }

    fn takes(&mut self, now: Duration, request: &Request) -> Duration {
        let per_channel = self.scenario.bytes_per_second / self.scenario.channels as f64;
        let jitter = 0.8 + self.random.below(400) as f64 / 1000.0;
        let usual = self.scenario.overhead.as_secs_f64() * jitter + request.bytes as f64 / per_channel;
        let seconds = match self.scenario.trouble {
            Trouble::Slows { at, factor } if now >= at => usual * factor,
            Trouble::Spells { seed, every, factor } => {
                let spell = (now.as_nanos() / every.as_nanos()) as u64;
                let is_slow = Random::new(seed ^ spell.wrapping_mul(0x9E37_79B9)).percent(40);
                if is_slow { usual * factor } else { usual }
            }
            Trouble::Cache { bytes, drain } if request.is_write => {
                let drained = (now - self.dirty_at).as_secs_f64() * drain;
                self.dirty = (self.dirty - drained).max(0.0) + request.bytes as f64;
                self.dirty_at = now;
                if self.dirty > bytes as f64 { usual.max(request.bytes as f64 / drain) } else { usual }
            }
            _ => usual,
        };
        Duration::from_secs_f64(seconds)
    }
}
