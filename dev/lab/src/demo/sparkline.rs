//! A line of small bars: the guest's requests, from the first measurement to the last.
//!
//! ```text
//!   ▇▇▇█▇▇▇▇▆▅▅▅▅▅▅▅▅▅▅▅▅▅▅▇▇▇▇▇▇▇▇
//!           └─ migrating ─┘
//! ```
//!
//! Named parts are marked below their bars; there may be several.

use crate::workload::Window;

/// The widest line, so that the report fits a terminal of 80 columns.
const COLUMNS_MAX: usize = 56;
const BARS: [char; 9] = ['·', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The rates of a guest in equal steps of time, with the parts to be marked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Requests per second, step by step.
    pub rates: Vec<f64>,
    /// The marked parts, in order and disjoint.
    pub spans: Vec<Span>,
}

/// A named part of a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The name that is written below it.
    pub name: &'static str,
    /// Index of the part's first step.
    pub begin: usize,
    /// Index of the first step after it.
    pub end: usize,
}

impl Timeline {
    /// Joins the three parts of a demo.
    pub fn of(before: &[Window], during: &[Window], after: &[Window]) -> Self {
        Self::of_parts(&[(None, before), (Some("migrating"), during), (None, after)])
    }

    /// Joins parts; the named ones are marked.
    pub fn of_parts(parts: &[(Option<&'static str>, &[Window])]) -> Self {
        let mut timeline = Self::default();
        for (name, windows) in parts {
            let begin = timeline.rates.len();
            timeline.rates.extend(windows.iter().map(Window::rate));
            timeline.spans.extend(name.map(|name| Span { name, begin, end: timeline.rates.len() }));
        }
        timeline
    }

    /// Returns the bars, and the marks below them; `None` if there is nothing to show.
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

    fn mean(&self, column: usize, columns: usize) -> f64 {
        let begin = column * self.rates.len() / columns;
        let end = ((column + 1) * self.rates.len() / columns).max(begin + 1);
        let steps = &self.rates[begin..end.min(self.rates.len())];
        steps.iter().sum::<f64>() / steps.len().max(1) as f64
    }
}

/// Returns the bar for a part of the maximum; only zero gives the empty bar.
fn bar(part: f64) -> char {
    let last = BARS.len() - 1;
    let index = if part <= 0.0 { 0 } else { (part * last as f64).round() as usize };
    BARS[index.clamp(usize::from(part > 0.0), last)]
}

/// Adds the mark of the columns from `begin` to `end` to a line of marks. A long name may have extended the line beyond `begin`.
fn mark(line: &mut String, name: &str, begin: usize, end: usize) {
    let label = format!(" {name} ");
    let length = label.chars().count();
    let width = end.saturating_sub(begin);
    line.push_str(&" ".repeat(begin.saturating_sub(line.chars().count())));
    let mark = match width {
        0 | 1 => format!("╵{label}"),
        // Too narrow for the name.
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
