//! The source's side of a migration: one machine over all its volumes.
//!
//! See [`crate::phase`] for the phases and [`crate::message`] for the conversation. The copying itself is each
//! volume's strategy's; this machine hears when all replicas are synchronised, closes the gates, and hands over. All
//! volumes move, or none.

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::Generation;

use crate::failure::CommitFault;
use crate::handover::{Handover, Step, with_left_over};
use crate::identity::{Attempt, CommitId, MigrationId, VolumeId, VolumeIndex};
use crate::journal::{FailureCode, Outcome, Record, Summary};
use crate::message::{ToSource, ToTarget};
use crate::phase::Phase;
use crate::planted::{Bug, broken};
use crate::target::FlushResult;

/// Tries at the handover before the migration fails.
const ATTEMPTS_MAX: u32 = 10;
/// Pause after a try that was given up.
const ATTEMPT_PAUSE: Duration = Duration::from_secs(1);
/// Pause before a commit that the journal did not take, or a message without an answer, is repeated.
const REPEAT: Duration = Duration::from_millis(200);

/// What a source is told at its beginning.
#[derive(Clone, Debug)]
pub struct SourceSettings {
    /// Identity of the migration.
    pub migration: MigrationId,
    /// The volumes and the generations that they have now.
    pub volumes: Vec<(VolumeId, Generation)>,
    /// How long the gates may be closed before the commit point; then the try is given up.
    pub switch_over_max: Duration,
}

/// What happened at the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// A volume's replica equals the volume.
    Synchronised(VolumeIndex),
    /// A volume's replica no longer equals the volume.
    Behind(VolumeIndex),
    /// A volume cannot be copied.
    VolumeFailed {
        /// The cause, for programs.
        code: FailureCode,
        /// The cause, for people.
        detail: String,
    },
    /// A volume's gate is closed, and no request is in flight below it.
    GateClosed {
        /// Which volume.
        volume: VolumeIndex,
        /// For which try.
        attempt: Attempt,
    },
    /// A flush of a volume's store has ended.
    Flushed {
        /// Which volume.
        volume: VolumeIndex,
        /// For which try.
        attempt: Attempt,
        /// Whether everything is durable.
        result: FlushResult,
    },
    /// A commit has ended.
    Committed {
        /// Which.
        commit: CommitId,
        /// Whether the records are durable.
        result: Result<(), CommitFault>,
    },
    /// The target says something.
    Received(ToSource),
    /// Somebody wants the migration to end. Too late from [`Phase::Releasing`] on.
    Cancel,
    /// The source's images have been dealt with.
    Retired {
        /// What could not be deleted or renamed; empty if all was.
        left_over: String,
    },
}

/// What is to be done at the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceAction {
    /// The phase has changed; for reports.
    Enter(Phase),
    /// Hold a volume's requests, and say when none is in flight.
    CloseGate {
        /// Which volume.
        volume: VolumeIndex,
        /// For the answer.
        attempt: Attempt,
    },
    /// Let a volume's requests go on, to the source.
    OpenGate(VolumeIndex),
    /// Flush a volume's store.
    Flush {
        /// Which volume.
        volume: VolumeIndex,
        /// For the answer.
        attempt: Attempt,
    },
    /// Make records durable, all or none.
    Commit {
        /// For the answer.
        commit: CommitId,
        /// What has become true.
        records: Vec<Record>,
    },
    /// Tell the target.
    Send(ToTarget),
    /// Stop copying and mirroring all volumes; the guests go on at the source.
    StopCopying,
    /// Serve all volumes from the source's stores again, with these generations, after a hand-back.
    TakeBack(Vec<(VolumeId, Generation)>),
    /// Deal with the source's images.
    Retire,
    /// The migration has ended; the journal says so already.
    End {
        /// How.
        outcome: Outcome,
        /// What it cost.
        summary: Summary,
    },
}

/// What copying has cost so far, of all volumes; told by the caller before it matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Bytes that the movers have written.
    pub bytes_copied: u64,
    /// Bytes of mirrored writes.
    pub bytes_mirrored: u64,
    /// Bytes that were zero.
    pub bytes_zero: u64,
}

/// The machine of the source's side.
#[derive(Debug)]
pub struct Source {
    settings: SourceSettings,
    began: Duration,
    state: State,
    attempt: Attempt,
    /// Tries below or at this will not be released; durable in the journal.
    aborted: Attempt,
    synchronised: Vec<bool>,
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
        unflushed: Vec<VolumeIndex>,
    },
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
    Telling { repeat_at: Duration },
}

impl Source {
    /// Makes the machine of a migration that begins to copy.
    pub fn new(now: Duration, settings: SourceSettings) -> Self {
        Self {
            synchronised: vec![false; settings.volumes.len()],
            settings,
            began: now,
            state: State::Copying { not_before: now },
            attempt: Attempt::NONE,
            aborted: Attempt::NONE,
            pending_end: None,
            last_commit: CommitId(0),
            costs: Costs::default(),
            summary: Summary::default(),
            actions: VecDeque::new(),
        }
    }

    /// Takes what happened. What does not fit the phase changes nothing: it is late, or repeated.
    pub fn handle_event(&mut self, now: Duration, event: SourceEvent) {
        match event {
            SourceEvent::Synchronised(volume) => self.set_synchronised(volume, Synchronised::Yes),
            SourceEvent::Behind(volume) => self.set_synchronised(volume, Synchronised::No),
            SourceEvent::VolumeFailed { code, detail } => {
                self.end_before_release(Outcome::Failed { code, detail });
            }
            SourceEvent::Cancel => self.end_before_release(Outcome::Cancelled),
            SourceEvent::GateClosed { volume, attempt } => self.gate_closed(now, volume, attempt),
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
            State::Discarding { step: DiscardStep::Telling { repeat_at }, .. } if *repeat_at <= now => {
                *repeat_at = now + REPEAT;
                self.actions.push_back(SourceAction::Send(ToTarget::Discard));
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
            State::Copying { not_before } => {
                self.all_synchronised().then_some((*not_before, "the pause after a try that was given up"))
            }
            State::Closing { began, .. } => {
                Some((*began + self.settings.switch_over_max, "the guest requests in flight to end"))
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
            State::Discarding { step: DiscardStep::Telling { repeat_at }, .. } => {
                Some((*repeat_at, "the target to delete its images"))
            }
            State::Released { handover, .. } => handover.poll_timeout(),
            State::Settling { .. } | State::Ended => None,
        }
    }

    /// Where the migration stands.
    pub fn phase(&self) -> Phase {
        match &self.state {
            State::Copying { .. } | State::Settling { .. } => Phase::Copying,
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

    /// Tells what copying has cost, for the record at the end.
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
    }
}

// Up to the commit point.
impl Source {
    fn set_synchronised(&mut self, volume: VolumeIndex, now_is: Synchronised) {
        if let Some(known) = self.synchronised.get_mut(volume.as_usize()) {
            *known = now_is == Synchronised::Yes;
        }
    }

    fn all_synchronised(&self) -> bool {
        self.synchronised.iter().all(|known| *known)
    }

    fn volumes(&self) -> impl Iterator<Item = VolumeIndex> + use<> {
        VolumeIndex::all(self.settings.volumes.len())
    }

    fn try_handover(&mut self, now: Duration) {
        let State::Copying { not_before } = self.state else { return };
        if !self.all_synchronised() || now < not_before {
            return;
        }
        self.attempt = self.attempt.next();
        let attempt = self.attempt;
        self.state = State::Settling { unflushed: self.volumes().collect() };
        self.actions.extend(self.volumes().map(|volume| SourceAction::Flush { volume, attempt }));
    }

    fn settled(&mut self, now: Duration) {
        if !self.all_synchronised() {
            self.state = State::Copying { not_before: now };
            return;
        }
        let attempt = self.attempt;
        self.state = State::Closing { open: self.volumes().collect(), began: now };
        self.actions.push_back(SourceAction::Enter(Phase::Closing));
        let close = self.volumes().map(|volume| SourceAction::CloseGate { volume, attempt });
        self.actions.extend(close);
    }

    fn gate_closed(&mut self, now: Duration, volume: VolumeIndex, attempt: Attempt) {
        let State::Closing { open, began } = &mut self.state else { return };
        if attempt != self.attempt {
            return;
        }
        open.retain(|waiting| *waiting != volume);
        if !open.is_empty() {
            return;
        }
        let gates_closing_at = *began;
        if !self.all_synchronised() {
            // The last mirrored writes failed at the target: they are copied, and then it is tried again.
            self.give_up_attempt(now);
            return;
        }
        let unflushed =
            if broken(Bug::SourceCache) { Vec::new() } else { self.volumes().collect::<Vec<_>>() };
        let flush = unflushed.clone().into_iter().map(|volume| SourceAction::Flush { volume, attempt });
        self.actions.push_back(SourceAction::Enter(Phase::Preparing));
        self.actions.push_back(SourceAction::Send(ToTarget::Prepare(attempt)));
        self.actions.extend(flush);
        self.state = State::Preparing { prepared: false, unflushed, gates_closing_at, began: now };
    }

    fn flushed(&mut self, now: Duration, volume: VolumeIndex, attempt: Attempt, result: FlushResult) {
        let (State::Settling { unflushed } | State::Preparing { unflushed, .. }) = &mut self.state else {
            return;
        };
        if attempt != self.attempt {
            return;
        }
        if result == FlushResult::Failed {
            self.give_up_attempt(now);
            return;
        }
        unflushed.retain(|waiting| *waiting != volume);
        match &self.state {
            State::Settling { unflushed } if unflushed.is_empty() => self.settled(now),
            State::Preparing { .. } => self.release_if_ready(now),
            _ => {}
        }
    }

    fn release_if_ready(&mut self, now: Duration) {
        let State::Preparing { prepared: true, unflushed, gates_closing_at, .. } = &self.state else {
            return;
        };
        if unflushed.is_empty() && !self.all_synchronised() {
            // The target lost what it had applied, perhaps before its flush could make it durable (hard case 13).
            self.give_up_attempt(now);
        } else if unflushed.is_empty() {
            let gates_closing_at = *gates_closing_at;
            self.note_prepared(now);
            self.actions.push_back(SourceAction::Enter(Phase::Releasing));
            self.state =
                State::Releasing { gates_closing_at, began: now, fate: ReleaseFate::Open, retry_at: None };
            self.commit_release();
        }
    }

    /// **N.B.** Once this commit is durable the source serves nothing of these volumes, whatever happens.
    fn commit_release(&mut self) {
        let released = Record::Released {
            migration: self.settings.migration,
            attempt: self.attempt,
            generations: self.next_generations(),
        };
        self.commit(vec![released]);
    }

    fn next_generations(&self) -> Vec<(VolumeId, Generation)> {
        self.settings.volumes.iter().map(|(volume, generation)| (*volume, generation.next())).collect()
    }

    /// Ends a try before the commit point: the guests go on at once, the target is told when that is durable.
    fn give_up_attempt(&mut self, now: Duration) {
        let told = !matches!(self.state, State::Settling { .. } | State::Closing { .. });
        self.state = State::Copying { not_before: now + ATTEMPT_PAUSE };
        self.actions.push_back(SourceAction::Enter(Phase::Copying));
        self.actions.extend(self.volumes().map(SourceAction::OpenGate));
        if told {
            self.commit_abort();
        }
        if let Some(outcome) = self.pending_end.take() {
            self.end_before_release(outcome);
        } else if self.attempt.0 >= ATTEMPTS_MAX {
            let detail = format!("the handover did not succeed in {ATTEMPTS_MAX} tries");
            self.end_before_release(Outcome::Failed { code: FailureCode::HandoverRefused, detail });
        }
    }

    fn commit_abort(&mut self) {
        let migration = self.settings.migration;
        self.commit(vec![Record::AttemptAborted { migration, attempt: self.attempt }]);
    }

    fn end_before_release(&mut self, outcome: Outcome) {
        match self.state {
            State::Copying { .. }
            | State::Settling { .. }
            | State::Closing { .. }
            | State::Preparing { .. } => {
                let closed = !matches!(self.state, State::Copying { .. } | State::Settling { .. });
                self.actions.push_back(SourceAction::Enter(Phase::Discarding));
                self.actions.push_back(SourceAction::StopCopying);
                if closed {
                    self.actions.extend(self.volumes().map(SourceAction::OpenGate));
                }
                self.state = State::Discarding { outcome, step: DiscardStep::Aborting { retry_at: None } };
                self.commit_abort();
            }
            State::Releasing { .. } => {
                self.pending_end.get_or_insert(outcome);
            }
            _ => {}
        }
    }
}

// Answers from the journal and the target.
impl Source {
    fn commit(&mut self, records: Vec<Record>) {
        self.last_commit = CommitId(self.last_commit.0 + 1);
        self.actions.push_back(SourceAction::Commit { commit: self.last_commit, records });
    }

    fn committed(&mut self, now: Duration, result: Result<(), CommitFault>) {
        match (&mut self.state, result) {
            (State::Copying { .. }, Ok(())) => {
                self.aborted = self.attempt;
                self.actions.push_back(SourceAction::Send(ToTarget::Abort(self.attempt)));
            }
            // The target hears of it when it asks; the next try overtakes this one in any case.
            (State::Copying { .. }, Err(_)) => {}
            (State::Releasing { gates_closing_at, began, .. }, Ok(())) => {
                let (gates_closing_at, began) = (*gates_closing_at, *began);
                self.summary.release_us = micros(now.saturating_sub(began));
                self.actions.push_back(SourceAction::Enter(Phase::Committing));
                let handover = Handover::new(
                    now,
                    self.settings.migration,
                    self.attempt,
                    self.next_generations(),
                    &mut self.actions,
                );
                self.state = State::Released { handover, gates_closing_at, began: now };
            }
            (State::Releasing { fate: ReleaseFate::Open, .. }, Err(CommitFault::NotWritten)) => {
                self.give_up_attempt(now);
            }
            // Undecided: nobody may act before the journal has an answer.
            (State::Releasing { fate, retry_at, .. }, Err(_)) => {
                *fate = ReleaseFate::PerhapsReleased;
                *retry_at = Some(now + REPEAT);
            }
            (State::Discarding { step, .. }, Ok(())) => {
                if let DiscardStep::Aborting { .. } = step {
                    self.aborted = self.attempt;
                    *step = DiscardStep::Telling { repeat_at: now + REPEAT };
                    self.actions.push_back(SourceAction::Send(ToTarget::Discard));
                }
            }
            (State::Discarding { step: DiscardStep::Aborting { retry_at }, .. }, Err(_)) => {
                *retry_at = Some(now + REPEAT);
            }
            (State::Released { handover, .. }, result) => {
                handover.committed(now, result, &mut self.actions);
                self.enter_phase_of_handover();
            }
            (State::Ending { outcome, .. }, Ok(())) => {
                let outcome = outcome.clone();
                let summary = self.summary;
                self.state = State::Ended;
                self.actions.push_back(SourceAction::Enter(Phase::Ended));
                self.actions.push_back(SourceAction::End { outcome, summary });
            }
            (State::Ending { retry_at, .. }, Err(_)) => *retry_at = Some(now + REPEAT),
            _ => {}
        }
    }

    fn received(&mut self, now: Duration, message: ToSource) {
        match (&mut self.state, message) {
            (State::Preparing { prepared, .. }, ToSource::Prepared(attempt))
                if attempt == self.attempt || broken(Bug::StaleAttempt) =>
            {
                *prepared = true;
                self.release_if_ready(now);
            }
            (State::Released { handover, .. }, message) => {
                let step = handover.received(now, message, &mut self.actions);
                self.after(now, step);
            }
            (
                State::Discarding { outcome, step: DiscardStep::Telling { .. } },
                ToSource::Discarded { left_over },
            ) => {
                let mut outcome = outcome.clone();
                if let Outcome::Failed { detail, .. } | Outcome::HandedBack { detail } = &mut outcome {
                    *detail = with_left_over(detail, &left_over);
                }
                self.end(now, outcome);
            }
            // "Not released" is said only of a try that is durably aborted (design §5.13).
            (_, ToSource::Query(attempt)) if attempt <= self.aborted => {
                self.actions.push_back(SourceAction::Send(ToTarget::Abort(attempt)));
            }
            _ => {}
        }
    }

    fn after(&mut self, now: Duration, step: Step) {
        match step {
            Step::Stay => {}
            Step::Active { own } => {
                self.note_active(now, own);
                self.enter_phase_of_handover();
            }
            Step::Commit(records) => {
                self.enter_phase_of_handover();
                self.commit(records);
            }
            Step::Over(outcome) => self.end(now, outcome),
        }
    }

    fn enter_phase_of_handover(&mut self) {
        self.actions.push_back(SourceAction::Enter(self.phase()));
    }

    fn end(&mut self, now: Duration, outcome: Outcome) {
        if !matches!(outcome, Outcome::Moved { .. }) {
            self.summary.total_us = micros(now.saturating_sub(self.began));
        }
        self.summary.attempts = self.attempt.0;
        self.summary.bytes_copied = self.costs.bytes_copied;
        self.summary.bytes_mirrored = self.costs.bytes_mirrored;
        self.summary.bytes_zero = self.costs.bytes_zero;
        self.state = State::Ending { outcome, retry_at: None };
        self.commit_end();
    }

    fn commit_end(&mut self) {
        let State::Ending { outcome, .. } = &self.state else { return };
        let (migration, outcome, summary) = (self.settings.migration, outcome.clone(), self.summary);
        self.commit(vec![Record::MigrationEnded { migration, outcome, summary }]);
    }
}

// The parts of the switch-over; they add up to the time that the gates were closed.
impl Source {
    fn note_prepared(&mut self, now: Duration) {
        if let State::Preparing { gates_closing_at, began, .. } = &self.state {
            self.summary.drain_us = micros(began.saturating_sub(*gates_closing_at));
            self.summary.prepare_us = micros(now.saturating_sub(*began));
        }
    }

    fn note_active(&mut self, now: Duration, own: Duration) {
        if let State::Released { gates_closing_at, began, .. } = &self.state {
            let own = own.min(now.saturating_sub(*began));
            self.summary.own_us = micros(own);
            self.summary.start_us = micros(now.saturating_sub(*began).saturating_sub(own));
            self.summary.gate_closed_us = micros(now.saturating_sub(*gates_closing_at));
            self.summary.total_us = micros(now.saturating_sub(self.began));
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Synchronised {
    Yes,
    No,
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
