//! The pace of a migration, as options.

use clap::Args;

use console::units::parse_rate;

use crate::moments::parse_moment;

#[derive(Debug, Args)]
pub(crate) struct PaceArguments {
    /// Largest rate of the copying, for example 200MiB/s: of all volumes and a VM's memory together. It does not limit guests' own
    /// writes, and nothing that guests wait for.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub(crate) bandwidth: Option<u64>,
    /// What guests of the disks may lose to the copying, of their throughput, for example 10%; `none`: copy at full speed. The
    /// default is `limits.impact_percent` of the configuration. It holds at both hosts.
    #[arg(long, value_name = "PERCENT|none", value_parser = parse_impact)]
    pub(crate) impact: Option<u8>,
    /// When it is to end, for example 04:00 or 2h. If the ordered impact would make it later, guests lose more, as far as it
    /// must be; it says so while it does.
    #[arg(long, value_name = "TIME", value_parser = parse_moment)]
    pub(crate) deadline: Option<u64>,
    /// When it begins, for example 04:00, 2026-11-29T04:00 or 2h; until then it waits in the queue.
    #[arg(long, value_name = "TIME", value_parser = parse_moment)]
    pub(crate) at: Option<u64>,
}

/// Reads `10%`, `10` or `none`.
pub(crate) fn parse_impact(text: &str) -> Result<u8, String> {
    if text == "none" {
        return Ok(api::FULL_SPEED_PERCENT);
    }
    let percent = text.strip_suffix('%').unwrap_or(text).trim().parse::<u8>();
    match percent {
        Ok(percent @ 1..=90) => Ok(percent),
        _ => {
            Err("it is a percentage from 1% to 90% that guests may lose, or none: copy at full speed"
                .to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impact_is_a_percentage_or_none() {
        assert_eq!(parse_impact("20%"), Ok(20));
        assert_eq!(parse_impact("5"), Ok(5));
        assert_eq!(parse_impact("none"), Ok(100));
        for wrong in ["0%", "91%", "100%", "-1", "half", ""] {
            assert!(parse_impact(wrong).is_err(), "{wrong}");
        }
    }
}
