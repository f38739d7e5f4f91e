//! The durable stages of a migration, and the table of records that may follow each other, for either side.
//!
//! ```text
//!              prepared           released          owned            ended
//!   Copying ───────────► Prepared ────────► Released ─────► Owned ─────────► Ended     one host
//!      ▲────aborted─────────┘                                 └─► HandedBack ──►┘
//!   Copying ───────────────────────────────► Released ───────────────────────► Ended   outgoing
//!                                               └─promoted───► HandedBack ─────►┘
//!   Copying ───────────► Prepared ─────────────────────────► Owned ──────────► Ended   incoming
//!      ▲────aborted─────────┘ └──────────promoted────────────►┘ └─► HandedBack     ▲
//!                                                             ▲─promoted──┘        │
//!   Copying, Prepared, HandedBack ───discarding──► Discarding ────────────────────►┘   incoming, one host
//! ```
//! A record may repeat an existing fact: a commit with an unknown result is made again.

use serde::{Deserialize, Serialize};

use super::record::{Outcome, Record};
use super::side::Side;
use crate::identity::Attempt;
use crate::planted::{Bug, broken};

/// The durable stage of a migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// The source owns the volumes; the target may hold parts of them.
    Copying,
    /// The source owns the volumes; the target has promised to wait. For an incoming migration: only the source knows whether
    /// it has released them.
    Prepared(Attempt),
    /// Past the commit point: the target does not own the volumes yet, but no other host will. For an outgoing migration: the
    /// target may own them by now.
    Released(Attempt),
    /// The target owns the volumes; the source images must still be deleted or kept.
    Owned(Attempt),
    /// The source owns the volumes again; the target images must still be deleted.
    HandedBack,
    /// Nothing is left to do.
    Ended(Outcome),
    /// The source owns the volumes, and the target never will: its images, at this host, are being deleted.
    Discarding(Outcome),
}

impl Stage {
    /// Returns the stage after `record`; `None` if the record does not fit.
    pub(super) fn after(&self, side: &Side, record: &Record) -> Option<Self> {
        match record {
            Record::TargetPrepared { attempt, .. } => self.prepared(side, *attempt),
            Record::AttemptAborted { attempt, .. } => self.aborted(*attempt),
            Record::Discarding { outcome, .. } => self.discarding(side, outcome),
            Record::Released { attempt, .. } => self.released(side, *attempt),
            Record::Owned { attempt, .. } => self.owned(side, *attempt),
            Record::Promoted { attempt, .. } => match side {
                Side::Incoming { .. } => self.promoted(side, *attempt),
                // The source takes the volumes back without the target's word.
                Side::Outgoing { .. } => self.handed_back(side),
                Side::OneHost => None,
            },
            Record::HandedBack { .. } => self.handed_back(side),
            Record::CancelOrdered { .. } => self.can_be_cancelled(side).then(|| self.clone()),
            Record::MigrationEnded { outcome, .. } => self.ended(side, outcome),
            _ => None,
        }
    }

    fn prepared(&self, side: &Side, attempt: Attempt) -> Option<Self> {
        if let (Side::OneHost, Self::Discarding(_)) = (side, self) {
            // The source gave the migration up while the target's promise was being committed.
            return Some(self.clone());
        }
        let fits = side.has_target() && matches!(self, Self::Copying | Self::Prepared(_));
        fits.then_some(Self::Prepared(attempt))
    }

    fn aborted(&self, attempt: Attempt) -> Option<Self> {
        match self {
            Self::Prepared(prepared) if *prepared > attempt => Some(self.clone()),
            Self::Copying | Self::Prepared(_) => Some(Self::Copying),
            _ => None,
        }
    }

    fn discarding(&self, side: &Side, outcome: &Outcome) -> Option<Self> {
        let fits = match (self, outcome) {
            // Two may give it up at the same time: the first one counts.
            (Self::Discarding(known), outcome) if is_of_one_kind(known, outcome) => {
                return Some(self.clone());
            }
            (Self::HandedBack, Outcome::HandedBack { .. }) => true,
            (Self::Copying | Self::Prepared(_), outcome) => leaves_at_source(outcome),
            _ => false,
        };
        (side.has_target() && fits).then(|| Self::Discarding(outcome.clone()))
    }

    /// **N.B.** A target that has promised waits for its source's decision, whatever is ordered here.
    pub(super) fn can_be_cancelled(&self, side: &Side) -> bool {
        match self {
            Self::Copying | Self::Discarding(_) => true,
            Self::Prepared(_) => *side == Side::OneHost || broken(Bug::CancelledAfterPromise),
            _ => false,
        }
    }

    fn released(&self, side: &Side, attempt: Attempt) -> Option<Self> {
        let fits = match (side, self) {
            (Side::OneHost, Self::Prepared(prepared)) => *prepared == attempt,
            // The target's promise is in the target's own journal.
            (Side::Outgoing { .. }, Self::Copying) => true,
            (Side::OneHost | Side::Outgoing { .. }, Self::Released(released)) => *released == attempt,
            _ => false,
        };
        fits.then_some(Self::Released(attempt))
    }

    fn owned(&self, side: &Side, attempt: Attempt) -> Option<Self> {
        let fits = match (side, self) {
            (Side::OneHost, Self::Released(released)) => *released == attempt,
            (Side::Incoming { .. }, Self::Prepared(prepared)) => *prepared == attempt,
            (Side::OneHost | Side::Incoming { .. }, Self::Owned(owned)) => *owned == attempt,
            _ => false,
        };
        fits.then_some(Self::Owned(attempt))
    }

    /// A copy that was handed back is complete and unmodified.
    fn promoted(&self, side: &Side, attempt: Attempt) -> Option<Self> {
        match self {
            Self::HandedBack => Some(Self::Owned(attempt)),
            Self::Copying if broken(Bug::IncompletePromoted) => Some(Self::Owned(attempt)),
            _ => self.owned(side, attempt),
        }
    }

    fn handed_back(&self, side: &Side) -> Option<Self> {
        let fits = matches!(
            (side, self),
            (Side::OneHost | Side::Incoming { .. }, Self::Owned(_))
                | (Side::Outgoing { .. }, Self::Released(_))
                | (_, Self::HandedBack)
        );
        fits.then_some(Self::HandedBack)
    }

    fn ended(&self, side: &Side, outcome: &Outcome) -> Option<Self> {
        let fits = match (side, self, outcome) {
            (_, Self::Ended(known), outcome) => known == outcome,
            (Side::OneHost | Side::Incoming { .. }, Self::Owned(_), Outcome::Moved { .. })
            | (Side::Outgoing { .. }, Self::Released(_), Outcome::Moved { .. })
            | (_, Self::HandedBack, Outcome::HandedBack { .. }) => true,
            // The text may have grown by a report of images left over.
            (_, Self::Discarding(begun), outcome) => is_of_one_kind(begun, outcome),
            (_, Self::Copying | Self::Prepared(_), outcome) => leaves_at_source(outcome),
            _ => false,
        };
        fits.then(|| Self::Ended(outcome.clone()))
    }
}

/// Returns whether both outcomes leave the volumes at the source, before a handover or after one.
fn is_of_one_kind(one: &Outcome, other: &Outcome) -> bool {
    let handed_back = |outcome: &Outcome| matches!(outcome, Outcome::HandedBack { .. });
    handed_back(one) && handed_back(other) || leaves_at_source(one) && leaves_at_source(other)
}

/// Returns whether an outcome is of a migration that was never released.
fn leaves_at_source(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Cancelled | Outcome::CancelledThere | Outcome::Failed { .. })
}
