//! Simulates copies beside guests on one disk, and compares the guests with the same seed without copies.
//!
//! A seed draws a disk (first come first served, or copies first; with pauses of its own, a cache that fills, a neighbour that nobody
//! measures, or a sudden loss of speed), guests (that wait for each answer, that ask at a rate, in bursts, or none) and one to three copies.
//! The pacer is the product's.

mod disk;
mod world;

use std::time::Duration;

use crate::random::Random;
use crate::restored::Telling;
use disk::Trouble;
use world::{Shape, World};

/// How long a seed is simulated.
const LASTS: Duration = Duration::from_secs(12);
/// When everything is settled.
const SETTLED: Duration = Duration::from_secs(3);

#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) seeds: u64,
    /// Losses of guests as a part of what was ordered, in seeds with guests that wait for each answer and a disk without trouble.
    pub(crate) losses: Vec<f64>,
    /// What copies moved there, as a part of what the ordered loss frees.
    pub(crate) gains: Vec<f64>,
    pub(crate) violations: Vec<(u64, String)>,
}

pub(crate) fn campaign(first: u64, count: u64, until_found: bool) -> Shown {
    let mut shown = Shown::default();
    for seed in first..first.saturating_add(count) {
        shown.seeds += 1;
        if let Some(violation) = run(seed, Telling::Silent, &mut shown) {
            shown.violations.push((seed, violation));
            if until_found {
                break;
            }
        }
    }
    shown.losses.sort_by(f64::total_cmp);
    shown.gains.sort_by(f64::total_cmp);
    shown
}

pub(crate) fn replay(seed: u64, telling: Telling) -> Option<String> {
    run(seed, telling, &mut Shown::default())
}

fn run(seed: u64, telling: Telling, shown: &mut Shown) -> Option<String> {
    let scenario = Scenario::draw(seed);
    let with = World::run(seed, &scenario, scenario.copies);
    let without = World::run(seed, &scenario, 0);
    if telling == Telling::Printed {
        println!("{scenario:#?}\nwith copies: {with:#?}\nwithout: {without:#?}");
    }
    if scenario.is_plain() {
        let loss = 1.0 - with.served as f64 / without.served.max(1) as f64;
        shown.losses.push(loss / scenario.impact());
        shown.gains.push(with.moved_settled as f64 / (scenario.impact() * scenario.bytes_free()));
    }
    scenario.judge(&with, &without)
}

/// What a seed draws.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) impact_percent: u8,
    pub(crate) copies: usize,
    pub(crate) shapes: Vec<Shape>,
    pub(crate) channels: usize,
    pub(crate) bytes_per_second: f64,
    pub(crate) overhead: Duration,
    pub(crate) copies_first: bool,
    pub(crate) trouble: Trouble,
    /// An earlier order for the impact, and when it was changed.
    pub(crate) before: Option<(Impact, Duration)>,
}

/// An order for the impact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Impact {
    None,
    Percent(u8),
}

/// The measurements of a world.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Guests' requests that ended after everything was settled.
    pub(crate) served: u64,
    /// What copies moved in that time, of each copy, and the least in any two seconds of all.
    pub(crate) moved: Vec<u64>,
    pub(crate) moved_settled: u64,
    pub(crate) moved_least: u64,
    /// What copies began while a guest waited far too long, and the time of that.
    pub(crate) begun_beside_stuck: u64,
    pub(crate) stuck_for: Duration,
}

impl Scenario {
    fn draw(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x7061_6365);
        let guests = random.pick(&[0, 1, 1, 1, 2]);
        let channels = random.pick(&[1, 1, 2, 4]);
        let bytes_per_second = random.pick(&[60e6, 150e6, 500e6, 1500e6]);
        let overhead = random.duration(Duration::from_micros(20), Duration::from_micros(300));
        let shapes = (0..guests).map(|_| Shape::draw(&mut random)).collect();
        let mut scenario = Self {
            impact_percent: random.pick(&[5, 10, 20, 20, 40]),
            copies: random.pick(&[1, 1, 2, 3]),
            shapes,
            channels,
            bytes_per_second,
            overhead,
            copies_first: random.percent(15),
            trouble: Trouble::draw(&mut random),
            before: None,
        };
        if random.percent(25) {
            let before = random.pick(&[Impact::None, Impact::Percent(3), Impact::Percent(60)]);
            let changed = Duration::from_millis(random.between(200, 1500));
            scenario.before = Some((before, changed));
        }
        if random.percent(8) {
            let every = Duration::from_millis(random.between(60, 500));
            scenario.shapes = vec![Shape::Seldom { every }];
        }
        scenario
    }

    fn impact(&self) -> f64 {
        f64::from(self.impact_percent) / 100.0
    }

    /// Whether guests wait for each answer, on a disk that is what it seems.
    fn is_plain(&self) -> bool {
        self.trouble == Trouble::None && !self.copies_first && self.waits_for_answers()
    }

    fn waits_for_answers(&self) -> bool {
        !self.shapes.is_empty() && self.shapes.iter().all(|shape| matches!(shape, Shape::Closed { .. }))
    }

    /// Returns the time that a guest's request waits for those of all guests.
    fn queue_of_guests(&self) -> Duration {
        let of = |shape: &Shape| match *shape {
            Shape::Closed { depth, bytes, .. } => (depth as f64, bytes as f64),
            Shape::Open { bytes } => (1.0, bytes as f64),
            Shape::Seldom { .. } => (1.0, 4096.0),
            Shape::Bursts { depth, .. } => (depth as f64, 4096.0),
        };
        let overhead = self.overhead.as_secs_f64() / self.channels as f64;
        let takes = |(depth, bytes): (f64, f64)| depth * (bytes / self.bytes_per_second + overhead);
        Duration::from_secs_f64(self.shapes.iter().map(|shape| takes(of(shape))).sum())
    }

    /// Returns the bytes that the disk moves in large pieces in the time after everything is settled.
    fn bytes_free(&self) -> f64 {
        self.bytes_per_second * (LASTS - SETTLED).as_secs_f64()
    }

    fn judge(&self, with: &Seen, without: &Seen) -> Option<String> {
        let loss = 1.0 - with.served as f64 / without.served.max(1) as f64;
        // What requests take without copies changes with bursts and troubles: the last pause tells less.
        let is_steady = self.trouble == Trouble::None && (self.shapes.len() < 2 || self.waits_for_answers());
        let slack = if is_steady { 0.03 } else { 0.08 };
        // Where copies go first in the disk itself, the least rate may already cost more.
        if !self.copies_first && without.served > 0 && loss > self.impact() * 1.2 + slack {
            return Some(format!("guests lost {:.1} % of {} %", loss * 100.0, self.impact_percent));
        }
        if with.moved_least < 64 << 10 {
            return Some(format!("only {} bytes were moved in two seconds", with.moved_least));
        }
        // Waits of 4 ms for each request cost the guest less than a quarter of what it may lose.
        let part_of_waits =
            |every: Duration| 0.004 / every.as_secs_f64() * (1.0 - self.impact()) / self.impact();
        let is_rare =
            |shape: &Shape| matches!(shape, Shape::Seldom { every } if part_of_waits(*every) < 0.25);
        // Where copies go first in the disk itself, even one request waits long, and copies for it.
        let is_nearly_idle = self.shapes.iter().all(|shape| is_rare(shape) && !self.copies_first);
        if is_nearly_idle && self.trouble == Trouble::None {
            let part = with.moved_settled as f64 / self.bytes_free();
            // A chunk also costs the overhead of one request.
            let chunk = (512 << 10) as f64 / self.bytes_per_second * self.channels as f64;
            let possible = chunk / (chunk + self.overhead.as_secs_f64());
            // Each request of a guest that asks seldom holds chunks back for a moment.
            let least = if self.shapes.is_empty() { 0.95 } else { 0.7 };
            if part < least * possible {
                return Some(format!(
                    "a disk that is idle, or nearly, was copied at {part:.3} of {possible:.3}"
                ));
            }
        }
        let of_floor = 0.02 * self.bytes_per_second * with.stuck_for.as_secs_f64();
        if with.begun_beside_stuck as f64 > of_floor + (2 << 20) as f64 {
            return Some(format!(
                "{} bytes were begun while a guest waited, for {:?} in all",
                with.begun_beside_stuck, with.stuck_for
            ));
        }
        if let (Some(most), Some(least)) = (with.moved.iter().max(), with.moved.iter().min())
            && *least < most / 50
        {
            return Some(format!("one copy moved {least} bytes, another {most}"));
        }
        // A disk that has become slow is another disk: copies get their part of it.
        let slowed = match self.trouble {
            Trouble::Slows { factor, .. } | Trouble::Spells { factor, .. } => factor,
            _ => 1.0,
        };
        let is_plain = matches!(self.trouble, Trouble::None | Trouble::Slows { .. } | Trouble::Spells { .. })
            && !self.copies_first;
        let part = if matches!(self.trouble, Trouble::Spells { .. }) { 0.05 } else { 0.1 };
        let least = part * self.impact() * self.bytes_free() / slowed;
        if is_plain && self.waits_for_answers() && (with.moved_settled as f64) < least {
            return Some(format!("copies moved {} bytes, {least:.0} are the least", with.moved_settled));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_keep_what_they_are_to_keep() {
        let shown = campaign(0, 60, false);
        assert_eq!(shown.violations, []);
        assert!(shown.losses.len() > 10, "{shown:?}");
    }
}
