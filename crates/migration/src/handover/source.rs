//! The source's side of a migration: one machine over all its volumes.
//!
//! See [`crate::phase`] for the phases and [`crate::message`] for the messages. Each volume's strategy does the copying. This
//! machine waits until all replicas are synchronised, closes the gates, and hands over. Either all volumes move, or none.

mod answer;
mod attempt;
mod early;
mod event;

use std::collections::VecDeque;
use std::time::Duration;

use attempt::SyncState;
use early::Early;

use crate::filling::Manifest;
use crate::handover::phase::Phase;
use crate::handover::released::{Completeness, Handover};
use crate::identity::{Attempt, CommitId, VolumeIndex};
use crate::journal::{MigrationState, Outcome, Side, Stage, Summary};

pub use attempt::ATTEMPTS_MAX;
pub use event::{Costs, Following, Moves, Peer, SourceAction, SourceEvent, SourceSettings};

/// The pause before a failed commit or an unanswered message is repeated.
const REPEAT: Duration = Duration::from_millis(200);
/// How long the source repeats to another host that the migration is over. Then it ends without an answer, because the link may
/// be gone for good. A host that reappears later asks, and is answered then ([`crate::recovery::answer_as_source`]).
pub const TELL_MAX: Duration = Duration::from_secs(10);
/// The left-over that is reported in that case.
pub(crate) const UNTOLD: &str =
    "the other host has not confirmed that it deleted its copy; it deletes it when it connects";

/// The machine of a migration's source.
#[derive(Debug)]
pub struct Source {
    settings: SourceSettings,
    began: Duration,
    /// The time that earlier daemons spent on the migration.
    spent: Duration,
    state: State,
    /// The current attempt, or the last one. A number is assigned when a gate begins to close.
    attempt: Attempt,
    tries: u32,
    settlings: u32,
    /// The number of them that failed since the last success.
    settlings_failed: u32,
    /// Attempts up to this one will not be released; durable in the journal.
    aborted: Attempt,
    replicas: Vec<SyncState>,
    /// The reason of the last suspension, for each volume that has not been synchronised since.
    hindrances: Vec<Option<&'static str>>,
    /// The manifest of each volume's target; `None` if it is to lack nothing.
    manifests: Vec<Option<Manifest>>,
    early: Early,
    /// A failure or a cancellation that came while the release was undecided.
    pending_end: Option<Outcome>,
    last_commit: CommitId,
    costs: Costs,
    summary: Summary,
    actions: VecDeque<SourceAction>,
}

#[derive(Debug)]
enum State {
    Copying {
        not_before: Duration,
    },
    /// The source's stores are flushed while the guests work, so that the flush behind the closed gates is short (hard case
    /// 27). Still [`Phase::Copying`]: no request is held.
    Settling {
        settling: u32,
        unflushed: Vec<VolumeIndex>,
    },
    /// The VM's memory is copied until the VM is paused; mirroring continues.
    MovingMemory,
    /// The hooks before the handover run; mirroring continues. Still [`Phase::Copying`]: no request is held.
    RunningHooks,
    Closing {
        open: Vec<VolumeIndex>,
        began: Duration,
    },
    Preparing {
        prepared: bool,
        unflushed: Vec<VolumeIndex>,
        gates_closing_at: Duration,
        began: Duration,
    },
    Releasing {
        gates_closing_at: Duration,
        began: Duration,
        fate: ReleaseFate,
        retry_at: Option<Duration>,
    },
    Released {
        handover: Handover,
        gates_closing_at: Duration,
        began: Duration,
    },
    /// The migration ends before its commit point.
    Discarding {
        outcome: Outcome,
        step: DiscardStep,
    },
    Ending {
        outcome: Outcome,
        retry_at: Option<Duration>,
    },
    Ended,
}

/// The known state of a release that is being made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReleaseFate {
    /// No commit of the release has ended. If the first commit certainly failed, the source still owns the volumes.
    Open,
    /// A commit of the release may be in the journal. From here on only a success decides: a failed repetition says nothing
    /// about the first commit.
    PerhapsReleased,
}

#[derive(Debug)]
enum DiscardStep {
    /// *Aborted* is being made durable; the target must not learn of it earlier.
    Aborting {
        retry_at: Option<Duration>,
    },
    Telling {
        repeat_at: Duration,
        began: Duration,
    },
}

impl Source {
    /// Makes the machine of a migration that begins to copy.
    pub fn new(now: Duration, settings: SourceSettings) -> Self {
        Self {
            replicas: vec![SyncState::Behind; settings.volumes.len()],
            hindrances: vec![None; settings.volumes.len()],
            manifests: vec![None; settings.volumes.len()],
            early: Early::default(),
            settings,
            began: now,
            spent: Duration::ZERO,
            state: State::Copying { not_before: now },
            attempt: Attempt::NONE,
            tries: 0,
            settlings: 0,
            settlings_failed: 0,
            aborted: Attempt::NONE,
            pending_end: None,
            last_commit: CommitId(0),
            costs: Costs::default(),
            summary: Summary::default(),
            actions: VecDeque::new(),
        }
    }

    /// Makes the machine of an outgoing migration that a restart interrupted, or of a copying one on this host. Returns `None`
    /// if there is nothing left to do.
    ///
    /// **N.B.** Before the commit point, the commits requested by [`crate::recovery::recover`] are durable, and `recorded`
    /// reflects them: attempts of the earlier run are aborted. The machine continues to copy. A migration that cannot continue
    /// receives [`SourceEvent::VolumeFailed`] at once.
    pub fn resume(now: Duration, settings: SourceSettings, recorded: &MigrationState) -> Option<Self> {
        match recorded.side {
            Side::Outgoing { .. } => {}
            // A start ends every later stage.
            Side::OneHost if recorded.stage == Stage::Copying => {}
            Side::OneHost | Side::Incoming { .. } => return None,
        }
        let mut source = Self::new(now, settings);
        source.aborted = recorded.aborted;
        source.attempt = recorded.aborted.max(recorded.attempt());
        match &recorded.stage {
            Stage::Copying => {}
            Stage::Released(_) => {
                let hollow = recorded.hollow_now().into_iter().flat_map(|hollow| &hollow.manifests);
                source.manifests = hollow.map(|(_, manifest)| Some(*manifest)).collect();
                source.hand_over(now, now, Completeness::of(recorded));
            }
            Stage::HandedBack => {
                let detail = "the volume could not be started at the target".to_owned();
                source.tell(now, Outcome::HandedBack { detail });
            }
            Stage::Prepared(_) | Stage::Owned(_) | Stage::Discarding(_) | Stage::Ended(_) => return None,
        }
        Some(source)
    }

    /// Sets the time spent before this machine was made.
    #[must_use]
    pub fn having_spent(self, spent: Duration) -> Self {
        Self { spent, ..self }
    }

    /// Handles an event. An event that does not fit the phase is late or repeated, and changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: SourceEvent) {
        match event {
            SourceEvent::Synchronised(volume) => self.stands(now, volume, SyncState::Synchronised),
            SourceEvent::Converged(volume) => self.stands(now, volume, SyncState::Converged),
            SourceEvent::Behind(volume) => self.stands(now, volume, SyncState::Behind),
            SourceEvent::Suspended { volume, reason } => self.suspended(volume, reason),
            SourceEvent::Told { volume, manifest } => self.told(volume, manifest),
            SourceEvent::VolumeFailed { code, detail } => {
                self.end_before_release(Outcome::Failed { code, detail });
            }
            SourceEvent::Cancel => self.cancelled(),
            SourceEvent::VmPaused => self.vm_paused(now),
            SourceEvent::VmStopped(result) => self.vm_stopped(now, result),
            SourceEvent::HooksRun(result) => self.hooks_run(now, result),
            SourceEvent::GateClosed { volume, attempt } => self.gate_closed(now, volume, attempt),
            SourceEvent::RequestHeld { attempt, .. } => self.request_held(attempt),
            SourceEvent::Settled { volume, settling, result } => self.settled(now, volume, settling, result),
            SourceEvent::Flushed { volume, attempt, result } => self.flushed(now, volume, attempt, result),
            SourceEvent::Committed { commit, result } => {
                if commit == self.last_commit {
                    self.committed(now, result);
                }
            }
            SourceEvent::Received(message) => self.received(now, message),
            SourceEvent::Retired { left_over } => {
                if let State::Released { handover, .. } = &mut self.state {
                    let step = handover.retired(left_over);
                    self.after(now, step);
                }
            }
        }
        self.try_handover(now);
    }

    /// Handles everything that is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        match &mut self.state {
            // The wait for the VM has a deadline of its own.
            State::Closing { .. } | State::Preparing { .. } if self.early == Early::UnderWay => {}
            State::Closing { began, .. } if now >= *began + self.settings.switch_over_max => {
                self.give_up_attempt(now);
            }
            State::Preparing { gates_closing_at, .. }
                if now >= *gates_closing_at + self.settings.switch_over_max =>
            {
                self.give_up_attempt(now);
            }
            State::Releasing { retry_at, .. } if retry_at.is_some_and(|at| at <= now) => {
                *retry_at = None;
                self.commit_release();
            }
            State::Released { handover, .. } => {
                let step = handover.handle_timeout(now, &mut self.actions);
                self.after(now, step);
            }
            State::Discarding { step: DiscardStep::Aborting { retry_at }, .. }
                if retry_at.is_some_and(|at| at <= now) =>
            {
                *retry_at = None;
                self.commit_abort();
            }
            State::Discarding { step: DiscardStep::Telling { repeat_at, began }, outcome }
                if *repeat_at <= now =>
            {
                *repeat_at = now + REPEAT;
                if self.settings.peer.is_told_enough(now.saturating_sub(*began)) {
                    let outcome = outcome.clone().with_left_over(UNTOLD);
                    self.end(now, outcome);
                } else {
                    self.say_discard();
                }
            }
            State::Ending { retry_at, .. } if retry_at.is_some_and(|at| at <= now) => {
                *retry_at = None;
                self.commit_end();
            }
            _ => {}
        }
        self.try_handover(now);
    }

    /// Returns the next action for the caller.
    pub fn poll_action(&mut self) -> Option<SourceAction> {
        self.actions.pop_front()
    }

    /// Returns the latest time to call `handle_timeout`, and the reason for it.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        match &self.state {
            State::Copying { not_before } => self
                .all_at_least(SyncState::Converged)
                .then_some((*not_before, "a pause before the next attempt at the handover")),
            State::Closing { .. } | State::Preparing { .. } if self.early == Early::UnderWay => None,
            State::Closing { began, open } => {
                let reason = if open.is_empty() {
                    "data in flight to the target to arrive"
                } else {
                    "the guest requests in flight to end"
                };
                Some((*began + self.settings.switch_over_max, reason))
            }
            State::Preparing { gates_closing_at, .. } => {
                let reason = "both stores to be flushed and the target to promise";
                Some((*gates_closing_at + self.settings.switch_over_max, reason))
            }
            State::Releasing { retry_at, .. }
            | State::Ending { retry_at, .. }
            | State::Discarding { step: DiscardStep::Aborting { retry_at }, .. } => {
                Some(((*retry_at)?, "the journal"))
            }
            State::Discarding { step: DiscardStep::Telling { repeat_at, .. }, .. } => {
                Some((*repeat_at, "the target to delete its images"))
            }
            State::Released { handover, .. } => handover.poll_timeout(),
            State::Settling { .. } | State::MovingMemory | State::RunningHooks | State::Ended => None,
        }
    }

    /// Returns the reason of a wait without deadline; `None` while there is a deadline, or no wait.
    pub fn waits_for(&self) -> Option<&'static str> {
        match &self.state {
            State::Settling { .. } => Some("the source's stores to be flushed"),
            State::MovingMemory => Some("the VM's memory to be copied"),
            State::Closing { .. } | State::Preparing { .. } if self.early == Early::UnderWay => {
                Some("the VM to be loaded at the target")
            }
            State::RunningHooks => Some("the hooks of both hosts"),
            State::Releasing { retry_at: None, .. }
            | State::Ending { retry_at: None, .. }
            | State::Discarding { step: DiscardStep::Aborting { retry_at: None }, .. } => Some("the journal"),
            State::Released { handover, .. } => handover.waits_for(),
            _ => None,
        }
    }

    /// Returns the migration's current phase.
    pub fn phase(&self) -> Phase {
        match &self.state {
            State::Copying { .. } | State::Settling { .. } | State::RunningHooks => Phase::Copying,
            State::MovingMemory => Phase::Memory,
            State::Closing { .. } | State::Preparing { .. } if self.early == Early::UnderWay => Phase::Memory,
            State::Closing { .. } => Phase::Closing,
            State::Preparing { .. } => Phase::Preparing,
            State::Releasing { .. } => Phase::Releasing,
            State::Released { handover, .. } => handover.phase(),
            State::Discarding { .. } => Phase::Discarding,
            State::Ending { .. } | State::Ended => Phase::Ended,
        }
    }

    /// Returns the number of the current attempt, or of the last one.
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Returns the number of attempts in this run.
    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// Returns the state of the filling after a handover of incomplete volumes; otherwise `None`.
    pub fn following(&self) -> Option<Following> {
        let State::Released { handover, .. } = &self.state else { return None };
        let units_missing = handover.units_missing()?;
        let units_at_handover =
            self.manifests.iter().flatten().map(|manifest| manifest.units).fold(0, u64::saturating_add);
        // The report is limited to the manifest's units, and to at least one: completeness is another message.
        let units_missing = units_missing.map(|units| units.min(units_at_handover).max(1));
        Some(Following { units_at_handover, units_missing })
    }

    /// Sets the cost of copying, for the record at the end.
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
    }
}
