//! The source up to its commit point: attempts at the handover, and how an attempt or the whole migration is given up.

use std::time::Duration;

use chronicle::Generation;

use super::early::Early;
use super::{DiscardStep, Moves, Peer, ReleaseFate, Source, SourceAction, State};
use crate::filling::Manifest;
use crate::handover::message::ToTarget;
use crate::handover::phase::Phase;
use crate::handover::target::FlushResult;
use crate::identity::{Attempt, VolumeId, VolumeIndex};
use crate::journal::{FailureCode, Hollow, Outcome, Record};
use crate::planted::{Bug, broken};

/// The most attempts before the migration fails: each of them closes gates, so guests notice it.
pub const ATTEMPTS_MAX: u32 = 10;
/// The most consecutive failed flushes while the guests work, before the migration fails.
const SETTLINGS_FAILED_MAX: u32 = 30;
const ATTEMPT_PAUSE: Duration = Duration::from_secs(1);
/// The pause between the end of copying and an attempt. Requests that copying delayed at the disks complete first, so that
/// guests do not wait for these and for the closed gate at once.
const REST: Duration = Duration::from_millis(10);

impl Source {
    pub(super) fn stands(&mut self, now: Duration, volume: VolumeIndex, state: SyncState) {
        let Some(known) = self.replicas.get_mut(volume.as_usize()) else { return };
        let before = std::mem::replace(known, state);
        if let (SyncState::Synchronised, Some(hindrance)) =
            (state, self.hindrances.get_mut(volume.as_usize()))
        {
            *hindrance = None;
        }
        match (&self.state, state) {
            (State::Copying { .. }, SyncState::Converged | SyncState::Synchronised)
                if before == SyncState::Behind =>
            {
                self.rest(now);
            }
            (State::MovingMemory, SyncState::Converged | SyncState::Synchronised) => self.try_early(now),
            (State::Closing { open, .. }, _) if open.is_empty() => self.prepare_if_complete(now),
            // **N.B.** Blocks that were lost after the target's promise may return without being durable: the promise is older.
            (State::Preparing { .. }, SyncState::Behind | SyncState::Converged) => self.give_up_attempt(now),
            _ => {}
        }
    }

    pub(super) fn suspended(&mut self, volume: VolumeIndex, reason: &'static str) {
        if let Some(hindrance) = self.hindrances.get_mut(volume.as_usize()) {
            *hindrance = Some(reason);
        }
    }

    /// Returns why the volumes are not synchronised, as the end of a sentence. Empty if only the guest's writes prevent it.
    fn because(&self) -> String {
        self.hindrances.iter().flatten().next().map(|reason| format!(": {reason}")).unwrap_or_default()
    }

    /// Notes the manifest of a volume: its target knows the missing blocks.
    pub(super) fn told(&mut self, volume: VolumeIndex, manifest: Manifest) {
        if let Some(known) = self.manifests.get_mut(volume.as_usize()) {
            *known = Some(manifest);
        }
    }

    /// Returns the manifests of all volumes in order; `None` if no target lacks blocks.
    fn manifests(&self) -> Option<Vec<Manifest>> {
        let is_any = self.manifests.iter().any(Option::is_some);
        is_any.then(|| self.manifests.iter().map(|known| known.unwrap_or(Manifest::NOTHING)).collect())
    }

    pub(super) fn all_at_least(&self, state: SyncState) -> bool {
        self.replicas.iter().all(|known| *known >= state)
    }

    pub(super) fn volumes(&self) -> impl Iterator<Item = VolumeIndex> + use<> {
        VolumeIndex::all(self.settings.volumes.len())
    }

    /// Delays the next attempt briefly after everything is copied.
    pub(super) fn rest(&mut self, now: Duration) {
        if let State::Copying { not_before } = &mut self.state {
            *not_before = (*not_before).max(now + REST);
        }
    }

    pub(super) fn try_handover(&mut self, now: Duration) {
        let State::Copying { not_before } = self.state else { return };
        if !self.all_at_least(SyncState::Converged) || now < not_before {
            return;
        }
        self.settlings += 1;
        let settling = self.settlings;
        self.state = State::Settling { settling, unflushed: self.volumes().collect() };
        self.actions.extend(self.volumes().map(|volume| SourceAction::Settle { volume, settling }));
    }

    /// **N.B.** No attempt has begun yet: numbers are assigned, and attempts given up, only after a gate begins to close.
    pub(super) fn settled(&mut self, now: Duration, volume: VolumeIndex, of: u32, result: FlushResult) {
        let State::Settling { settling, unflushed } = &mut self.state else { return };
        if of != *settling {
            return;
        }
        if result == FlushResult::Failed {
            self.settling_failed(now);
            return;
        }
        unflushed.retain(|waiting| *waiting != volume);
        if unflushed.is_empty() {
            self.settlings_failed = 0;
            self.go_on_settled(now);
        }
    }

    /// The source's store reports the failure to its guests, too; it may recover afterwards.
    fn settling_failed(&mut self, now: Duration) {
        self.state = State::Copying { not_before: now + ATTEMPT_PAUSE };
        self.settlings_failed += 1;
        if self.settlings_failed >= SETTLINGS_FAILED_MAX {
            let detail = format!("the source's store failed to flush {SETTLINGS_FAILED_MAX} times in a row");
            self.end_before_release(Outcome::Failed { code: FailureCode::HandoverRefused, detail });
        }
    }

    fn go_on_settled(&mut self, now: Duration) {
        if !self.all_at_least(SyncState::Converged) {
            self.state = State::Copying { not_before: now };
            return;
        }
        match self.settings.moves {
            Moves::Volumes => self.close_gates(now),
            Moves::VolumesAfterHooks if broken(Bug::HooksNotAwaited) => self.close_gates(now),
            Moves::VolumesAfterHooks => {
                self.state = State::RunningHooks;
                self.actions.push_back(SourceAction::RunHooks);
            }
            Moves::Vm => {
                self.state = State::MovingMemory;
                self.early = Early::NotYet;
                self.actions.push_back(SourceAction::Enter(Phase::Memory));
                self.actions.push_back(SourceAction::StopVm);
            }
        }
    }

    /// **N.B.** Hooks run once: later attempts find them done.
    pub(super) fn hooks_run(&mut self, now: Duration, result: Result<(), String>) {
        if !matches!(self.state, State::RunningHooks) {
            return;
        }
        match result {
            Ok(()) => {
                self.settings.moves = Moves::Volumes;
                // The guests have worked on meanwhile: their writes are considered anew.
                self.state = State::Copying { not_before: now };
            }
            Err(detail) => {
                self.end_before_release(Outcome::Failed { code: FailureCode::HookFailed, detail });
            }
        }
    }

    /// **N.B.** With a VM, the gates close only after the VM is paused: a VM whose requests are held cannot be paused (hard
    /// case 16).
    pub(super) fn close_gates(&mut self, now: Duration) {
        if self.attempt.next() == Attempt::ALL {
            let detail = "no numbers are left for attempts at the handover; begin a new migration".to_owned();
            self.end_before_release(Outcome::Failed { code: FailureCode::HandoverRefused, detail });
            return;
        }
        // **N.B.** Numbers are assigned only here: every attempt that may be promised has held guests, and is counted.
        self.attempt = self.attempt.next();
        self.tries += 1;
        let attempt = self.attempt;
        self.state = State::Closing { open: self.volumes().collect(), began: now };
        self.enter_if_not_early(Phase::Closing);
        let close = self.volumes().map(|volume| SourceAction::CloseGate { volume, attempt });
        self.actions.extend(close);
    }

    /// An early attempt belongs to the phase Memory.
    fn enter_if_not_early(&mut self, phase: Phase) {
        if self.early != Early::UnderWay {
            self.actions.push_back(SourceAction::Enter(phase));
        }
    }

    pub(super) fn gate_closed(&mut self, now: Duration, volume: VolumeIndex, attempt: Attempt) {
        let State::Closing { open, .. } = &mut self.state else { return };
        if attempt != self.attempt {
            return;
        }
        open.retain(|waiting| *waiting != volume);
        if open.is_empty() {
            self.prepare_if_complete(now);
        }
    }

    /// Continues behind closed gates once the replicas are synchronised; converged ones soon will be. With a paused VM the rest
    /// is awaited in any case.
    fn prepare_if_complete(&mut self, now: Duration) {
        let State::Closing { began, .. } = &self.state else { return };
        let gates_closing_at = *began;
        if !self.all_at_least(SyncState::Converged) && self.settings.moves != Moves::Vm {
            // The last mirrored writes failed at the target. They are copied before the next attempt.
            self.give_up_attempt(now);
            return;
        }
        if !self.all_at_least(SyncState::Synchronised) {
            return;
        }
        let attempt = self.attempt;
        let unflushed =
            if broken(Bug::SourceCache) { Vec::new() } else { self.volumes().collect::<Vec<_>>() };
        let flush = unflushed.clone().into_iter().map(|volume| SourceAction::Flush { volume, attempt });
        self.enter_if_not_early(Phase::Preparing);
        let prepare = match self.manifests() {
            None => ToTarget::Prepare(attempt),
            Some(manifests) => ToTarget::PrepareHollow { attempt, manifests },
        };
        self.actions.push_back(SourceAction::Send(prepare));
        self.actions.extend(flush);
        self.state = State::Preparing { prepared: false, unflushed, gates_closing_at, began: now };
    }

    pub(super) fn flushed(
        &mut self,
        now: Duration,
        volume: VolumeIndex,
        attempt: Attempt,
        result: FlushResult,
    ) {
        let State::Preparing { unflushed, .. } = &mut self.state else { return };
        if attempt != self.attempt {
            return;
        }
        if result == FlushResult::Failed {
            self.give_up_attempt(now);
            return;
        }
        unflushed.retain(|waiting| *waiting != volume);
        self.release_if_ready(now);
    }

    pub(super) fn release_if_ready(&mut self, now: Duration) {
        let State::Preparing { prepared: true, unflushed, gates_closing_at, .. } = &self.state else {
            return;
        };
        if unflushed.is_empty() && !self.all_at_least(SyncState::Synchronised) {
            // The target lost applied writes, perhaps before its flush could make them durable (hard case 13).
            self.give_up_attempt(now);
        } else if unflushed.is_empty() && self.early != Early::UnderWay {
            let gates_closing_at = *gates_closing_at;
            self.note_prepared(now);
            self.actions.push_back(SourceAction::Enter(Phase::Releasing));
            self.state =
                State::Releasing { gates_closing_at, began: now, fate: ReleaseFate::Open, retry_at: None };
            self.commit_release();
        }
    }

    /// **N.B.** Once this commit is durable, the source serves nothing of these volumes unless the target hands them back.
    pub(super) fn commit_release(&mut self) {
        let released = Record::Released {
            migration: self.settings.migration,
            attempt: self.attempt,
            generations: self.next_generations(),
        };
        // **N.B.** In one commit: a restart must know whether the target still reads blocks here.
        let (migration, attempt) = (self.settings.migration, self.attempt);
        let hollow = self.manifests().map(|manifests| {
            let manifests = self.settings.volumes.iter().map(|(volume, _)| *volume).zip(manifests).collect();
            Record::Hollow { migration, hollow: Hollow { attempt, manifests } }
        });
        self.commit(hollow.into_iter().chain([released]).collect());
    }

    pub(super) fn next_generations(&self) -> Vec<(VolumeId, Generation)> {
        self.settings.volumes.iter().map(|(volume, generation)| (*volume, generation.next())).collect()
    }

    /// Ends an attempt before the commit point. The guests resume at once; the target learns of it when that is durable.
    pub(super) fn give_up_attempt(&mut self, now: Duration) {
        if self.early == Early::UnderWay {
            self.give_up_early();
            return;
        }
        let told = !matches!(self.state, State::Closing { .. });
        if self.settings.moves == Moves::Vm {
            self.keep_vm();
            return;
        }
        self.state = State::Copying { not_before: now + ATTEMPT_PAUSE };
        self.actions.push_back(SourceAction::Enter(Phase::Copying));
        self.actions.extend(self.volumes().map(SourceAction::OpenGate));
        if told {
            self.commit_abort();
        }
        if let Some(outcome) = self.pending_end.take() {
            self.end_before_release(outcome);
        } else if self.tries >= ATTEMPTS_MAX {
            let detail = format!("the handover failed in {ATTEMPTS_MAX} attempts{}", self.because());
            self.end_before_release(Outcome::Failed { code: FailureCode::HandoverRefused, detail });
        }
    }

    /// Ends the migration, so that the paused VM resumes at this host at once.
    fn keep_vm(&mut self) {
        let detail = format!(
            "the disks were not handed over within {} ms after the VM had been stopped{}",
            self.settings.switch_over_max.as_millis(),
            self.because()
        );
        let failed = Outcome::Failed { code: FailureCode::HandoverRefused, detail };
        let outcome = self.pending_end.take().unwrap_or(failed);
        if matches!(self.state, State::Releasing { .. }) {
            // The release was certainly not written, so nothing is undecided.
            self.state = State::Copying { not_before: Duration::ZERO };
            self.actions.push_back(SourceAction::Enter(Phase::Copying));
            self.actions.extend(self.volumes().map(SourceAction::OpenGate));
        }
        self.end_before_release(outcome);
    }

    pub(super) fn commit_abort(&mut self) {
        let migration = self.settings.migration;
        let record = match (&self.state, self.settings.peer) {
            // **N.B.** A restart must not continue with images that are being deleted. Another host records that itself.
            (State::Discarding { outcome, .. }, Peer::SameHost) if !broken(Bug::DiscardedBeforeNoted) => {
                Record::Discarding { migration, outcome: outcome.clone() }
            }
            _ => Record::AttemptAborted { migration, attempt: self.attempt },
        };
        self.commit(vec![record]);
    }

    /// **N.B.** The cancellation is durable, so no release is or will be. An undecided release is given up as soon as the
    /// journal has refused it.
    pub(super) fn cancelled(&mut self) {
        if matches!(self.state, State::Releasing { .. }) {
            self.pending_end = Some(Outcome::Cancelled);
        } else {
            self.end_before_release(Outcome::Cancelled);
        }
    }

    pub(super) fn end_before_release(&mut self, outcome: Outcome) {
        match self.state {
            State::Copying { .. }
            | State::Settling { .. }
            | State::MovingMemory
            | State::RunningHooks
            | State::Closing { .. }
            | State::Preparing { .. } => {
                let closed = matches!(self.state, State::Closing { .. } | State::Preparing { .. });
                self.actions.push_back(SourceAction::Enter(Phase::Discarding));
                self.actions.push_back(SourceAction::StopCopying);
                if closed {
                    self.actions.extend(self.volumes().map(SourceAction::OpenGate));
                }
                self.early = Early::Over;
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SyncState {
    Behind,
    Converged,
    Synchronised,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::message::{ToSource, ToTarget};
    use crate::handover::source::{SourceEvent, SourceSettings};
    use crate::handover::target::{Target, TargetAction, TargetEvent};
    use crate::identity::MigrationId;

    fn settings(peer: Peer, moves: Moves) -> SourceSettings {
        SourceSettings {
            migration: MigrationId(1),
            volumes: vec![(VolumeId([1; 16]), Generation(0))],
            switch_over_max: Duration::from_secs(1),
            peer,
            moves,
        }
    }

    #[test]
    fn a_try_begins_a_little_after_the_copying_has_ended() {
        let volume = VolumeIndex::all(1).next().unwrap();
        let copied = Duration::from_secs(5);
        let mut source = Source::new(Duration::ZERO, settings(Peer::SameHost, Moves::Volumes));
        source.handle_event(copied, SourceEvent::Synchronised(volume));
        assert_eq!(source.poll_action(), None, "the disks rest");
        let (at, _) = source.poll_timeout().unwrap();
        assert_eq!(at, copied + REST);
        source.handle_timeout(at);
        assert_eq!(source.poll_action(), Some(SourceAction::Settle { volume, settling: 1 }));
    }

    #[test]
    fn what_is_to_be_done_before_the_volumes_change_hands_is_done_once_and_holds_nobody() {
        let volume = VolumeIndex::all(1).next().unwrap();
        let settled = || {
            let mut source = Source::new(Duration::ZERO, settings(Peer::OtherHost, Moves::VolumesAfterHooks));
            source.handle_event(Duration::ZERO, SourceEvent::Synchronised(volume));
            source.handle_timeout(REST);
            assert_eq!(source.poll_action(), Some(SourceAction::Settle { volume, settling: 1 }));
            let result = FlushResult::Durable;
            source.handle_event(REST, SourceEvent::Settled { volume, settling: 1, result });
            assert_eq!(source.poll_action(), Some(SourceAction::RunHooks));
            assert_eq!((source.poll_action(), source.phase()), (None, Phase::Copying), "nothing is held");
            assert!(source.waits_for().is_some_and(|reason| reason.contains("hooks")));
            source
        };
        let mut source = settled();
        source.handle_event(REST, SourceEvent::Behind(volume));
        source.handle_event(REST, SourceEvent::HooksRun(Ok(())));
        assert_eq!(source.poll_action(), None, "what was written meanwhile is copied first");
        source.handle_event(REST * 2, SourceEvent::Synchronised(volume));
        source.handle_timeout(REST * 3);
        assert_eq!(source.poll_action(), Some(SourceAction::Settle { volume, settling: 2 }));
        let result = FlushResult::Durable;
        source.handle_event(REST * 3, SourceEvent::Settled { volume, settling: 2, result });
        assert_eq!(source.poll_action(), Some(SourceAction::Enter(Phase::Closing)), "they are not run again");

        let mut source = settled();
        source.handle_event(REST, SourceEvent::HooksRun(Err("no route".to_owned())));
        assert_eq!(source.phase(), Phase::Discarding);
        let mut source = settled();
        source.handle_event(REST, SourceEvent::Cancel);
        assert_eq!(source.phase(), Phase::Discarding);
        source.handle_event(REST, SourceEvent::HooksRun(Ok(())));
        assert_eq!(source.phase(), Phase::Discarding, "it is too late");
    }

    #[test]
    fn what_kept_the_disks_of_a_vm_that_stood_still_from_being_handed_over_is_said() {
        let volume = VolumeIndex::all(1).next().unwrap();
        let suspended =
            SourceEvent::Suspended { volume, reason: "the target's store answered with an error" };
        let (behind, synchronised) = (SourceEvent::Behind(volume), SourceEvent::Synchronised(volume));
        for (events, end) in [
            (vec![suspended.clone(), behind.clone()], ": the target's store answered with an error"),
            // The suspension was overcome, and then the guest wrote more than was sent.
            (vec![suspended, synchronised.clone(), behind], "had been stopped"),
        ] {
            let mut source = Source::new(Duration::ZERO, settings(Peer::OtherHost, Moves::Vm));
            source.handle_event(Duration::ZERO, synchronised.clone());
            source.handle_timeout(REST);
            let result = FlushResult::Durable;
            source.handle_event(REST, SourceEvent::Settled { volume, settling: 1, result });
            events.into_iter().for_each(|event| source.handle_event(REST, event));
            source.handle_event(REST, SourceEvent::VmStopped(Ok(())));
            assert_eq!(source.phase(), Phase::Closing);
            source.handle_event(REST, SourceEvent::GateClosed { volume, attempt: source.attempt() });
            source.handle_timeout(Duration::from_secs(2));
            let State::Discarding { outcome: Outcome::Failed { code, detail }, .. } = &source.state else {
                panic!("{:?}", source.state)
            };
            assert!(*code == FailureCode::HandoverRefused && detail.ends_with(end), "{detail}");
        }
    }

    #[test]
    fn a_migration_that_is_ended_at_the_other_host_ends_here_at_once() {
        let left_over = "v.img".to_owned();
        for said in [ToSource::Cancelled, ToSource::Discarded { left_over }, ToSource::Unknown] {
            let mut source = Source::new(Duration::ZERO, settings(Peer::OtherHost, Moves::Volumes));
            source.handle_event(Duration::from_secs(1), SourceEvent::Received(said.clone()));
            assert_eq!(source.phase(), Phase::Discarding, "{said:?}");
            let cancelled =
                matches!(&source.state, State::Discarding { outcome: Outcome::CancelledThere, .. });
            assert_eq!(cancelled, said == ToSource::Cancelled, "{said:?}");
        }
    }

    #[test]
    fn a_target_learns_that_the_sources_administrator_has_cancelled() {
        for peer in [Peer::OtherHost, Peer::SameHost] {
            let mut source = Source::new(Duration::ZERO, settings(peer, Moves::Volumes));
            source.handle_event(Duration::ZERO, SourceEvent::Cancel);
            let mut said = Vec::new();
            while let Some(action) = source.poll_action() {
                match action {
                    SourceAction::Commit { commit, .. } => {
                        source
                            .handle_event(Duration::ZERO, SourceEvent::Committed { commit, result: Ok(()) });
                    }
                    SourceAction::Send(message) => said.push(message),
                    _ => {}
                }
            }
            let with_reason = peer == Peer::OtherHost;
            assert_eq!(said.first() == Some(&ToTarget::Cancelled), with_reason, "{said:?}");
            assert_eq!(said.last(), Some(&ToTarget::Discard));
            let mut target = Target::between_hosts(MigrationId(1), 1);
            said.into_iter()
                .for_each(|said| target.handle_event(Duration::ZERO, TargetEvent::Received(said)));
            let noted = std::iter::from_fn(|| target.poll_action()).find_map(|action| match action {
                TargetAction::Commit { records, .. } => Some(records),
                _ => None,
            });
            let Some([Record::Discarding { outcome, .. }]) = noted.as_deref() else { panic!("{noted:?}") };
            assert_eq!(*outcome == Outcome::CancelledThere, with_reason, "{outcome:?}");
        }
    }
}
