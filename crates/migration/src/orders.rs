//! Orders of the administrator for a migration: durable before they are answered (law 39).
//!
//! ```text
//!   cancel ──► the journal takes it, or has taken the handover ──► answered: cancelled, or too late ──► driver or session
//!                └── killed: the next start finds it, and ends the migration instead of copying
//! ```
//! The journal decides: of a cancellation and a handover it takes the one that comes first, and refuses the other
//! ([`Inconsistent::Overtaken`](crate::journal::Inconsistent::Overtaken)).

use crate::identity::MigrationId;
use crate::journal::{MigrationState, Outcome, Record, Side, Stage, State};
use crate::planted::{Bug, broken};

/// A migration that is cancelled too late: it has been handed over, or may have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot cancel {0}: it is past the commit point")]
pub struct TooLate(pub MigrationId);

/// Returns the records that must be durable before the cancellation is answered; none if it is recorded already.
///
/// # Errors
/// [`TooLate`], as far as the state shows it; the journal may still refuse the order.
pub fn cancel(state: &State, migration: MigrationId) -> Result<Vec<Record>, TooLate> {
    let known = state.migrations.get(&migration).filter(|known| !known.has_ended());
    let known = known.ok_or(TooLate(migration))?;
    if known.is_cancelled || broken(Bug::CancelNotRecorded) {
        return Ok(Vec::new());
    }
    if known.may_be_cancelled() {
        Ok(vec![Record::CancelOrdered { migration }])
    } else {
        Err(TooLate(migration))
    }
}

/// Returns the records that give up an incomplete copy which waits for a host that is lost for good, and removed. Only that
/// host has its missing blocks, so nothing can be promoted. `None`: the migration is none of these.
///
/// **N.B.** Nothing is lost if the source comes back: its image is complete, and no guest has written here.
pub fn give_up(state: &State, migration: MigrationId) -> Option<Vec<Record>> {
    let known = state.migrations.get(&migration)?;
    let outcome = match &known.stage {
        Stage::Prepared(_) => Outcome::Cancelled,
        Stage::HandedBack => {
            Outcome::HandedBack { detail: "given up when its source was removed".to_owned() }
        }
        _ => return None,
    };
    let waits_for_blocks = matches!(known.side, Side::Incoming { .. }) && known.is_hollow();
    let is_given_up = waits_for_blocks && !broken(Bug::HollowWaitsForEver);
    is_given_up.then(|| vec![Record::Discarding { migration, outcome }])
}

/// Returns whether a restart continues to copy for a migration that it finds; otherwise it only ends it.
pub fn goes_on(recorded: &MigrationState) -> bool {
    !recorded.is_cancelled || broken(Bug::CancelForgotten)
}
