//! The strategy of an order: what lanes and other hosts are sent of it.

use std::time::Duration;

use api::{MigrateVolume, Strategy};
use migration::journal::MigrationState;
use migration::source::Moves;
use migration::strategy::{Choice, Diverging, HotBlocks, Recording, Strategy as CopyStrategy};
use migration::wire::OfferedStrategy;
use transport::Session;

use crate::error::RequestError;
use crate::journal::now_unix_ms;
use crate::migrations::departures::leave::{SWITCH_OVER_MAX, round_trip, switch_over_max};
use crate::vms::orders::move_vm::downtime_max;

/// The limit of guest writes in flight to another host, in bytes: three times what fills 1 Gbit/s at 180 ms.
const BUFFER_BYTES_MAX: u64 = 64 << 20;
/// The largest useful number of rounds: further rounds achieve nothing more.
const ROUNDS_MAX: u32 = 50;

pub(crate) fn choice(order: &MigrateVolume) -> Choice {
    let hot = if order.ignore_hot_blocks { HotBlocks::AsOthers } else { HotBlocks::PutOff };
    match (order.strategy.begun(), order.not_incremental) {
        (Strategy::Auto | Strategy::Mirror, _) => Choice::Mirror(hot),
        (Strategy::Tracking, is_full) => {
            let recording = if is_full { Recording::Full } else { Recording::Incremental };
            let diverging = if order.or_mirror { Diverging::IsMirrored } else { Diverging::Fails };
            Choice::Tracking(recording, hot, diverging)
        }
        (Strategy::ThreePhase, _) => {
            Choice::PostCopy { rounds_max: order.rounds.unwrap_or(Strategy::ROUNDS_USUAL) }
        }
        (Strategy::PostCopy, _) => Choice::PostCopy { rounds_max: 0 },
    }
}

/// Does the same for a migration that a restart resumes. **N.B.** if it was released with blocks missing, they are read from
/// this host, whatever the order says.
pub(crate) fn choice_again(order: &MigrateVolume, recorded: &MigrationState) -> Choice {
    match choice(order) {
        known if known.leaves_blocks() || recorded.hollow_now().is_none() => known,
        _ => Choice::PostCopy { rounds_max: 0 },
    }
}

/// Returns the strategy towards the host of a session.
pub(crate) fn away(choice: Choice, order: &MigrateVolume, moves: Moves, session: &Session) -> CopyStrategy {
    let (drain_max, switch_over_max) = (held_max(order, moves) / 2, switch_over_max(session, moves, order));
    choice.away(BUFFER_BYTES_MAX, drain_max, round_trip(session), switch_over_max)
}

pub(crate) fn offered(strategy: Strategy) -> OfferedStrategy {
    match strategy {
        Strategy::Auto | Strategy::Mirror => OfferedStrategy::Mirror,
        Strategy::Tracking => OfferedStrategy::Tracking,
        Strategy::ThreePhase | Strategy::PostCopy => OfferedStrategy::PostCopy,
    }
}

/// Returns how long guests may be held at the handover.
pub(crate) fn held_max(order: &MigrateVolume, moves: Moves) -> Duration {
    match (moves, order.max_downtime_ms) {
        (Moves::Vm, _) => downtime_max(order),
        (Moves::Volumes | Moves::VolumesAfterHooks, None) => SWITCH_OVER_MAX,
        (Moves::Volumes | Moves::VolumesAfterHooks, Some(milliseconds)) => {
            Duration::from_millis(milliseconds)
        }
    }
}

/// Returns the time until a migration's deadline; `None`: it has none.
pub(crate) fn time_left(order: &MigrateVolume) -> Option<Duration> {
    let left = order.deadline_unix_ms?.saturating_sub(now_unix_ms());
    Some(Duration::from_millis(left))
}

/// Refuses an order that contradicts itself.
pub(crate) fn check_strategy(order: &MigrateVolume) -> Result<(), RequestError> {
    if order.not_incremental && order.strategy != Strategy::Tracking {
        let text =
            "not_incremental is an option of the strategy tracking (--strategy tracking --no-incremental)";
        return Err(RequestError::Invalid(text.to_owned()));
    }
    if order.or_mirror && order.strategy != Strategy::Tracking {
        let text = "or_mirror is an option of the strategy tracking (--strategy tracking --or-mirror)";
        return Err(RequestError::Invalid(text.to_owned()));
    }
    if order.rounds.is_some() && order.strategy != Strategy::ThreePhase {
        let text = "rounds is an option of the strategy three-phase (--strategy three-phase --rounds 4)";
        return Err(RequestError::Invalid(text.to_owned()));
    }
    if order.rounds.is_some_and(|rounds| !(1..=ROUNDS_MAX).contains(&rounds)) {
        let text =
            format!("{ROUNDS_MAX} rounds at most, and one at least; without any it is --strategy post-copy");
        return Err(RequestError::Invalid(text));
    }
    Ok(())
}

/// Refuses, between stores of this host, options that are only of use between hosts.
pub(crate) fn check_strategy_here(order: &MigrateVolume) -> Result<(), RequestError> {
    if order.strategy.leaves_blocks() {
        return Err(RequestError::Invalid(format!(
            "--strategy {} is for moves to other hosts: it has no advantage between stores of one host; use mirror or tracking",
            order.strategy.name()
        )));
    }
    Ok(())
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
        assert_eq!(choice(&tracked), Choice::Tracking(Recording::Full, HotBlocks::PutOff, Diverging::Fails));
        let usual = |diverging| Choice::Tracking(Recording::Incremental, HotBlocks::PutOff, diverging);
        assert_eq!(choice(&order(Strategy::Tracking)), usual(Diverging::Fails));
        let mirrored = MigrateVolume { or_mirror: true, ..order(Strategy::Tracking) };
        assert_eq!(choice(&mirrored), usual(Diverging::IsMirrored));
        assert_eq!(choice(&order(Strategy::Mirror)), Choice::Mirror(HotBlocks::PutOff));
        let ignored = MigrateVolume { ignore_hot_blocks: true, ..order(Strategy::Mirror) };
        assert_eq!(choice(&ignored), Choice::Mirror(HotBlocks::AsOthers));
    }

    /// Orders of older daemons name no strategy, and peers know no choice of ours.
    #[test]
    fn an_order_that_has_begun_without_a_strategy_is_mirrored() {
        let old = order(Strategy::default());
        assert_eq!(old.strategy, Strategy::Auto);
        assert_eq!(choice(&old), choice(&order(Strategy::Mirror)));
        assert_eq!(offered(old.strategy), OfferedStrategy::Mirror);
        check_strategy_here(&old).unwrap();
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
}
