//! When it pays to look for completions for a moment, rather than to sleep at once.
//!
//! Going to sleep and being woken costs two switches and, where the processor has gone to rest, tens of microseconds.
//! If completions come faster than that, the next one is there sooner than sleep. If they do not, looking for them only
//! takes processor time from guests: so a ring looks only while it is busy, and never for long.

use std::time::Duration;

/// How long a ring looks: about what it takes to sleep and be woken.
const LOOK_MAX: Duration = Duration::from_micros(30);
/// Completions in a [`WINDOW`] from which on a ring counts as busy: one each 20 µs on average. A client that has one
/// request in flight never gets there: it would pay twice the processor time for nothing.
const BUSY_FROM: u32 = 50;
/// Time over which completions are counted.
const WINDOW: Duration = Duration::from_millis(1);

/// Counts completions.
#[derive(Debug, Default)]
pub(super) struct Polling {
    window_began: Duration,
    completions: u32,
    is_busy: bool,
}

impl Polling {
    /// Counts `completions` that were there at `now`.
    pub(super) fn note(&mut self, now: Duration, completions: u32) {
        self.completions = self.completions.saturating_add(completions);
        let length = now.saturating_sub(self.window_began);
        if length >= WINDOW {
            // A long window is one in which the ring slept.
            let windows = u32::try_from(length.as_micros() / WINDOW.as_micros()).unwrap_or(u32::MAX);
            self.is_busy = self.completions / windows >= BUSY_FROM;
            self.window_began = now;
            self.completions = 0;
        }
    }

    /// How long to look before sleeping; zero: not at all.
    pub(super) fn look(&self) -> Duration {
        if self.is_busy { LOOK_MAX } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_looks_while_completions_come_quickly_and_stops_when_they_no_longer_do() {
        let mut polling = Polling::default();
        let mut now = Duration::ZERO;
        let mut pass = |polling: &mut Polling, interval_us, count| {
            for _ in 0..count {
                now += Duration::from_micros(interval_us);
                polling.note(now, 1);
            }
        };
        assert_eq!(polling.look(), Duration::ZERO);
        pass(&mut polling, 40, 100);
        assert_eq!(polling.look(), Duration::ZERO, "one at a time");
        pass(&mut polling, 15, 200);
        assert_eq!(polling.look(), LOOK_MAX);
        pass(&mut polling, 100_000, 1);
        assert_eq!(polling.look(), Duration::ZERO, "it slept");
    }
}
