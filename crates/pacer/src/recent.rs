//! How often guests asked lately.

use std::time::Duration;

/// After this time a request counts for a third.
const FORGOTTEN: Duration = Duration::from_millis(500);
/// What is assumed of a disk that is new to the pacer, in requests a second.
const AT_FIRST: f64 = 1000.0;

/// A count of guests' requests that is forgotten over time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recent {
    count: f64,
    at: Duration,
    /// Those that were counted since.
    new: u32,
}

impl Recent {
    /// Begins to count.
    pub(crate) fn begin(now: Duration) -> Self {
        Self { count: AT_FIRST * FORGOTTEN.as_secs_f64(), at: now, new: 0 }
    }

    pub(crate) fn add(&mut self, requests: u32) {
        self.new += requests;
    }

    /// Returns the requests of a second.
    pub(crate) fn per_second(&mut self, now: Duration) -> f64 {
        let lasted = now.saturating_sub(self.at).as_secs_f64() / FORGOTTEN.as_secs_f64();
        self.count = self.count * (-lasted).exp() + f64::from(std::mem::take(&mut self.new));
        self.at = now;
        self.count / FORGOTTEN.as_secs_f64()
    }
}

impl Default for Recent {
    fn default() -> Self {
        Self::begin(Duration::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_what_guests_do_and_assumes_much_at_first() {
        let mut recent = Recent::begin(Duration::ZERO);
        assert!(recent.per_second(Duration::from_millis(100)) > 500.0);
        for tenth in 2..60 {
            recent.add(2);
            recent.per_second(Duration::from_millis(tenth * 100));
        }
        let steady = recent.per_second(Duration::from_secs(6));
        assert!((15.0..25.0).contains(&steady), "{steady}");
        recent.add(100);
        assert!(recent.per_second(Duration::from_secs(6)) > 200.0);
    }
}
