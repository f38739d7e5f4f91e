//! Formats figures of benchmarks, for tables of text and of pages.

use super::statistics::Summary;

/// A table of figures, a row for each contender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Names of the columns. The first column holds names, the others figures.
    pub header: Vec<String>,
    /// The rows, as long as the header.
    pub rows: Vec<Vec<String>>,
    /// The result of the figures, in a sentence.
    pub conclusion: String,
}

pub(super) fn figure_and_spread(summary: &Summary, show: impl Fn(f64) -> String) -> [String; 2] {
    [show(summary.median), format!("{}–{}", show(summary.min), show(summary.max))]
}

/// Formats a median; a dash without one.
pub(super) fn median(summary: Option<&Summary>, show: impl Fn(f64) -> String) -> String {
    summary.map_or_else(|| "-".to_owned(), |summary| show(summary.median))
}

pub(super) fn ratio(summary: &Summary) -> String {
    format!("{:.2} ({:.2}–{:.2})", summary.median, summary.min, summary.max)
}

pub(super) fn microseconds(value: f64) -> String {
    if value.abs() < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

pub(super) fn milliseconds(value: f64) -> String {
    if value < 10.0 { format!("{value:.2}") } else { format!("{value:.0}") }
}

pub(super) fn seconds(value: f64) -> String {
    format!("{value:.2}")
}

pub(super) fn mebibytes(bytes: f64) -> String {
    format!("{:.0}", bytes / f64::from(1 << 20))
}

/// Formats a number, in thousands if it is large.
pub(super) fn thousands(value: f64) -> String {
    if value < 10_000.0 { format!("{value:.0}") } else { format!("{:.1}k", value / 1e3) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_as_many_digits_as_they_are_worth() {
        assert_eq!(
            [microseconds(99.94), microseconds(-186.4), microseconds(1234.0)],
            ["99.9", "-186", "1234"]
        );
        assert_eq!([milliseconds(2.254), milliseconds(31.4)], ["2.25", "31"]);
        assert_eq!([thousands(9800.0), thousands(64_000.0)], ["9800", "64.0k"]);
        assert_eq!(mebibytes(819.2e6), "781");
    }

    #[test]
    fn spreads_go_from_the_least_to_the_most() {
        let summary = Summary::of(vec![2.0, 1.0, 4.0]).unwrap();
        assert_eq!(figure_and_spread(&summary, seconds), ["2.00", "1.00–4.00"]);
        assert_eq!((median(Some(&summary), seconds), median(None, seconds)), ("2.00".into(), "-".into()));
        assert_eq!(ratio(&summary), "2.00 (1.00–4.00)");
    }
}
