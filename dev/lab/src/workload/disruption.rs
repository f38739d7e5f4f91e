//! Disruption: how long a client was served worse than before (\[TPM\] §III-A).
//!
//! ```text
//!   before  ▇▇▇▇▇▇▇▇ ─► Baseline: its rate, its usual slowest requests
//!   during  ▇▇▅▇▇▁▃▇▇▇  each window is judged by it; the lengths of those that are worse add up
//!             ×  ××
//! ```
//!
//! \[TPM\] defines disruption, but not its measurement. Here it is the time in which a client's throughput was below 90 % of
//! before, or the latency of its slowest hundredth above twice that of before. This applies to any kind of client.

use std::time::Duration;

use super::record::per_second;

/// Below this part of its earlier rate, a client is disrupted.
const RATE_LEAST: f64 = 0.9;
/// Above this multiple of its earlier latency, a client is disrupted.
const LATENCY_MOST: f64 = 2.0;

/// A client's figures in a short time, about a tenth of a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The length of the window.
    pub length: Duration,
    /// Number of requests answered in it.
    pub requests: u64,
    /// 99th percentile of their latency; `None` if unknown, or nothing was answered.
    pub latency_p99: Option<Duration>,
}

impl Window {
    /// Returns a window in which nothing was answered.
    pub fn standstill(length: Duration) -> Self {
        Self { length, requests: 0, latency_p99: None }
    }

    /// Returns the requests per second.
    pub fn rate(&self) -> f64 {
        per_second(self.requests, self.length)
    }
}

/// The undisturbed service of a client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Baseline {
    rate: f64,
    /// The median of the windows' 99th percentiles, so that one outlier does not count. `None` if none is known.
    latency_p99: Option<Duration>,
}

impl Baseline {
    /// Returns the baseline of the windows `before`; `None` if nothing was answered.
    pub fn of(before: &[Window]) -> Option<Self> {
        let requests: u64 = before.iter().map(|window| window.requests).sum();
        let rate = per_second(requests, before.iter().map(|window| window.length).sum());
        let mut latencies: Vec<Duration> = before.iter().filter_map(|window| window.latency_p99).collect();
        latencies.sort_unstable();
        let latency_p99 = latencies.get(latencies.len() / 2).copied();
        (rate > 0.0).then_some(Self { rate, latency_p99 })
    }

    /// Returns whether a client was disrupted in a window.
    pub fn is_disrupted(&self, window: &Window) -> bool {
        let is_slower = match (self.latency_p99, window.latency_p99) {
            (Some(before), Some(now)) => now > before.mul_f64(LATENCY_MOST),
            _ => false,
        };
        is_slower || window.rate() < self.rate * RATE_LEAST
    }

    /// Returns the total length of the windows in which a client was disrupted.
    pub fn disruption<'a>(&self, windows: impl IntoIterator<Item = &'a Window>) -> Duration {
        windows.into_iter().filter(|window| self.is_disrupted(window)).map(|window| window.length).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(rows: &[(u64, u64)]) -> Vec<Window> {
        let window = |&(requests, p99_ms)| Window {
            length: Duration::from_millis(100),
            requests,
            latency_p99: (p99_ms > 0).then(|| Duration::from_millis(p99_ms)),
        };
        rows.iter().map(window).collect()
    }

    #[track_caller]
    fn check(before: &[(u64, u64)], during: &[(u64, u64)], expected_ms: u64) {
        let baseline = Baseline::of(&windows(before)).unwrap();
        assert_eq!(baseline.disruption(&windows(during)), Duration::from_millis(expected_ms), "{baseline:?}");
    }

    #[test]
    fn a_client_is_disrupted_below_nine_tenths_of_its_rate() {
        check(&[(90, 4), (110, 4)], &[(90, 4), (89, 4), (0, 0), (200, 4)], 200);
    }

    #[test]
    fn a_client_is_disrupted_above_twice_its_latency() {
        check(&[(100, 4); 3], &[(100, 8), (100, 9), (150, 30)], 200);
    }

    #[test]
    fn a_window_that_is_worse_in_both_counts_once() {
        check(&[(100, 4)], &[(10, 40), (100, 4)], 100);
    }

    #[test]
    fn one_slow_request_before_does_not_excuse_those_that_follow() {
        check(&[(100, 4), (100, 4), (100, 500), (100, 4)], &[(100, 9)], 100);
    }

    #[test]
    fn latencies_that_are_not_known_are_not_judged() {
        check(&[(100, 0)], &[(100, 700), (100, 0)], 0);
        check(&[(100, 5)], &[(100, 0), (0, 0)], 100);
    }

    #[test]
    fn a_standstill_counts_with_its_own_length() {
        let baseline = Baseline::of(&windows(&[(100, 4)])).unwrap();
        let still = Window::standstill(Duration::from_millis(37));
        assert_eq!(baseline.disruption([&still]), Duration::from_millis(37));
    }

    #[test]
    fn there_is_nothing_to_compare_with_if_nothing_was_answered_before() {
        assert_eq!(Baseline::of(&[]), None);
        assert_eq!(Baseline::of(&windows(&[(0, 0)])), None);
        assert_eq!(Baseline::of(&[Window::standstill(Duration::ZERO)]), None);
    }
}
