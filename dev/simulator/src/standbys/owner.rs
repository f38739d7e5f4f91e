//! The owner's host: it carries the machine's actions out over a store with a cache, and keeps a chronicle.

mod lives;
mod permission;

pub(super) use permission::LOCKED_MAX;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use chronicle::{BlockCount, BlockRange, LayeredBitmap};
use standby::asking::{self, Asking, Permission, Word};
use standby::owner::{Action, Event, Outcome, ReadId, State};
use standby::record::OwnerRecord;
use standby::wire::{Answer, Content, StreamId, ToOwner, ToStandby};
use standby::{Place, Replication, StandbyId};

use super::disk::{Disk, Flush};
use super::met::Fault;
use super::truth::Cut;
use super::world::{AGE_SLACK, Asked, InFlight, Task, WAIT_MAX, World};

pub(super) const STANDBY: StandbyId = StandbyId(7);

/// What an incomplete owner reads where it lacks a block.
const NOT_HERE: u64 = u64::MAX;

#[derive(Debug)]
pub(super) enum OwnerTask {
    Landed(u64),
    ReadDone {
        read: ReadId,
        purpose: ReadFor,
        volume: usize,
        blocks: BlockRange,
        early: Vec<u64>,
    },
    GatesClosed,
    Flushed(Vec<Flush>),
    Recorded(u64),
    /// It is durable whether the standby was promoted.
    Replaced(bool),
    MaySend,
    Fetched,
    /// The images of a group that may be served are not locked any more.
    Unlocked,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum ReadFor {
    Copy,
    Send(StreamId),
}

/// Ways in which an owner's process begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Knows {
    /// Its journal, and what was written since.
    History,
    /// A journal of a backup.
    Nothing,
}

#[derive(Debug, Default)]
pub(super) struct OwnerHost {
    pub(super) machine: Option<Replication>,
    pub(super) process: u64,
    pub(super) volumes: Vec<Disk>,
    pub(super) record: Option<OwnerRecord>,
    pending: VecDeque<(u64, OwnerRecord)>,
    pub(super) backups: Vec<OwnerRecord>,
    pub(super) knows: Option<Knows>,
    /// Blocks of each volume that were written, by epoch; durable.
    chronicle: BTreeMap<u64, Vec<BTreeSet<u64>>>,
    open: u64,
    pub(super) is_serving: bool,
    /// Asks before the process serves.
    asking: Option<Asking>,
    /// What [`OwnerHost::asking`] has made durable: whether the standby was promoted.
    is_replaced: bool,
    /// Whether anything permits the process to serve.
    may_serve: bool,
    /// Until when the newest permission counts.
    may_serve_until: Duration,
    /// Whether it has heard of a promotion, and that is durable.
    has_heard: bool,
    /// When its last process has ended, unless the host has lost its power since.
    pub(super) ended_at: Option<Duration>,
    /// When the process began.
    began_at: Duration,
    are_gates_closed: bool,
    opened_at: Duration,
    pub(super) asked: BTreeMap<u64, Asked>,
    pub(super) in_flight: BTreeMap<u64, InFlight>,
    /// Payloads that are kept: by epoch, volume and block.
    kept: BTreeMap<(u64, usize, u64), u64>,
    /// What the last ended write or read holds.
    at_hand: Vec<u64>,
    pub(super) stream: Option<StreamId>,
    pub(super) state: Option<State>,
    may_send_is_due: bool,
    /// Blocks that are fetched after a handover.
    absent: BTreeMap<(usize, u64), u64>,
    /// What the stream has carried of the epoch that was begun, and that epoch.
    pub(super) carried: BTreeSet<(usize, u64)>,
    begun: u64,
    /// What a former owner's images lack, until an epoch has carried it.
    theirs: Vec<LayeredBitmap>,
    /// The number of blocks that were sent.
    pub(super) sent_blocks: u64,
    /// Blocks that were sent before the cut of their epoch and then written again.
    pub(super) rewritten: u64,
    last_zeroes: Option<(usize, u64)>,
    /// The newest epoch that the standby has confirmed to it.
    pub(super) confirmed: Option<(u128, u64)>,
    /// Messages, records and writes since the world has begun to be idle.
    pub(super) noise: Noise,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Noise {
    pub(super) messages: u64,
    pub(super) records: u64,
}

impl OwnerHost {
    pub(super) fn due(&self) -> Option<Duration> {
        let asking = self.asking.as_ref().and_then(Asking::poll_timeout);
        self.machine.as_ref().map(|machine| machine.poll_timeout().0).into_iter().chain(asking).min()
    }

    /// Returns whether its process runs.
    pub(super) fn is_up(&self) -> bool {
        self.machine.is_some() || self.asking.is_some()
    }

    /// Returns whether it may be served as far as its administrator can see.
    pub(super) fn permission(&self) -> Option<Permission> {
        self.asking.as_ref().map(Asking::permission)
    }

    pub(super) fn grow(&mut self, volume: usize, size: u64) {
        self.volumes[volume].resize(size);
    }

    /// Returns how many blocks both owners may have written, before anything is sent.
    pub(super) fn lacks_at_first(&self) -> u64 {
        let is_known = self.knows == Some(Knows::History);
        let all = || self.volumes.iter().map(Disk::len).sum();
        let union = || {
            let mut missing = self.missing();
            missing.iter_mut().zip(&self.theirs).for_each(|(ours, theirs)| ours.union_with(theirs));
            missing.iter().map(LayeredBitmap::count).sum()
        };
        if is_known { union() } else { all() }
    }

    /// Returns whether it still lacks blocks of its own.
    pub(super) fn is_incomplete(&self) -> bool {
        !self.absent.is_empty()
    }

    fn note_written(&mut self, volume: usize, blocks: BlockRange) {
        let volumes = self.volumes.len();
        let epoch = self.chronicle.entry(self.open).or_insert_with(|| vec![BTreeSet::new(); volumes]);
        epoch[volume].extend(blocks.iter().map(|block| block.0));
    }

    pub(super) fn missing(&self) -> Vec<LayeredBitmap> {
        let new = |volume: &Disk| LayeredBitmap::new(BlockCount(volume.len()));
        let mut missing: Vec<_> = self.volumes.iter().map(new).collect();
        for written in self.chronicle.values() {
            for (missing, written) in missing.iter_mut().zip(written) {
                for block in written {
                    missing.insert(BlockRange::new(*block, block + 1));
                }
            }
        }
        missing
    }

    fn forget_history(&mut self) {
        let all = self.volumes.iter().map(|volume| (0..volume.len()).collect()).collect();
        self.chronicle = BTreeMap::from([(0, all)]);
    }

    /// Returns what guests see: also what is still elsewhere.
    pub(super) fn logical(&self, volume: usize) -> Vec<u64> {
        let mut content = self.volumes[volume].content();
        for ((at, block), value) in &self.absent {
            if *at == volume {
                content[*block as usize] = *value;
            }
        }
        content
    }

    /// Takes a process away. What was in flight may have reached the store.
    fn stop(&mut self, landed: impl FnMut() -> bool) {
        let mut landed = landed;
        for (_, write) in std::mem::take(&mut self.in_flight) {
            for block in write.asked.blocks.iter().filter(|block| !write.landed.contains(&block.0)) {
                if landed() {
                    self.volumes[write.asked.volume].write(block.0, write.asked.value);
                    self.absent.remove(&(write.asked.volume, block.0));
                }
            }
        }
        for (_, record) in std::mem::take(&mut self.pending) {
            if !landed() {
                break;
            }
            self.record = Some(record);
        }
        self.machine = None;
        self.asking = None;
        self.is_serving = false;
        self.asked.clear();
        self.kept.clear();
        self.stream = None;
        self.state = None;
        self.are_gates_closed = false;
        self.may_send_is_due = false;
    }
}

impl World {
    pub(super) fn owner_later(&mut self, host: usize, most: Duration, task: OwnerTask) {
        let process = self.owners[host].process;
        self.in_about(most, Task::Owner { host, process, task });
    }

    fn owner_after_disk(&mut self, host: usize, task: OwnerTask) {
        let (delay, process) = (self.disk_time(), self.owners[host].process);
        self.after(delay, Task::Owner { host, process, task });
    }

    pub(super) fn begin_stream(&mut self, host: usize) {
        self.asking_event(host, asking::Event::Connected);
        if self.owners[host].machine.is_none() {
            return;
        }
        let stream = StreamId(self.number());
        self.owners[host].stream = Some(stream);
        self.owners[host].carried.clear();
        self.owner_event(host, Event::StreamBegins(stream));
    }

    pub(super) fn owner_receives(&mut self, host: usize, stream: StreamId, message: ToOwner) {
        match &message {
            ToOwner::Answer(Answer::Promoted) => {
                self.asking_event(host, asking::Event::Said(Word::Promoted));
            }
            ToOwner::Acknowledged { epoch } => {
                let life = self.owners[host].machine.as_ref().map(|machine| machine.record().life.0);
                self.owners[host].confirmed = life.map(|life| (life, epoch.0));
            }
            ToOwner::Refused { .. } => self.owners[host].carried.clear(),
            _ => {}
        }
        self.owner_event(host, Event::Received(stream, message));
    }

    pub(super) fn owner_event(&mut self, host: usize, event: Event) {
        let now = self.now;
        if let Some(machine) = &mut self.owners[host].machine {
            machine.handle_event(now, event);
        }
        self.drain_owner(host);
        self.check_age(host);
    }

    /// A standby that has heard nothing for a while is no younger.
    fn check_age(&mut self, host: usize) {
        let as_of = self.owners[host].machine.as_ref().and_then(Replication::as_of);
        if as_of.is_some_and(|as_of| as_of > self.standby.heard_at + AGE_SLACK) {
            self.violate("a standby counts as current that has heard nothing");
        }
    }

    pub(super) fn owner_timeout(&mut self, host: usize) {
        let now = self.now;
        if let Some(machine) = &mut self.owners[host].machine
            && machine.poll_timeout().0 <= now
        {
            machine.handle_timeout(now);
        }
        self.drain_owner(host);
        self.asking_timeout(host);
    }

    pub(super) fn owner_task(&mut self, host: usize, task: OwnerTask) {
        match task {
            OwnerTask::Landed(id) => self.land(host, id),
            OwnerTask::ReadDone { read, purpose, volume, blocks, early } => {
                if self.random.percent(1) && !self.is_calm {
                    self.meet(Fault::ReadFailed);
                    return self.owner_event(host, Event::ReadEnded { read, outcome: Outcome::Failed });
                }
                // Some of it was read early.
                let late: Vec<_> =
                    blocks.iter().map(|block| self.owners[host].volumes[volume].read(block.0)).collect();
                let payload: Vec<_> = early
                    .into_iter()
                    .zip(late)
                    .map(|(early, late)| if self.random.percent(50) { early } else { late })
                    .collect();
                match purpose {
                    ReadFor::Copy => self.owners[host].at_hand = payload,
                    ReadFor::Send(stream) => {
                        self.transmit(host, stream, volume, blocks, Content::Payload, payload);
                    }
                }
                self.owner_event(host, Event::ReadEnded { read, outcome: Outcome::Done });
            }
            OwnerTask::GatesClosed => self.cut(host),
            OwnerTask::Unlocked => self.unlocked(host),
            OwnerTask::Flushed(flushes) => {
                if !self.is_calm && self.random.percent(6) {
                    self.fail_owners_flush(host);
                    return self.owner_event(host, Event::FlushFailed);
                }
                let owner = &mut self.owners[host];
                owner.volumes.iter_mut().zip(&flushes).for_each(|(volume, flush)| volume.end_flush(flush));
                self.owner_event(host, Event::StoresFlushed);
            }
            OwnerTask::Recorded(number) => {
                let owner = &mut self.owners[host];
                while owner.pending.front().is_some_and(|(pending, _)| *pending <= number) {
                    let Some((_, record)) = owner.pending.pop_front() else { break };
                    owner.knows = Some(Knows::History);
                    owner.record = Some(record.clone());
                    owner.backups.push(record);
                }
                self.owner_event(host, Event::Durable(number));
            }
            OwnerTask::Replaced(is_replaced) => {
                self.owners[host].is_replaced = is_replaced;
                self.owners[host].has_heard = is_replaced;
            }
            OwnerTask::MaySend => {
                self.owners[host].may_send_is_due = false;
                let most = self.shape.rate;
                let blocks = 1 + self.random.below(most);
                self.owner_event(host, Event::MaySend(blocks));
            }
            OwnerTask::Fetched => {
                for ((volume, block), value) in std::mem::take(&mut self.owners[host].absent) {
                    self.owners[host].volumes[volume].write(block, value);
                }
                self.owners[host].volumes.iter_mut().for_each(Disk::sync);
                self.owner_event(host, Event::Completed);
            }
        }
    }

    pub(super) fn fail_owners_flush(&mut self, host: usize) {
        self.meet(Fault::OwnerFlushFailed);
        // What it may have lost is sent once more.
        if self.owners[host].begun == self.owners[host].open {
            self.owners[host].carried.clear();
        }
        let mut random = self.random.fork();
        self.owners[host].volumes.iter_mut().for_each(|volume| volume.fail_flush(&mut random));
    }

    /// All gates are closed: the epoch ends with what the volumes hold.
    fn cut(&mut self, host: usize) {
        let owner = &self.owners[host];
        let mut volumes: Vec<Vec<_>> = (0..owner.volumes.len())
            .map(|volume| owner.logical(volume).into_iter().map(|value| (value, value)).collect())
            .collect();
        for write in owner.in_flight.values() {
            for (block, before) in write.asked.blocks.iter().zip(&write.before) {
                let (visible, value) = (volumes[write.asked.volume][block.0 as usize].0, write.asked.value);
                // A flush that has failed since may have brought something older back.
                let before = if visible == value { *before } else { visible };
                volumes[write.asked.volume][block.0 as usize] = (before, value);
            }
        }
        let cut = Cut { at: self.now, volumes };
        let life = owner.machine.as_ref().map_or(0, |machine| machine.record().life.0);
        self.shown.cuts += 1;
        self.truth.add(life, owner.open, cut);
        self.owner_event(host, Event::GatesClosed);
    }

    fn pass(&mut self, host: usize, id: u64) {
        let is_wanted = self.owners[host].is_serving && !self.owners[host].are_gates_closed;
        let Some(asked) = self.owners[host].asked.remove(&id) else { return };
        if !is_wanted {
            self.violate("a write has passed a closed gate");
        }
        let overlaps = |write: &InFlight| {
            write.asked.volume == asked.volume && write.asked.blocks.overlaps(&asked.blocks)
        };
        if self.owners[host].in_flight.values().any(overlaps) {
            self.violate("two writes to one block are in flight");
        }
        // Gates are closed for a moment.
        let barrier = Duration::from_millis(5);
        let limit = (asked.free_since.max(asked.at) + WAIT_MAX + barrier).max(self.owners[host].opened_at);
        if self.now > limit {
            self.violate(format!("a write has waited since {:?}", asked.free_since));
        }
        let fails = !self.is_calm && self.random.percent(2);
        if fails {
            self.meet(Fault::WriteFailed);
        }
        let owner = &mut self.owners[host];
        owner.note_written(asked.volume, asked.blocks);
        let (open, volume) = (owner.open, asked.volume);
        let content = owner.logical(volume);
        let before = asked.blocks.iter().map(|block| content[block.0 as usize]).collect();
        let mut landed = BTreeSet::new();
        for block in asked.blocks.iter() {
            owner.kept.remove(&(open, volume, block.0));
            // What was sent before the cut is sent once more.
            owner.rewritten += u64::from(owner.begun == open && owner.carried.remove(&(volume, block.0)));
            if self.random.percent(30) {
                owner.absent.remove(&(volume, block.0));
                owner.volumes[volume].write(block.0, asked.value);
                landed.insert(block.0);
            }
        }
        let outcome = if fails { Outcome::Failed } else { Outcome::Done };
        owner.in_flight.insert(id, InFlight { asked, before, landed, outcome });
        self.owner_after_disk(host, OwnerTask::Landed(id));
    }

    fn land(&mut self, host: usize, id: u64) {
        let Some(write) = self.owners[host].in_flight.remove(&id) else { return };
        let (volume, value) = (write.asked.volume, write.asked.value);
        for block in write.asked.blocks.iter().filter(|block| !write.landed.contains(&block.0)) {
            if write.outcome == Outcome::Done || self.random.percent(50) {
                self.owners[host].absent.remove(&(volume, block.0));
                self.owners[host].volumes[volume].write(block.0, value);
            }
        }
        let now = self.now;
        let owner = &mut self.owners[host];
        owner.note_written(volume, write.asked.blocks);
        for (other, asked) in &mut owner.asked {
            if *other > id && asked.volume == volume && asked.blocks.overlaps(&write.asked.blocks) {
                asked.free_since = now;
            }
        }
        owner.at_hand = vec![value; write.asked.blocks.len() as usize];
        let (write, outcome) = (standby::owner::WriteId(id), write.outcome);
        self.owner_event(host, Event::WriteEnded { write, outcome });
    }

    fn drain_owner(&mut self, host: usize) {
        while let Some(action) = self.owners[host].machine.as_mut().and_then(Replication::poll_action) {
            self.owner_action(host, action);
        }
        let wants = self.owners[host].machine.as_ref().is_some_and(Replication::wants_to_send);
        if wants && !std::mem::replace(&mut self.owners[host].may_send_is_due, wants) {
            self.owner_later(host, Duration::from_millis(20), OwnerTask::MaySend);
        }
    }

    fn owner_action(&mut self, host: usize, action: Action) {
        if !matches!(action, Action::Pass(_) | Action::Send(..)) {
            self.tell(|_| format!("owner {host}: {action:?}"));
        }
        match action {
            Action::Pass(write) => self.pass(host, write.0),
            Action::CloseGates => {
                self.owners[host].are_gates_closed = true;
                self.owner_later(host, Duration::from_millis(4), OwnerTask::GatesClosed);
            }
            Action::OpenGates { ended } => {
                let now = self.now;
                let owner = &mut self.owners[host];
                owner.are_gates_closed = false;
                owner.opened_at = now;
                owner.open = ended.0 + 1;
            }
            Action::Keep { epoch, volume, blocks, .. } => {
                let owner = &mut self.owners[host];
                for (block, value) in blocks.iter().zip(owner.at_hand.clone()) {
                    owner.kept.insert((epoch.0, volume.index(), block.0), value);
                }
            }
            Action::CopyBefore { read, volume, blocks, .. } => {
                self.read(host, read, ReadFor::Copy, volume.index(), blocks);
            }
            Action::Merge { from, into } => {
                let kept = &mut self.owners[host].kept;
                let of_from = (from.0, 0, 0)..(from.0 + 1, 0, 0);
                let moved: Vec<_> = kept.range(of_from).map(|(key, value)| (*key, *value)).collect();
                kept.retain(|key, _| key.0 != from.0);
                for ((_, volume, block), value) in moved {
                    kept.entry((into.0, volume, block)).or_insert(value);
                }
            }
            Action::Release(epoch) => self.owners[host].kept.retain(|key, _| key.0 != epoch.0),
            Action::Send(stream, message) => {
                if let ToStandby::Begin { epoch, .. } = message {
                    self.owners[host].begun = epoch.0;
                    self.owners[host].carried.clear();
                    self.owners[host].last_zeroes = None;
                }
                self.owners[host].noise.messages += 1;
                if self.owners[host].stream == Some(stream) && self.links[host].is_up {
                    self.send_to_standby(host, stream, message, Vec::new());
                }
            }
            Action::SendExtent { stream, read, epoch, volume, blocks, place } => {
                let volume = volume.index();
                self.expect_new(host, stream, volume, blocks);
                match place {
                    Place::Disk => self.read(host, read, ReadFor::Send(stream), volume, blocks),
                    Place::Zeroes => self.transmit(host, stream, volume, blocks, Content::Zeroes, Vec::new()),
                    Place::Ring | Place::Spool => {
                        let kept = &self.owners[host].kept;
                        let payload =
                            blocks.iter().map(|block| kept.get(&(epoch.0, volume, block.0)).copied());
                        match payload.collect::<Option<Vec<_>>>() {
                            Some(payload) => {
                                self.transmit(host, stream, volume, blocks, Content::Payload, payload);
                            }
                            None => self.violate("what is to be sent was not kept"),
                        }
                    }
                }
            }
            Action::FlushStores => {
                let flushes = self.owners[host].volumes.iter().map(Disk::begin_flush).collect();
                self.owner_after_disk(host, OwnerTask::Flushed(flushes));
            }
            Action::MakeDurable(number, record) => {
                self.owners[host].noise.records += 1;
                self.owners[host].pending.push_back((number, record));
                self.owner_after_disk(host, OwnerTask::Recorded(number));
            }
            Action::Forget { through } => self.owners[host].chronicle.retain(|epoch, _| *epoch > through.0),
            Action::Tell(state) => self.owners[host].state = Some(state),
        }
    }

    fn read(&mut self, host: usize, read: ReadId, purpose: ReadFor, volume: usize, blocks: BlockRange) {
        let early = blocks.iter().map(|block| self.owners[host].volumes[volume].read(block.0)).collect();
        self.owner_after_disk(host, OwnerTask::ReadDone { read, purpose, volume, blocks, early });
    }

    /// No block is sent twice in an epoch, unless it is written between.
    fn expect_new(&mut self, host: usize, stream: StreamId, volume: usize, blocks: BlockRange) {
        let owner = &mut self.owners[host];
        if owner.stream == Some(stream)
            && self.links[host].is_up
            && !blocks.iter().all(|block| owner.carried.insert((volume, block.0)))
        {
            self.violate("a block was sent twice in an epoch");
        }
    }

    /// Sends an extent. No range of zeroes is sent in parts.
    fn transmit(
        &mut self,
        host: usize,
        stream: StreamId,
        volume: usize,
        blocks: BlockRange,
        content: Content,
        payload: Vec<u64>,
    ) {
        let owner = &mut self.owners[host];
        if owner.stream != Some(stream) || !self.links[host].is_up {
            return;
        }
        owner.noise.messages += 1;
        owner.sent_blocks += blocks.len();
        let before = owner.last_zeroes.take();
        if content == Content::Zeroes {
            owner.last_zeroes = Some((volume, blocks.end.0));
        }
        let is_part = content == Content::Zeroes && before == Some((volume, blocks.start.0));
        if is_part {
            self.violate("a range of zeroes was sent in parts");
        }
        let volume = standby::VolumeIndex(volume as u16);
        self.send_to_standby(host, stream, ToStandby::Extent { volume, blocks, content }, payload);
    }
}
