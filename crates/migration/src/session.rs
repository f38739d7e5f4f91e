//! The life of a migration at one host, from its order, or offer, until nothing is left to be done for it there.
//!
//! ```text
//!   source        Record ─► Offer ─► LetVmLeave ─► ExamineVm ─► Begin ─┐
//!   target        MakeRoom ─► Record ─► MakeImages ─► Begin ───────────┤
//!   within a host MakeRoom ─► Record ─► MakeImages ─► Begin ───────────┤
//!                    │ a step fails, or it is cancelled                ▼
//!                    ▼                              lost ┌──────── under way ◄──── Begin ◄── Recall ◄── a restart
//!                  Undo                                  └─► Recall, ▲ │ the driver has ended it
//!                    ▼                              a little later ──┘ ▼
//!                  End, again until it is durable ──────────────────► Note where the VM is, until it is ─► over
//! ```
//! Within a host a restart goes on with what is being copied if the copy may be believed ([`crate::stay::copy`]), and otherwise
//! undoes it: *Begin* fails with [`FailureCode::DaemonStopped`](crate::journal::FailureCode::DaemonStopped) then.
//!
//! A step is asked for when the one before it is done: what is to be durable first stands first ([`steps`](Role::steps)). What
//! happens while it is under way, the copying and the handover, is decided by [`Source`](crate::Source) and
//! [`Target`](crate::Target), which a driver runs; all that this machine knows of them is that they have ended.

mod event;
mod state;
#[cfg(test)]
mod tests;

pub use event::{Action, Answer, Event, Step, Undo, VmPlace};
pub use state::MigrationSession;

use std::time::Duration;

/// Which part of a migration a host has.
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
    /// What is to be done until a driver has the migration, in this order.
    pub fn steps(self, has_vm: bool) -> &'static [Step] {
        match (self, has_vm) {
            (Self::Source, false) => &[Step::Record, Step::Offer, Step::Begin],
            (Self::Source, true) => {
                &[Step::Record, Step::Offer, Step::LetVmLeave, Step::ExamineVm, Step::Begin]
            }
            // Of a VM that comes along nothing is known before its manifest has come, and the driver is there then.
            (Self::Target | Self::Local, _) => &[Step::MakeRoom, Step::Record, Step::MakeImages, Step::Begin],
        }
    }
}

/// How patient a session is.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// How long the other host may take to answer an offer.
    pub offer_max: Duration,
    /// Pause before it is looked again whether a driver can go on with what was interrupted.
    pub resume_interval: Duration,
    /// Pause before something is written again that could not be made durable.
    pub repeat_interval: Duration,
}
