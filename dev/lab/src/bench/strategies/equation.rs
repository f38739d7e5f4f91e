//! Equation 1 of \[ESX\]: the requests of a guest whose image is mirrored to a slow target.

use super::Device;
use crate::bench::migration::Progressed;

/// The guest's requests in flight (\[ESX\] Figure 10).
pub(super) const DEPTH: u32 = 16;
const WRITES: f64 = 0.3;

/// Latencies of the guest's requests, in seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Latencies {
    /// At the source: the store's delay, or the wait for its limit if that is longer.
    source: f64,
    /// Latency at the target: behind the chunks that the mover always has there.
    target: f64,
}

impl Latencies {
    /// Returns the latencies of two devices, if the mover has `queued_bytes` on the way.
    pub(super) fn of(source: Device, target: Device, queued_bytes: u64) -> Self {
        let delay = |device: Device| device.latency_us as f64 / 1e6;
        let turn = f64::from(DEPTH) / source.operations_per_second as f64;
        let queued = queued_bytes as f64 / target.bytes_per_second as f64;
        Self { source: delay(source).max(turn), target: delay(target) + queued }
    }
}

/// Returns Equation 1: IOPS ≈ min(in flight / (part that goes to the target × its latency), in flight / latency of the source).
pub(super) fn equation(
    progress: &[Progressed],
    seconds: f64,
    margin: f64,
    latencies: Latencies,
) -> Vec<(f64, f64)> {
    let in_flight = f64::from(DEPTH);
    let iops = |fraction: f64| {
        let to_target = WRITES * fraction;
        let of_target =
            if to_target > 0.0 { in_flight / (to_target * latencies.target) } else { f64::INFINITY };
        of_target.min(in_flight / latencies.source)
    };
    let during = progress.iter().map(|seen| (seen.seconds, iops(seen.fraction)));
    std::iter::once((-margin, iops(0.0))).chain(during).chain([(seconds, iops(1.0))]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equation_1_is_the_source_s_until_the_target_saturates() {
        let seen = |fraction| Progressed { seconds: fraction, fraction, bytes_copied: 0 };
        let progress = [seen(0.0), seen(0.1), seen(0.5)];
        let points = equation(&progress, 1.0, 2.0, Latencies { source: 0.001, target: 0.01 });
        let iops: Vec<f64> = points.iter().map(|(_, iops)| iops.round()).collect();
        // 16 / 1 ms; then 16 / (0.15 × 10 ms), and 16 / (0.3 × 10 ms).
        assert_eq!(iops, [16_000.0, 16_000.0, 16_000.0, 10_667.0, 5333.0]);
    }

    #[test]
    fn latencies_are_delays_turns_and_what_the_mover_has_queued() {
        let source = Device { latency_us: 2000, bytes_per_second: 1 << 30, operations_per_second: 4000 };
        let target = Device { latency_us: 20_000, bytes_per_second: 10 << 20, operations_per_second: 400 };
        let latencies = Latencies::of(source, target, 16 * (64 << 10));
        assert_eq!((latencies.source, latencies.target), (0.004, 0.02 + 0.1));
        let quick = Device { operations_per_second: 1 << 20, ..source };
        assert_eq!(Latencies::of(quick, target, 16 * (64 << 10)).source, 0.002);
    }
}
