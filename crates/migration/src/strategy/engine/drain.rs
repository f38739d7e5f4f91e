//! Measures how fast the target takes data, and throttles guests that write faster.
//!
//! ```text
//!   no throttle ──── the mover gets too little of what the target takes ────► throttle at a share of the measured rate
//!        ▲                                                                          │
//!        └────────────── no write has had to wait for a while ◄────────────────────┘
//! ```
//! \[VM51\] changes from asynchronous to synchronous mirroring when the guest writes faster than the network carries. Here the
//! change is a rate instead of a mode: admitted writes leave the mover its share, and the migration ends.

use std::time::Duration;

/// The length of a sample of the rate, counting only time with data in flight.
const SAMPLE: Duration = Duration::from_millis(250);
/// The shortest time that yields a usable rate.
const SAMPLE_MIN: Duration = Duration::from_millis(20);
/// How long the copying is observed before each convergence check: several round trips even of a long link.
const WINDOW: Duration = Duration::from_millis(500);
/// The share of the target's rate by which the mover must make progress; below it guests are throttled.
const PROGRESS_MIN: f64 = 0.2;
/// The share of the target's rate that throttled guests get: more than half, but little enough to leave the mover
/// [`PROGRESS_MIN`].
const GUEST_SHARE: f64 = 0.72;
/// How long no write must have waited before the throttle is removed.
const REST: Duration = Duration::from_secs(2);
/// The burst that the throttle permits, as time.
const BURST: Duration = Duration::from_millis(20);
/// The least bytes a second that are admitted: a rate measured during a standstill says nothing.
const RATE_MIN: f64 = 65536.0;

#[derive(Debug, Default)]
pub(super) struct Drain {
    /// When the amount in flight last changed, and how large it was; `None` while nothing is in flight.
    since: Option<(Duration, Load)>,
    time: Duration,
    bytes: u64,
    load: Load,
    /// The measured rate, and the load during it. Under little load it is a lower bound.
    rate: Option<(f64, Load)>,
}

impl Drain {
    pub(super) fn note(&mut self, now: Duration, bytes: u64, load: Load) {
        if let Some((since, before)) = self.since {
            let elapsed = now.saturating_sub(since);
            if self.time == Duration::ZERO {
                self.load = before;
            } else if elapsed > Duration::ZERO {
                // A load of zero duration, as between the end of a chunk and the beginning of the next, does not count.
                self.load = self.load.min(before);
            }
            self.time += elapsed;
            self.bytes += bytes;
        }
        self.since = (load != Load::Nothing).then_some((now, load));
        if self.time >= SAMPLE {
            let sample = self.bytes as f64 / self.time.as_secs_f64();
            self.rate = match (self.rate, self.load) {
                (Some((rate, Load::Enough)), Load::Enough) => Some(((rate + sample) / 2.0, Load::Enough)),
                (_, Load::Enough) => Some((sample, Load::Enough)),
                (Some((rate, Load::Enough)), _) => Some((rate, Load::Enough)),
                // The target takes everything, and could take more.
                (known, _) => Some((known.map_or(sample, |(rate, _)| rate.max(sample)), Load::Little)),
            };
            (self.time, self.bytes) = (Duration::ZERO, 0);
        }
    }

    pub(super) fn rate(&self) -> Option<f64> {
        let first = || (self.time >= SAMPLE_MIN).then(|| self.bytes as f64 / self.time.as_secs_f64());
        self.rate.map(|(rate, _)| rate).or_else(first)
    }

    /// Ends the sample: the rate before a break says nothing about the break.
    pub(super) fn interrupt(&mut self) {
        self.since = None;
        (self.time, self.bytes) = (Duration::ZERO, 0);
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Load {
    #[default]
    Nothing,
    /// So little that the sender limits the rate.
    Little,
    /// So much that the target limits the rate.
    Enough,
}

/// Checks whether the copying converges, and throttles guest writes while it does not.
#[derive(Debug, Default)]
pub(super) struct Admission {
    window_began: Duration,
    /// For this window: bytes that the mover copied, that became missing, and that went by value.
    moved: u64,
    undone: u64,
    by_value: u64,
    throttle: Option<Throttle>,
}

#[derive(Debug)]
struct Throttle {
    bytes_per_second: f64,
    /// When everything admitted so far will have been taken at that rate.
    taken_at: Duration,
    waited_at: Duration,
}

/// Further input of a convergence check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Situation {
    /// The mover works at full speed, and is not done.
    Copying,
    /// No check is needed: the copying is near enough, paused, or limited by its own bandwidth.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judged {
    Nothing,
    Throttled,
    Freed,
}

impl Admission {
    pub(super) fn note_moved(&mut self, bytes: u64) {
        self.moved += bytes;
    }

    pub(super) fn note_undone(&mut self, bytes: u64) {
        self.undone += bytes;
    }

    pub(super) fn note_by_value(&mut self, bytes: u64) {
        self.by_value += bytes;
    }

    pub(super) fn is_throttled(&self) -> bool {
        self.throttle.is_some()
    }

    /// Returns the earliest time of the next admission; `None`: at once.
    pub(super) fn opens_at(&self) -> Option<Duration> {
        self.throttle.as_ref().map(|throttle| throttle.taken_at.saturating_sub(BURST))
    }

    pub(super) fn note_waits(&mut self, now: Duration) {
        if let Some(throttle) = &mut self.throttle {
            throttle.waited_at = now;
        }
    }

    /// Spends the tokens of an admitted write. A write that was admitted because its wait was over delays others for at most
    /// `wait_max`.
    pub(super) fn spend(&mut self, now: Duration, bytes: u64, wait_max: Duration) {
        if let Some(throttle) = &mut self.throttle {
            let cost = Duration::try_from_secs_f64(bytes as f64 / throttle.bytes_per_second);
            let taken_at = throttle.taken_at.max(now).saturating_add(cost.unwrap_or(wait_max));
            throttle.taken_at = taken_at.min(now + wait_max);
        }
    }

    pub(super) fn judge(&mut self, now: Duration, rate: Option<f64>, situation: Situation) -> Judged {
        let elapsed = now.saturating_sub(self.window_began);
        if elapsed < WINDOW {
            return Judged::Nothing;
        }
        let taken = (self.moved + self.by_value) as f64;
        let progress = self.moved as f64 - self.undone as f64;
        let starves = taken > 0.0 && progress < PROGRESS_MIN * taken && situation == Situation::Copying;
        let rate = rate.unwrap_or(taken / elapsed.as_secs_f64());
        let bytes_per_second = (GUEST_SHARE * rate).max(RATE_MIN);
        self.window_began = now;
        (self.moved, self.undone, self.by_value) = (0, 0, 0);
        match &mut self.throttle {
            None if starves => {
                self.throttle = Some(Throttle { bytes_per_second, taken_at: now, waited_at: now });
                Judged::Throttled
            }
            Some(throttle) if now.saturating_sub(throttle.waited_at) >= REST => {
                self.throttle = None;
                Judged::Freed
            }
            Some(throttle) => {
                throttle.bytes_per_second = bytes_per_second;
                Judged::Nothing
            }
            None => Judged::Nothing,
        }
    }

    pub(super) fn free(&mut self) {
        self.throttle = None;
    }
}
