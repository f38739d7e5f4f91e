//! The two hosts of the model: a VM, a journal, gates, and a daemon that recovers after a crash. A commit that is under way
//! during a crash is in the journal or not; the gate of a crashed host is closed.

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::Generation;
use migration::journal::{
    ExportSettings, FailureCode, Forwarding, ImageLocation, MigratingVolume, Outcome, Record, Side, Stage,
    State, VolumeRecord,
};
use migration::recovery;
use migration::source::{Moves, Peer, SourceAction, SourceEvent, SourceSettings};
use migration::target::{FlushResult, TargetAction, TargetEvent, Wrote};
use migration::wire;
use migration::{HostId, MigrationId, Phase, Source, Target, VolumeId, VolumeIndex};

use crate::books::Books;
use crate::random::Random;

const SOURCE_HOST: HostId = HostId([1; 32]);
const TARGET_HOST: HostId = HostId([2; 32]);
const MIGRATION: MigrationId = MigrationId(7);
const THERE: MigrationId = MigrationId(40);
const FIRST: Generation = Generation(4);

/// A message on the link; its variant determines the direction.
#[derive(Clone, Debug)]
pub(crate) struct Message(pub(crate) wire::Message);

/// The state, at one host, of the VM that moves with the volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guest {
    Runs,
    Stands,
    /// It has written, and stopped for ever.
    Broken,
}

/// The host that has the volumes at first.
pub(crate) struct Giving {
    books: Books,
    machine: Option<Source>,
    is_up: bool,
    is_open: bool,
    synchronised: bool,
    pending: Vec<SourceEvent>,
    phase: Phase,
    volumes: u8,
    /// Grows whenever the gate opens, because the guest writes then.
    version: u64,
    moves: Moves,
    /// Survives a crash of the daemon.
    pub(crate) guest: Guest,
}

/// The host that the volumes go to.
pub(crate) struct Bringing {
    books: Books,
    machine: Option<Target>,
    is_up: bool,
    is_open: bool,
    image_is_gone: bool,
    pending: Vec<TargetEvent>,
    volumes: u8,
    /// The version in its stores at their last flush; `None` if the guest was writing then.
    pub(crate) flushed: Option<u64>,
    pub(crate) flushes: u32,
    moves: Moves,
    pub(crate) guest: Guest,
}

impl Giving {
    pub(crate) fn new(volumes: u8, moves: Moves) -> Self {
        let added = (0..volumes).map(|number| Record::VolumeAdded(record(number, "source")));
        let side = Side::Outgoing {
            peer: TARGET_HOST,
            peer_name: "b".to_owned(),
            store: "store".to_owned(),
            forwarding: Forwarding::WhileConnected,
        };
        let records = added.chain([started(MIGRATION, volumes, side)]).collect();
        let mut books = Books { now: Duration::ZERO, state: State::default(), commits: VecDeque::new() };
        books.apply(records);
        let mut giving = Self {
            books,
            machine: None,
            is_up: true,
            is_open: true,
            synchronised: false,
            pending: Vec::new(),
            phase: Phase::Copying,
            volumes,
            version: 0,
            moves,
            guest: Guest::Runs,
        };
        giving.machine = Some(Source::new(Duration::ZERO, giving.settings()));
        giving.synchronise();
        giving
    }

    fn settings(&self) -> SourceSettings {
        SourceSettings {
            migration: MIGRATION,
            volumes: (0..self.volumes).map(|number| (id(number), FIRST)).collect(),
            switch_over_max: Duration::from_millis(500),
            peer: Peer::OtherHost,
            moves: self.moves,
        }
    }

    pub(crate) fn stage(&self) -> Stage {
        self.books.stage(MIGRATION)
    }

    pub(crate) fn machine(&self) -> &Option<Source> {
        &self.machine
    }

    pub(crate) fn serves(&self) -> bool {
        self.is_up && self.is_open
    }

    pub(crate) fn owns(&self) -> bool {
        !self.books.state.volumes.is_empty()
    }

    /// Returns the version that the guest has written; `None` while it may be writing.
    pub(crate) fn version(&self) -> Option<u64> {
        (!self.serves()).then_some(self.version)
    }

    pub(crate) fn synchronise(&mut self) {
        let events =
            (0..u32::from(self.volumes)).map(|number| SourceEvent::Synchronised(VolumeIndex(number)));
        self.pending.extend(events);
        self.synchronised = true;
    }

    pub(crate) fn crash(&mut self, random: &mut Random) {
        if self.is_up {
            self.books.crash(random);
            self.machine = None;
            self.pending.clear();
            self.is_up = false;
        }
    }

    pub(crate) fn restart_if_down(&mut self, link: &mut Vec<Message>) {
        if self.is_up {
            return;
        }
        self.is_up = true;
        let (resumes, _) = self.books.recover();
        self.is_open = self.owns();
        self.version += u64::from(self.is_open);
        // A restarted daemon resumes the VM of its own volumes.
        if self.owns() {
            self.guest = Guest::Runs;
        }
        self.synchronised = false;
        if resumes {
            let recorded = &self.books.state.migrations[&MIGRATION];
            let machine = Source::resume(self.books.now, self.settings(), recorded).unwrap();
            self.phase = machine.phase();
            self.machine = Some(machine);
            self.synchronise();
            if self.books.is_cancelled(MIGRATION) {
                self.tell(SourceEvent::Cancel);
            }
            self.drain(link);
        }
    }

    pub(crate) fn act(&mut self, random: &mut Random, faulty: bool, link: &mut Vec<Message>) {
        if !self.is_up {
            if random.below(10) == 0 {
                self.restart_if_down(link);
            }
            return;
        }
        let now = self.books.now;
        match random.below(4) {
            0 => {
                if let Some((commit, result)) = self.books.journal_acts(random, faulty) {
                    self.tell(SourceEvent::Committed { commit, result });
                }
            }
            1 if random.below(3) == 0 || self.pending.is_empty() => {
                self.books.now = now + Duration::from_millis(random.below(250));
                let now = self.books.now;
                if let Some(machine) = &mut self.machine {
                    machine.handle_timeout(now);
                }
            }
            2 if faulty && random.below(20) == 0 => {
                let event = match random.below(5) {
                    0 if self.books.order_cancel(MIGRATION) => SourceEvent::Cancel,
                    4 => SourceEvent::VmStopped(Err("x".to_owned())),
                    1 => {
                        SourceEvent::VolumeFailed { code: FailureCode::TargetFaulty, detail: "x".to_owned() }
                    }
                    2 => SourceEvent::Behind(VolumeIndex(0)),
                    _ => SourceEvent::Synchronised(VolumeIndex(0)),
                };
                self.tell(event);
            }
            _ => {
                if !self.pending.is_empty() {
                    let index = random.below(self.pending.len() as u64) as usize;
                    let event = self.pending.swap_remove(index);
                    self.tell(event);
                }
            }
        }
        self.drain(link);
    }

    fn tell(&mut self, event: SourceEvent) {
        match event {
            SourceEvent::Synchronised(_) => self.synchronised = true,
            SourceEvent::Behind(_) => self.synchronised = false,
            SourceEvent::VmPaused | SourceEvent::VmStopped(Ok(())) if self.phase == Phase::Memory => {
                self.guest = Guest::Stands;
            }
            _ => {}
        }
        if let Some(machine) = &mut self.machine {
            machine.handle_event(self.books.now, event);
        }
    }

    pub(crate) fn receive(&mut self, message: &Message, link: &mut Vec<Message>) {
        let wire::Message::ToSource { migration, message } = &message.0 else { return };
        if !self.is_up {
            return;
        }
        let answer = recovery::answer_as_source(&self.books.state, TARGET_HOST, *migration, message);
        if self.machine.is_some() {
            self.tell(SourceEvent::Received(message.clone()));
        } else if let Some(message) = answer {
            link.push(Message(wire::Message::ToTarget { migration: MIGRATION, message }));
        }
        self.drain(link);
    }

    fn drain(&mut self, link: &mut Vec<Message>) {
        while let Some(action) = self.machine.as_mut().and_then(Source::poll_action) {
            match action {
                SourceAction::Enter(phase) => {
                    assert!(phase == self.phase || self.phase.may_become(phase), "{} -> {phase}", self.phase);
                    self.phase = phase;
                    if phase == Phase::Discarding {
                        self.guest = Guest::Runs;
                    }
                }
                SourceAction::StopVm => {
                    self.pending.push(SourceEvent::VmPaused);
                    self.pending.push(SourceEvent::VmStopped(Ok(())));
                }
                SourceAction::RunHooks => {
                    assert!(self.is_open, "a hook holds nobody");
                    let result = if self.version % 8 == 7 { Err("no".to_owned()) } else { Ok(()) };
                    self.pending.push(SourceEvent::HooksRun(result));
                }
                SourceAction::CloseGate { volume, attempt } => {
                    let stands = self.moves != Moves::Vm || self.guest == Guest::Stands;
                    assert!(stands, "a gate closes below a VM that runs");
                    self.is_open = false;
                    self.pending.push(SourceEvent::GateClosed { volume, attempt });
                    if self.version.is_multiple_of(3) {
                        self.pending.push(SourceEvent::RequestHeld { volume, attempt });
                    }
                }
                SourceAction::OpenGate(_) => {
                    self.is_open = true;
                    self.version += 1;
                }
                SourceAction::Settle { volume, settling } => {
                    let result = FlushResult::Durable;
                    self.pending.push(SourceEvent::Settled { volume, settling, result });
                }
                SourceAction::Flush { volume, attempt } => {
                    let result = FlushResult::Durable;
                    self.pending.push(SourceEvent::Flushed { volume, attempt, result });
                }
                SourceAction::Commit { commit, records } => {
                    self.books.commits.push_back((Some(commit), records));
                }
                SourceAction::Send(message) => {
                    link.push(Message(wire::Message::ToTarget { migration: MIGRATION, message }));
                }
                SourceAction::StopCopying => {}
                SourceAction::TakeBack(generations) => {
                    assert!(generations.iter().all(|(_, generation)| generation.0 == FIRST.0 + 2));
                    self.is_open = true;
                }
                SourceAction::Retire | SourceAction::KeepImages => {
                    self.pending.push(SourceEvent::Retired { left_over: String::new() });
                }
                SourceAction::End { .. } => self.machine = None,
            }
        }
    }

    pub(crate) fn check_books(&self, outcome: &Outcome) {
        let state = &self.books.state;
        match outcome {
            Outcome::Moved { .. } => {
                assert!(state.volumes.is_empty());
                assert_eq!(state.moved.len(), usize::from(self.volumes));
                let there = |moved: &migration::journal::Moved| {
                    (moved.host, moved.generation) == (TARGET_HOST, FIRST.next())
                };
                assert!(state.moved.values().all(there));
            }
            outcome => {
                assert!(state.moved.is_empty());
                assert_eq!(state.volumes.len(), usize::from(self.volumes));
                let handed_back = matches!(outcome, Outcome::HandedBack { .. });
                let generation = Generation(FIRST.0 + if handed_back { 2 } else { 0 });
                assert!(state.volumes.values().all(|volume| volume.record.generation == generation));
            }
        }
    }
}

impl Bringing {
    pub(crate) fn new(volumes: u8, moves: Moves) -> Self {
        let side = Side::Incoming {
            peer: SOURCE_HOST,
            peer_name: "a".to_owned(),
            remote: MIGRATION,
            volumes: (0..volumes).map(|number| record(number, "target")).collect(),
        };
        let mut books = Books { now: Duration::ZERO, state: State::default(), commits: VecDeque::new() };
        books.apply(vec![started(THERE, volumes, side)]);
        Self {
            books,
            machine: Some(accompanied(Target::between_hosts(THERE, usize::from(volumes)), moves)),
            is_up: true,
            is_open: false,
            image_is_gone: false,
            pending: Vec::new(),
            volumes,
            flushed: None,
            flushes: 0,
            moves,
            guest: Guest::Stands,
        }
    }

    pub(crate) fn stage(&self) -> Stage {
        self.books.stage(THERE)
    }

    pub(crate) fn machine(&self) -> &Option<Target> {
        &self.machine
    }

    pub(crate) fn serves(&self) -> bool {
        self.is_up && self.is_open
    }

    pub(crate) fn owns(&self) -> bool {
        !self.books.state.volumes.is_empty()
    }

    pub(crate) fn image_is_gone(&self) -> bool {
        self.image_is_gone
    }

    pub(crate) fn link_back(&mut self, link: &mut Vec<Message>) {
        if let Some(machine) = &mut self.machine {
            machine.handle_event(self.books.now, TargetEvent::LinkBack);
        }
        self.drain(link);
    }

    pub(crate) fn crash(&mut self, random: &mut Random) {
        if self.is_up {
            self.books.crash(random);
            self.machine = None;
            self.pending.clear();
            self.is_up = false;
        }
    }

    pub(crate) fn restart_if_down(&mut self, link: &mut Vec<Message>) {
        if self.is_up {
            return;
        }
        self.is_up = true;
        let (resumes, discards) = self.books.recover();
        self.image_is_gone |= discards;
        self.is_open = self.owns();
        if self.owns() && self.guest == Guest::Stands {
            self.guest = Guest::Runs;
        }
        if resumes {
            let recorded = &self.books.state.migrations[&THERE];
            let machine = Target::resume(self.books.now, THERE, recorded).unwrap();
            self.machine = Some(accompanied(machine, self.moves));
            if self.books.is_cancelled(THERE) {
                self.tell(TargetEvent::Cancel);
            }
            self.drain(link);
        }
    }

    pub(crate) fn act(&mut self, random: &mut Random, faulty: bool, link: &mut Vec<Message>) {
        if !self.is_up {
            if random.below(10) == 0 {
                self.restart_if_down(link);
            }
            return;
        }
        match random.below(4) {
            0 => {
                if let Some((commit, result)) = self.books.journal_acts(random, faulty) {
                    self.tell(TargetEvent::Committed { commit, result });
                }
            }
            1 if random.below(3) == 0 || self.pending.is_empty() => {
                self.books.now += Duration::from_millis(random.below(250));
                let now = self.books.now;
                if let Some(machine) = &mut self.machine {
                    machine.handle_timeout(now);
                }
            }
            2 if faulty && random.below(200) == 0 => {
                if self.books.state.migrations.contains_key(&THERE) && self.books.order_cancel(THERE) {
                    self.tell(TargetEvent::Cancel);
                }
            }
            2 if faulty && random.below(20) == 0 => self.tell(TargetEvent::LinkBack),
            _ => {
                if !self.pending.is_empty() {
                    let index = random.below(self.pending.len() as u64) as usize;
                    let mut event = self.pending.swap_remove(index);
                    if let TargetEvent::Started(volume) = event
                        && faulty
                        && random.below(6) == 0
                    {
                        event = TargetEvent::StartFailed { volume, detail: "x".to_owned() };
                    }
                    if event == TargetEvent::VmRuns && faulty && random.below(3) == 0 {
                        let wrote = if random.below(2) == 0 { Wrote::Nothing } else { Wrote::Something };
                        if wrote == Wrote::Something {
                            self.guest = Guest::Broken;
                        }
                        event = TargetEvent::VmFailed { detail: "x".to_owned(), wrote };
                    }
                    if event == TargetEvent::VmRuns {
                        self.guest = Guest::Runs;
                    }
                    self.tell(event);
                }
            }
        }
        self.drain(link);
    }

    fn tell(&mut self, event: TargetEvent) {
        if let Some(machine) = &mut self.machine {
            machine.handle_event(self.books.now, event);
        }
    }

    pub(crate) fn receive(&mut self, message: &Message, link: &mut Vec<Message>) {
        let wire::Message::ToTarget { migration, message } = &message.0 else { return };
        if !self.is_up {
            return;
        }
        if self.machine.is_some() {
            self.tell(TargetEvent::Received(message.clone()));
        } else if let Some(message) =
            recovery::answer_as_target(&self.books.state, SOURCE_HOST, *migration, message)
        {
            link.push(Message(wire::Message::ToSource { migration: MIGRATION, message }));
        }
        self.drain(link);
    }

    fn drain(&mut self, link: &mut Vec<Message>) {
        while let Some(action) = self.machine.as_mut().and_then(Target::poll_action) {
            match action {
                TargetAction::Flush { volume, attempt } => {
                    self.flushes += 1;
                    let result = FlushResult::Durable;
                    self.pending.push(TargetEvent::Flushed { volume, attempt, result });
                }
                TargetAction::Commit { commit, records } => {
                    self.books.commits.push_back((Some(commit), records));
                }
                TargetAction::Send(message) => {
                    link.push(Message(wire::Message::ToSource { migration: MIGRATION, message }));
                }
                TargetAction::Start(volume) => self.pending.push(TargetEvent::Started(volume)),
                TargetAction::FlushHollow { .. } | TargetAction::StartHollow(_) => {
                    unreachable!("no volume leaves before it is copied here")
                }
                TargetAction::Open(_) => self.is_open = true,
                TargetAction::RunVm => self.pending.push(TargetEvent::VmRuns),
                TargetAction::Close(_) => self.is_open = false,
                TargetAction::Discard => {
                    self.image_is_gone = true;
                    self.pending.push(TargetEvent::Discarded { left_over: String::new() });
                }
                TargetAction::End { .. } => self.machine = None,
            }
        }
    }

    pub(crate) fn check_books(&self, outcome: &Outcome) {
        let state = &self.books.state;
        let moved = matches!(outcome, Outcome::Moved { .. });
        assert_eq!(state.volumes.len(), if moved { usize::from(self.volumes) } else { 0 });
        assert!(state.volumes.values().all(|volume| volume.record.generation == FIRST.next()));
        assert_eq!(self.image_is_gone, !moved, "leftovers, or the image is gone");
    }
}

fn accompanied(target: Target, moves: Moves) -> Target {
    if moves == Moves::Vm { target.with_vm() } else { target }
}

fn started(migration: MigrationId, volumes: u8, side: Side) -> Record {
    let moving = |number| MigratingVolume {
        volume: id(number),
        source: ImageLocation::raw_file("a", "/source"),
        target: ImageLocation::raw_file("b", "/target"),
    };
    let volumes = (0..volumes).map(moving).collect();
    Record::MigrationStarted { migration, volumes, keep_source: false, side }
}

fn record(number: u8, store: &str) -> VolumeRecord {
    VolumeRecord {
        volume: id(number),
        name: format!("v{number}"),
        size_bytes: 1 << 20,
        block_size_bytes: 65536,
        image: ImageLocation::raw_file(store, format!("/{store}")),
        generation: FIRST,
        export: ExportSettings::default(),
    }
}

fn id(number: u8) -> VolumeId {
    VolumeId([number; 16])
}
