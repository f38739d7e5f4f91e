//! Formats figures.

/// Formats bytes: `1.5 GiB`.
pub(crate) fn bytes(count: f64) -> String {
    const NAMES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = count.max(0.0);
    let mut name = 0;
    while value >= 1023.95 && name + 1 < NAMES.len() {
        value /= 1024.0;
        name += 1;
    }
    let digits = usize::from(name > 0 && value < 99.95);
    format!("{value:.digits$} {}", NAMES[name])
}

/// Formats seconds: `0.85 s`, `3 min 20 s`, `1 h 5 min`.
pub(crate) fn seconds(seconds: f64) -> String {
    let seconds = seconds.max(0.0);
    if seconds < 9.995 {
        return format!("{seconds:.2} s");
    }
    if seconds < 59.95 {
        return format!("{seconds:.1} s");
    }
    let whole = seconds.round() as u64;
    if whole < 3600 {
        return format!("{} min {} s", whole / 60, whole % 60);
    }
    format!("{} h {} min", whole / 3600, whole % 3600 / 60)
}

/// Formats microseconds with three digits: `87 µs`, `1.43 ms`, `2.10 s`.
pub(crate) fn latency(micros: f64) -> String {
    let three = |value: f64, unit: &str| {
        let digits = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
        format!("{value:.digits$} {unit}")
    };
    match micros {
        below if below < 999.5 => format!("{:.0} µs", below.max(0.0)),
        below if below < 999_500.0 => three(below / 1000.0, "ms"),
        more => three(more / 1_000_000.0, "s"),
    }
}

/// Formats a number with separated thousands: `12,345`.
pub(crate) fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.max(0.0));
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// Formats the change from `before` to `now`: `−23 %`.
pub(crate) fn change(before: f64, now: f64) -> Option<String> {
    if before <= 0.0 {
        return None;
    }
    let percent = ((now / before - 1.0) * 100.0).round();
    Some(match percent {
        lower if lower < 0.0 => format!("−{:.0} %", -lower),
        higher if higher > 0.0 => format!("+{higher:.0} %"),
        _ => "±0 %".to_owned(),
    })
}

/// Formats an instant in milliseconds since 1970: `2026-11-21 23:49:00 UTC`.
pub(crate) fn moment(unix_ms: u64) -> String {
    let (days, second) = (unix_ms / 86_400_000, unix_ms / 1000 % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// Returns the Gregorian date `days` after 1970-01-01: year, month, day.
fn date(days: u64) -> (u64, u64, u64) {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // Whole cycles of 400 years are taken first, so that the loop is short.
    const CYCLE_DAYS: u64 = 146_097;
    let (mut year, mut rest) = (1970 + days / CYCLE_DAYS * 400, days % CYCLE_DAYS);
    loop {
        let length = 365 + u64::from(is_leap(year));
        if rest < length {
            break;
        }
        rest -= length;
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if rest < length {
            break;
        }
        rest -= length;
        month += 1;
    }
    (year, month, rest + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_the_digits_that_can_be_read() {
        assert_eq!(
            ["0 B", "1.5 KiB", "100 MiB"],
            [bytes(0.0), bytes(1536.0), bytes(104_857_600.0)].map(|text| text)
        );
        assert_eq!(seconds(0.854), "0.85 s");
        assert_eq!((seconds(200.4), seconds(3900.0)), ("3 min 20 s".into(), "1 h 5 min".into()));
        assert_eq!(
            (latency(87.4), latency(1430.0), latency(999_600.0)),
            ("87 µs".into(), "1.43 ms".into(), "1.00 s".into())
        );
        assert_eq!((grouped(1_234_567.4), grouped(12.0)), ("1,234,567".into(), "12".into()));
        assert_eq!(change(100.0, 77.0).as_deref(), Some("−23 %"));
        assert_eq!((change(100.0, 100.2).as_deref(), change(0.0, 1.0)), (Some("±0 %"), None));
    }

    #[test]
    fn moments_are_those_of_the_calendar() {
        assert_eq!(moment(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(moment(951_782_400_000), "2000-02-29 00:00:00 UTC");
        assert_eq!(moment(1_795_304_940_000), "2026-11-21 23:49:00 UTC");
        assert!(moment(u64::MAX).ends_with("UTC"));
    }
}
