//! Tests the attempts at the handover: which are counted, and which promise belongs to which.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::Generation;
use migration::journal::{
    Entry, ExportSettings, Forwarding, ImageLocation, MigratingVolume, Outcome, Promotion, Record, Side,
    Stage, State, VolumeRecord,
};
use migration::message::{ToSource, ToTarget};
use migration::recovery::{Step, recover};
use migration::source::{ATTEMPTS_MAX, Moves, Peer, SourceAction, SourceEvent, SourceSettings};
use migration::target::{FlushResult, TargetAction, TargetEvent};
use migration::{Attempt, HostId, MigrationId, Phase, Source, Target, VolumeId, VolumeIndex};

const DISK: VolumeIndex = VolumeIndex(0);
const ID: MigrationId = MigrationId(1);
const VOLUME: VolumeId = VolumeId([1; 16]);
const SWITCH_OVER_MAX: Duration = Duration::from_millis(500);

struct Leaving {
    source: Source,
    now: Duration,
    settling: u32,
    journal: State,
}

impl Leaving {
    fn begin() -> Self {
        let image = || ImageLocation::raw_file("a", "/a/v.img");
        let side = Side::Outgoing {
            peer: HostId([9; 32]),
            peer_name: "b".into(),
            store: String::new(),
            forwarding: Forwarding::WhileConnected,
        };
        let added = Record::VolumeAdded(VolumeRecord {
            volume: VOLUME,
            name: "v".into(),
            size_bytes: 1 << 20,
            block_size_bytes: 65536,
            image: image(),
            generation: Generation(0),
            export: ExportSettings::default(),
        });
        let volumes = vec![MigratingVolume { volume: VOLUME, source: image(), target: image() }];
        let started = Record::MigrationStarted { migration: ID, volumes, keep_source: false, side };
        let mut leaving = Self {
            source: Source::new(Duration::ZERO, settings()),
            now: Duration::ZERO,
            settling: 0,
            journal: State::default(),
        };
        leaving.record(vec![added, started]);
        leaving
    }

    fn record(&mut self, records: Vec<Record>) {
        self.journal.apply(&Entry { at_unix_ms: 0, records }).unwrap();
    }

    fn tell(&mut self, event: SourceEvent) {
        self.source.handle_event(self.now, event);
    }

    fn actions(&mut self) -> Vec<SourceAction> {
        std::iter::from_fn(|| self.source.poll_action()).collect()
    }

    /// The replica is near enough, and the source's store is flushed while the guest works; `meanwhile` happens during the flush.
    fn settle(&mut self, meanwhile: Option<SourceEvent>) {
        self.now += Duration::from_secs(2);
        self.tell(SourceEvent::Converged(DISK));
        self.now += Duration::from_millis(20);
        self.source.handle_timeout(self.now);
        self.settling += 1;
        let (settling, result) = (self.settling, FlushResult::Durable);
        assert!(self.actions().contains(&SourceAction::Settle { volume: DISK, settling }));
        meanwhile.into_iter().for_each(|event| self.tell(event));
        self.tell(SourceEvent::Settled { volume: DISK, settling, result });
    }

    /// Simulates a busy guest: after each flush of the source's store the replica is behind again.
    fn busy(&mut self, times: u32) {
        for _ in 0..times {
            self.settle(Some(SourceEvent::Behind(DISK)));
            assert_eq!(self.actions(), vec![], "no gate is closed");
        }
    }

    fn prepare(&mut self) -> Attempt {
        self.settle(None);
        let attempt = self.source.attempt();
        self.tell(SourceEvent::GateClosed { volume: DISK, attempt });
        self.tell(SourceEvent::Synchronised(DISK));
        assert!(self.actions().contains(&SourceAction::Send(ToTarget::Prepare(attempt))));
        attempt
    }

    /// Lets the attempt exceed its time limit, durably; returns the messages to the target.
    fn give_up(&mut self) -> Vec<ToTarget> {
        self.now += SWITCH_OVER_MAX;
        self.source.handle_timeout(self.now);
        let mut said = Vec::new();
        while let Some(action) = self.source.poll_action() {
            match action {
                SourceAction::Commit { commit, records } => {
                    self.record(records);
                    self.tell(SourceEvent::Committed { commit, result: Ok(()) });
                }
                SourceAction::Send(message) => said.push(message),
                _ => {}
            }
        }
        said
    }

    fn restart(&mut self) {
        for step in recover(&self.journal.clone()) {
            if let Step::Commit(records) = step {
                self.record(records);
            }
        }
        let recorded = &self.journal.migrations[&ID];
        assert_eq!(recorded.stage, Stage::Copying);
        self.source = Source::resume(self.now, settings(), recorded).unwrap();
        self.settling = 0;
    }
}

fn settings() -> SourceSettings {
    SourceSettings {
        migration: ID,
        volumes: vec![(VOLUME, Generation(0))],
        switch_over_max: SWITCH_OVER_MAX,
        peer: Peer::OtherHost,
        moves: Moves::Volumes,
    }
}

fn actions(target: &mut Target) -> Vec<TargetAction> {
    std::iter::from_fn(|| target.poll_action()).collect()
}

/// Returns a target that has promised `attempt`, durably.
fn promised(attempt: Attempt) -> Target {
    let (mut target, now) = (Target::between_hosts(ID, 1), Duration::ZERO);
    target.handle_event(now, TargetEvent::Received(ToTarget::Prepare(attempt)));
    assert!(matches!(target.poll_action(), Some(TargetAction::Flush { .. })));
    let result = FlushResult::Durable;
    target.handle_event(now, TargetEvent::Flushed { volume: DISK, attempt, result });
    let Some(TargetAction::Commit { commit, .. }) = target.poll_action() else { panic!() };
    target.handle_event(now, TargetEvent::Committed { commit, result: Ok(()) });
    assert_eq!(target.poll_action(), Some(TargetAction::Send(ToSource::Prepared(attempt))));
    target
}

#[test]
fn only_tries_that_guests_notice_are_counted() {
    let mut leaving = Leaving::begin();
    leaving.busy(5 * ATTEMPTS_MAX);
    for tries in 1..=ATTEMPTS_MAX {
        leaving.busy(3);
        let attempt = leaving.prepare();
        assert_eq!((attempt, leaving.source.tries()), (Attempt(tries), tries));
        leaving.give_up();
        let expected = if tries < ATTEMPTS_MAX { Phase::Copying } else { Phase::Discarding };
        assert_eq!(leaving.source.phase(), expected, "after {tries} tries that closed a gate");
    }
}

#[test]
fn a_flush_of_an_earlier_settling_is_none_behind_the_closed_gate() {
    let mut leaving = Leaving::begin();
    leaving.busy(1);
    let attempt = leaving.prepare();
    leaving.tell(SourceEvent::Received(ToSource::Prepared(attempt)));
    for settling in 1..=2 {
        let result = FlushResult::Durable;
        leaving.tell(SourceEvent::Settled { volume: DISK, settling, result });
    }
    assert_eq!((leaving.source.phase(), leaving.actions()), (Phase::Preparing, vec![]));
}

#[test]
fn a_source_that_cannot_be_flushed_says_so_in_the_end() {
    let mut leaving = Leaving::begin();
    for _ in 0..100 {
        if leaving.source.phase() != Phase::Copying {
            break;
        }
        leaving.now += Duration::from_secs(2);
        leaving.tell(SourceEvent::Converged(DISK));
        leaving.now += Duration::from_millis(20);
        leaving.source.handle_timeout(leaving.now);
        leaving.settling += 1;
        let (settling, result) = (leaving.settling, FlushResult::Failed);
        leaving.tell(SourceEvent::Settled { volume: DISK, settling, result });
        assert!(!leaving.actions().iter().any(|action| matches!(action, SourceAction::CloseGate { .. })));
    }
    assert_eq!((leaving.source.phase(), leaving.source.tries()), (Phase::Discarding, 0));
}

#[test]
fn a_promise_of_the_run_before_is_not_taken_for_one_of_this() {
    for tries_before in 1..ATTEMPTS_MAX {
        let mut leaving = Leaving::begin();
        let mut old = leaving.prepare();
        for _ in 1..tries_before {
            leaving.give_up();
            old = leaving.prepare();
        }
        let mut target = promised(old);
        leaving.restart();
        // The target asks for the outcome of its attempt, and is answered.
        leaving.tell(SourceEvent::Received(ToSource::Query(old)));
        let aborted = leaving.actions();
        assert!(aborted.contains(&SourceAction::Send(ToTarget::Abort(old))), "{aborted:?}");
        // The answer is lost. Each attempt of this run is flushed for.
        for _ in 1..ATTEMPTS_MAX {
            let attempt = leaving.prepare();
            target.handle_event(leaving.now, TargetEvent::Received(ToTarget::Prepare(attempt)));
            let done = actions(&mut target);
            assert!(
                matches!(done[..], [TargetAction::Flush { attempt: flushed, .. }] if flushed == attempt),
                "{done:?}"
            );
            leaving.give_up();
        }
    }
}

#[test]
fn a_source_that_goes_on_changing_has_its_promise_taken_back_first() {
    let (mut target, now) = (promised(Attempt(1)), Duration::ZERO);
    target.handle_event(now, TargetEvent::ChangeHeld);
    let done = actions(&mut target);
    let [TargetAction::Commit { commit, records }] = &done[..] else { panic!("{done:?}") };
    assert_eq!(records[..], [Record::AttemptAborted { migration: ID, attempt: Attempt(1) }]);
    assert!(
        target.prepared().is_none() && !target.is_receiving(),
        "nothing is changed before that is durable"
    );
    target.handle_event(now, TargetEvent::Committed { commit: *commit, result: Ok(()) });
    assert!(target.is_receiving());
    // A late repetition of the request belongs to an attempt that is over.
    target.handle_event(now, TargetEvent::Received(ToTarget::Prepare(Attempt(1))));
    assert_eq!(actions(&mut target), vec![]);
}

#[test]
fn a_source_that_has_its_volumes_again_ends_when_the_copy_is_promoted_also_after_a_restart() {
    let mut leaving = Leaving::begin();
    let (attempt, generations) = (leaving.prepare(), vec![(VOLUME, Generation(1))]);
    leaving.record(vec![Record::Released { migration: ID, attempt, generations }]);
    let generations = vec![(VOLUME, Generation(2))];
    leaving.record(vec![Record::HandedBack { migration: ID, generations }]);
    leaving.source = Source::resume(leaving.now, settings(), &leaving.journal.migrations[&ID]).unwrap();
    assert!(leaving.actions().contains(&SourceAction::Send(ToTarget::Discard)));
    let generations = vec![(VOLUME, Generation(3))];
    leaving.tell(SourceEvent::Received(ToSource::TakenByForce { generations }));
    let ends = leaving.actions().into_iter().find_map(|action| match action {
        SourceAction::Commit { records, .. } => Some(records),
        _ => None,
    });
    // The journal accepts it: a record that does not fit the stage would be refused at each attempt.
    leaving.record(ends.unwrap());
    let stage = &leaving.journal.migrations[&ID].stage;
    assert!(matches!(stage, Stage::Ended(Outcome::HandedBack { .. })), "{stage:?}");
}

#[test]
fn a_copy_that_is_promoted_by_force_is_said_to_be_taken_once_it_is_in_use_and_may_be_handed_back_before() {
    let (attempt, now) = (Attempt(1), Duration::ZERO);
    let asks = || TargetEvent::Received(ToTarget::Prepare(Attempt::NONE));
    let starting = || {
        let mut target = promised(attempt);
        let promotion = Promotion::Force { branches: Vec::new() };
        let generations = vec![(VOLUME, Generation(1))];
        target.handle_event(now, TargetEvent::Promote { attempt, generations, promotion });
        let done = actions(&mut target);
        let [TargetAction::Commit { commit, .. }] = &done[..] else { panic!("{done:?}") };
        target.handle_event(now, TargetEvent::Committed { commit: *commit, result: Ok(()) });
        assert_eq!(actions(&mut target), vec![TargetAction::Start(DISK)]);
        target.handle_event(now, asks());
        assert_eq!(actions(&mut target), vec![], "a source that has released would never take it back");
        target
    };
    let mut target = starting();
    target.handle_event(now, TargetEvent::Started(DISK));
    actions(&mut target);
    target.handle_event(now, asks());
    let generations = vec![(VOLUME, Generation(1))];
    assert_eq!(actions(&mut target), vec![TargetAction::Send(ToSource::TakenByForce { generations })]);

    let mut target = starting();
    let detail = "the target's store does not answer in time".to_owned();
    target.handle_event(now, TargetEvent::StartFailed { volume: DISK, detail });
    let done = actions(&mut target);
    let commit = done.iter().find_map(|action| match action {
        TargetAction::Commit { commit, .. } => Some(*commit),
        _ => None,
    });
    target.handle_event(now, TargetEvent::Committed { commit: commit.unwrap(), result: Ok(()) });
    let done = actions(&mut target);
    assert!(matches!(done[..], [TargetAction::Send(ToSource::HandedBack { .. })]), "{done:?}");
}
