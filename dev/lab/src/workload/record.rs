//! A guest's record: every completion goes into a histogram of latencies, a timeline, and a list of stalls.
//!
//! ```text
//!   mark "before" ──── mark "during" ─────── mark "after" ───── mark "end"
//!        └── between() ──┘└──── between() ─────┘
//! ```

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use super::disruption::Window;

/// Length of a step of the timeline.
pub const STEP: Duration = Duration::from_millis(100);
/// Shorter gaps between completions are not recorded as stalls, at first.
const STALL_MIN: Duration = Duration::from_micros(100);
/// Number of recorded stalls; beyond it the shortest are dropped.
const STALLS_MAX: usize = 1 << 20;
/// Number of recorded latencies of a step: more than any guest has requests in it.
const STEP_LATENCIES_MAX: usize = 1 << 18;
/// The longest latency that the histogram distinguishes, in microseconds: ten minutes, longer than any deadline.
const LATENCY_US_MAX: u64 = 600_000_000;

/// Records completions as they come.
#[derive(Clone, Debug)]
pub struct Recorder {
    started: Instant,
    last_completion: Option<Instant>,
    completions: u64,
    latencies_us: Histogram<u64>,
    timeline: Vec<Step>,
    step_latencies_us: Vec<u32>,
    stalls: Vec<Stall>,
    stall_min: Duration,
}

/// A step of the timeline, a tenth of a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Requests completed in this step.
    pub completions: u32,
    /// The longest latency in this step, in microseconds.
    pub latency_us_max: u32,
    /// 99th percentile of the latencies, in microseconds; 0 for an unfinished step.
    latency_us_p99: u32,
}

impl Step {
    /// Returns the step as a window for disruption. An unfinished step is judged by its slowest request.
    pub fn window(&self) -> Window {
        let latency_us = if self.latency_us_p99 > 0 { self.latency_us_p99 } else { self.latency_us_max };
        Window {
            length: STEP,
            requests: self.completions.into(),
            latency_p99: (self.completions > 0).then(|| Duration::from_micros(latency_us.into())),
        }
    }

    /// Returns the completions per second.
    pub fn iops(&self) -> f64 {
        f64::from(self.completions) / STEP.as_secs_f64()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stall {
    began: Instant,
    ended: Instant,
}

impl Stall {
    fn length(&self) -> Duration {
        self.ended.duration_since(self.began)
    }
}

/// A moment, with everything recorded until then.
#[derive(Clone, Debug)]
pub struct Mark {
    /// The time of the mark.
    pub at: Instant,
    completions: u64,
    latencies_us: Histogram<u64>,
}

/// The figures between two marks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Time between the marks.
    pub duration: Duration,
    /// Number of completions between the marks.
    pub completions: u64,
    /// Completions per second between the marks.
    pub iops: f64,
    /// Median latency of the requests.
    pub latency_median: Duration,
    /// 99th percentile of the latencies.
    pub latency_p99: Duration,
    /// Latency of the slowest request.
    pub latency_max: Duration,
    /// The longest time without a completion that lies in the window, at least in part.
    pub longest_stall: Duration,
}

impl Recorder {
    /// Returns a recorder for a guest that begins to work at `now`.
    pub fn new(now: Instant) -> Self {
        Self {
            started: now,
            last_completion: Some(now),
            completions: 0,
            latencies_us: new_histogram(),
            timeline: Vec::new(),
            step_latencies_us: Vec::new(),
            stalls: Vec::new(),
            stall_min: STALL_MIN,
        }
    }

    /// Records a completion. Calls come in the order of completion.
    pub fn record(&mut self, submitted: Instant, completed: Instant) {
        let latency_us = micros(completed.saturating_duration_since(submitted));
        self.completions += 1;
        self.latencies_us.saturating_record(latency_us.max(1));
        self.record_step(completed, latency_us);
        if let Some(began) = self.last_completion.replace(completed)
            && completed.saturating_duration_since(began) >= self.stall_min
        {
            self.record_stall(Stall { began, ended: completed });
        }
    }

    /// Records that the guest pauses by itself: the time until [`Recorder::resume`] is not a stall.
    pub fn pause(&mut self) {
        self.last_completion = None;
    }

    /// Records that the guest works again.
    pub fn resume(&mut self, now: Instant) {
        self.last_completion = Some(now);
    }

    /// Returns the number of completions so far.
    pub fn completions(&self) -> u64 {
        self.completions
    }

    /// Returns the whole record in steps of [`STEP`].
    pub fn timeline(&self) -> &[Step] {
        &self.timeline
    }

    /// Returns the steps of the timeline from one mark to the other; adjoining windows share no step.
    pub fn steps_between(&self, first: &Mark, last: &Mark) -> &[Step] {
        // An idle step at the very end is not in the timeline yet.
        let end = self.step_of(last.at).min(self.timeline.len());
        &self.timeline[self.step_of(first.at).min(end)..end]
    }

    /// Marks a moment, for comparison with another.
    pub fn mark(&self, now: Instant) -> Mark {
        Mark { at: now, completions: self.completions, latencies_us: self.latencies_us.clone() }
    }

    /// Returns the figures from `first` to `last`, both marks of this recorder.
    pub fn between(&self, first: &Mark, last: &Mark) -> Summary {
        let duration = last.at.saturating_duration_since(first.at);
        let completions = last.completions.saturating_sub(first.completions);
        let mut latencies_us = last.latencies_us.clone();
        // The histograms have the same layout, and the later contains the earlier. Otherwise the whole is the honest answer.
        if latencies_us.subtract(&first.latencies_us).is_err() {
            latencies_us.clone_from(&last.latencies_us);
        }
        let quantile = |quantile| Duration::from_micros(latencies_us.value_at_quantile(quantile));
        Summary {
            duration,
            completions,
            iops: per_second(completions, duration),
            latency_median: quantile(0.5),
            latency_p99: quantile(0.99),
            latency_max: Duration::from_micros(latencies_us.max()),
            longest_stall: self.longest_stall(first.at, last.at),
        }
    }

    /// Returns the longest time without a completion that lies, at least in part, between two moments.
    ///
    /// A stall that lasts until `to` counts up to `to`. Without a recorded stall, the result is the threshold of recording (at
    /// first a tenth of a millisecond): no window is completely free of stalls.
    pub fn longest_stall(&self, from: Instant, to: Instant) -> Duration {
        let open = self
            .last_completion
            .filter(|began| *began < to)
            .map(|began| Stall { began, ended: to })
            .filter(|stall| stall.ended > from);
        let ended = self.stalls.iter().filter(|stall| stall.began < to && stall.ended > from);
        ended.chain(open.iter()).map(Stall::length).max().unwrap_or(Duration::ZERO).max(self.stall_min)
    }

    fn step_of(&self, moment: Instant) -> usize {
        let steps = moment.saturating_duration_since(self.started).as_millis() / STEP.as_millis();
        usize::try_from(steps).unwrap_or(usize::MAX)
    }

    fn record_step(&mut self, completed: Instant, latency_us: u64) {
        let step = self.step_of(completed);
        if step >= self.timeline.len() {
            self.end_step();
            self.timeline.resize(step + 1, Step::default());
        }
        let latency_us = u32::try_from(latency_us).unwrap_or(u32::MAX);
        let step = &mut self.timeline[step];
        step.completions += 1;
        step.latency_us_max = step.latency_us_max.max(latency_us);
        if self.step_latencies_us.len() < STEP_LATENCIES_MAX {
            self.step_latencies_us.push(latency_us);
        }
    }

    fn end_step(&mut self) {
        let rank = self.step_latencies_us.len() * 99 / 100;
        if let Some(step) = self.timeline.last_mut()
            && !self.step_latencies_us.is_empty()
        {
            step.latency_us_p99 = *self.step_latencies_us.select_nth_unstable(rank).1;
        }
        self.step_latencies_us.clear();
    }

    fn record_stall(&mut self, stall: Stall) {
        while self.stalls.len() >= STALLS_MAX {
            self.stall_min *= 2;
            self.stalls.retain(|stall| stall.length() >= self.stall_min);
        }
        self.stalls.push(stall);
    }
}

/// Returns `count` per second; 0 if no time has passed.
pub fn per_second(count: u64, duration: Duration) -> f64 {
    if duration.is_zero() { 0.0 } else { count as f64 / duration.as_secs_f64() }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn new_histogram() -> Histogram<u64> {
    #[expect(
        clippy::expect_used,
        reason = "the bounds are constants that satisfy the library's only conditions"
    )]
    Histogram::new_with_bounds(1, LATENCY_US_MAX, 3).expect("1 ≤ low, 2·low ≤ high, digits ≤ 5")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a moment after `start`: a clock that the test controls.
    fn at(start: Instant, milliseconds: u64) -> Instant {
        start + Duration::from_millis(milliseconds)
    }

    /// Records completions every 2 ms from `from` to `to`, each after 1 ms.
    fn work(recorder: &mut Recorder, start: Instant, from: u64, to: u64) {
        for milliseconds in (from..to).step_by(2) {
            recorder.record(at(start, milliseconds), at(start, milliseconds + 1));
        }
    }

    #[test]
    fn rates_and_stalls_belong_to_the_window_in_which_they_happened() {
        let start = Instant::now();
        let mut recorder = Recorder::new(start);
        let before = recorder.mark(start);
        work(&mut recorder, start, 0, 1000);
        let during = recorder.mark(at(start, 1000));
        work(&mut recorder, start, 1000, 1200);
        work(&mut recorder, start, 1500, 2000);
        let after = recorder.mark(at(start, 2000));
        work(&mut recorder, start, 2000, 3000);
        let end = recorder.mark(at(start, 3000));

        let summary = recorder.between(&before, &during);
        assert_eq!((summary.completions, summary.iops), (500, 500.0));
        assert_eq!(summary.longest_stall, Duration::from_millis(2));
        let summary = recorder.between(&during, &after);
        assert_eq!((summary.completions, summary.iops), (350, 350.0));
        assert_eq!(summary.longest_stall, Duration::from_millis(302));
        let summary = recorder.between(&after, &end);
        assert_eq!(summary.longest_stall, Duration::from_millis(2));
        assert_eq!(summary.latency_median, Duration::from_millis(1));
    }

    #[test]
    fn a_stall_counts_for_both_sides_of_a_mark_within_it() {
        let start = Instant::now();
        let mut recorder = Recorder::new(start);
        let first = recorder.mark(start);
        recorder.record(start, at(start, 10));
        let middle = recorder.mark(at(start, 20));
        recorder.record(start, at(start, 60));
        let last = recorder.mark(at(start, 61));
        assert_eq!(recorder.between(&first, &middle).longest_stall, Duration::from_millis(50));
        assert_eq!(recorder.between(&middle, &last).longest_stall, Duration::from_millis(50));
    }

    #[test]
    fn a_stall_that_has_not_ended_counts_and_a_pause_does_not() {
        let start = Instant::now();
        let mut recorder = Recorder::new(start);
        recorder.record(start, at(start, 10));
        assert_eq!(recorder.longest_stall(start, at(start, 500)), Duration::from_millis(490));
        recorder.pause();
        assert_eq!(recorder.longest_stall(at(start, 20), at(start, 500)), STALL_MIN);
        recorder.resume(at(start, 600));
        recorder.record(at(start, 600), at(start, 601));
        assert_eq!(recorder.longest_stall(at(start, 20), at(start, 700)), Duration::from_millis(99));
    }

    #[test]
    fn the_timeline_has_a_step_for_every_tenth_of_a_second() {
        let start = Instant::now();
        let mut recorder = Recorder::new(start);
        recorder.record(at(start, 40), at(start, 50));
        recorder.record(at(start, 40), at(start, 320));
        let expected = [(1, 10_000), (0, 0), (0, 0), (1, 280_000)];
        let steps: Vec<_> =
            recorder.timeline().iter().map(|step| (step.completions, step.latency_us_max)).collect();
        assert_eq!(steps, expected);
        assert_eq!(recorder.timeline()[0].iops(), 10.0);
        let mark = |milliseconds| recorder.mark(at(start, milliseconds));
        assert_eq!(recorder.steps_between(&mark(50), &mark(220)), &recorder.timeline()[0..2]);
        assert_eq!(recorder.steps_between(&mark(220), &mark(9000)), &recorder.timeline()[2..4]);
        assert_eq!(recorder.steps_between(&mark(8000), &mark(9000)), []);
    }

    #[test]
    fn a_step_tells_what_its_slowest_hundredth_took() {
        let start = Instant::now();
        let mut recorder = Recorder::new(start);
        for number in 0..200 {
            let completed = at(start, 10 + number / 4);
            let latency = if number % 100 == 50 { 7000 } else { 1000 + number };
            recorder.record(completed - Duration::from_micros(latency), completed);
        }
        let p99 = |recorder: &Recorder| recorder.timeline()[0].window().latency_p99;
        assert_eq!(p99(&recorder), Some(Duration::from_micros(7000)), "it is not over");
        recorder.record(start, at(start, 310));
        assert_eq!(p99(&recorder), Some(Duration::from_micros(7000)));
        let standstill = recorder.timeline()[1].window();
        assert_eq!((standstill.requests, standstill.latency_p99), (0, None));
        let latencies = (1..=300).map(|number| if number == 300 { 9000 } else { number });
        for latency in latencies {
            recorder.record(at(start, 420) - Duration::from_micros(latency), at(start, 420));
        }
        recorder.record(at(start, 500), at(start, 501));
        assert_eq!(recorder.timeline()[4].window().latency_p99, Some(Duration::from_micros(298)));
    }

    #[test]
    fn the_list_of_stalls_is_bounded_and_keeps_the_long_ones() {
        let start = Instant::now();
        let mut recorder = Recorder::new(start);
        let mut now = at(start, 7);
        recorder.record(start, now);
        for _ in 0..STALLS_MAX + 1 {
            now += STALL_MIN;
            recorder.record(now, now);
        }
        assert!(recorder.stalls.len() < STALLS_MAX);
        assert_eq!(recorder.longest_stall(start, now), Duration::from_millis(7));
    }
}
