//! A line of small bars: how many requests the guest did, from the first measurement to the last.
//!
//! ```text
//!   ▇▇▇█▇▇▇▇▆▅▅▅▅▅▅▅▅▅▅▅▅▅▅▇▇▇▇▇▇▇▇
//!           └─ migrating ─┘
//! ```
//!
//! Parts that have a name are marked below their bars; there may be several.

use crate::workload::Window;

/// How wide the line is at most, so that the report fits a terminal of 80 columns.
const COLUMNS_MAX: usize = 56;
/// From nothing to the most.
const BARS: [char; 9] = ['·', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The rates of a guest in equal steps of time, and which of them belong to a migration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Requests per second, step by step.
    pub rates: Vec<f64>,
    /// The parts that are marked, in order and apart.
    pub spans: Vec<Span>,
}

/// A part of a timeline that has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// What is written below it.
    pub name: &'static str,
    /// The first step of it.
    pub begin: usize,
    /// The first step after it.
    pub end: usize,
}

impl Timeline {
    /// Puts the three parts of a demo together.
    pub fn of(before: &[Window], during: &[Window], after: &[Window]) -> Self {
        Self::of_parts(&[(None, before), (Some("migrating"), during), (None, after)])
    }

    /// Puts parts together; those that have a name are marked.
    pub fn of_parts(parts: &[(Option<&'static str>, &[Window])]) -> Self {
        let mut timeline = Self::default();
        for (name, windows) in parts {
            let begin = timeline.rates.len();
            timeline.rates.extend(windows.iter().map(Window::rate));
            timeline.spans.extend(name.map(|name| Span { name, begin, end: timeline.rates.len() }));
        }
        timeline
    }

    /// The bars, and below them the marks. `None` if there is nothing to show.
    pub fn lines(&self) -> Option<(String, String)> {
        if self.rates.is_empty() {
            return None;
        }
        let columns = self.rates.len().min(COLUMNS_MAX);
        let column_of = |step: usize| step * columns / self.rates.len();
        let values: Vec<f64> = (0..columns).map(|column| self.mean(column, columns)).collect();
        let most = values.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let bars = values.iter().map(|value| bar(value / most)).collect();
        let mut marks = String::new();
        for Span { name, begin, end } in &self.spans {
            mark(&mut marks, name, column_of(*begin), column_of(*end));
        }
        Some((bars, marks))
    }

    /// The mean rate of the steps that fall into a column.
    fn mean(&self, column: usize, columns: usize) -> f64 {
        let begin = column * self.rates.len() / columns;
        let end = ((column + 1) * self.rates.len() / columns).max(begin + 1);
        let steps = &self.rates[begin..end.min(self.rates.len())];
        steps.iter().sum::<f64>() / steps.len().max(1) as f64
    }
}

/// The bar for a part of the whole; only nothing at all looks like nothing.
fn bar(part: f64) -> char {
    let last = BARS.len() - 1;
    let index = if part <= 0.0 { 0 } else { (part * last as f64).round() as usize };
    BARS[index.clamp(usize::from(part > 0.0), last)]
}

/// Adds the mark of the columns from `begin` to `end` to a line of marks that may end before or, if a name was too long
/// for its part, behind `begin`.
fn mark(line: &mut String, name: &str, begin: usize, end: usize) {
    let label = format!(" {name} ");
    let length = label.chars().count();
    let width = end.saturating_sub(begin);
    line.push_str(&" ".repeat(begin.saturating_sub(line.chars().count())));
    let mark = match width {
        0 | 1 => format!("╵{label}"),
        // Too narrow to hold the words.
        width if width < length + 4 => format!("└{}┘{label}", "─".repeat(width - 2)),
        width => {
            let dashes = width - 2 - length;
            format!("└{}{label}{}┘", "─".repeat(dashes / 2), "─".repeat(dashes - dashes / 2))
        }
    };
    line.push_str(mark.trim_end());
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Seconds with so many requests.
    fn of<const COUNT: usize>(requests: u64) -> [Window; COUNT] {
        [Window { length: Duration::from_secs(1), requests, latency_p99: None }; COUNT]
    }

    #[test]
    fn the_mark_lies_below_the_steps_of_the_migration() {
        let timeline = Timeline::of(&of::<10>(100), &of::<20>(50), &of::<10>(100));
        let (bars, mark) = timeline.lines().unwrap();
        assert_eq!(bars, "██████████▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄██████████");
        assert_eq!(mark, "          └─── migrating ────┘");
    }

    #[test]
    fn a_short_migration_is_still_marked() {
        let (_, mark) = Timeline::of(&of::<4>(1), &of::<3>(1), &of::<4>(1)).lines().unwrap();
        assert_eq!(mark, "    └─┘ migrating");
        let (_, mark) = Timeline::of(&of::<4>(1), &[], &of::<4>(1)).lines().unwrap();
        assert_eq!(mark, "    ╵ migrating");
    }

    #[test]
    fn each_part_with_a_name_has_its_mark() {
        let rates = of::<12>(1);
        let parts =
            [(None, &rates[..4]), (Some("there"), &rates), (None, &rates[..3]), (Some("home"), &rates)];
        let (_, marks) = Timeline::of_parts(&parts).lines().unwrap();
        assert_eq!(marks, "    └─ there ──┘   └── home ──┘");
        let parts = [(Some("there"), &rates[..3]), (None, &rates[..1]), (Some("home"), &rates[..2])];
        let (_, marks) = Timeline::of_parts(&parts).lines().unwrap();
        assert_eq!(marks, "└─┘ there└┘ home");
    }

    #[test]
    fn a_long_demo_is_squeezed_and_a_standstill_remains_visible() {
        let (bars, _) = Timeline::of(&of::<500>(0), &of::<500>(9000), &of::<500>(1)).lines().unwrap();
        assert_eq!(bars.chars().count(), COLUMNS_MAX);
        assert!(bars.starts_with('·') && bars.contains('█') && bars.ends_with('▁'), "{bars}");
        assert_eq!(Timeline::default().lines(), None);
        assert_eq!(Timeline::of(&of::<1>(0), &of::<1>(0), &[]).lines().unwrap().0, "··");
    }
}
