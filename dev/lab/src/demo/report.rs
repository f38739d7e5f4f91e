//! The demo's final report, as text and as JSON.

use std::fmt;

use api::MigrationHistory;
use serde::Serialize;

use super::sparkline::Timeline;

/// The demo's result.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The figures of the JSON output.
    pub figures: Figures,
    /// Size of the disk in bytes.
    pub disk_bytes: u64,
    /// The guest's work, in a few words.
    pub guest: String,
    /// The names of the source's and the target's store.
    pub stores: (String, String),
    /// How long the gate was closed at the switch, in milliseconds, as the daemon reports.
    pub gate_closed_ms: Option<f64>,
    /// Requests that the guest completed, from the first mark to the last.
    pub requests: u64,
    /// How often the guest had to connect again.
    pub reconnects: u64,
    /// The guest's requests, from the first measurement to the last.
    pub timeline: Timeline,
    /// All errors, counted; the first few in words.
    pub wrong: Wrong,
    /// The daemon's record of the migration; `None` if unavailable.
    pub history: Option<MigrationHistory>,
}

/// The figures of the demo. Names and number of the fields are a contract with readers of the JSON.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Bytes written to the target.
    pub bytes_moved: u64,
    /// How long the migration took, in seconds.
    pub migration_seconds: f64,
    /// The longest time in which no request of the guest completed while the migration ran, in milliseconds.
    pub longest_stall_ms: f64,
    /// Requests per second before the migration.
    pub iops_before: f64,
    /// Requests per second during the migration.
    pub iops_during: f64,
    /// Requests per second after the migration.
    pub iops_after: f64,
    /// Whether every read, the whole disk at the end, and the target's image held what the guest had written.
    pub verified: bool,
    /// Total time, in milliseconds, in which the guest had less than 90 % of its earlier requests, or its slowest hundredth took
    /// more than twice as long; during the migration and after it. `None` if it did nothing before.
    pub disruption_ms: Option<f64>,
}

/// The errors that a guest has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wrong {
    /// Number of wrong blocks and requests.
    pub count: u64,
    /// The first few errors, in words.
    pub first: Vec<String>,
}

impl Report {
    /// Returns the figures as one line of JSON.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string(&self.figures)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Figures { bytes_moved, migration_seconds, longest_stall_ms, .. } = self.figures;
        let Figures { iops_before, iops_during, iops_after, verified, .. } = self.figures;
        let (source, target) = &self.stores;
        writeln!(
            formatter,
            "A {} disk moved from store \"{source}\" to store \"{target}\"",
            Bytes(self.disk_bytes)
        )?;
        writeln!(formatter, "under a working guest ({}).\n", self.guest)?;
        let rate = Bytes(rate(bytes_moved, migration_seconds));
        row(formatter, "migration time", &seconds(migration_seconds), "")?;
        row(formatter, "bytes moved", &Bytes(bytes_moved).to_string(), &format!("{rate}/s"))?;
        row(
            formatter,
            "longest guest stall",
            &milliseconds(longest_stall_ms),
            "no request completed for so long",
        )?;
        if let Some(gate_closed_ms) = self.gate_closed_ms {
            row(formatter, "switch-over", &milliseconds(gate_closed_ms), "new requests were held")?;
        }
        disruption_row(formatter, self.figures.disruption_ms)?;
        row(formatter, "IOPS before", &grouped(iops_before), "")?;
        row(formatter, "IOPS during", &grouped(iops_during), &change(iops_before, iops_during))?;
        row(formatter, "IOPS after", &grouped(iops_after), &change(iops_before, iops_after))?;
        if self.reconnects > 0 {
            row(formatter, "reconnects", &self.reconnects.to_string(), "")?;
        }
        if let Some((bars, mark)) = self.timeline.lines() {
            writeln!(formatter, "  {:<20} {bars}\n  {:<20} {mark}", "IOPS over time", "")?;
        }
        let reads = format!("{} requests, the whole disk, the target's image", grouped(self.requests as f64));
        if verified {
            return row(formatter, "verified", "yes", &reads);
        }
        row(formatter, "verified", "NO", &format!("{} wrong; the first:", grouped(self.wrong.count as f64)))?;
        self.wrong.first.iter().try_for_each(|line| writeln!(formatter, "    {line}"))
    }
}

pub(super) fn row(formatter: &mut fmt::Formatter<'_>, name: &str, value: &str, remark: &str) -> fmt::Result {
    let line = format!("  {name:<20} {value:>12}   {remark}");
    writeln!(formatter, "{}", line.trim_end())
}

/// Writes the disruption in seconds, to a tenth.
pub(super) fn disruption_row(formatter: &mut fmt::Formatter<'_>, disruption_ms: Option<f64>) -> fmt::Result {
    let Some(disruption_ms) = disruption_ms else { return Ok(()) };
    let remark = "below 90 % of before, or twice its latency";
    row(formatter, "disruption", &seconds(disruption_ms / 1000.0), remark)
}

pub(super) fn rate(bytes: u64, seconds: f64) -> u64 {
    if seconds > 0.0 { (bytes as f64 / seconds) as u64 } else { 0 }
}

pub(super) fn change(before: f64, after: f64) -> String {
    if before <= 0.0 {
        return String::new();
    }
    let percent = (after / before - 1.0) * 100.0;
    // "-0 %" would look like a mistake.
    let percent = if percent.abs() < 0.5 { 0.0 } else { percent };
    format!("{percent:+.0} %")
}

pub(super) fn seconds(value: f64) -> String {
    format!("{value:.2} s")
}

pub(super) fn milliseconds(value: f64) -> String {
    if value < 10.0 { format!("{value:.1} ms") } else { format!("{value:.0} ms") }
}

/// Formats a whole number with a comma at every thousand.
pub(super) fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A number of bytes, shown in the largest binary unit that leaves it above one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        for (shift, unit) in UNITS {
            if self.0 >= 1 << shift {
                let value = self.0 as f64 / (1_u64 << shift) as f64;
                let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
                return write!(formatter, "{value:.digits$} {unit}");
            }
        }
        write!(formatter, "{} B", self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::workload::Window;

    fn steps(requests: u64) -> [Window; 5] {
        [Window { length: Duration::from_millis(100), requests, latency_p99: None }; 5]
    }

    fn report() -> Report {
        Report {
            figures: Figures {
                bytes_moved: 1_288_490_188,
                migration_seconds: 1.5,
                longest_stall_ms: 3.12,
                iops_before: 52_134.4,
                iops_during: 39_100.0,
                iops_after: 52_000.0,
                verified: true,
                disruption_ms: Some(300.0),
            },
            disk_bytes: 1 << 30,
            guest: "8 KiB, 70 % reads, 16 outstanding".to_owned(),
            stores: ("first".to_owned(), "second".to_owned()),
            gate_closed_ms: Some(0.84),
            requests: 412_345,
            reconnects: 0,
            timeline: Timeline::of(&steps(52), &steps(39), &steps(52)),
            wrong: Wrong::default(),
            history: None,
        }
    }

    #[test]
    fn the_report_is_aligned_and_says_everything() {
        let expected = "\
A 1.00 GiB disk moved from store \"first\" to store \"second\"
under a working guest (8 KiB, 70 % reads, 16 outstanding).

  migration time             1.50 s
  bytes moved              1.20 GiB   819 MiB/s
  longest guest stall        3.1 ms   no request completed for so long
  switch-over                0.8 ms   new requests were held
  disruption                 0.30 s   below 90 % of before, or twice its latency
  IOPS before                52,134
  IOPS during                39,100   -25 %
  IOPS after                 52,000   +0 %
  IOPS over time       █████▆▆▆▆▆█████
                            └───┘ migrating
  verified                      yes   412,345 requests, the whole disk, the target's image
";
        assert_eq!(report().to_string(), expected);
    }

    #[test]
    fn what_is_wrong_is_counted_and_told() {
        let mut report = report();
        report.figures.verified = false;
        report.wrong = Wrong { count: 1234, first: vec!["block 7: zeroes".to_owned()] };
        let text = report.to_string();
        assert!(
            text.ends_with(
                "  verified                       NO   1,234 wrong; the first:\n    block 7: zeroes\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn the_json_has_exactly_the_eight_fields() {
        let value: serde_json::Value = serde_json::from_str(&report().json().unwrap()).unwrap();
        let expected = serde_json::json!({
            "bytes_moved": 1_288_490_188, "migration_seconds": 1.5, "longest_stall_ms": 3.12,
            "iops_before": 52_134.4, "iops_during": 39_100.0, "iops_after": 52_000.0, "verified": true,
            "disruption_ms": 300.0,
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn numbers_are_shown_as_people_write_them() {
        assert_eq!(grouped(999.0), "999");
        assert_eq!(grouped(1_234_567.4), "1,234,567");
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes(4096).to_string(), "4.00 KiB");
        assert_eq!(Bytes(123 << 20).to_string(), "123 MiB");
        assert_eq!(change(0.0, 5.0), "");
        assert_eq!(change(100.0, 99.8), "+0 %");
        assert_eq!(rate(5, 0.0), 0);
    }
}
