//! The strategy of an order: what lanes are told of it, what other hosts are, and who does not know it.

use std::time::Duration;

use api::{MigrateVolume, Strategy};
use migration::source::Moves;
use migration::strategy::{Choice, Recording};
use migration::wire::OfferedStrategy;
use transport::Session;

use crate::error::RequestError;
use crate::host::migrations::leave::SWITCH_OVER_MAX;
use crate::host::vms::move_vm::downtime_max;

/// Hosts that speak this version, or a later one, know of strategies besides mirroring.
const STRATEGIES_SINCE: u16 = 5;

/// How an order wants volumes to be copied.
pub(super) fn choice(order: &MigrateVolume) -> Choice {
    match (order.strategy, order.not_incremental) {
        (Strategy::Mirror, _) => Choice::Mirror,
        (Strategy::Tracking, false) => Choice::Tracking(Recording::Incremental),
        (Strategy::Tracking, true) => Choice::Tracking(Recording::Full),
    }
}

/// How another host is told of it.
pub(super) fn offered(strategy: Strategy) -> OfferedStrategy {
    match strategy {
        Strategy::Mirror => OfferedStrategy::Mirror,
        Strategy::Tracking => OfferedStrategy::Tracking,
    }
}

/// How long guests may be held at the handover.
pub(super) fn held_max(order: &MigrateVolume, moves: Moves) -> Duration {
    match (moves, order.max_downtime_ms) {
        (Moves::Vm, _) => downtime_max(order),
        (Moves::Volumes | Moves::VolumesAfterHooks, None) => SWITCH_OVER_MAX,
        (Moves::Volumes | Moves::VolumesAfterHooks, Some(milliseconds)) => {
            Duration::from_millis(milliseconds)
        }
    }
}

/// Refuses what contradicts itself.
///
/// # Errors
/// [`RequestError::Invalid`].
pub(super) fn check_strategy(order: &MigrateVolume) -> Result<(), RequestError> {
    if order.not_incremental && order.strategy != Strategy::Tracking {
        let text =
            "not_incremental is an option of the strategy tracking (--strategy tracking --no-incremental)";
        return Err(RequestError::Invalid(text.to_owned()));
    }
    Ok(())
}

/// Refuses a strategy that the other host does not know.
///
/// # Errors
/// [`RequestError::Invalid`].
pub(super) fn check_peer_knows(
    order: &MigrateVolume,
    session: &Session,
    peer: &str,
) -> Result<(), RequestError> {
    if session.version().is_none_or(|version| knows(version, order.strategy)) {
        return Ok(());
    }
    Err(RequestError::Invalid(format!(
        "host \"{peer}\" runs an older version, which knows no strategy but mirror: update it, or leave --strategy {} out",
        order.strategy.name()
    )))
}

/// Tells whether hosts that speak this version know a strategy.
fn knows(version: u16, strategy: Strategy) -> bool {
    version >= STRATEGIES_SINCE || strategy == Strategy::Mirror
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(strategy: Strategy) -> MigrateVolume {
        MigrateVolume { strategy, ..MigrateVolume::to("b") }
    }

    #[test]
    fn an_option_of_one_strategy_is_refused_with_another() {
        for strategy in [Strategy::Mirror, Strategy::Tracking] {
            let contradicts = MigrateVolume { not_incremental: true, ..order(strategy) };
            assert_eq!(check_strategy(&contradicts).is_err(), strategy == Strategy::Mirror);
            check_strategy(&order(strategy)).unwrap();
        }
        let tracked = MigrateVolume { not_incremental: true, ..order(Strategy::Tracking) };
        assert_eq!(choice(&tracked), Choice::Tracking(Recording::Full));
        assert_eq!(choice(&order(Strategy::Tracking)), Choice::Tracking(Recording::Incremental));
        assert_eq!(choice(&order(Strategy::Mirror)), Choice::Mirror);
    }

    #[test]
    fn guests_are_held_for_as_long_as_is_ordered_and_half_a_second_otherwise() {
        let ordered =
            |milliseconds| MigrateVolume { max_downtime_ms: milliseconds, ..order(Strategy::Tracking) };
        assert_eq!(held_max(&ordered(None), Moves::Volumes), Duration::from_millis(500));
        for moves in [Moves::Volumes, Moves::VolumesAfterHooks, Moves::Vm] {
            assert_eq!(held_max(&ordered(Some(7000)), moves), Duration::from_secs(7));
        }
        assert_eq!(held_max(&ordered(None), Moves::Vm), Duration::from_millis(300));
    }

    #[test]
    fn a_host_of_an_older_version_knows_mirroring_only() {
        assert!(knows(STRATEGIES_SINCE - 1, Strategy::Mirror));
        assert!(!knows(STRATEGIES_SINCE - 1, Strategy::Tracking));
        assert!(knows(STRATEGIES_SINCE, Strategy::Tracking));
    }
}
