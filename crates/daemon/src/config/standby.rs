//! What concerns the standbys of this host's volumes.

use std::time::Duration;

use serde::Deserialize;
use standby::asking::IfSilent;

const DAY_S: u64 = 86_400;
/// The shortest and the longest time between two comparisons, in seconds.
const VERIFY_S: std::ops::RangeInclusive<u64> = 10..=366 * DAY_S;

/// The settings of all standbys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct StandbyConfig {
    /// What a start does if the host of a standby does not say whether that was promoted.
    pub if_silent: IfSilent,
    /// How often everything is compared with each standby.
    pub verify: Verify,
}

/// How often everything is compared with each standby; `None`: only if it is ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Verify(pub Option<Duration>);

impl TryFrom<String> for Verify {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let seconds = match text.as_str() {
            "off" => return Ok(Self(None)),
            "daily" => DAY_S,
            "weekly" => 7 * DAY_S,
            "monthly" => 30 * DAY_S,
            other => seconds(other)
                .filter(|seconds| VERIFY_S.contains(seconds))
                .ok_or_else(|| format!("\"{}\" is not how often standbys are compared: write off, daily, weekly, monthly, or a time from 10s to \
                    366d as in 36h", words::clean(&other.chars().take(40).collect::<String>())))?,
        };
        Ok(Self(Some(Duration::from_secs(seconds))))
    }
}

/// Reads a whole number of seconds, minutes, hours or days: `36h`.
fn seconds(text: &str) -> Option<u64> {
    let unit = text.chars().next_back()?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => DAY_S,
        _ => return None,
    };
    let digits = text.strip_suffix(unit).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
    digits.parse::<u64>().ok()?.checked_mul(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standbys_are_compared_as_often_as_a_word_or_a_time_says() {
        let verify = |text: &str| {
            Verify::try_from(text.to_owned()).map(|Verify(every)| every.map(|every| every.as_secs()))
        };
        assert_eq!(verify("off"), Ok(None));
        assert_eq!(verify("weekly"), Ok(Some(604_800)));
        assert_eq!(verify("36h"), verify("2160m"));
        assert_eq!(verify("10s"), Ok(Some(10)));
        for wrong in ["", "9s", "h", "+3h", "3 h", "yearly", "367d", "99999999999999999d", "ä", "12\u{1b}"] {
            let refused = verify(wrong).unwrap_err();
            assert!(refused.contains("write off, daily") && !refused.contains('\u{1b}'), "{refused}");
        }
    }
}
