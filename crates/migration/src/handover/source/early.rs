//! An early attempt at the handover: the VM is paused, and its hypervisor still sends the rest of the memory and the devices
//! (hard case 27).
//!
//! ```text
//!   VM   works ──► paused ──────── devices ────────► loaded at the target
//!                         │                                  │
//!   early     NotYet ──► Due ──► UnderWay ───────────────► Over: the same attempt continues, and releases
//!                         near    │  gates closed, both sides flush, the target promises
//!                         enough  ▼
//!                                Over: a request for a disk arrived, or the target could not promise;
//!                                      the gates are open again, and the next attempt waits for the VM
//! ```
//! It differs from other attempts in two ways: it releases nothing before the VM is loaded, and a request that waits at its
//! gates ends it. A hypervisor may have to write until its own migration is over, and behind a closed gate it would never
//! finish (hard case 16).

use std::time::Duration;

use super::attempt::SyncState;
use super::{Source, SourceAction, State};
use crate::handover::phase::Phase;
use crate::identity::Attempt;
use crate::journal::{FailureCode, Outcome};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Early {
    /// The VM works, or there is none.
    #[default]
    NotYet,
    /// The VM is paused; the replicas are not near enough yet.
    Due,
    /// The attempt has begun, and the VM is not loaded yet.
    UnderWay,
    /// The attempt was given up, or the VM is loaded.
    Over,
}

impl Source {
    /// Handles that the VM is paused, while its hypervisor is still busy with it.
    pub(super) fn vm_paused(&mut self, now: Duration) {
        if matches!(self.state, State::MovingMemory) && self.early == Early::NotYet {
            self.early = Early::Due;
            self.try_early(now);
        }
    }

    /// Begins the attempt as soon as the replicas have converged.
    pub(super) fn try_early(&mut self, now: Duration) {
        let is_due = matches!(self.state, State::MovingMemory) && self.early == Early::Due;
        if is_due && self.all_at_least(SyncState::Converged) {
            self.early = Early::UnderWay;
            self.close_gates(now);
        }
    }

    /// **N.B.** From here on the VM is paused in any case, and sends no request to its disks.
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
            // The switch-over counts from here: until now the VM did not wait for the disks.
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

    /// Handles a request that waits at a gate closed for this attempt.
    pub(super) fn request_held(&mut self, attempt: Attempt) {
        if self.early == Early::UnderWay && attempt == self.attempt {
            self.give_up_early();
        }
    }

    /// Undoes the attempt; the next one waits for the VM.
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
