//! The source's side of a migration: one machine over all its volumes.
//!
//! See [`crate::phase`] for the phases and [`crate::message`] for the conversation. The copying itself is each
//! volume's strategy's; this machine hears when all replicas are synchronised, closes the gates, and hands over. All
//! volumes move, or none.

mod answer;
mod attempt;
mod early;
mod event;

use std::collections::VecDeque;
use std::time::Duration;

use attempt::SyncState;
use early::Early;

use crate::filling::Manifest;
use crate::handover::message::ToTarget;
use crate::handover::phase::Phase;
use crate::handover::released::{Completeness, Handover};
use crate::identity::{Attempt, CommitId, VolumeIndex};
use crate::journal::{MigrationState, Outcome, Side, Stage, Summary};

pub use attempt::ATTEMPTS_MAX;
pub use event::{Costs, Following, Moves, Peer, SourceAction, SourceEvent, SourceSettings};

/// Pause before a commit that the journal did not take, or a message without an answer, is repeated.
const REPEAT: Duration = Duration::from_millis(200);
/// How long another host is told that the migration is over before it ends without that host's answer: a link may be
/// gone for good. A host that comes back later asks, and is told then ([`crate::recovery::answer_as_source`]).
pub const TELL_MAX: Duration = Duration::from_secs(10);
/// What is left over then.
const UNTOLD: &str = "the other host has not said that it deleted its copy; it will when it asks";

/// The machine of the source's side.
#[derive(Debug)]
pub struct Source {
    settings: SourceSettings,
    began: Duration,
    /// What daemons before this one have spent on it.
    spent: Duration,
    state: State,
    /// The current try, or the last one: a number is given when a gate begins to close.
    attempt: Attempt,
    /// Tries of this run.
    tries: u32,
    /// How often the stores were flushed while the guests worked.
    settlings: u32,
    /// How many of them have failed since one succeeded.
    settlings_failed: u32,
    /// Tries below or at this will not be released; durable in the journal.
    aborted: Attempt,
    replicas: Vec<SyncState>,
    /// Why mirroring was suspended last, of each volume that has not been synchronised since.
    hindrances: Vec<Option<&'static str>>,
    /// What each volume's target lacks; `None`: it is to lack nothing.
    manifests: Vec<Option<Manifest>>,
    early: Early,
    /// A failure, or a wish to end, that came while the release was undecided.
    pending_end: Option<Outcome>,
    last_commit: CommitId,
    costs: Costs,
    summary: Summary,
    actions: VecDeque<SourceAction>,
}

#[derive(Debug)]
enum State {
    Copying {
        /// No try at the handover before this.
        not_before: Duration,
    },
    /// The source's stores are flushed while the guests still work, so that the flush behind the closed gates finds
    /// little to do (hard case 27). Still [`Phase::Copying`]: nothing is held.
    Settling {
        settling: u32,
        unflushed: Vec<VolumeIndex>,
    },
    /// The VM's memory is copied, and the VM brought to a stand; the volumes are copied all the while.
    MovingMemory,
    /// What is to be done before the volumes change hands is being done; they are copied all the while. Still
    /// [`Phase::Copying`]: nothing is held.
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
    /// Past the commit point.
    Released {
        handover: Handover,
        gates_closing_at: Duration,
        began: Duration,
    },
    /// Before the commit point, and it will never be reached.
    Discarding {
        outcome: Outcome,
        step: DiscardStep,
    },
    /// The outcome is being made durable.
    Ending {
        outcome: Outcome,
        retry_at: Option<Duration>,
    },
    Ended,
}

/// What is known of a release that is being made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReleaseFate {
    /// No commit of it has ended: if the first certainly took nothing, the source still owns the volumes.
    Open,
    /// A commit of it may be in the journal. From here on only one that succeeds decides; that a repetition took
    /// nothing says nothing of the first.
    PerhapsReleased,
}

#[derive(Debug)]
enum DiscardStep {
    /// *Aborted* is being made durable: before that the target must hear nothing.
    Aborting { retry_at: Option<Duration> },
    /// The target deletes its images.
    Telling { repeat_at: Duration, began: Duration },
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

    /// Makes the machine of an outgoing migration that a restart interrupted, or of one on this host that is still copying; `None`
    /// if there is nothing left to do.
    ///
    /// **N.B.** before the commit point, what [`crate::recovery::recover`] wants committed is durable by now, and
    /// `recorded` says so: tries of the run before are aborted. The machine goes on copying; one that cannot is told
    /// [`SourceEvent::VolumeFailed`] at once.
    pub fn resume(now: Duration, settings: SourceSettings, recorded: &MigrationState) -> Option<Self> {
        match recorded.side {
            Side::Outgoing { .. } => {}
            // Whatever is further a start ends.
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

    /// Says how long it had taken when this machine was made.
    #[must_use]
    pub fn having_spent(self, spent: Duration) -> Self {
        Self { spent, ..self }
    }

    /// Takes what happened. What does not fit the phase changes nothing: it is late, or repeated.
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

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        match &mut self.state {
            // The VM is waited for, and that has a deadline of its own.
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
                if self.settings.peer == Peer::OtherHost && now >= *began + TELL_MAX {
                    let outcome = outcome.clone().with_left_over(UNTOLD);
                    self.end(now, outcome);
                } else {
                    self.actions.push_back(SourceAction::Send(ToTarget::Discard));
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

    /// The next thing to be done.
    pub fn poll_action(&mut self) -> Option<SourceAction> {
        self.actions.pop_front()
    }

    /// When `handle_timeout` is to be called, at the latest, and what is waited for.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        match &self.state {
            State::Copying { not_before } => self
                .all_at_least(SyncState::Converged)
                .then_some((*not_before, "a pause before the next try at the handover")),
            State::Closing { .. } | State::Preparing { .. } if self.early == Early::UnderWay => None,
            State::Closing { began, open } => {
                let reason = if open.is_empty() {
                    "what is on its way to the target to arrive"
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

    /// What is waited for as long as it takes; `None` while there is a deadline, or nothing to wait for.
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

    /// Where the migration stands.
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

    /// The number of the current try, or of the last one.
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// How many tries this run has made.
    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// What follows of volumes that have left with blocks missing; `None`: nothing does.
    pub fn following(&self) -> Option<Following> {
        let State::Released { handover, .. } = &self.state else { return None };
        let units_missing = handover.units_missing()?;
        let units_at_handover =
            self.manifests.iter().flatten().map(|manifest| manifest.units).fold(0, u64::saturating_add);
        // Whatever it says, no more than what it was told; and not nothing: that it lacks nothing is another word.
        let units_missing = units_missing.map(|units| units.min(units_at_handover).max(1));
        Some(Following { units_at_handover, units_missing })
    }

    /// Tells what copying has cost, for the record at the end.
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
    }
}
