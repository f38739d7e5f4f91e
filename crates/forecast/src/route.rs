//! What is known of one way, from a store to a store or a host: the rates of earlier migrations, and how far forecasts were off.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::ahead::{Course, Question};
use crate::random::Random;

/// How often a migration is run ahead.
const RUNS: u64 = 50;
/// How many earlier migrations are remembered of one way: the latest.
const SAMPLES_MAX: usize = 24;
/// After this many steps in all there are no further runs, if there were some: people wait for the answer.
const STEPS_MAX: u32 = 300_000;
const RUNS_MIN: usize = 12;
/// The part of runs below and above the range: eight of ten lie within it.
const OUTSIDE: f64 = 0.1;
/// The deviation of the natural logarithm of the time, where nothing has been learned: a factor of 1.5 both ways.
const UNKNOWN: f64 = 0.32;
/// The least deviation, however well a way is known.
const KNOWN: f64 = 0.04;
/// Loads below this many bytes a second are as none.
const LOAD_NONE: f64 = (1 << 20) as f64;
/// Loads are alike within this natural logarithm: a factor of two.
const ALIKE: f64 = 0.7;
/// So many of the nearest are asked, however near they are.
const ALIKE_MIN: usize = 3;
/// Two migrations differ in size if one has this many times the bytes of the other.
const DIFFERENT: f64 = 1.3;
/// The part of the shortest migration that may be overhead.
const OVERHEAD_MAX: f64 = 0.8;
/// The most that one outcome counts, as the natural logarithm of the factor: tenfold.
const OFF_MAX: f64 = 2.3;

/// What one ended migration has shown of its way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The bytes that it sent.
    pub bytes: u64,
    /// Its duration in seconds.
    pub seconds: f64,
    /// What guests of its volumes wrote before, in bytes a second.
    #[serde(default)]
    pub load: f64,
    /// The natural logarithm of its duration divided by the forecast one; `None`: it had no forecast.
    pub off: Option<f64>,
}

impl Sample {
    /// Returns what an ended migration shows; `None`: it was too short to show anything.
    pub fn of(bytes: u64, seconds: f64, load: f64, forecast: Option<f64>) -> Option<Self> {
        let is_long = seconds >= 0.01 && bytes >= 1 << 20;
        let off = forecast.filter(|forecast| *forecast > 0.0);
        let off = off.map(|forecast| (seconds / forecast).ln().clamp(-OFF_MAX, OFF_MAX));
        is_long.then_some(Self { bytes, seconds, load, off })
    }
}

/// The memory of one way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Route {
    samples: VecDeque<Sample>,
}

/// From which knowledge a forecast was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From this many earlier migrations of the same way.
    Learned(usize),
    /// From a rate that was measured or stated, without any earlier migration of this way.
    Rate,
}

/// A range that is to hold eight of ten outcomes, and the middle one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Range {
    /// A tenth of the outcomes lies below it.
    pub least: f64,
    /// Half of the outcomes lie below it.
    pub middle: f64,
    /// A tenth of the outcomes lies above it.
    pub most: f64,
}

/// What to expect of a migration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// Its duration in seconds, if it ends.
    pub seconds: Range,
    /// The bytes that it sends.
    pub bytes: Range,
    /// How long guests are held at its end, in seconds.
    pub downtime: Range,
    /// The part of the runs that end, 0 to 1.
    pub ends: f64,
    /// What it was made from.
    pub origin: Origin,
}

impl Route {
    /// Adds what an ended migration has shown.
    pub fn learn(&mut self, sample: Sample) {
        if self.samples.len() == SAMPLES_MAX {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// Returns the middle one of the rates of earlier migrations, in bytes a second.
    pub fn rate(&self) -> Option<f64> {
        middle(self.rates(self.overhead()))
    }

    /// Returns the seconds that a migration of this way takes besides its bytes.
    ///
    /// It is where the line through migrations of different sizes begins (Theil and Sen: the middle one of the slopes of all
    /// pairs, which an odd one out does not move).
    fn overhead(&self) -> f64 {
        let pairs = self.samples.iter().enumerate().flat_map(|(index, one)| {
            let others = self.samples.iter().skip(index + 1);
            others.filter_map(move |two| {
                let (less, more) = if one.bytes < two.bytes { (one, two) } else { (two, one) };
                let differ = more.bytes as f64 >= DIFFERENT * less.bytes as f64;
                differ.then(|| (more.seconds - less.seconds) / (more.bytes - less.bytes) as f64)
            })
        });
        let shortest = self.samples.iter().map(|sample| sample.seconds).fold(f64::INFINITY, f64::min);
        let Some(slope) = middle(pairs.collect()).filter(|slope| *slope > 0.0) else { return 0.0 };
        let starts = self.samples.iter().map(|sample| sample.seconds - slope * sample.bytes as f64);
        middle(starts.collect()).unwrap_or_default().clamp(0.0, shortest * OVERHEAD_MAX)
    }

    /// Returns what migrations beside guests of about this load have shown: copies are slower beside a busy guest.
    fn like(&self, load: f64) -> Self {
        let far = |sample: &Sample| ((sample.load + LOAD_NONE) / (load + LOAD_NONE)).ln().abs();
        let mut samples: Vec<Sample> = self.samples.iter().copied().collect();
        samples.sort_by(|one, two| far(one).total_cmp(&far(two)));
        let near = samples.iter().take_while(|sample| far(sample) <= ALIKE).count();
        samples.truncate(near.max(ALIKE_MIN));
        Self { samples: samples.into() }
    }

    fn rates(&self, overhead: f64) -> Vec<f64> {
        self.samples.iter().map(|sample| sample.bytes as f64 / (sample.seconds - overhead)).collect()
    }

    /// Runs a migration ahead. `rate`, in bytes a second, is used where this way is new; `limit` is an ordered limit. `None`: no
    /// rate is known.
    pub fn forecast(&self, question: &Question, rate: Option<f64>, limit: Option<f64>) -> Option<Forecast> {
        let like = self.like(question.written.bytes_per_second());
        let overhead = self.overhead();
        let rates = like.rates(overhead);
        let middle = middle(rates.clone()).or(rate)?;
        let capped = |rate: f64| limit.map_or(rate, |limit| rate.min(limit)).max(1.0);
        let mut random = Random::new(question.held_bytes ^ self.samples.len() as u64);
        let (mean, deviation) = like.off();
        let mut courses: Vec<Course> = Vec::new();
        for _ in 0..RUNS {
            let course = question.run(capped(drawn(&rates, middle, &mut random)), &mut random);
            // An ordered limit is exact: what the rate was off by does not count then.
            let off = if limit.is_some_and(|limit| limit < middle) {
                KNOWN * random.normal()
            } else {
                mean + deviation * random.normal()
            };
            courses.push(Course { seconds: (course.seconds + overhead) * off.exp(), ..course });
            let steps: u32 = courses.iter().map(|course| course.steps).sum();
            if steps > STEPS_MAX && courses.len() >= RUNS_MIN {
                break;
            }
        }
        let ended: Vec<&Course> = courses.iter().filter(|course| course.ends).collect();
        // Of migrations that never end, what they cost until they are given up.
        let told: Vec<&Course> = if ended.is_empty() { courses.iter().collect() } else { ended.clone() };
        let range =
            |figure: fn(&Course) -> f64| Range::of(told.iter().map(|course| figure(course)).collect());
        Some(Forecast {
            seconds: range(|course| course.seconds),
            bytes: range(|course| course.bytes),
            downtime: range(|course| course.downtime),
            ends: ended.len() as f64 / courses.len() as f64,
            origin: if self.samples.is_empty() { Origin::Rate } else { Origin::Learned(self.samples.len()) },
        })
    }

    /// Returns the mean and the deviation of how far forecasts were off, as natural logarithms.
    fn off(&self) -> (f64, f64) {
        let off: Vec<f64> = self.samples.iter().filter_map(|sample| sample.off).collect();
        let count = off.len() as f64;
        // Three outcomes as uncertain as nothing, so that one lucky forecast promises nothing.
        let mean = off.iter().sum::<f64>() / (count + 1.0);
        let squares: f64 = off.iter().map(|off| (off - mean).powi(2)).sum();
        let deviation = ((squares + 3.0 * UNKNOWN * UNKNOWN) / (count * count / 3.0 + count + 3.0)).sqrt();
        (mean, deviation.max(KNOWN))
    }
}

/// Draws a rate of an earlier migration, smoothed, or the given one.
fn drawn(rates: &[f64], given: f64, random: &mut Random) -> f64 {
    let index = usize::try_from(random.below(rates.len() as u64)).unwrap_or_default();
    rates.get(index).copied().unwrap_or(given) * (KNOWN * random.normal()).exp()
}

fn middle(mut figures: Vec<f64>) -> Option<f64> {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied()
}

impl Range {
    fn of(mut figures: Vec<f64>) -> Self {
        figures.sort_by(f64::total_cmp);
        let at = |part: f64| {
            // Between 0 and the number of figures.
            let index = (part * figures.len().saturating_sub(1) as f64).round() as usize;
            figures.get(index).copied().unwrap_or_default()
        };
        Self { least: at(OUTSIDE), middle: at(0.5), most: at(1.0 - OUTSIDE) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use migration::strategy::Choice;

    use super::*;
    use crate::writing::{Window, Written};

    const MIB: f64 = (1 << 20) as f64;

    fn question() -> Question {
        Question {
            held_bytes: 1 << 30,
            written: Written::default(),
            choice: Choice::default(),
            round_trip: None,
            downtime_max: Duration::from_millis(500),
            memory_bytes: 0,
        }
    }

    #[test]
    fn nothing_known_is_no_forecast_and_a_rate_is_a_wide_one() {
        assert_eq!(Route::default().forecast(&question(), None, None), None);
        let told = Route::default().forecast(&question(), Some(100.0 * MIB), None).unwrap();
        assert_eq!((told.origin, told.ends), (Origin::Rate, 1.0));
        let Range { least, middle, most } = told.seconds;
        assert!(least < 8.0 && (8.5..12.5).contains(&middle) && most > 12.5, "{told:?}");
    }

    #[test]
    fn an_ordered_limit_is_kept_exactly() {
        let told = Route::default().forecast(&question(), Some(500.0 * MIB), Some(50.0 * MIB)).unwrap();
        let Range { least, middle, most } = told.seconds;
        assert!(least > 18.5 && (19.5..21.5).contains(&middle) && most < 22.5, "{told:?}");
    }

    /// Eight of ten outcomes lie in the range, whatever the way is like, once it has been gone a few times.
    #[test]
    fn ranges_hold_what_they_are_to_hold() {
        let mut random = Random::new(7);
        let (mut within, mut all, mut errors) = (0, 0, Vec::new());
        for _ in 0..6 {
            let rate = (20.0 + 400.0 * random.part()) * MIB;
            let spread = 0.05 + 0.15 * random.part();
            let mut route = Route::default();
            for turn in 0..10 {
                let bytes = (1 << 28) + random.below(1 << 31);
                let question = Question { held_bytes: bytes, ..question() };
                let told = route.forecast(&question, Some(100.0 * MIB), None).unwrap();
                let seconds = bytes as f64 / (rate * (spread * random.normal()).exp());
                if turn >= 4 {
                    all += 1;
                    within += i32::from((told.seconds.least..told.seconds.most).contains(&seconds));
                    errors.push((told.seconds.middle / seconds).ln().abs());
                }
                route.learn(Sample::of(bytes, seconds, 0.0, Some(told.seconds.middle)).unwrap());
            }
        }
        errors.sort_by(f64::total_cmp);
        let part = f64::from(within) / f64::from(all);
        assert!((0.7..0.95).contains(&part), "{part} of the outcomes are in the range");
        assert!(errors[errors.len() / 2] < 0.12, "the forecast is off by {:.3}", errors[errors.len() / 2]);
    }

    #[test]
    fn what_each_migration_takes_besides_its_bytes_is_learned() {
        let mut route = Route::default();
        for mib in [50_u32, 100, 200, 400, 100, 50, 300] {
            let seconds = 0.5 + f64::from(mib) / 100.0;
            route.learn(Sample::of(u64::from(mib) << 20, seconds, 0.0, None).unwrap());
        }
        assert!((route.overhead() - 0.5).abs() < 0.01, "{}", route.overhead());
        assert!((route.rate().unwrap() / MIB - 100.0).abs() < 1.0, "{:?}", route.rate());
        let told = route.forecast(&Question { held_bytes: 1 << 26, ..question() }, None, None).unwrap();
        assert!((told.seconds.middle - 1.14).abs() < 0.2, "{told:?}");
    }

    #[test]
    fn beside_a_busy_guest_it_is_as_slow_as_it_was_beside_a_busy_guest() {
        let mut route = Route::default();
        for turn in 0..12 {
            let (load, rate) = if turn % 2 == 0 { (0.0, 200.0) } else { (50.0 * MIB, 50.0) };
            route.learn(Sample::of(1 << 30, 1024.0 / rate, load, None).unwrap());
        }
        let busy = Window { seconds: 10.0, distinct_bytes: 1 << 20, bytes: 500 << 20, writes: 32_000 };
        let told =
            |written| route.forecast(&Question { written, ..question() }, None, None).unwrap().seconds.middle;
        assert!((4.5..6.0).contains(&told(Written::default())), "{}", told(Written::default()));
        let beside = told(Written { windows: [Window::default(), busy, busy, busy] });
        assert!(beside > 19.0, "{beside}");
    }

    #[test]
    fn what_is_long_ago_is_forgotten_and_an_odd_one_out_changes_little() {
        let mut route = Route::default();
        for _ in 0..40 {
            route.learn(Sample::of(1 << 30, 10.0, 0.0, None).unwrap());
        }
        route.learn(Sample::of(1 << 30, 1000.0, 0.0, Some(10.0)).unwrap());
        assert_eq!(route.samples.len(), SAMPLES_MAX);
        assert!((route.rate().unwrap() - f64::from(1 << 30) / 10.0).abs() < 1.0);
        assert_eq!(Sample::of(100, 10.0, 0.0, None), None);
    }
}
