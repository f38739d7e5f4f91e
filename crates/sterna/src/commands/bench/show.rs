//! How figures of benchmarks are written in tables.

use lab::bench::Summary;

/// A median, and the least and the most.
pub(super) fn figure_and_spread(summary: &Summary, show: impl Fn(f64) -> String) -> (String, String) {
    (show(summary.median), format!("{}–{}", show(summary.min), show(summary.max)))
}

/// A median, or a dash.
pub(super) fn median(summary: Option<&Summary>, show: impl Fn(f64) -> String) -> String {
    summary.map_or_else(|| "-".to_owned(), |summary| show(summary.median))
}

/// Microseconds without their unit.
pub(super) fn microseconds(value: f64) -> String {
    if value.abs() < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

/// Bytes as MiB without their unit.
pub(super) fn mebibytes(bytes: f64) -> String {
    format!("{:.0}", bytes / f64::from(1 << 20))
}

/// A number, in thousands if it is large.
pub(super) fn thousands(value: f64) -> String {
    if value < 10_000.0 { format!("{value:.0}") } else { format!("{:.1}k", value / 1e3) }
}

/// A ratio with its range.
pub(super) fn ratio(summary: &Summary) -> String {
    format!("{:.2} ({:.2}–{:.2})", summary.median, summary.min, summary.max)
}
