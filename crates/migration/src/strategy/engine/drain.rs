//! How fast the target takes what is sent to it, and how writes are admitted when guests write faster than that.
//!
//! ```text
//!   no throttle ──── the mover gets too little of what the target takes ────► throttle at a share of the measured rate
//!        ▲                                                                          │
//!        └────────────── no write has had to wait for a while ◄────────────────────┘
//! ```
//! \[VM51\] goes from asynchronous to synchronous mirroring when the guest writes faster than the network carries. Here
//! that is a rate rather than a mode: so much is admitted as leaves the mover its part, and the migration ends.

use std::time::Duration;

/// What a sample of the rate is taken over, of the time in which there was something in flight.
const SAMPLE: Duration = Duration::from_millis(250);
/// The shortest time that says anything about a rate.
const SAMPLE_MIN: Duration = Duration::from_millis(20);
/// How long the copying is watched before it is judged: several round trips also of a long link.
const WINDOW: Duration = Duration::from_millis(500);
/// Part of what the target takes that the mover must make progress by; below it, guests are throttled.
const PROGRESS_MIN: f64 = 0.2;
/// Part of what the target takes that is admitted from throttled guests: more than half, and less than what would leave
/// the mover less than [`PROGRESS_MIN`].
const GUEST_SHARE: f64 = 0.72;
/// How long no write must have waited before the throttle is taken off.
const REST: Duration = Duration::from_secs(2);
/// A burst that the throttle allows, as time.
const BURST: Duration = Duration::from_millis(20);
/// Bytes a second that are admitted whatever was measured: a rate measured while everything stood still is none.
const RATE_MIN: f64 = 65536.0;

/// Measures the rate at which the target takes what it is sent.
#[derive(Debug, Default)]
pub(super) struct Drain {
    /// When what is in flight changed last, and how much it was; `None` while nothing is.
    since: Option<(Duration, Load)>,
    /// Time, bytes and load of the sample under way.
    time: Duration,
    bytes: u64,
    load: Load,
    /// What was measured, and under which load: under little, it is a lower bound.
    rate: Option<(f64, Load)>,
}

impl Drain {
    /// The target has taken so many bytes, and now has so much to take.
    pub(super) fn note(&mut self, now: Duration, bytes: u64, load: Load) {
        if let Some((since, before)) = self.since {
            let elapsed = now.saturating_sub(since);
            if self.time == Duration::ZERO {
                self.load = before;
            } else if elapsed > Duration::ZERO {
                // What lasted no time, as between a chunk's end and the next one's beginning, was no load.
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
                // It takes what comes, and could take more.
                (known, _) => Some((known.map_or(sample, |(rate, _)| rate.max(sample)), Load::Little)),
            };
            (self.time, self.bytes) = (Duration::ZERO, 0);
        }
    }

    /// Bytes a second; `None` while nothing is known.
    pub(super) fn rate(&self) -> Option<f64> {
        let first = || (self.time >= SAMPLE_MIN).then(|| self.bytes as f64 / self.time.as_secs_f64());
        self.rate.map(|(rate, _)| rate).or_else(first)
    }

    /// What was measured before a break says nothing of what is taken in it.
    pub(super) fn interrupt(&mut self) {
        self.since = None;
        (self.time, self.bytes) = (Duration::ZERO, 0);
    }
}

/// How much the target has to take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Load {
    #[default]
    Nothing,
    /// So little that the sender's pace shows rather than its own.
    Little,
    /// So much that its own pace shows.
    Enough,
}

/// Judges whether the copying converges, and admits guest writes at a rate while it does not.
#[derive(Debug, Default)]
pub(super) struct Admission {
    window_began: Duration,
    /// Of this window: bytes of blocks that the mover brought, that became missing, and that came by value.
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
    /// When a write had to wait last.
    waited_at: Duration,
}

/// What is known besides when a window is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Situation {
    /// The mover works as fast as it can, and is not done.
    Copying,
    /// There is nothing to converge: it is near enough, rests, or keeps to a limit of its own.
    Other,
}

/// What becomes of a throttle when a window is judged.
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

    /// When the next write may be admitted, at the earliest; `None`: at any time.
    pub(super) fn opens_at(&self) -> Option<Duration> {
        self.throttle.as_ref().map(|throttle| throttle.taken_at.saturating_sub(BURST))
    }

    /// A write has to wait.
    pub(super) fn note_waits(&mut self, now: Duration) {
        if let Some(throttle) = &mut self.throttle {
            throttle.waited_at = now;
        }
    }

    /// A write is admitted that costs the link so many bytes. What was admitted because it had waited long enough is
    /// not held against others for longer than `wait_max`.
    pub(super) fn spend(&mut self, now: Duration, bytes: u64, wait_max: Duration) {
        if let Some(throttle) = &mut self.throttle {
            let cost = Duration::try_from_secs_f64(bytes as f64 / throttle.bytes_per_second);
            let taken_at = throttle.taken_at.max(now).saturating_add(cost.unwrap_or(wait_max));
            throttle.taken_at = taken_at.min(now + wait_max);
        }
    }

    /// Judges the window, if it is over.
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

    /// Takes the throttle off at once: there is nothing that it would be for.
    pub(super) fn free(&mut self) {
        self.throttle = None;
    }
}
