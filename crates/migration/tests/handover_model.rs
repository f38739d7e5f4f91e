//! The source's and the target's machine, with a channel that delays, reorders, repeats and loses messages, and a journal that
//! fails. At most one side admits writes, the journal stays consistent, and the migration ends.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::{BlockSize, Generation};
use migration::journal::{
    Entry, ExportSettings, FailureCode, ImageLocation, Inconsistent, MigratingVolume, Outcome, Record, Side,
    Stage, State, VolumeRecord,
};
use migration::message::{ToSource, ToTarget};
use migration::orders;
use migration::source::{Moves, Peer, SourceAction, SourceEvent, SourceSettings};
use migration::target::{FlushResult, TargetAction, TargetEvent};
use migration::{CommitFault, CommitId, MigrationId, Phase, Source, Target, VolumeId, VolumeIndex};
use proptest::prelude::*;

const MIGRATION: MigrationId = MigrationId(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    Closed,
}

#[derive(Clone, Debug)]
enum Pending {
    ToTarget(ToTarget),
    ToSource(ToSource),
    Source(SourceEvent),
    Target(TargetEvent),
}

/// A requested commit. The journal takes them in the order of the requests.
#[derive(Debug)]
enum Commit {
    Source(CommitId, Vec<Record>),
    Target(CommitId, Vec<Record>),
}

struct Model {
    source: Source,
    target: Target,
    now: Duration,
    random: Random,
    pending: Vec<Pending>,
    commits: VecDeque<Commit>,
    journal: State,
    source_gates: Vec<Gate>,
    target_gates: Vec<Gate>,
    phase: Phase,
    synchronised: Vec<bool>,
    faults: Faults,
    discarded: bool,
    outcome: Option<Outcome>,
    was_cancelled: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Faults {
    On,
    Off,
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let volumes: Vec<_> = (0..1 + random.below(3)).map(|index| VolumeId([index as u8; 16])).collect();
        let settings = SourceSettings {
            migration: MIGRATION,
            volumes: volumes.iter().map(|volume| (*volume, Generation(4))).collect(),
            switch_over_max: Duration::from_millis(500),
            peer: Peer::SameHost,
            moves: if seed.is_multiple_of(2) { Moves::Volumes } else { Moves::VolumesAfterHooks },
        };
        let mut model = Self {
            source: Source::new(Duration::ZERO, settings),
            target: Target::new(MIGRATION, volumes.len()),
            now: Duration::ZERO,
            random,
            pending: Vec::new(),
            commits: VecDeque::new(),
            journal: State::default(),
            source_gates: vec![Gate::Open; volumes.len()],
            target_gates: vec![Gate::Closed; volumes.len()],
            phase: Phase::Copying,
            synchronised: vec![false; volumes.len()],
            faults: Faults::On,
            discarded: false,
            outcome: None,
            was_cancelled: false,
        };
        let added = volumes.iter().map(|volume| Record::VolumeAdded(volume_record(*volume)));
        let moving = volumes.iter().map(|volume| MigratingVolume {
            volume: *volume,
            source: location("source"),
            target: location("target"),
        });
        let started = Record::MigrationStarted {
            migration: MIGRATION,
            volumes: moving.collect(),
            keep_source: false,
            side: Side::OneHost,
        };
        let records = added.chain([started]).collect();
        model.journal.apply(&Entry { at_unix_ms: 0, records }).unwrap();
        for volume in VolumeIndex::all(volumes.len()) {
            model.pending.push(Pending::Source(SourceEvent::Synchronised(volume)));
        }
        model
    }

    fn run(&mut self) {
        for step in 0..3000 {
            if step == 400 {
                self.faults = Faults::Off;
                self.pending.push(Pending::Source(SourceEvent::Synchronised(VolumeIndex(0))));
            }
            if self.outcome.is_some() {
                self.check_end();
                return;
            }
            self.step();
            self.drain();
            self.check();
        }
        panic!("it does not end: {:?}, pending {:?}", self.source, self.pending);
    }

    fn step(&mut self) {
        let faulty = self.faults == Faults::On;
        if faulty && self.random.below(60) == 0 {
            let event = self.disturbance();
            self.tell_source(event);
            return;
        }
        if !self.commits.is_empty() && self.random.below(3) == 0 {
            self.journal_acts();
            return;
        }
        if self.pending.is_empty() || self.random.below(8) == 0 {
            self.now += Duration::from_millis(self.random.below(250));
            self.source.handle_timeout(self.now);
            self.target.handle_timeout(self.now);
            return;
        }
        let index = self.random.below(self.pending.len() as u64) as usize;
        let pending = self.pending.swap_remove(index);
        let message = matches!(pending, Pending::ToTarget(_) | Pending::ToSource(_));
        match self.random.below(10) {
            0 if faulty && message => return,
            1 if faulty && message => self.pending.push(pending.clone()),
            _ => {}
        }
        self.happen(pending);
    }

    fn disturbance(&mut self) -> SourceEvent {
        match self.random.below(4) {
            0 if self.order_cancel() => SourceEvent::Cancel,
            1 => SourceEvent::VolumeFailed { code: FailureCode::TargetFaulty, detail: "test".to_owned() },
            2 => SourceEvent::Behind(VolumeIndex(0)),
            _ => SourceEvent::Synchronised(VolumeIndex(0)),
        }
    }

    /// Cancels the migration; returns whether that was early enough, and is durable.
    fn order_cancel(&mut self) -> bool {
        let records = orders::cancel(&self.journal, MIGRATION);
        let is_taken =
            records.is_ok_and(|records| self.journal.apply(&Entry { at_unix_ms: 1, records }).is_ok());
        self.was_cancelled |= is_taken;
        is_taken
    }

    fn happen(&mut self, pending: Pending) {
        let now = self.now;
        match pending {
            Pending::ToTarget(message) => self.target.handle_event(now, TargetEvent::Received(message)),
            Pending::ToSource(message) => self.source.handle_event(now, SourceEvent::Received(message)),
            Pending::Source(event) => self.tell_source(event),
            Pending::Target(event) => self.target.handle_event(now, event),
        }
    }

    fn tell_source(&mut self, event: SourceEvent) {
        match event {
            SourceEvent::Synchronised(volume) => self.synchronised[volume.as_usize()] = true,
            SourceEvent::Behind(volume) => self.synchronised[volume.as_usize()] = false,
            _ => {}
        }
        self.source.handle_event(self.now, event);
    }

    fn journal_acts(&mut self) {
        let now = self.now;
        match self.commits.pop_front() {
            Some(Commit::Source(commit, records)) => {
                let result = self.commit(records);
                self.source.handle_event(now, SourceEvent::Committed { commit, result });
            }
            Some(Commit::Target(commit, records)) => {
                let result = self.commit(records);
                self.target.handle_event(now, TargetEvent::Committed { commit, result });
            }
            None => {}
        }
    }

    fn commit(&mut self, records: Vec<Record>) -> Result<(), CommitFault> {
        let fate = if self.faults == Faults::On { self.random.below(12) } else { 12 };
        if fate == 0 {
            return Err(CommitFault::NotWritten);
        }
        let written = fate != 1;
        if written {
            match self.journal.apply(&Entry { at_unix_ms: 1, records }) {
                Err(Inconsistent::Overtaken(_)) => return Err(CommitFault::NotWritten),
                applied => applied.unwrap(),
            }
        }
        // An unknown result may be either.
        if fate <= 2 { Err(CommitFault::Unknown) } else { Ok(()) }
    }

    fn drain(&mut self) {
        loop {
            if let Some(action) = self.source.poll_action() {
                self.source_acts(action);
            } else if let Some(action) = self.target.poll_action() {
                self.target_acts(action);
            } else {
                return;
            }
        }
    }

    fn source_acts(&mut self, action: SourceAction) {
        match action {
            SourceAction::Enter(phase) => {
                assert!(phase == self.phase || self.phase.may_become(phase), "{} -> {phase}", self.phase);
                self.phase = phase;
                if phase == Phase::Releasing {
                    assert!(
                        self.synchronised.iter().all(|known| *known),
                        "released to a replica that is behind"
                    );
                }
            }
            SourceAction::CloseGate { volume, attempt } => {
                self.source_gates[volume.as_usize()] = Gate::Closed;
                self.pending.push(Pending::Source(SourceEvent::GateClosed { volume, attempt }));
            }
            SourceAction::OpenGate(volume) => self.source_gates[volume.as_usize()] = Gate::Open,
            SourceAction::Settle { volume, settling } => {
                let result = self.flush_result();
                self.pending.push(Pending::Source(SourceEvent::Settled { volume, settling, result }));
            }
            SourceAction::Flush { volume, attempt } => {
                let result = self.flush_result();
                self.pending.push(Pending::Source(SourceEvent::Flushed { volume, attempt, result }));
            }
            SourceAction::Commit { commit, records } => {
                self.commits.push_back(Commit::Source(commit, records));
            }
            SourceAction::Send(message) => self.pending.push(Pending::ToTarget(message)),
            SourceAction::StopCopying => {}
            SourceAction::StopVm => panic!("machines move between hosts"),
            SourceAction::RunHooks => self.pending.push(Pending::Source(SourceEvent::HooksRun(Ok(())))),
            SourceAction::TakeBack(generations) => {
                assert!(generations.iter().all(|(_, generation)| *generation == Generation(6)));
                self.source_gates.fill(Gate::Open);
            }
            SourceAction::Retire | SourceAction::KeepImages => {
                self.pending.push(Pending::Source(SourceEvent::Retired { left_over: String::new() }));
            }
            SourceAction::End { outcome, .. } => self.outcome = Some(outcome),
        }
    }

    fn target_acts(&mut self, action: TargetAction) {
        match action {
            TargetAction::FlushHollow { .. } | TargetAction::StartHollow(_) => {
                unreachable!("no volume leaves before it is copied here")
            }
            TargetAction::Flush { volume, attempt } => {
                let result = self.flush_result();
                self.pending.push(Pending::Target(TargetEvent::Flushed { volume, attempt, result }));
            }
            TargetAction::Commit { commit, records } => {
                self.commits.push_back(Commit::Target(commit, records));
            }
            TargetAction::Send(message) => self.pending.push(Pending::ToSource(message)),
            TargetAction::Start(volume) => {
                let fails = self.faults == Faults::On && self.random.below(6) == 0;
                let event = if fails {
                    TargetEvent::StartFailed { volume, detail: "test".to_owned() }
                } else {
                    TargetEvent::Started(volume)
                };
                self.pending.push(Pending::Target(event));
            }
            TargetAction::Open(volume) => self.target_gates[volume.as_usize()] = Gate::Open,
            TargetAction::Close(volume) => self.target_gates[volume.as_usize()] = Gate::Closed,
            TargetAction::End { .. } => panic!("the source ends it"),
            TargetAction::RunVm => panic!("machines move between hosts"),
            TargetAction::Discard => {
                self.discarded = true;
                let event = TargetEvent::Discarded { left_over: String::new() };
                self.pending.push(Pending::Target(event));
            }
        }
    }

    fn flush_result(&mut self) -> FlushResult {
        let fails = self.faults == Faults::On && self.random.below(10) == 0;
        if fails { FlushResult::Failed } else { FlushResult::Durable }
    }

    fn check(&self) {
        let source_open = self.source_gates.contains(&Gate::Open);
        let target_open = self.target_gates.contains(&Gate::Open);
        assert!(!(source_open && target_open), "both sides let writes through");
        let stage = &self.journal.migrations[&MIGRATION].stage;
        match stage {
            Stage::Released(_) => {
                assert!(!source_open && !target_open, "released, and somebody lets writes through");
            }
            Stage::Owned(_) => {
                assert!(!source_open, "the target owns it, and the source lets writes through");
            }
            Stage::Copying | Stage::Prepared(_) | Stage::HandedBack | Stage::Discarding(_) => {
                assert!(!target_open, "the source owns it, and the target lets writes through");
            }
            Stage::Ended(_) => {}
        }
        if self.discarded {
            assert!(
                !matches!(stage, Stage::Released(_) | Stage::Owned(_)),
                "the owner's images were discarded"
            );
        }
    }

    fn check_end(&self) {
        let state = &self.journal.migrations[&MIGRATION];
        let outcome = self.outcome.clone().unwrap();
        assert_eq!(state.stage, Stage::Ended(outcome.clone()));
        let moved = matches!(outcome, Outcome::Moved { .. });
        assert!(!(moved && self.was_cancelled), "its cancellation was answered, and it moved");
        let handed_back = matches!(outcome, Outcome::HandedBack { .. });
        let (owner, generation) = match (moved, handed_back) {
            (true, _) => ("target", 5),
            (_, true) => ("source", 6),
            _ => ("source", 4),
        };
        for volume in self.journal.volumes.values() {
            assert_eq!(volume.record.image, location(owner));
            assert_eq!(volume.record.generation, Generation(generation));
        }
        let (open, closed) = if moved {
            (&self.target_gates, &self.source_gates)
        } else {
            (&self.source_gates, &self.target_gates)
        };
        assert!(open.iter().all(|gate| *gate == Gate::Open), "the guest is not served at {owner}");
        assert!(closed.iter().all(|gate| *gate == Gate::Closed));
        assert_eq!(self.discarded, !moved);
    }
}

fn location(store: &str) -> ImageLocation {
    ImageLocation::raw_file(store, format!("/{store}"))
}

fn volume_record(volume: VolumeId) -> VolumeRecord {
    VolumeRecord {
        volume,
        name: volume.to_string(),
        size_bytes: 1 << 20,
        block_size_bytes: u32::try_from(BlockSize::DEFAULT.bytes()).unwrap(),
        image: location("source"),
        generation: Generation(4),
        export: ExportSettings::default(),
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn at_most_one_side_lets_writes_through_whatever_happens(seed in any::<u64>()) {
        Model::new(seed).run();
    }
}
