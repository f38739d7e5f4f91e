//! A try at the handover that begins early: a VM that goes along stands still, and its hypervisor still sends the last of
//! its memory and its devices (hard case 27).
//!
//! ```text
//!   VM   works ──► paused ──────── devices ────────► loaded at the target
//!                         │                                  │
//!   early     NotYet ──► Due ──► UnderWay ───────────────► Over: the same try goes on, and releases
//!                         near    │  gates closed, both sides flush, the target promises
//!                         enough  ▼
//!                                Over: somebody wanted something of a disk, or the target could not promise;
//!                                      the gates are open again, and the next try waits for the VM
//! ```
//! It is a try like any other, but for two things: it releases nothing before the VM is loaded, and a request that its
//! gates hold ends it. A hypervisor may have something to write until its own migration is over, and would never come to an
//! end behind a closed gate (hard case 16).

use std::time::Duration;

use super::attempt::SyncState;
use super::{Source, SourceAction, State};
use crate::handover::phase::Phase;
use crate::identity::Attempt;
use crate::journal::{FailureCode, Outcome};

/// How far the early try is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Early {
    /// The VM works, or there is none.
    #[default]
    NotYet,
    /// The VM stands still; the replicas are not near enough yet.
    Due,
    /// It has been begun, and the VM is not loaded yet.
    UnderWay,
    /// It was given up, or the VM is loaded.
    Over,
}

impl Source {
    /// The VM does nothing any more, but its hypervisor has not done with it.
    pub(super) fn vm_paused(&mut self, now: Duration) {
        if matches!(self.state, State::MovingMemory) && self.early == Early::NotYet {
            self.early = Early::Due;
            self.try_early(now);
        }
    }

    /// Begins, as soon as what is left arrives soon enough.
    pub(super) fn try_early(&mut self, now: Duration) {
        let is_due = matches!(self.state, State::MovingMemory) && self.early == Early::Due;
        if is_due && self.all_at_least(SyncState::Converged) {
            self.early = Early::UnderWay;
            self.close_gates(now);
        }
    }

    /// **N.B.** From here on the VM stands still in any case: nobody asks for anything of its disks.
    pub(super) fn vm_stopped(&mut self, now: Duration, result: Result<(), String>) {
        if !matches!(self.state, State::MovingMemory) && self.early != Early::UnderWay {
            return;
        }
        if let Err(detail) = result {
            self.end_before_release(Outcome::Failed { code: FailureCode::VmStayed, detail });
            return;
        }
        self.early = Early::Over;
        match &mut self.state {
            // The switch-over is counted from here: until now the disks were not what the VM waited for.
            State::Closing { began, .. } => {
                *began = now;
                self.actions.push_back(SourceAction::Enter(Phase::Closing));
            }
            State::Preparing { gates_closing_at, began, .. } => {
                (*gates_closing_at, *began) = (now, now);
                self.actions.push_back(SourceAction::Enter(Phase::Closing));
                self.actions.push_back(SourceAction::Enter(Phase::Preparing));
                self.release_if_ready(now);
            }
            _ => self.close_gates(now),
        }
    }

    /// A request waits at a gate that was closed for this try.
    pub(super) fn request_held(&mut self, attempt: Attempt) {
        if self.early == Early::UnderWay && attempt == self.attempt {
            self.give_up_early();
        }
    }

    /// As if it had not been begun; the next try waits for the VM.
    pub(super) fn give_up_early(&mut self) {
        let told = matches!(self.state, State::Preparing { .. });
        self.early = Early::Over;
        self.state = State::MovingMemory;
        self.actions.extend(self.volumes().map(SourceAction::OpenGate));
        if told {
            self.commit_abort();
        }
    }
}
