//! The steps of the simulation: guests, messages, commits, machines, faults, and what must hold after each.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use migration::authority::{Request, Role, judge};
use migration::filling::Manifest;
use migration::journal::{LaneLeft, Record, Side, Stage, Users};
use migration::message::{ToSource, ToTarget};
use migration::recovery;
use migration::source::{SourceAction, SourceEvent};
use migration::target::{FlushResult, TargetAction, TargetEvent};
use migration::{Attempt, CommitFault, CommitId, MigrationId, Phase};

use super::host::{Blocks, By, Commit, Event, FIRST, Host, Mail, VOLUME, added};
use super::met::Met;
use crate::random::Random;
use crate::restored::Telling;

/// The percentages of steps that are an order, a kill, a change of the link, and a pairing.
const ORDERS: u64 = 10;
const KILLS: u64 = 2;
const LINKS: u64 = 2;
const PAIRS: u64 = 4;
/// The percentage of entries into a phase that are followed by an order at once.
const AFTER_ENTRY: u64 = 30;
/// The percentages of messages that are lost, and of commits that fail.
const LOST: u64 = 4;
const COMMITS_FAIL: u64 = 6;
/// The percentage of trials at a target that fail.
const TRIALS_FAIL: u64 = 20;
/// The percentage of steps in which a missing block is fetched.
const FILLS: u64 = 3;
/// The percentage of kills that lose which blocks of a volume are missing.
pub(super) const MISSING_FORGOTTEN: u64 = 25;

/// One end of a migration: the source's host, and its number there.
pub(super) type Number = (usize, MigrationId);

#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) done: u64,
    pub(super) refused: u64,
    pub(super) needed: u64,
}

pub(super) struct World {
    pub(super) random: Random,
    pub(super) now: Duration,
    pub(super) hosts: [Host; 2],
    pub(super) link: Vec<(usize, Mail)>,
    pub(super) is_linked: bool,
    /// Whether each host is paired with the other.
    pub(super) is_paired: [bool; 2],
    is_order_due: bool,
    /// What guests wrote last, by branch; `None`: it is given up.
    pub(super) branches: Vec<Blocks>,
    pub(super) branch_of: BTreeMap<Number, usize>,
    /// What volumes were when they left.
    pub(super) left: BTreeMap<Number, Blocks>,
    pub(super) is_hollow: BTreeMap<Number, bool>,
    /// The departures whose volume has all blocks at its new host.
    pub(super) whole_there: BTreeSet<Number>,
    /// The migrations, by their number at either host, of which was answered that they are cancelled.
    pub(super) cancelled: BTreeSet<(usize, MigrationId)>,
    /// Branches whose volume an order has removed.
    pub(super) removed: BTreeSet<usize>,
    pub(super) writes: u64,
    pub(super) images_made: u64,
    pub(super) has_faults: bool,
    pub(super) met: Met,
    pub(super) shown: Counts,
    pub(super) violation: Option<String>,
    telling: Telling,
}

impl World {
    pub(super) fn new(random: Random, telling: Telling) -> Self {
        let mut world = Self {
            random,
            now: Duration::ZERO,
            hosts: [Host::new(0), Host::new(1)],
            link: Vec::new(),
            is_linked: true,
            is_paired: [true; 2],
            is_order_due: false,
            branches: vec![[Some(0); 2]],
            branch_of: BTreeMap::new(),
            left: BTreeMap::new(),
            is_hollow: BTreeMap::new(),
            whole_there: BTreeSet::new(),
            cancelled: BTreeSet::new(),
            removed: BTreeSet::new(),
            writes: 0,
            images_made: 0,
            has_faults: true,
            met: Met::default(),
            shown: Counts::default(),
            violation: None,
            telling,
        };
        world.hosts[0].images.insert("/0/made".to_owned(), [Some(0); 2]);
        world.commit(0, &[added()]);
        world
    }

    pub(super) fn say(&self, text: impl FnOnce() -> String) {
        if self.telling == Telling::Printed {
            println!("{:>9.3} {}", self.now.as_secs_f64(), text());
        }
    }

    pub(super) fn violated(&mut self, detail: impl FnOnce() -> String) {
        if self.violation.is_none() {
            let detail = detail();
            self.say(|| format!("VIOLATION: {detail}"));
            self.violation = Some(detail);
        }
    }

    pub(super) fn hears_each_other(&self) -> bool {
        self.is_linked && self.is_paired == [true; 2]
    }

    pub(super) fn step(&mut self) {
        self.now += self.random.duration(Duration::from_millis(1), Duration::from_millis(120));
        let at = self.random.index(2);
        if std::mem::take(&mut self.is_order_due) {
            self.order(at);
        }
        match self.random.below(100) {
            percent if percent < ORDERS => self.order(at),
            percent if percent < ORDERS + KILLS => self.kill(at),
            percent if percent < ORDERS + KILLS + LINKS => self.is_linked = !self.is_linked,
            percent if percent < ORDERS + KILLS + LINKS + PAIRS => self.is_paired = [true; 2],
            _ => {}
        }
        self.work();
    }

    /// Lets everything that is under way get on a little.
    pub(super) fn work(&mut self) {
        for at in 0..2 {
            if !self.hosts[at].is_up {
                if !self.hosts[at].is_lost && self.random.percent(if self.has_faults { 20 } else { 100 }) {
                    self.start(at);
                }
                continue;
            }
            self.serve(at);
            self.fill(at);
            self.journal_acts(at);
            self.store_acts(at);
            self.time_passes(at);
            self.copy_on(at);
            self.look_at_lane(at);
        }
        for _ in 0..2 {
            self.deliver();
        }
    }

    /// Reads and writes as a guest of the volume, and compares.
    fn serve(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let (true, Some(path)) = (host.serves(), host.own_image()) else { return };
        let (branch, block) = (host.branch, self.random.index(2));
        let Some(image) = host.images.get_mut(&path) else {
            return self.violated(|| format!("host {at}: {path} owns the volume, and is gone"));
        };
        if self.random.percent(50) {
            self.writes += 1;
            (image[block], self.branches[branch][block]) = (Some(self.writes), Some(self.writes));
            return self.see_whole(at);
        }
        let (found, expected) = (image[block], self.branches[branch][block]);
        let is_missing = host.state.fillings.contains_key(&VOLUME) && found.is_none();
        if !is_missing && found != expected {
            let detail = || {
                format!(
                    "host {at}: block {block} of branch {branch} is {found:?}, and {expected:?} was written"
                )
            };
            self.violated(detail);
        }
    }

    /// Fetches the missing block of the volume, if the other host permits it.
    fn fill(&mut self, at: usize) {
        let (host, there) = (&self.hosts[at], &self.hosts[1 - at]);
        let Some(filling) = host.state.fillings.get(&VOLUME).filter(|_| host.serves()) else { return };
        let is_heard = there.is_up && self.hears_each_other() && !filling.is_given_up;
        if !is_heard || !self.random.percent(if self.has_faults { FILLS } else { 30 }) {
            return;
        }
        let (id, remote) = (host.id, filling.remote);
        let role = Role::Filler { migration: remote, volume: FIRST };
        let is_permitted = judge(&there.state, id, role, Request::Reservoir(FIRST)).is_ok();
        let left = there.state.migrations.get(&remote).and_then(|left| left.volumes.first());
        let (true, Some(left)) = (is_permitted, left) else { return };
        let path = left.source.place.name().to_owned();
        let Some(found) = there.images.get(&path).copied() else {
            return self.violated(|| format!("host {}: {path} has missing blocks, and is gone", 1 - at));
        };
        let (branch, own) = (host.branch, host.own_image());
        let Some(image) = own.and_then(|path| self.hosts[at].images.get_mut(&path)) else { return };
        for block in (0..2).filter(|block| image[*block].is_none()).collect::<Vec<_>>() {
            if self.branches[branch][block] != found[block] {
                let expected = self.branches[branch][block];
                let detail = format!(
                    "host {at}: {:?} is fetched for block {block}, and {expected:?} was written",
                    found[block]
                );
                return self.violated(|| detail);
            }
            image[block] = found[block];
        }
        self.see_whole(at);
    }

    fn see_whole(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let image = host.own_image().and_then(|path| host.images.get(&path).copied());
        let is_noted = host.commits.iter().any(|commit| commit.by == By::Filling);
        if host.lacks_blocks() && !is_noted && image.is_some_and(|image| image.iter().all(Option::is_some)) {
            let records = vec![Record::Filled { volume: VOLUME }];
            host.commits.push_back(Commit { by: By::Filling, id: CommitId(0), records });
        }
    }

    fn journal_acts(&mut self, at: usize) {
        if !self.random.percent(60) {
            return;
        }
        let Some(Commit { by, id, records }) = self.hosts[at].commits.pop_front() else { return };
        let fails = self.has_faults && self.random.percent(COMMITS_FAIL);
        let is_written = !fails || self.random.percent(30);
        let is_taken = is_written && self.commit(at, &records);
        let result = match (fails, is_written, is_taken) {
            (false, _, true) => Ok(()),
            (_, true, _) if is_taken => Err(CommitFault::Unknown),
            _ if !is_written && self.random.percent(50) => Err(CommitFault::Unknown),
            _ => Err(CommitFault::NotWritten),
        };
        match by {
            By::Source(migration) => {
                self.tell_source(at, migration, SourceEvent::Committed { commit: id, result });
            }
            By::Target(migration) => {
                self.tell_target(at, migration, TargetEvent::Committed { commit: id, result });
            }
            By::Filling => {}
        }
    }

    fn store_acts(&mut self, at: usize) {
        let pending = &mut self.hosts[at].pending;
        if pending.is_empty() || !self.random.percent(60) {
            return;
        }
        let event = pending.swap_remove(self.random.index(pending.len()));
        let fails = self.has_faults && self.random.percent(TRIALS_FAIL);
        match event {
            Event::Source(event) => {
                if let Some(migration) = self.hosts[at].source.as_ref().map(|(id, _)| *id) {
                    self.tell_source(at, migration, event);
                }
            }
            Event::Target(event) => {
                let Some(migration) = self.hosts[at].target.as_ref().map(|(id, _)| *id) else { return };
                let event = match event {
                    TargetEvent::Started(volume) if fails => {
                        TargetEvent::StartFailed { volume, detail: "EIO".to_owned() }
                    }
                    event => event,
                };
                self.tell_target(at, migration, event);
            }
        }
    }

    fn time_passes(&mut self, at: usize) {
        let now = self.now;
        let host = &mut self.hosts[at];
        if let Some((_, source)) = &mut host.source {
            source.handle_timeout(now);
        }
        if let Some((_, target)) = &mut host.target {
            target.handle_timeout(now);
        }
        self.drain(at);
    }

    /// Copies the volume, again and again while its migration copies.
    fn copy_on(&mut self, at: usize) {
        let Some((id, phase)) = self.hosts[at].source.as_ref().map(|(id, source)| (*id, source.phase()))
        else {
            return;
        };
        if phase == Phase::Copying && self.random.percent(15) {
            self.send_data(at, id, None);
        }
    }

    fn send_data(&mut self, at: usize, id: MigrationId, attempt: Option<Attempt>) {
        let host = &self.hosts[at];
        let recorded = host.state.migrations.get(&id).and_then(|known| known.volumes.first());
        let Some(image) = recorded.and_then(|moving| host.images.get(moving.source.place.name())) else {
            return;
        };
        let mut blocks = *image;
        if self.is_hollow.get(&(at, id)) == Some(&true) {
            blocks[1] = None;
        }
        self.link.push((1 - at, Mail::Data(id, attempt, blocks)));
    }

    /// Lets clients come and go, and checks that the lane of a volume that has left does not end under them, or too early.
    fn look_at_lane(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        match self.random.below(40) {
            0 => host.clients = self.random.index(3),
            1 => host.has_vm = !host.has_vm,
            _ => {}
        }
        let users = Users { clients: host.clients, led_here_by: &[], has_vm: host.has_vm };
        let LaneLeft::Unneeded { .. } = host.state.lane_left(VOLUME, users) else { return };
        let left_by = host.state.moved.get(&VOLUME).map(|moved| moved.migration);
        let is_under_way = host.state.unfinished().any(|(id, _)| Some(id) == left_by);
        if is_under_way || host.clients > 0 || host.has_vm {
            let (clients, has_vm) = (host.clients, host.has_vm);
            self.violated(|| {
                format!(
                    "host {at}: the lane ends: under way: {is_under_way}, clients: {clients}, a VM: {has_vm}"
                )
            });
        }
    }

    fn deliver(&mut self) {
        if self.link.is_empty() {
            return;
        }
        let (to, mail) = self.link.swap_remove(self.random.index(self.link.len()));
        let is_lost = !self.hears_each_other() || self.has_faults && self.random.percent(LOST);
        if is_lost || !self.hosts[to].is_up {
            return;
        }
        match mail {
            Mail::ToSource(id, message) => self.source_hears(to, id, message),
            Mail::ToTarget(remote, message) => self.target_hears(to, remote, message),
            Mail::Data(remote, attempt, blocks) => self.data_comes(to, remote, attempt, blocks),
            Mail::Copied(id, attempt) => self.copied(to, id, attempt),
        }
    }

    fn source_hears(&mut self, at: usize, id: MigrationId, message: ToSource) {
        if self.hosts[at].source.as_ref().is_some_and(|(driven, _)| *driven == id) {
            return self.tell_source(at, id, SourceEvent::Received(message));
        }
        let peer = self.hosts[1 - at].id;
        if let Some(answer) = recovery::answer_as_source(&self.hosts[at].state, peer, id, &message) {
            self.link.push((1 - at, Mail::ToTarget(id, answer)));
        }
    }

    pub(super) fn target_hears(&mut self, at: usize, remote: MigrationId, message: ToTarget) {
        let peer = self.hosts[1 - at].id;
        let host = &self.hosts[at];
        let known = host.state.incoming(peer, remote).map(|(id, _)| id);
        let driven = host.target.as_ref().map(|(id, _)| *id);
        if let Some(id) = known.filter(|id| driven == Some(*id)) {
            return self.tell_target(at, id, TargetEvent::Received(message));
        }
        if matches!(message, ToTarget::NothingKept(_)) {
            return;
        }
        let mut answers = recovery::answers_as_target(&host.state, peer, remote, &message);
        if let (true, ToTarget::IsWhole(attempt)) = (answers.is_empty(), message)
            && host.state.fillings_from(peer, remote).next().is_some()
        {
            answers.push(ToSource::Lacks { attempt, units: 1 });
        }
        self.link.extend(answers.into_iter().map(|answer| (1 - at, Mail::ToSource(remote, answer))));
    }

    fn data_comes(&mut self, at: usize, remote: MigrationId, attempt: Option<Attempt>, blocks: Blocks) {
        let peer = self.hosts[1 - at].id;
        let role = Role::Source { migration: remote, volume: FIRST };
        if judge(&self.hosts[at].state, peer, role, Request::Store(FIRST)).is_err() {
            return;
        }
        let Some((id, recorded)) = self.hosts[at].state.incoming(peer, remote) else { return };
        let (path, stage) = (recorded.volumes[0].target.place.name().to_owned(), recorded.stage.clone());
        let Some((driven, target)) = &self.hosts[at].target else { return };
        if *driven != id || !target.is_receiving() || stage != Stage::Copying {
            return self.tell_target(at, id, TargetEvent::ChangeHeld);
        }
        let image = self.hosts[at].images.entry(path).or_default();
        for (here, came) in image.iter_mut().zip(blocks) {
            *here = came.or(*here);
        }
        self.link.push((1 - at, Mail::Copied(remote, attempt)));
    }

    fn copied(&mut self, at: usize, id: MigrationId, attempt: Option<Attempt>) {
        match attempt {
            None => {
                if self.is_hollow.get(&(at, id)) == Some(&true) {
                    let manifest = Manifest { units: 1, checksum: 1 };
                    self.tell_source(at, id, SourceEvent::Told { volume: FIRST, manifest });
                }
                self.tell_source(at, id, SourceEvent::Synchronised(FIRST));
            }
            Some(attempt) if self.hosts[at].closing == Some(attempt) => {
                self.hosts[at].closing = None;
                self.tell_source(at, id, SourceEvent::GateClosed { volume: FIRST, attempt });
            }
            Some(_) => {}
        }
    }

    pub(super) fn tell_source(&mut self, at: usize, migration: MigrationId, event: SourceEvent) {
        let now = self.now;
        if let Some((id, source)) = &mut self.hosts[at].source
            && *id == migration
        {
            source.handle_event(now, event);
        }
        self.drain(at);
    }

    pub(super) fn tell_target(&mut self, at: usize, migration: MigrationId, event: TargetEvent) {
        let now = self.now;
        if let Some((id, target)) = &mut self.hosts[at].target
            && *id == migration
        {
            target.handle_event(now, event);
        }
        self.drain(at);
    }

    pub(super) fn drain(&mut self, at: usize) {
        while let Some((id, action)) = self.hosts[at].next_of_source() {
            self.source_acts(at, id, action);
        }
        while let Some((id, action)) = self.hosts[at].next_of_target() {
            self.target_acts(at, id, action);
        }
    }

    fn source_acts(&mut self, at: usize, id: MigrationId, action: SourceAction) {
        let host = &mut self.hosts[at];
        let durable = FlushResult::Durable;
        match action {
            SourceAction::CloseGate { attempt, .. } => {
                (host.is_open, host.closing) = (false, Some(attempt));
                // Messages arrive in the order in which they were sent.
                self.link.retain(|(_, mail)| !matches!(mail, Mail::Data(of, ..) if *of == id));
                self.send_data(at, id, Some(attempt));
            }
            SourceAction::OpenGate(_) => (host.is_open, host.closing) = (true, None),
            SourceAction::TakeBack(_) => host.is_open = true,
            SourceAction::Settle { volume, settling } => {
                let event = SourceEvent::Settled { volume, settling, result: durable };
                host.pending.push(Event::Source(event));
            }
            SourceAction::Flush { volume, attempt } => {
                let event = SourceEvent::Flushed { volume, attempt, result: durable };
                host.pending.push(Event::Source(event));
            }
            SourceAction::Commit { commit, records } => {
                host.commits.push_back(Commit { by: By::Source(id), id: commit, records });
            }
            SourceAction::Send(message) => self.link.push((1 - at, Mail::ToTarget(id, message))),
            SourceAction::Retire => {
                let path =
                    host.state.migrations.get(&id).map(|left| left.volumes[0].source.place.name().to_owned());
                path.into_iter().for_each(|path| self.delete(at, &path));
                self.hosts[at].pending.push(Event::Source(SourceEvent::Retired { left_over: String::new() }));
            }
            SourceAction::KeepImages => {
                host.pending.push(Event::Source(SourceEvent::Retired { left_over: String::new() }));
            }
            SourceAction::End { outcome, .. } => {
                self.say(|| format!("host {at}: {id} to the other host: {outcome:?}"));
                self.hosts[at].source = None;
            }
            SourceAction::Enter(phase) => {
                self.say(|| format!("host {at}: {id}: {phase}"));
                let percent = if phase == Phase::TakingBack { 100 } else { AFTER_ENTRY };
                self.is_order_due |= self.has_faults && self.random.percent(percent);
            }
            SourceAction::StopVm | SourceAction::RunHooks | SourceAction::StopCopying => {}
        }
    }

    fn target_acts(&mut self, at: usize, id: MigrationId, action: TargetAction) {
        let host = &mut self.hosts[at];
        let result = FlushResult::Durable;
        match action {
            TargetAction::Flush { volume, attempt } | TargetAction::FlushHollow { volume, attempt, .. } => {
                host.pending.push(Event::Target(TargetEvent::Flushed { volume, attempt, result }));
            }
            TargetAction::Commit { commit, records } => {
                host.commits.push_back(Commit { by: By::Target(id), id: commit, records });
            }
            TargetAction::Send(message) => {
                if let Some((_, remote)) = host.remote_of(id) {
                    self.link.push((1 - at, Mail::ToSource(remote, message)));
                }
            }
            TargetAction::Start(volume) | TargetAction::StartHollow(volume) => {
                host.pending.push(Event::Target(TargetEvent::Started(volume)));
            }
            TargetAction::Open(_) => host.is_open = true,
            TargetAction::Close(_) => host.is_open = false,
            TargetAction::Discard => {
                let path =
                    host.state.migrations.get(&id).map(|came| came.volumes[0].target.place.name().to_owned());
                let path = path.filter(|path| !self.hosts[at].state.is_reservoir(path));
                path.into_iter().for_each(|path| self.delete(at, &path));
                self.hosts[at]
                    .pending
                    .push(Event::Target(TargetEvent::Discarded { left_over: String::new() }));
            }
            TargetAction::End { outcome } => {
                self.say(|| format!("host {at}: {id} from the other host: {outcome:?}"));
                self.hosts[at].target = None;
                self.go_on_with_departures(at);
            }
            TargetAction::RunVm => {}
        }
    }

    /// Goes on with a departure whose volume was to come back, and has not.
    fn go_on_with_departures(&mut self, at: usize) {
        if self.hosts[at].source.is_some() {
            return;
        }
        let leaving =
            self.hosts[at].state.unfinished().find(|(_, known)| matches!(known.side, Side::Outgoing { .. }));
        if let Some(id) = leaving.map(|(id, _)| id) {
            self.resume(at, id);
        }
    }
}
