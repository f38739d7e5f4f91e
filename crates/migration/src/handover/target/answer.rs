//! Handles messages of the source, answers of the journal and the stores, and orders of the administrator at the target.

use std::time::Duration;

use chronicle::Generation;

use super::{
    COMMIT_RETRY, End, FlushResult, Journal, Ownership, QUERY_INTERVAL, State, Target, TargetAction,
};
use crate::failure::CommitFault;
use crate::filling::Manifest;
use crate::handover::message::{ToSource, ToTarget};
use crate::handover::source::Moves;
use crate::handover::target::Wrote;
use crate::identity::{Attempt, VolumeId, VolumeIndex};
use crate::journal::{Outcome, Promotion};
use crate::planted::{Bug, broken};

impl Target {
    pub(super) fn received(&mut self, now: Duration, message: ToTarget) {
        if let Some(generations) = self.taken_by_force()
            && !matches!(message, ToTarget::Commit { .. })
        {
            self.say(ToSource::TakenByForce { generations });
            return;
        }
        match message {
            ToTarget::Prepare(attempt) => self.prepare(attempt, None),
            ToTarget::PrepareHollow { attempt, manifests } => {
                // A list for other volumes is ignored.
                if manifests.len() == self.identities.len() {
                    self.prepare(attempt, Some(manifests));
                }
            }
            // The journal answers this once nothing is left to do here.
            ToTarget::IsWhole(_) | ToTarget::NothingKept(_) => {}
            ToTarget::Cancelled => self.is_cancelled_there = true,
            ToTarget::Abort(attempt) => self.abort(attempt),
            ToTarget::Commit { attempt, generations } => self.take_over(now, attempt, generations),
            ToTarget::Discard => match &self.state {
                State::Gone { left_over, end: End::Recorded, .. } => {
                    let left_over = left_over.clone();
                    // The source knows the reason, or has a reason of its own.
                    self.say(ToSource::Discarded { left_over });
                }
                // **N.B.** Once the volumes are owned here, only a hand-back makes the images worthless.
                State::Owning { .. }
                | State::Starting { .. }
                | State::Running { .. }
                | State::Active { .. }
                | State::HandingBack { .. }
                | State::Aborting { .. }
                | State::Discarding { .. }
                | State::Gone { .. } => {}
                State::HandedBack { detail, .. } => {
                    let detail = detail.clone();
                    self.discard(Outcome::HandedBack { detail });
                }
                _ if self.is_cancelled_there => self.discard(Outcome::CancelledThere),
                _ => self.discard(self.given_up()),
            },
        }
    }

    fn take_over(&mut self, now: Duration, attempt: Attempt, generations: Vec<(VolumeId, Generation)>) {
        match &self.state {
            State::Prepared { attempt: prepared, .. } if *prepared == attempt => {
                let own = Ownership { attempt, generations, promotion: None };
                self.state = State::Owning { own, began: now, retry_at: None };
                self.commit();
            }
            State::Active { own, took, .. } if own.attempt == attempt => {
                let message = ToSource::Active { attempt, own: *took };
                self.say(message);
            }
            // There is at most one committed attempt; after a restart its number is not known here.
            State::HandedBack { own, detail } if own.attempt == attempt || own.attempt == Attempt::NONE => {
                let message = handed_back(attempt, own, detail);
                self.say(message);
            }
            _ => {}
        }
    }

    /// Handles a change to a promised replica. A source sends nothing while it waits for a promise, so a source that sends has
    /// given the attempt up.
    ///
    /// **N.B.** The promise is withdrawn durably before the change is made: a promise, and what a restart finds of it, belongs
    /// to one instant (design §5.11).
    pub(super) fn change_held(&mut self) {
        if let Some(attempt) = self.attempt_under_way()
            && !broken(Bug::PromiseOfAnotherIncarnation)
        {
            self.abort(attempt);
        }
    }

    fn abort(&mut self, attempt: Attempt) {
        // The planted bug keeps the promise until it is redeemed.
        if broken(Bug::PromiseOfAnotherIncarnation) && matches!(self.state, State::Prepared { .. }) {
            return;
        }
        self.aborted = self.aborted.max(attempt);
        if self.attempt_under_way().is_some_and(|under_way| under_way <= attempt) {
            let promised = matches!(self.state, State::Promising { .. } | State::Prepared { .. });
            if promised && self.journal == Journal::Own {
                self.state = State::Withdrawing { attempt, retry_at: None };
                self.commit();
            } else {
                self.state = State::Receiving;
            }
        }
    }

    fn prepare(&mut self, attempt: Attempt, hollow: Option<Vec<Manifest>>) {
        match self.state {
            State::Prepared { attempt: prepared, .. }
                if prepared == attempt || self.outlives_its_run(attempt) =>
            {
                self.say(ToSource::Prepared(attempt));
                return;
            }
            State::Receiving
            | State::Withdrawing { .. }
            | State::Flushing { .. }
            | State::Promising { .. }
            | State::Prepared { .. } => {}
            State::Aborting { .. } | State::Discarding { .. } | State::Gone { .. } => {
                if self.journal == Journal::Own {
                    self.say_if_cancelled();
                    self.say(ToSource::Unknown);
                }
                return;
            }
            _ => return,
        }
        // An attempt that is older than the current one, or known to be aborted, belongs to a late message.
        if attempt <= self.aborted || self.attempt_under_way().is_some_and(|under_way| under_way >= attempt) {
            return;
        }
        // A source that asks for this attempt has ended the earlier ones, even a promised one.
        self.aborted = Attempt(attempt.0.saturating_sub(1));
        self.state = State::Flushing { attempt, left: VolumeIndex::all(self.volumes).collect() };
        let missing =
            |volume: VolumeIndex| hollow.as_ref().and_then(|all| all.get(volume.as_usize()).copied());
        let flush = |volume| match missing(volume) {
            None => TargetAction::Flush { volume, attempt },
            Some(manifest) => TargetAction::FlushHollow { volume, attempt, manifest },
        };
        self.actions.extend(VolumeIndex::all(self.volumes).map(flush));
        self.hollow = hollow.map(|manifests| (attempt, manifests));
    }

    /// Returns whether the planted bug keeps a promise made to an earlier run of the source.
    fn outlives_its_run(&self, attempt: Attempt) -> bool {
        let is_of_other = |prepared: Attempt| prepared.run() < attempt.run();
        broken(Bug::PromiseOfAnotherIncarnation)
            && matches!(self.state, State::Prepared { attempt: prepared, .. } if is_of_other(prepared))
    }

    pub(super) fn promote(
        &mut self,
        now: Duration,
        attempt: Attempt,
        generations: Vec<(VolumeId, Generation)>,
        promotion: Promotion,
    ) {
        // **N.B.** After a forced promotion the source may keep the volume: its blocks would belong to another branch.
        let is_hollow = self.hollow.as_ref().is_some_and(|(of, _)| *of == attempt);
        if is_hollow && matches!(promotion, Promotion::Force { .. }) && !broken(Bug::HollowForced) {
            return;
        }
        let fits = self.journal == Journal::Own
            && matches!(self.state, State::Prepared { attempt: prepared, .. } if prepared == attempt);
        if fits {
            let own = Ownership { attempt, generations, promotion: Some(promotion) };
            self.state = State::Owning { own, began: now, retry_at: None };
            self.commit();
        }
    }

    pub(super) fn flushed(&mut self, volume: VolumeIndex, flushed: Attempt, result: FlushResult) {
        let State::Flushing { attempt, left } = &mut self.state else { return };
        let attempt = *attempt;
        if flushed != attempt {
            return;
        }
        if result == FlushResult::Failed {
            // The source gives the attempt up at its time limit; the mirror handles the fault itself.
            self.state = State::Receiving;
            return;
        }
        left.retain(|waiting| *waiting != volume);
        if left.is_empty() {
            self.state = State::Promising { attempt, retry_at: None };
            self.commit();
        }
    }

    pub(super) fn committed(&mut self, now: Duration, result: Result<(), CommitFault>) {
        if result.is_err() {
            if let Some(retry_at) = self.state.retry_at() {
                *retry_at = Some(now + COMMIT_RETRY);
            }
            return;
        }
        match std::mem::replace(&mut self.state, State::Receiving) {
            State::Withdrawing { .. } => {}
            State::Promising { attempt, .. } => {
                self.state = State::Prepared { attempt, ask_at: now + QUERY_INTERVAL, since: now };
                self.say(ToSource::Prepared(attempt));
            }
            State::Owning { own, began, .. } => {
                let own_attempt = own.attempt;
                let left = VolumeIndex::all(self.volumes).collect();
                self.state = State::Starting { own, took: now.saturating_sub(began), left };
                let is_hollow = self.hollow.as_ref().is_some_and(|(attempt, _)| *attempt == own_attempt);
                let start = if is_hollow { TargetAction::StartHollow } else { TargetAction::Start };
                self.actions.extend(VolumeIndex::all(self.volumes).map(start));
            }
            State::HandingBack { own, detail, .. } => {
                let message = handed_back(own.attempt, &own, &detail);
                self.state = State::HandedBack { own, detail };
                self.say(message);
            }
            State::Aborting { outcome, .. } => self.delete(outcome),
            State::Active { own, took, .. } => {
                let left_over = String::new();
                self.actions.push_back(TargetAction::End { outcome: Outcome::Moved { left_over } });
                self.state = State::Active { own, took, end: End::Recorded };
            }
            State::Gone { outcome, left_over, end: End::Committing { .. } } => {
                let ended = outcome.clone().with_left_over(&left_over);
                self.state = State::Gone { outcome, left_over: left_over.clone(), end: End::Recorded };
                self.say_if_cancelled();
                self.say(ToSource::Discarded { left_over });
                self.actions.push_back(TargetAction::End { outcome: ended });
            }
            other => self.state = other,
        }
    }

    pub(super) fn started(&mut self, volume: VolumeIndex) {
        let State::Starting { own, took, left } = &mut self.state else { return };
        left.retain(|waiting| *waiting != volume);
        if left.is_empty() {
            let (own, took) = (own.clone(), *took);
            self.actions.extend(VolumeIndex::all(self.volumes).map(TargetAction::Open));
            match self.moves {
                Moves::Volumes | Moves::VolumesAfterHooks => self.activate(own, took),
                Moves::Vm => {
                    self.state = State::Running { own, took };
                    self.actions.push_back(TargetAction::RunVm);
                }
            }
        }
    }

    pub(super) fn vm_runs(&mut self) {
        if let State::Running { own, took } = &self.state {
            let (own, took) = (own.clone(), *took);
            self.activate(own, took);
        }
    }

    /// Handles that the VM does not run. If it has written nothing here, the volumes can return and the VM resumes at the
    /// source. Otherwise they are this host's, and so is the VM, despite its fault (design §5.14).
    pub(super) fn vm_failed(&mut self, detail: String, wrote: Wrote) {
        let State::Running { own, took } = &self.state else { return };
        let (own, took) = (own.clone(), *took);
        match wrote {
            Wrote::Nothing => self.hand_back(&own, detail),
            Wrote::Something => self.activate(own, took),
        }
    }

    fn activate(&mut self, own: Ownership, took: Duration) {
        let message = ToSource::Active { attempt: own.attempt, own: took };
        let end = self.end();
        self.state = State::Active { own, took, end };
        self.say(message);
        if end != End::Recorded {
            self.commit();
        }
    }

    /// Handles a failed start. No gate has admitted a write yet, so the volumes can return (design §5.14).
    pub(super) fn start_failed(&mut self, volume: VolumeIndex, detail: String) {
        let State::Starting { own, left, .. } = &mut self.state else { return };
        if left.contains(&volume) {
            let own = own.clone();
            self.hand_back(&own, detail);
        }
    }

    fn hand_back(&mut self, own: &Ownership, detail: String) {
        let generations = own.generations.iter().map(|(id, generation)| (*id, generation.next())).collect();
        let own = Ownership { attempt: own.attempt, generations, promotion: own.promotion.clone() };
        self.state = State::HandingBack { own, detail, retry_at: None };
        self.actions.extend(VolumeIndex::all(self.volumes).map(TargetAction::Close));
        self.commit();
    }

    pub(super) fn discard(&mut self, outcome: Outcome) {
        if self.journal == Journal::Own && !broken(Bug::DiscardedBeforeNoted) {
            self.state = State::Aborting { outcome, retry_at: None };
            self.commit();
        } else {
            self.delete(outcome);
        }
    }

    pub(super) fn delete(&mut self, outcome: Outcome) {
        self.state = State::Discarding { outcome };
        self.actions.push_back(TargetAction::Discard);
    }

    pub(super) fn discarded(&mut self, left_over: String) {
        let State::Discarding { outcome } = &self.state else { return };
        let outcome = outcome.clone();
        let end = self.end();
        if end == End::Recorded {
            self.say(ToSource::Discarded { left_over: left_over.clone() });
        }
        self.state = State::Gone { outcome, left_over, end };
        if end != End::Recorded {
            self.commit();
        }
    }

    /// Tells the source, if it does not know of the end yet, that this host's administrator cancelled.
    fn say_if_cancelled(&mut self) {
        let (State::Aborting { outcome, .. } | State::Discarding { outcome } | State::Gone { outcome, .. }) =
            &self.state
        else {
            return;
        };
        if *outcome == Outcome::Cancelled {
            self.say(ToSource::Cancelled);
        }
    }

    /// Returns how the end is recorded: on one host the source does it.
    fn end(&self) -> End {
        match self.journal {
            Journal::Shared => End::Recorded,
            Journal::Own => End::Committing { retry_at: None },
        }
    }

    /// Returns the generations of volumes promoted by force, once they are in use here. Until then they may be handed back.
    fn taken_by_force(&self) -> Option<Vec<(VolumeId, Generation)>> {
        let State::Active { own, .. } = &self.state else { return None };
        let forced = matches!(own.promotion, Some(Promotion::Force { .. }));
        forced.then(|| own.generations.clone())
    }
}

fn handed_back(attempt: Attempt, own: &Ownership, detail: &str) -> ToSource {
    ToSource::HandedBack { attempt, generations: own.generations.clone(), detail: detail.to_owned() }
}
