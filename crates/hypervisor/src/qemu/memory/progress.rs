//! The progress of a transfer of memory, from QEMU's figures.

use serde_json::Value;

use crate::qemu::error::PRODUCT;
use crate::{HypervisorError, MemoryProgress, MigrationStatus};

/// Reads the answer to `query-migrate`. Missing or new fields are no error.
pub(super) fn read(answer: &Value) -> MemoryProgress {
    let memory = &answer["ram"];
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let page_bytes = memory["page-size"].as_u64().unwrap_or(4096);
    let megabits_per_s = memory["mbps"].as_f64().unwrap_or(0.0).max(0.0);
    let throttle = number(&answer["cpu-throttle-percentage"]).min(100);
    MemoryProgress {
        status: MigrationStatus::of(answer["status"].as_str().unwrap_or("none")),
        total_bytes: number(&memory["total"]),
        remaining_bytes: number(&memory["remaining"]),
        transferred_bytes: number(&memory["transferred"]),
        dirty_bytes_per_s: number(&memory["dirty-pages-rate"]).saturating_mul(page_bytes),
        rounds: number(&memory["dirty-sync-count"]),
        throttle_percent: u8::try_from(throttle).unwrap_or(100),
        // The cast saturates.
        bandwidth_bytes_per_s: (megabits_per_s * 1e6 / 8.0) as u64,
        expected_downtime_ms: number(&answer["expected-downtime"]),
        downtime_ms: answer["downtime"].as_u64(),
        error: answer["error-desc"].as_str().map(str::to_owned),
    }
}

pub(super) fn into_error(progress: MemoryProgress) -> HypervisorError {
    HypervisorError::MigrationEnded { product: PRODUCT, status: progress.status, detail: progress.error }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_read_in_our_units() {
        let progress = read(&json!({
            "status": "active", "expected-downtime": 300, "cpu-throttle-percentage": 20,
            "ram": {
                "total": 4096, "remaining": 2048, "transferred": 1024, "page-size": 4096, "dirty-pages-rate": 10,
                "dirty-sync-count": 3, "mbps": 8.5,
            },
        }));
        assert_eq!(progress.dirty_bytes_per_s, 40960);
        assert_eq!(progress.bandwidth_bytes_per_s, 1_062_500);
        assert_eq!((progress.rounds, progress.throttle_percent), (3, 20));
        assert_eq!((progress.downtime_ms, progress.error), (None, None));
    }

    #[test]
    fn what_is_missing_or_absurd_is_no_error() {
        assert_eq!(read(&json!({})).status, MigrationStatus::None);
        let absurd = read(&json!({
            "status": 7, "cpu-throttle-percentage": 100_000,
            "ram": {"mbps": -1e300, "page-size": u64::MAX, "dirty-pages-rate": u64::MAX, "total": "much"},
        }));
        assert_eq!((absurd.throttle_percent, absurd.bandwidth_bytes_per_s), (100, 0));
        assert_eq!((absurd.dirty_bytes_per_s, absurd.total_bytes), (u64::MAX, 0));
    }
}
