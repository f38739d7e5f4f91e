//! Small simulations of product machines that the fleet does not use: a seed is a few thousand steps of one host.
//!
//! - `hooks`: hooks before and after migrations, while the daemon is killed at any instant.
//! - `shares`: the shares of other hosts here, while some of them do their worst.

mod hooks;
mod shares;

use crate::restored::Telling;

#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) seeds: u64,
    pub(crate) hooks_begun: u64,
    pub(crate) kills: u64,
    pub(crate) arrivals: u64,
    pub(crate) refused: u64,
    /// Arrivals that ended because their source was silent.
    pub(crate) abandoned: u64,
    pub(crate) violations: Vec<(u64, String)>,
}

pub(crate) fn campaign(first: u64, count: u64, until_found: bool) -> Shown {
    let mut shown = Shown::default();
    for seed in first..first.saturating_add(count) {
        shown.seeds += 1;
        let violation = run(seed, Telling::Silent, &mut shown);
        if let Some(violation) = violation {
            shown.violations.push((seed, violation));
            if until_found {
                break;
            }
        }
    }
    shown
}

pub(crate) fn replay(seed: u64, telling: Telling) -> Option<String> {
    run(seed, telling, &mut Shown::default())
}

fn run(seed: u64, telling: Telling, shown: &mut Shown) -> Option<String> {
    let hooks = hooks::World::run(seed, telling, shown);
    let shares = shares::World::run(seed, telling, shown);
    hooks.or(shares)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hooks_run_once_and_each_host_keeps_to_its_share_whatever_happens() {
        let shown = campaign(0, 400, false);
        assert_eq!(shown.violations, []);
        for seen in [shown.hooks_begun, shown.kills, shown.arrivals, shown.refused, shown.abandoned] {
            assert!(seen > 400, "{shown:?}");
        }
    }
}
