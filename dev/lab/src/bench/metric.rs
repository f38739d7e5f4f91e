//! Figures by name: a scenario says what it measures, and whether more of it is better.

use serde::Serialize;

/// A figure that each round of a variant gives.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Metric {
    /// The name in the JSON, a contract with its readers.
    #[serde(rename = "metric")]
    pub(super) name: &'static str,
    /// Its words, for columns, sentences and charts.
    #[serde(skip)]
    pub(super) head: &'static str,
    pub(super) unit: Unit,
    pub(super) better: Better,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Better {
    Less,
    More,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Unit {
    #[serde(rename = "s")]
    Seconds,
    #[serde(rename = "ms")]
    Milliseconds,
    #[serde(rename = "ms2")]
    SquareMilliseconds,
    #[serde(rename = "us")]
    Microseconds,
    #[serde(rename = "1/s")]
    PerSecond,
    #[serde(rename = "B/s")]
    BytesPerSecond,
    #[serde(rename = "B")]
    Bytes,
    /// A part of something, 0 to 1.
    #[serde(rename = "part")]
    Part,
    #[serde(rename = "ratio")]
    Ratio,
    /// 1: it happened in this round; 0: it did not.
    #[serde(rename = "happened")]
    Happened,
}

impl Metric {
    pub(super) const fn less(name: &'static str, head: &'static str, unit: Unit) -> Self {
        Self { name, head, unit, better: Better::Less }
    }

    pub(super) const fn more(name: &'static str, head: &'static str, unit: Unit) -> Self {
        Self { name, head, unit, better: Better::More }
    }

    /// Returns the better of two values.
    pub(super) fn best(self, one: f64, other: f64) -> f64 {
        match self.better {
            Better::Less => one.min(other),
            Better::More => one.max(other),
        }
    }
}

impl Unit {
    /// Formats a value with as many digits as it is worth.
    pub(super) fn show(self, value: f64) -> String {
        let mebibytes = value / f64::from(1 << 20);
        match self {
            Self::Seconds | Self::Ratio => format!("{value:.2}"),
            Self::Milliseconds | Self::SquareMilliseconds if value.abs() < 10.0 => format!("{value:.2}"),
            Self::Microseconds if value.abs() < 100.0 => format!("{value:.1}"),
            Self::Milliseconds | Self::SquareMilliseconds | Self::Microseconds | Self::Happened => {
                format!("{value:.0}")
            }
            Self::PerSecond if value.abs() < 10_000.0 => format!("{value:.0}"),
            Self::PerSecond => format!("{:.1}k", value / 1e3),
            Self::BytesPerSecond => format!("{mebibytes:.0}"),
            Self::Bytes if mebibytes < 10.0 => format!("{:.0} KiB", value / 1024.0),
            Self::Bytes => format!("{mebibytes:.0} MiB"),
            Self::Part if value.abs() < 0.1 => format!("{:.1} %", value * 100.0),
            Self::Part => format!("{:.0} %", value * 100.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_as_many_digits_as_they_are_worth() {
        let shown = [
            Unit::Microseconds.show(99.94),
            Unit::Microseconds.show(-186.4),
            Unit::Milliseconds.show(2.254),
            Unit::Milliseconds.show(31.4),
            Unit::PerSecond.show(9800.0),
            Unit::PerSecond.show(64_000.0),
            Unit::BytesPerSecond.show(819.2e6),
            Unit::Bytes.show(8192.0),
            Unit::Part.show(0.85),
        ];
        assert_eq!(shown, ["99.9", "-186", "2.25", "31", "9800", "64.0k", "781", "8 KiB", "85 %"]);
    }

    #[test]
    fn the_better_value_is_the_one_that_the_metric_prefers() {
        let metric = Metric::less("seconds", "SECONDS", Unit::Seconds);
        assert_eq!(metric.best(1.0, 2.0), 1.0);
        assert_eq!(Metric { better: Better::More, ..metric }.best(1.0, 2.0), 2.0);
    }
}
