//! Formats figures and states as short words.

pub(crate) use ::words::clean;
use api::{Activity, ImageLocation, Migration, MigrationState};

use super::sheet::Tone;
use crate::output;
use console::units::bytes;

/// The text for unknown values.
pub(crate) const DASH: &str = "-";
/// The heights of a line of figures. The highest leaves a gap to the row above.
const LEVELS: [char; 7] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇'];

pub(crate) fn requests(activity: Option<&Activity>) -> String {
    activity.map_or_else(|| DASH.to_owned(), |activity| whole(activity.requests_per_second()))
}

/// Formats a number with separated thousands: `1,760`. Below ten it has a digit after the point, unless that is zero.
pub(crate) fn whole(number: f64) -> String {
    if number < 9.95 {
        let short = format!("{number:.1}");
        return short.strip_suffix(".0").map(str::to_owned).unwrap_or(short);
    }
    let digits = format!("{number:.0}");
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

pub(crate) fn rate(per_second: Option<f64>) -> String {
    per_second.map_or_else(|| DASH.to_owned(), |rate| format!("{}/s", bytes(rate.max(0.0) as u64)))
}

/// Formats a latency: `140 µs`, `1.63 ms`.
pub(crate) fn latency(micros: Option<u64>) -> String {
    let Some(micros) = micros else { return DASH.to_owned() };
    let three = |value: f64| match value {
        value if value < 10.0 => format!("{value:.2}"),
        value if value < 100.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    };
    match micros {
        0..1_000 => format!("{micros} µs"),
        1_000..1_000_000 => format!("{} ms", three(micros as f64 / 1e3)),
        _ => format!("{} s", three(micros as f64 / 1e6)),
    }
}

pub(crate) fn place(location: &ImageLocation) -> String {
    location.store.clone().unwrap_or_else(|| "(in place)".to_owned())
}

/// Returns the source host, which counts the copied bytes, if it is another one.
pub(crate) fn counted_at(migration: &Migration) -> Option<&str> {
    let source = &migration.source;
    source.image.is_empty().then_some(source.store.as_deref()).flatten()
}

pub(crate) fn done(migration: &Migration) -> String {
    if counted_at(migration).is_some() && !migration.state.has_ended() {
        return DASH.to_owned();
    }
    output::share(migration)
}

/// Returns the state of a migration in one word.
pub(crate) fn state(migration: &Migration) -> (&'static str, Tone) {
    match migration.state {
        MigrationState::Running => (migration.phase.name(), Tone::Busy),
        MigrationState::Queued | MigrationState::Paused => (migration.state.name(), Tone::Warm),
        MigrationState::Moved => ("moved", Tone::Good),
        MigrationState::Cancelled => ("cancelled", Tone::Warm),
        MigrationState::Failed | MigrationState::HandedBack => (migration.state.name(), Tone::Bad),
    }
}

/// Returns the remark about a migration: the reason of its outcome or of its wait.
pub(crate) fn course(migration: &Migration) -> String {
    if migration.state.has_ended() {
        return migration.message.clone().unwrap_or_default();
    }
    if let Some(queue) = &migration.queue {
        return output::turn(queue);
    }
    // Waits with a short limit are normal.
    let is_near = migration
        .waiting_for
        .as_ref()
        .and_then(|waiting| waiting.remaining_ms)
        .is_some_and(|left| left < 1000);
    let reason = || migration.waiting_for.as_ref().map(|waiting| waiting.reason.clone());
    let waits = if is_near { reason() } else { output::waiting(migration) };
    let waits = waits.map(|waiting| format!("waits for {waiting}"));
    let suspended = migration.suspended.as_ref().map(|reason| format!("suspended: {reason}"));
    let limit = output::limit(migration).map(|limit| format!("limited by {limit}"));
    [suspended, waits, limit].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// Draws figures as a line of `width` characters, the latest at the end; unknown figures are blank.
pub(crate) fn line(figures: impl DoubleEndedIterator<Item = Option<f64>> + Clone, width: usize) -> String {
    let most = figures.clone().flatten().fold(0.0, f64::max);
    let level = |figure: f64| {
        let height = if most > 0.0 { figure / most * (LEVELS.len() - 1) as f64 } else { 0.0 };
        LEVELS[(height.round() as usize).min(LEVELS.len() - 1)]
    };
    let latest = figures.rev().take(width).map(|figure| figure.map_or(' ', level));
    let drawn: String = latest.collect::<Vec<_>>().into_iter().rev().collect();
    format!("{drawn:>width$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        assert_eq!(
            [0.0, 0.04, 3.25, 9.0, 9.96, 999.6, 1_234_567.0].map(whole),
            ["0", "0", "3.2", "9", "10", "1,000", "1,234,567"]
        );
        assert_eq!(
            [Some(999), Some(1630), Some(21_000), Some(2_000_000), None].map(latency),
            ["999 µs", "1.63 ms", "21.0 ms", "2.00 s", "-"]
        );
        assert_eq!(rate(Some(2048.0)), "2.0 KiB/s");
    }

    #[test]
    fn a_line_ends_with_the_latest_figure_and_has_gaps() {
        let figures = [Some(0.0), None, Some(50.0), Some(100.0)];
        assert_eq!(line(figures.into_iter(), 6), "  ▁ ▄▇");
        assert_eq!(line(figures.into_iter(), 2), "▄▇");
        assert_eq!(line([None].into_iter(), 3), "   ");
    }
}
