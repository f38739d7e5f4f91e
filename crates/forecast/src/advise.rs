//! Chooses the strategy of a migration whose order names none.
//!
//! ```text
//!   on one host ─────────────────────────────────────────────► mirror
//!   to another host: no rate is known ───────────────────────► mirror
//!                    guests write less than it copies ───────► mirror
//!                    otherwise: the rounds end, and in time ─► tracking
//!                               they may not ────────────────► mirror
//! ```
//! Mirroring always ends. It sends every write, and beside a guest that writes nearly as fast as it copies, it slows that guest
//! down to its own rate. Rounds send a block once that is written ten times meanwhile. No strategy is chosen that hands a volume
//! over incomplete.

use std::time::Duration;

use crate::route::Forecast;

/// Guests that write less than this part of the copy's rate are mirrored.
const NEARLY: f64 = 0.8;
/// The part of the forecast runs that must end in rounds.
const SURE: f64 = 0.95;

/// What is known before the choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// Whether the volumes go to another host.
    pub leaves_host: bool,
    /// What guests wrote lately, in bytes a second.
    pub written: f64,
    /// The rate of the copy, in bytes a second; `None`: it is not known.
    pub rate: Option<f64>,
    /// How long guests may be held.
    pub downtime_max: Duration,
}

/// A strategy that leaves no block behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// In one pass, while writes go to both stores.
    Mirror,
    /// In rounds.
    Tracking,
}

/// Returns a strategy, and the reason in one sentence. `in_rounds` runs the same migration ahead by [`Advice::Tracking`].
pub fn advise(facts: &Facts, in_rounds: impl FnOnce() -> Option<Forecast>) -> (Advice, String) {
    if !facts.leaves_host {
        return (Advice::Mirror, "between stores of one host, writes to both stores cost little".to_owned());
    }
    let Some(copied) = facts.rate.filter(|rate| *rate > 0.0) else {
        return (
            Advice::Mirror,
            "no earlier copy shows how fast it can be, and mirroring always ends".to_owned(),
        );
    };
    let rates = format!("guests write {}/s, and it can copy {}/s", size(facts.written), size(copied));
    if facts.written < NEARLY * copied {
        return (Advice::Mirror, format!("{rates}, so that both stores can take all writes"));
    }
    let Some(forecast) = in_rounds() else {
        return (Advice::Mirror, format!("{rates}, and nothing shows that rounds would end"));
    };
    let (ends, held) = ((forecast.ends * 100.0).round(), forecast.downtime.most * 1000.0);
    let downtime_max = facts.downtime_max.as_secs_f64() * 1000.0;
    if forecast.ends < SURE {
        (Advice::Mirror, format!("{rates}; rounds ended in only {ends:.0} of 100 forecasts"))
    } else if held > downtime_max {
        let advice = format!(
            "{rates}; rounds would hold guests for {held:.0} ms, and {downtime_max:.0} ms are allowed"
        );
        (Advice::Mirror, advice)
    } else {
        let advice = format!(
            "{rates}; rounds ended in {ends:.0} of 100 forecasts, hold guests for {held:.0} ms at most, and do not slow them down"
        );
        (Advice::Tracking, advice)
    }
}

fn size(bytes: f64) -> String {
    const KIB: f64 = 1024.0;
    const MIB: f64 = 1024.0 * KIB;
    if bytes < MIB { format!("{:.0} KiB", bytes / KIB) } else { format!("{:.1} MiB", bytes / MIB) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::{Origin, Range};

    const MIB: f64 = (1 << 20) as f64;

    fn facts(written_mib: f64, rate_mib: Option<f64>) -> Facts {
        Facts {
            leaves_host: true,
            written: written_mib * MIB,
            rate: rate_mib.map(|rate| rate * MIB),
            downtime_max: Duration::from_millis(300),
        }
    }

    fn forecast(ends: f64, downtime_ms: f64) -> Option<Forecast> {
        let downtime = Range { least: 0.0, middle: 0.0, most: downtime_ms / 1000.0 };
        let (seconds, bytes) = (Range::default(), Range::default());
        Some(Forecast { seconds, bytes, downtime, ends, origin: Origin::Rate })
    }

    fn never() -> Option<Forecast> {
        panic!("nothing is run ahead without need")
    }

    #[test]
    fn mirroring_is_advised_where_writes_to_both_stores_cost_little_or_nothing_is_known() {
        let here = Facts { leaves_host: false, ..facts(500.0, Some(100.0)) };
        for facts in [here, facts(500.0, None), facts(500.0, Some(0.0)), facts(79.0, Some(100.0))] {
            assert_eq!(advise(&facts, never).0, Advice::Mirror, "{facts:?}");
        }
        let (_, reason) = advise(&facts(12.5, Some(100.0)), never);
        assert!(reason.contains("guests write 12.5 MiB/s, and it can copy 100.0 MiB/s"), "{reason}");
    }

    #[test]
    fn rounds_are_advised_only_if_they_end_and_hold_guests_no_longer_than_ordered() {
        for (forecast, advice, said) in [
            (forecast(0.95, 300.0), Advice::Tracking, "95 of 100"),
            (forecast(0.94, 100.0), Advice::Mirror, "only 94 of 100"),
            (forecast(1.0, 301.0), Advice::Mirror, "for 301 ms, and 300 ms are allowed"),
            (None, Advice::Mirror, "nothing shows"),
        ] {
            let (advised, reason) = advise(&facts(80.0, Some(100.0)), || forecast);
            assert_eq!(advised, advice, "{reason}");
            assert!(reason.contains(said), "{reason}");
        }
    }
}
