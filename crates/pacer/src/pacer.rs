//! The pacer of one disk: it pauses all copies together, measures, and sets their common rate.
//!
//! ```text
//!   Working ──pause is due──► Draining ──no chunk in flight──► Calm ──enough requests, or time is up──► Working
//!      │ every 20 to 100 ms: the law                             └─► the latencies without us
//!      └─ between two chunks: the same latencies, without a pause
//! ```
//! A disk without guests is copied at full speed.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::baseline::{Baseline, Sums};
use crate::bucket::Bucket;
use crate::class::RequestClass;
use crate::histogram::Histogram;
use crate::law::{Impact, Law, Seen};
use crate::mover::{Limit, Terms};
use crate::planted::{Bug, broken};
use crate::recent::Recent;

/// A disk is idle when no guest has asked for this long.
const IDLE_AFTER: Duration = Duration::from_millis(20);
/// The time between two changes of the rate: at least this, with enough samples …
const STEP_MIN: Duration = Duration::from_millis(20);
/// … and at most this.
const STEP_MAX: Duration = Duration::from_millis(100);
const STEP_SAMPLES: u32 = 16;
/// The time between two pauses, where things change …
const PAUSE_EVERY_MIN: Duration = Duration::from_millis(500);
/// … and where they are steady.
const PAUSE_EVERY_MAX: Duration = Duration::from_secs(4);
/// The time after which a pause comes early, if guests lose far more than they may, or lost more in the last pause.
const PAUSE_EARLY: Duration = Duration::from_millis(250);
/// Requests beside us that take less than this part of what they take without us show that the guests' load is another.
const FASTER: f64 = 0.85;
/// How long a pause waits for the chunks in flight. A target that hangs does not stop the measuring for ever.
const DRAIN_MAX: Duration = Duration::from_secs(1);
/// The disk may still work for us this long after the last chunk has ended.
const SETTLES: Duration = Duration::from_millis(2);
/// A pause ends with this many samples, but not before this time: latencies come in spells …
const CALM_SAMPLES: u32 = 64;
const CALM_MIN: Duration = Duration::from_millis(20);
/// … nor after this time.
const CALM_MAX: Duration = Duration::from_millis(80);
/// Samples that are kept of one measurement, and of one step. While a migration rests, nobody takes them.
const SAMPLES_MAX: u32 = 1 << 16;
/// A pause with fewer samples tells nothing.
const CALM_SAMPLES_MIN: u32 = 8;
/// A step with this many requests between chunks is compared with these, and needs no earlier measurement.
const BETWEEN_SAMPLES: u32 = 16;
/// Latencies that differ by less than this between two pauses are steady.
const STEADY: f64 = 1.15;
/// Latencies that differ by more are those of another disk, or of another load.
const CHANGED: f64 = 1.5;
/// The span of time whose slowest requests are judged together.
const TAIL_SPAN: Duration = Duration::from_secs(2);
/// A guest's request older than this many times the 99th percentile without us: no chunk begins.
const BRAKE: u32 = 4;
/// A request older than this waits for something else than the disk, such as a host that is away.
const WAITS_ELSEWHERE: Duration = Duration::from_secs(5);
/// Until when a caller asks again whose chunk was not begun, where no time is known.
const ASK_AGAIN: Duration = Duration::from_millis(1);
/// The bytes of a chunk beside guests, for which a request may have to wait …
const CHUNK_BESIDE_GUESTS: u64 = 128 << 10;
/// … on a disk that takes longer for it than for guests' slowest requests.
const CHUNK_SMALL: u64 = 64 << 10;
/// The first request of a burst waits this long at most for what is in flight at an idle disk …
const IDLE_DRAINS: Duration = Duration::from_millis(4);
/// … also if guests ask, but so seldom that such waits cost them this part of what they may lose …
const QUIET: f64 = 0.5;
/// … but so many bytes are in flight whatever they take, in two chunks, or the disk would not be busy.
const IDLE_IN_FLIGHT_MIN: u64 = 256 << 10;
const IDLE_IN_FLIGHT_MAX: u64 = 4 << 20;
/// How far a mover falls behind others at most, of what it makes up for later: what it did not want, it has no claim on.
const LAG_MAX: f64 = (512 << 10) as f64;
/// How much longer than its chunks a copy may keep a disk busy: what was written is in the disk's cache.
const AFTER_EFFECT: f64 = 2.0;
/// A mover that was to ask again, and is this late, has nothing to do.
const LATE: Duration = Duration::from_millis(50);

/// What all gauges of a disk show at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Guests {
    pub(crate) in_flight: u32,
    /// The arrival of the oldest request in flight.
    pub(crate) oldest: Option<Duration>,
    /// When a request arrived or ended last.
    pub(crate) seen: Option<Duration>,
}

/// What guests of a store have to do with a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    /// The request ran beside copies.
    Us,
    /// No chunk was in flight meanwhile: in a pause, or between two chunks.
    Nobody,
}

/// One guest's request that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) class: RequestClass,
    pub(crate) latency: Duration,
    pub(crate) beside: Beside,
}

/// What a store's pacer does at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Status {
    /// The rate of all copies together while guests are active, in bytes a second.
    pub bytes_per_second: f64,
    /// The part of their throughput, 0 to 1, that guests lose to copies which wait for each answer. For others it is an upper bound.
    pub loss: f64,
    /// Whether guests are active.
    pub has_guests: bool,
}

impl Status {
    /// Returns the least rate and the greatest loss of two disks.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            bytes_per_second: self.bytes_per_second.min(other.bytes_per_second),
            loss: self.loss.max(other.loss),
            has_guests: self.has_guests || other.has_guests,
        }
    }
}

/// What the gauges do with requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nobody copies: nothing is measured.
    Unwatched,
    /// A chunk is in flight.
    Busy,
    /// Requests that arrive from then on have the disk for themselves.
    Calm(Duration),
}

#[derive(Debug)]
struct MoverEntry {
    terms: Terms,
    bytes_in_flight: u64,
    /// The bytes that it has moved, divided by the weight of its class. The waiting mover with the least is next.
    served: f64,
    /// Until when it counts as waiting; `None`: it does not wait.
    waits_until: Option<Duration>,
}

impl MoverEntry {
    fn waits(&self, now: Duration) -> bool {
        self.waits_until.is_some_and(|until| now < until)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Pacer {
    phase: Phase,
    movers: BTreeMap<u64, MoverEntry>,
    baseline: Baseline,
    law: Law,
    bucket: Bucket,
    step: Step,
    tail: Tail,
    calm: CalmSamples,
    pauses: Pauses,
    recent: Recent,
    /// What copies moved lately while guests were idle, in bytes a second.
    idle_rate: f64,
    /// Since when a chunk is in flight; `None`: none is.
    busy_since: Option<Duration>,
    /// When a chunk began last, and when one ended last.
    began: Duration,
    ended: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Working,
    Draining {
        since: Duration,
    },
    Calm {
        since: Duration,
    },
}

/// The measurements since the last change of the rate.
#[derive(Debug, Default)]
struct Step {
    since: Duration,
    sums: Sums,
    samples: u32,
    /// Of these, the requests beside which no chunk was in flight.
    between: Sums,
    between_samples: u32,
    bytes_moved: u64,
    /// For how long a chunk was in flight, without the present one.
    busy: Duration,
}

#[derive(Debug, Default)]
struct Tail {
    since: Duration,
    all: Histogram,
    /// The latencies of requests in pauses and between chunks. Earlier spans count for less.
    without_us: Histogram,
}

#[derive(Debug, Default)]
struct CalmSamples {
    sums: Sums,
    latencies: Vec<Duration>,
}

#[derive(Debug)]
struct Pauses {
    due: Duration,
    every: Duration,
    ended: Duration,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { due: Duration::ZERO, every: PAUSE_EVERY_MIN, ended: Duration::ZERO }
    }
}

impl Pacer {
    pub(crate) fn add(&mut self, now: Duration, id: u64, terms: Terms) {
        if self.movers.is_empty() {
            self.step = Step { since: now, ..Step::default() };
            self.tail = Tail { since: now, ..Tail::default() };
            self.recent = Recent::begin(now);
            // The earlier measurement is old.
            self.pauses = Pauses { due: now, ..Pauses::default() };
        }
        // A newcomer has no claim on what was moved before it came.
        let served = self.movers.values().map(|mover| mover.served).reduce(f64::min).unwrap_or_default();
        self.movers.insert(id, MoverEntry { terms, bytes_in_flight: 0, served, waits_until: None });
    }

    pub(crate) fn remove(&mut self, id: u64) {
        self.movers.remove(&id);
        if self.movers.is_empty() {
            self.phase = Phase::Working;
        }
    }

    pub(crate) fn set_terms(&mut self, id: u64, terms: Terms) {
        if let Some(mover) = self.movers.get_mut(&id) {
            mover.terms = terms;
        }
    }

    pub(crate) fn mode(&self) -> Mode {
        match self.phase {
            _ if self.movers.is_empty() => Mode::Unwatched,
            Phase::Calm { since } => Mode::Calm(since),
            _ if self.bytes_in_flight() > 0 => Mode::Busy,
            Phase::Working | Phase::Draining { .. } => Mode::Calm(self.ended + SETTLES),
        }
    }

    pub(crate) fn status(&self, now: Duration, guests: Guests) -> Status {
        Status { bytes_per_second: self.law.rate(), loss: self.law.loss(), has_guests: !is_idle(now, guests) }
    }

    pub(crate) fn take(&mut self, samples: &[Sample]) {
        self.recent.add(samples.len() as u32);
        for sample in samples {
            let class = sample.class.index();
            let latency = sample.latency.min(self.baseline.longest_believed(class));
            if self.phase == Phase::Working && self.step.samples < SAMPLES_MAX {
                self.step.sums[class].add(latency);
                self.step.samples += 1;
                self.tail.all.add(sample.latency);
                if sample.beside == Beside::Nobody {
                    self.step.between[class].add(latency);
                    self.step.between_samples += 1;
                }
            }
            if sample.beside == Beside::Nobody && self.calm.latencies.len() < SAMPLES_MAX as usize {
                self.tail.without_us.add(sample.latency);
                self.calm.sums[class].add(latency);
                self.calm.latencies.push(latency);
            }
        }
    }

    /// Returns when a mover may begin a chunk of this many bytes, or ask again, and what it waits for.
    pub(crate) fn ask(&mut self, now: Duration, guests: Guests, id: u64, bytes: u64) -> (Duration, Limit) {
        self.advance(now, guests);
        let (mut at, limit) = self.decide(now, guests, bytes, id);
        if at <= now && !self.is_next(now, id) {
            at = now + ASK_AGAIN;
        }
        if let Some(mover) = self.movers.get_mut(&id) {
            mover.waits_until = (at > now).then_some(at + LATE);
        }
        (at, limit)
    }

    fn decide(&mut self, now: Duration, guests: Guests, bytes: u64, id: u64) -> (Duration, Limit) {
        let pauses = self.phase != Phase::Working && !(broken(Bug::PausesOutOfStep) && id % 2 == 1);
        if pauses {
            return (now + ASK_AGAIN, Limit::Measuring);
        }
        if self.is_quiet(now, guests) {
            // A chunk that is too large by itself goes alone.
            let (in_flight, most) = (self.bytes_in_flight(), self.idle_in_flight_max(guests));
            let is_full = in_flight > 0 && most.is_some_and(|most| in_flight + bytes > most);
            return if is_full { (now + ASK_AGAIN, Limit::Disk) } else { (now, Limit::Disk) };
        }
        // Everything ends: however long guests wait, the least rate is kept.
        let floor_opens_at =
            self.began + Duration::from_secs_f64((bytes as f64 / self.law.floor()).min(600.0));
        if self.is_braked(now, guests) && now < floor_opens_at {
            return ((now + ASK_AGAIN).min(floor_opens_at), Limit::Guests);
        }
        (self.bucket.opens_at().max(now), Limit::Guests)
    }

    /// Returns whether no other mover that waits comes first.
    fn is_next(&self, now: Duration, id: u64) -> bool {
        let Some(mover) = self.movers.get(&id) else { return true };
        let mut others = self.movers.values().filter(|other| other.waits(now));
        if broken(Bug::ClassStarves) {
            return others.all(|other| other.terms.class >= mover.terms.class);
        }
        others.all(|other| other.served >= mover.served)
    }

    pub(crate) fn began(&mut self, now: Duration, guests: Guests, id: u64, bytes: u64) {
        if !self.is_quiet(now, guests) {
            self.bucket.spend(now, bytes, self.law.rate());
        }
        self.began = now;
        if self.bytes_in_flight() == 0 {
            self.busy_since = Some(now);
        }
        if let Some(mover) = self.movers.get_mut(&id) {
            mover.bytes_in_flight += bytes;
            mover.served += bytes as f64 / mover.terms.class.weight();
            mover.waits_until = None;
            let least = mover.served - LAG_MAX;
            self.movers.values_mut().for_each(|other| other.served = other.served.max(least));
        }
    }

    pub(crate) fn abandoned(&mut self, id: u64, bytes: u64) {
        if let Some(mover) = self.movers.get_mut(&id) {
            mover.bytes_in_flight = mover.bytes_in_flight.saturating_sub(bytes);
        }
    }

    pub(crate) fn ended(&mut self, now: Duration, guests: Guests, id: u64, bytes: u64) {
        self.abandoned(id, bytes);
        self.ended = now;
        if self.bytes_in_flight() == 0
            && let Some(since) = self.busy_since.take()
        {
            self.step.busy += now.saturating_sub(since.max(self.step.since));
        }
        self.step.bytes_moved += bytes;
        self.advance(now, guests);
    }

    /// Returns the most bytes of the next chunk; `None`: as many as the mover likes.
    pub(crate) fn chunk_bytes_max(&mut self, now: Duration, guests: Guests) -> Option<u64> {
        if !self.is_quiet(now, guests) {
            let within = self.baseline.p99().map(|p99| self.law.peak() * p99.as_secs_f64());
            let is_small = within.is_some_and(|bytes| bytes < CHUNK_BESIDE_GUESTS as f64);
            return Some(if is_small { CHUNK_SMALL } else { CHUNK_BESIDE_GUESTS });
        }
        self.idle_in_flight_max(guests).map(|max| max / 2)
    }

    /// Returns what may be in flight while guests are idle; `None`: no guest was ever seen.
    fn idle_in_flight_max(&self, guests: Guests) -> Option<u64> {
        let drains = (self.idle_rate * IDLE_DRAINS.as_secs_f64()) as u64;
        // A burst may be over before anything is measured beside much that is in flight.
        let were_seen = self.baseline.is_known() || guests.seen.is_some();
        were_seen.then(|| drains.clamp(IDLE_IN_FLIGHT_MIN, IDLE_IN_FLIGHT_MAX))
    }

    /// Returns whether the disk is idle, or guests ask so seldom that it may be copied like an idle one.
    fn is_quiet(&mut self, now: Duration, guests: Guests) -> bool {
        let waits = self.recent.per_second(now) * IDLE_DRAINS.as_secs_f64();
        let is_rare = guests.in_flight < 2 && waits < (self.impact().ratio() - 1.0) * QUIET;
        is_idle(now, guests) || is_rare
    }

    fn bytes_in_flight(&self) -> u64 {
        self.movers.values().map(|mover| mover.bytes_in_flight).sum()
    }

    fn is_braked(&self, now: Duration, guests: Guests) -> bool {
        let (Some(oldest), Some(p99)) = (guests.oldest, self.baseline.p99()) else { return false };
        let waits = now.saturating_sub(oldest);
        !broken(Bug::StuckIsIdle) && waits > p99 * BRAKE && waits < WAITS_ELSEWHERE
    }

    fn impact(&self) -> Impact {
        let strictest = self.movers.values().map(|mover| mover.terms.impact);
        strictest.reduce(|a, b| if b < a { b } else { a }).unwrap_or_default()
    }

    fn advance(&mut self, now: Duration, guests: Guests) {
        match self.phase {
            Phase::Working => self.work(now, guests),
            Phase::Draining { since } => {
                if self.bytes_in_flight() == 0 || broken(Bug::PausesOutOfStep) {
                    self.calm = CalmSamples::default();
                    self.phase = Phase::Calm { since: now + SETTLES };
                } else if now.saturating_sub(since) >= DRAIN_MAX {
                    self.end_pause(now);
                }
            }
            Phase::Calm { since } => {
                let samples = self.calm.latencies.len() as u32;
                let is_over = samples >= CALM_SAMPLES && now >= since + CALM_MIN
                    || now >= since + CALM_MAX
                    || now > since && is_idle(now, guests);
                if is_over {
                    self.learn();
                    self.end_pause(now);
                }
            }
        }
    }

    fn work(&mut self, now: Duration, guests: Guests) {
        let lasted = now.saturating_sub(self.step.since);
        if self.is_quiet(now, guests) {
            if lasted >= STEP_MAX {
                let moved = self.step.bytes_moved as f64 / lasted.as_secs_f64();
                self.law.note_moved(moved);
                self.idle_rate = (self.idle_rate + moved) / 2.0;
                self.begin_step(now);
            }
            return;
        }
        if now >= self.pauses.due && !(broken(Bug::NoPauses) && self.baseline.is_known()) {
            self.phase = Phase::Draining { since: now };
            return;
        }
        if lasted >= STEP_MAX || lasted >= STEP_MIN && self.step.samples >= STEP_SAMPLES {
            self.change_rate(now, lasted, guests);
            self.begin_step(now);
        }
        if self.calm.latencies.len() as u32 >= CALM_SAMPLES && !broken(Bug::NoPauses) {
            // So many requests between chunks are as good as a pause.
            self.learn();
            self.pauses.due = self.pauses.due.max(now + self.pauses.every);
        }
        if now.saturating_sub(self.tail.since) >= TAIL_SPAN {
            let Tail { since, all, without_us } = &mut self.tail;
            if let (Some(all), Some(without)) = (all.p99(), without_us.p99()) {
                self.law.judge_tail(all, without);
            }
            all.clear();
            without_us.scale(0.5);
            *since = now;
        }
    }

    fn change_rate(&mut self, now: Duration, lasted: Duration, guests: Guests) {
        let before = self.law.rate();
        let moved = self.step.bytes_moved as f64 / lasted.as_secs_f64().max(1e-6);
        let waits = guests.oldest.is_some_and(|oldest| oldest <= self.step.since);
        let is_stuck = self.step.samples == 0 && waits;
        if is_stuck {
            self.law.stuck();
        } else if let Some(ratio) = self.step_ratio() {
            let ratio = ratio.min(self.most_that_we_can_do(now, lasted));
            let seen = Seen { ratio, samples: self.step.samples, moved };
            let excess = self.law.step(seen, self.impact());
            let has_changed = excess > 2.0 || ratio < FASTER;
            if has_changed && now.saturating_sub(self.pauses.ended) >= PAUSE_EARLY {
                self.pauses.due = now;
            }
        }
        self.bucket.rescale(now, before / self.law.rate().max(1.0));
    }

    /// Returns how many times as long requests can have taken because of us. A guest gets nothing from the disk at the worst
    /// while a chunk is in flight, and the disk may work on for as long again; the rest has another cause.
    fn most_that_we_can_do(&self, now: Duration, lasted: Duration) -> f64 {
        let present = self
            .busy_since
            .filter(|_| self.bytes_in_flight() > 0)
            .map(|since| now.saturating_sub(since.max(self.step.since)));
        let busy = self.step.busy + present.unwrap_or_default();
        let part = busy.as_secs_f64() / lasted.as_secs_f64().max(1e-6);
        1.0 / (1.0 - (AFTER_EFFECT * part + 0.01).min(0.98))
    }

    /// Returns how many times as long requests took in this step as without us.
    fn step_ratio(&self) -> Option<f64> {
        if self.step.between_samples < BETWEEN_SAMPLES || broken(Bug::NoPauses) {
            return self.baseline.ratio(&self.step.sums);
        }
        // Both ran at the same time: what else made requests slow made both slow.
        let mut between = Baseline::default();
        between.learn(&self.step.between, &[]);
        between.ratio(&self.step.sums)
    }

    fn begin_step(&mut self, now: Duration) {
        self.step = Step { since: now, ..Step::default() };
    }

    fn learn(&mut self) {
        let calm = std::mem::take(&mut self.calm);
        let samples = calm.latencies.len() as u32;
        if samples < CALM_SAMPLES_MIN && (samples == 0 || self.baseline.is_known()) {
            return;
        }
        let change = self.baseline.learn(&calm.sums, &calm.latencies);
        if change >= CHANGED {
            self.law.begin_anew();
        }
        self.pauses.every = match change {
            change if change < STEADY => (self.pauses.every * 2).min(PAUSE_EVERY_MAX),
            _ => PAUSE_EVERY_MIN,
        };
    }

    fn end_pause(&mut self, now: Duration) {
        self.phase = Phase::Working;
        self.pauses = Pauses { due: now + self.pauses.every, ended: now, ..self.pauses };
        self.begin_step(now);
    }
}

fn is_idle(now: Duration, guests: Guests) -> bool {
    let quiet_for = guests.seen.map_or(Duration::MAX, |seen| now.saturating_sub(seen));
    let waits_elsewhere = quiet_for >= WAITS_ELSEWHERE;
    quiet_for >= IDLE_AFTER && (guests.in_flight == 0 || waits_elsewhere || broken(Bug::StuckIsIdle))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class::MoverClass;

    const CHUNK: u64 = 512 << 10;

    fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    fn pacer() -> Pacer {
        let mut pacer = Pacer::default();
        pacer.add(ms(1000), 1, Terms { class: MoverClass::Migration, impact: Impact::default() });
        pacer
    }

    fn samples(count: usize, beside: Beside) -> Vec<Sample> {
        vec![Sample { class: RequestClass::read(4096), latency: Duration::from_micros(100), beside }; count]
    }

    #[test]
    fn what_nobody_takes_is_not_kept_for_ever() {
        let mut pacer = pacer();
        for _ in 0..40 {
            pacer.take(&samples(10_000, Beside::Nobody));
        }
        assert_eq!((pacer.step.samples, pacer.calm.latencies.len() as u32), (SAMPLES_MAX, SAMPLES_MAX));
    }

    #[test]
    fn a_request_that_waits_for_another_host_stops_no_copy() {
        let mut pacer = pacer();
        let guests = Guests { in_flight: 1, oldest: Some(ms(900)), seen: Some(ms(900)) };
        let (at, limit) = pacer.ask(ms(1000), guests, 1, CHUNK);
        assert!(at > ms(1000) && limit == Limit::Measuring, "its first seconds count: {limit:?}");
        let later = ms(900) + WAITS_ELSEWHERE;
        pacer.ask(later, guests, 1, CHUNK);
        pacer.ask(later + CALM_MAX, guests, 1, CHUNK);
        let now = later + CALM_MAX + ms(1);
        assert_eq!(pacer.ask(now, guests, 1, CHUNK), (now, Limit::Disk));
    }

    #[test]
    fn chunks_that_were_abandoned_keep_the_disk_no_longer_busy() {
        let mut pacer = pacer();
        let busy = Guests { in_flight: 1, oldest: Some(ms(1000)), seen: Some(ms(1000)) };
        pacer.began(ms(1000), busy, 1, CHUNK);
        pacer.abandoned(1, CHUNK);
        assert!(pacer.most_that_we_can_do(ms(1100), ms(100)) < 1.02);
        pacer.began(ms(1150), busy, 1, CHUNK);
        assert!(pacer.most_that_we_can_do(ms(1200), ms(200)) > 1.5);
    }
}
