//! Parses and formats sizes, rates and durations.

use std::time::Duration;

/// Suffixes of sizes with their factors. `K` to `T` mean powers of 1,024, as in qemu-img and fdisk. They, and those with an `i`,
/// may be lower case.
const UNITS: [(&str, u64); 16] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("K", 1 << 10),
    ("M", 1 << 20),
    ("G", 1 << 30),
    ("T", 1 << 40),
    ("P", 1 << 50),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("PiB", 1 << 50),
];
/// Suffixes of network rates with their bits, in powers of 1,000.
const BIT_UNITS: [(&str, u64); 5] =
    [("bit", 1), ("kbit", 1_000), ("Mbit", 1_000_000), ("Gbit", 1_000_000_000), ("Tbit", 1_000_000_000_000)];
const BITS: u64 = 8;
/// Largest number of digits after the point, few enough for exact arithmetic.
const FRACTION_DIGITS_MAX: usize = 9;

/// Suffixes of times with their seconds.
const TIME_UNITS: [(&str, u64); 4] = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)];

/// Parses a time: a whole number with a unit.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let read = TIME_UNITS.iter().find_map(|(unit, seconds)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(*seconds)
    });
    read.map(Duration::from_secs)
        .ok_or_else(|| "write a number with s, m, h or d, for example 90s, 2h or 7d".to_owned())
}

/// Why a text is not a size or a rate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// It does not begin with a number.
    #[error("it must begin with a number: write, for example, {example}")]
    Number {
        /// An example of a valid text.
        example: &'static str,
    },
    /// The suffix is unknown.
    #[error(
        "\"{unit}\" is no unit: use B, KiB, MiB, GiB, TiB (or K, M, G, T) or kB, MB, GB, TB; for rates also Mbit, Gbit"
    )]
    Unit {
        /// The text after the number.
        unit: String,
    },
    /// The suffix may mean bits, or bytes.
    #[error(
        "\"{unit}\" may mean bits or bytes: write bytes with a capital B (GB), and bits with \"bit\" (Gbit)"
    )]
    BitOrByte {
        /// The text after the number.
        unit: String,
    },
    /// A rate has no `/s`.
    #[error("a rate is per second: write for example 200MiB/s")]
    PerSecond,
    /// It is not a whole number of bytes.
    #[error("it is not a whole number of bytes")]
    Fraction,
    /// It does not fit into 64 bits.
    #[error("it is too large")]
    TooLarge,
    /// A size of nothing.
    #[error("it must be more than zero")]
    Zero,
}

/// Parses a size: a number and a unit, `4GiB` or `1.5 TiB`; without a unit: bytes.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    parse(text.trim(), "4GiB", size_unit)
}

/// Parses a size of whole MiB that is at least `bytes_min`.
pub fn parse_size_of_at_least(text: &str, bytes_min: u64) -> Result<u64, String> {
    let size = parse_size(text).map_err(|error| error.to_string())?;
    if size < bytes_min || !size.is_multiple_of(1 << 20) {
        return Err(format!("it must be a multiple of 1MiB, and at least {}MiB", bytes_min >> 20));
    }
    Ok(size)
}

/// Parses a rate and returns bytes a second: `200MiB/s`, `1Gbit/s`.
pub fn parse_rate(text: &str) -> Result<u64, UnitError> {
    let text = text.trim();
    match text.strip_suffix("/s") {
        Some(size) => parse(size.trim_end(), "200MiB/s", rate_unit),
        None => parse(text, "200MiB/s", rate_unit).and(Err(UnitError::PerSecond)),
    }
}

/// Formats a number of bytes: `4.0 GiB`.
pub fn bytes(count: u64) -> String {
    api::Bytes(count).to_string()
}

/// Formats a duration of `seconds`.
pub fn duration(seconds: f64) -> String {
    if seconds < 10.0 {
        return format!("{seconds:.1} s");
    }
    let whole = seconds.round() as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds:02} s"),
        (hours, minutes, _) => format!("{hours} h {minutes:02} min"),
    }
}

/// Formats a fraction, 0 to 1, as percent. It rounds down, so that only a complete migration shows 100 %.
pub fn percent(fraction: f64) -> String {
    format!("{:.1} %", (fraction.clamp(0.0, 1.0) * 1000.0).floor() / 10.0)
}

/// Returns the factor and the divisor of a unit of sizes.
fn size_unit(unit: &str) -> Result<(u64, u64), UnitError> {
    let unknown = || UnitError::Unit { unit: unit.to_owned() };
    let exact = UNITS.iter().find(|(name, _)| *name == unit);
    let in_small = |name: &str| !name.ends_with("B") || name.contains('i');
    let small = || UNITS.iter().find(|(name, _)| in_small(name) && name.to_lowercase() == unit);
    match exact.or_else(small) {
        Some((_, multiplier)) => Ok((*multiplier, 1)),
        None if unit.is_empty() => Ok((1, 1)),
        None if unit.strip_suffix('b').is_some_and(|prefix| "kKMmGgTtPp".contains(prefix)) => {
            Err(UnitError::BitOrByte { unit: unit.to_owned() })
        }
        None => Err(unknown()),
    }
}

/// Returns the factor and the divisor of a unit of rates.
fn rate_unit(unit: &str) -> Result<(u64, u64), UnitError> {
    let bits = BIT_UNITS.iter().find(|(name, _)| *name == unit || name.to_lowercase() == unit);
    bits.map_or_else(|| size_unit(unit), |(_, bits)| Ok((*bits, BITS)))
}

fn parse(
    text: &str,
    example: &'static str,
    unit_of: impl Fn(&str) -> Result<(u64, u64), UnitError>,
) -> Result<u64, UnitError> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.trim_start();
    let (multiplier, divisor) = match unit_of(unit) {
        Err(_) if number.is_empty() => return Err(UnitError::Number { example }),
        known => known?,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.contains('.') || number.ends_with('.') {
        return Err(UnitError::Number { example });
    }
    if fraction.len() > FRACTION_DIGITS_MAX {
        return Err(UnitError::Fraction);
    }
    let whole: u64 = whole.parse().map_err(|_| UnitError::TooLarge)?;
    let scale = 10_u128.pow(fraction.len() as u32);
    let fraction: u128 = if fraction.is_empty() { 0 } else { fraction.parse().unwrap_or(0) };
    let scaled = (u128::from(whole) * scale + fraction) * u128::from(multiplier);
    let scale = scale * u128::from(divisor);
    if !scaled.is_multiple_of(scale) {
        return Err(UnitError::Fraction);
    }
    match u64::try_from(scaled / scale) {
        Ok(0) => Err(UnitError::Zero),
        Ok(bytes) => Ok(bytes),
        Err(_) => Err(UnitError::TooLarge),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{UnitError, bytes, duration, parse_rate, parse_size, parse_time, percent};

    #[test]
    fn times_have_a_unit() {
        for (text, seconds) in [("90s", 90), ("5m", 300), ("2h", 7200), ("7d", 604_800), ("0s", 0)] {
            assert_eq!(parse_time(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "5", "h", "-1h", "1.5h", "1 h", "99999999999999999999d", "999999999999999999d"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        for (text, expected) in [
            ("4096", 4096),
            ("1B", 1),
            ("4GiB", 4 << 30),
            ("4 GiB", 4 << 30),
            ("4G", 4 << 30),
            ("4g", 4 << 30),
            ("4gib", 4 << 30),
            ("512m", 512 << 20),
            ("1P", 1 << 50),
            ("1.5TiB", 3 << 39),
            ("0.5KiB", 512),
            ("2GB", 2_000_000_000),
            ("10kB", 10_000),
            (" 7MiB ", 7 << 20),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_by_cause() {
        let number = UnitError::Number { example: "4GiB" };
        for (text, expected) in [
            ("", number.clone()),
            ("GiB", number.clone()),
            ("-1GiB", number.clone()),
            (".5GiB", number.clone()),
            ("1.GiB", number.clone()),
            ("1.2.3GiB", number),
            ("4Gib", UnitError::Unit { unit: "Gib".into() }),
            ("4Gb", UnitError::BitOrByte { unit: "Gb".into() }),
            ("4gb", UnitError::BitOrByte { unit: "gb".into() }),
            ("4Gbit", UnitError::Unit { unit: "Gbit".into() }),
            ("4b", UnitError::BitOrByte { unit: "b".into() }),
            ("4GiB/s", UnitError::Unit { unit: "GiB/s".into() }),
            ("1e9", UnitError::Unit { unit: "e9".into() }),
            ("0.3B", UnitError::Fraction),
            ("1.0000000001GiB", UnitError::Fraction),
            ("0", UnitError::Zero),
            ("0GiB", UnitError::Zero),
            ("18446744073709551616", UnitError::TooLarge),
            ("99999999TiB", UnitError::TooLarge),
        ] {
            assert_eq!(parse_size(text), Err(expected), "{text}");
        }
    }

    #[test]
    fn rates_are_per_second() {
        assert_eq!(parse_rate("200MiB/s"), Ok(200 << 20));
        assert_eq!(parse_rate("1.5 GB/s"), Ok(1_500_000_000));
        assert_eq!(parse_rate("1Gbit/s"), Ok(125_000_000));
        assert_eq!(parse_rate("2.5 gbit/s"), Ok(312_500_000));
        assert_eq!(parse_rate("100m/s"), Ok(100 << 20));
        assert_eq!(parse_rate("4bit/s"), Err(UnitError::Fraction));
        assert_eq!(parse_rate("1Gb/s"), Err(UnitError::BitOrByte { unit: "Gb".into() }));
        assert_eq!(parse_rate("1Gbit"), Err(UnitError::PerSecond));
        assert_eq!(parse_rate("200MiB"), Err(UnitError::PerSecond));
        assert_eq!(parse_rate("0MiB/s"), Err(UnitError::Zero));
        assert_eq!(parse_rate("fast"), Err(UnitError::Number { example: "200MiB/s" }));
    }

    #[test]
    fn sizes_and_durations_are_short() {
        assert_eq!([bytes(0), bytes(1023), bytes(1024)], ["0 B", "1023 B", "1.0 KiB"]);
        assert_eq!(
            [bytes((1 << 20) - 1), bytes(4 << 30), bytes(u64::MAX)],
            ["1.0 MiB", "4.0 GiB", "16.0 EiB"]
        );
        assert_eq!([duration(0.04), duration(59.6), duration(3720.0)], ["0.0 s", "1 min 00 s", "1 h 02 min"]);
    }

    #[test]
    fn nothing_but_the_whole_is_a_hundred_percent() {
        assert_eq!([percent(0.9999999), percent(1.0), percent(0.5)], ["99.9 %", "100.0 %", "50.0 %"]);
    }
}
