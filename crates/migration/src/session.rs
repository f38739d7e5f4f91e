//! The session of a migration at one host: from the order or offer until nothing is left to do there.
//!
//! ```text
//!   source        Record ─► Offer ─► LetVmLeave ─► ExamineVm ─► Begin ─┐
//!   target        MakeRoom ─► Record ─► MakeImages ─► Begin ───────────┤
//!   within a host MakeRoom ─► Record ─► MakeImages ─► Begin ───────────┤
//!                    │ a step fails, or it is cancelled                ▼
//!                    ▼                              lost ┌──────── under way ◄──── Begin ◄── Recall ◄── a restart
//!                  Undo                                  └─► Recall, ▲ │ the driver has ended it
//!                    ▼                              a little later ──┘ ▼
//!                  End, again until it is durable ──────────────────► Note where the VM is, until noted ─► over
//! ```
//! Within a host a restart continues the copying if the copy can be trusted ([`crate::stay::copy`]). Otherwise it undoes the
//! migration: *Begin* fails with [`FailureCode::DaemonStopped`](crate::journal::FailureCode::DaemonStopped).
//!
//! A step is requested when the previous one is done. Their order ([`steps`](Role::steps)) puts whatever must be durable first.
//! [`Source`](crate::Source) and [`Target`](crate::Target) decide the copying and the handover, and a driver runs them. The
//! session only learns of their end.

mod event;
mod state;
#[cfg(test)]
mod tests;

pub use event::{Action, Answer, Event, Step, Undo, VmPlace};
pub use state::MigrationSession;

use std::time::Duration;

/// A host's part in a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The volumes leave for another host.
    Source,
    /// The volumes come from another host.
    Target,
    /// The volumes go to another store of this host.
    Local,
}

impl Role {
    /// Returns the steps, in order, until a driver has the migration.
    pub fn steps(self, has_vm: bool) -> &'static [Step] {
        match (self, has_vm) {
            (Self::Source, false) => &[Step::Record, Step::Offer, Step::Begin],
            (Self::Source, true) => {
                &[Step::Record, Step::Offer, Step::LetVmLeave, Step::ExamineVm, Step::Begin]
            }
            // A VM that moves is unknown before its description has arrived, and by then the driver exists.
            (Self::Target | Self::Local, _) => &[Step::MakeRoom, Step::Record, Step::MakeImages, Step::Begin],
        }
    }
}

/// The waiting times of a session.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// How long the other host may take to answer an offer.
    pub offer_max: Duration,
    /// The pause before the next check whether a driver can continue an interrupted migration.
    pub resume_interval: Duration,
    /// The pause before a failed write to the journal is tried again.
    pub repeat_interval: Duration,
}
