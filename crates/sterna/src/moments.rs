//! Moments: how people name them, and how they are printed.

use jiff::civil::{DateTime, Time};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ZonedDateTime};

const EXPECTED: &str = "a time is written 04:00 (the next one of this host's clock), 2026-11-29T04:00, with a zone \
    2026-11-29T04:00Z, or as a time from now: 2h, 1h30m";

/// Reads a moment to come, in milliseconds since 1970.
pub(crate) fn parse_moment(text: &str) -> Result<u64, String> {
    let now = ZonedDateTime::now();
    let moment = moment_after(text, &now).ok_or_else(|| EXPECTED.to_owned())?;
    if moment <= now.timestamp() {
        return Err("it has passed".to_owned());
    }
    u64::try_from(moment.as_millisecond()).map_err(|_| EXPECTED.to_owned())
}

fn moment_after(text: &str, now: &ZonedDateTime) -> Option<Timestamp> {
    if let Ok(from_now) = text.parse::<SignedDuration>() {
        return now.timestamp().checked_add(from_now).ok();
    }
    if let Ok(moment) = text.parse::<Timestamp>() {
        return Some(moment);
    }
    // N.B. Before the time of day, which a date with a time would also be read as.
    let zone = now.time_zone();
    if let Ok(moment) = text.parse::<DateTime>() {
        return Some(moment.to_zoned_datetime(zone.clone()).ok()?.timestamp());
    }
    let time = text.parse::<Time>().ok()?;
    let today = now.date().to_datetime(time).to_zoned_datetime(zone.clone()).ok()?;
    let is_over = today.timestamp() <= now.timestamp();
    Some(if is_over { today.tomorrow().ok()? } else { today }.timestamp())
}

/// Formats a moment, in milliseconds since 1970, as in the log: `2026-11-25T02:06:51Z`.
pub(crate) fn moment(unix_ms: u64) -> String {
    formatted(unix_ms, TimeZone::UTC, "%Y-%m-%dT%H:%M:%SZ")
}

/// Formats a moment, in milliseconds since 1970, by the clock of the reader: `2026-11-29 04:00:00 CET`.
pub(crate) fn local(unix_ms: u64) -> String {
    formatted(unix_ms, TimeZone::system(), "%Y-%m-%d %H:%M:%S %Z")
}

fn formatted(unix_ms: u64, zone: TimeZone, format: &str) -> String {
    let moment = i64::try_from(unix_ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    // Beyond the year 9999.
    moment.map_or_else(
        || unix_ms.to_string(),
        |moment| moment.to_zoned_datetime(zone).strftime(format).to_string(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<String> {
        let now: ZonedDateTime = "2026-11-28T22:10:00+01:00[+01:00]".parse().unwrap();
        moment_after(text, &now).map(|moment| moment.to_string())
    }

    #[test]
    fn people_name_a_moment_by_the_clock_the_date_or_from_now() {
        for (text, moment) in [
            ("23:00", "2026-11-28T22:00:00Z"),
            ("04:00", "2026-11-29T03:00:00Z"),
            ("22:10", "2026-11-29T21:10:00Z"),
            ("2026-12-01T04:00", "2026-12-01T03:00:00Z"),
            ("2026-12-01 04:00:30", "2026-12-01T03:00:30Z"),
            ("2026-12-01T04:00Z", "2026-12-01T04:00:00Z"),
            ("2h", "2026-11-28T23:10:00Z"),
            ("1h30m", "2026-11-28T22:40:00Z"),
            ("45s", "2026-11-28T21:10:45Z"),
        ] {
            assert_eq!(read(text).as_deref(), Some(moment), "{text}");
        }
        for text in ["", "4", "25:00", "tomorrow", "2026-13-01T04:00", "04:00pm"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn a_moment_that_has_passed_is_refused() {
        assert!(parse_moment("2020-01-01T00:00Z").is_err());
        assert!(parse_moment("-2h").is_err());
        assert!(parse_moment("2h").is_ok());
    }

    #[test]
    fn moments_are_printed_as_in_the_log() {
        for (unix_ms, written) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400_000, "2000-02-29T00:00:00Z"),
            (1_795_573_341_075, "2026-11-25T02:22:21Z"),
            (4_107_542_399_999, "2100-02-28T23:59:59Z"),
        ] {
            assert_eq!(moment(unix_ms), written);
        }
        assert_eq!(moment(u64::MAX), u64::MAX.to_string());
    }
}
