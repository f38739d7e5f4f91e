//! The standby's host: it carries the machine's actions out over spools, images and points, with caches.

mod images;
mod lives;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use chronicle::{BlockCount, BlockRange};
use standby::receiver::{Action, Event, Grown, PromoteOrder, Refusal, Settings};
use standby::record::{ImageState, KeptBy, Sealed, StandbyRecord, Standing};
use standby::reprotection::BASE;
use standby::retention::Keep;
use standby::whereabouts::Whereabouts;
use standby::wire::{Answer, Content, StreamId, ToOwner, ToStandby};
use standby::{Standby, VolumeIndex, Watermark};

use super::disk::{Disk, Flush};
use super::met::{Fault, Phase};
use super::owner::STANDBY;
use super::world::{Shape, Task, World};
use crate::random::Random;

#[derive(Debug)]
pub(super) enum StandbyTask {
    SpoolFlushed { volume: VolumeIndex, watermark: Watermark },
    PointKept(Watermark),
    Opened(Vec<BlockCount>),
    Applied(Sealed),
    ImageFlushed(Vec<Flush>),
    Restored(Watermark),
    Recorded(u64),
}

/// What is under way at the image, for the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Doing {
    #[default]
    Nothing,
    Keeping,
    Applying,
    Flushing,
    Restoring,
}

#[derive(Clone, Debug)]
struct Entry {
    blocks: BlockRange,
    payload: Vec<u64>,
    is_durable: bool,
}

/// The spool files of an epoch, of each volume.
type Spools = Vec<Vec<Entry>>;

#[derive(Clone, Debug)]
struct Backup {
    record: StandbyRecord,
    /// The version of each image.
    versions: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct StandbyHost {
    pub(super) machine: Option<Standby>,
    pub(super) process: u64,
    /// Which hosts may have the group, as this host knows it.
    pub(super) whereabouts: Whereabouts<usize>,
    pub(super) settings: Settings,
    pub(super) images: Vec<Disk>,
    record: Option<StandbyRecord>,
    pending: VecDeque<(u64, StandbyRecord)>,
    backups: Vec<Backup>,
    /// Whether the record is one of a backup, and the standby has no rights.
    pub(super) is_restored: bool,
    /// Whether an administrator has said that it is a standby all the same.
    is_agreed: bool,
    unnamed: Spools,
    named: BTreeMap<Watermark, Spools>,
    pub(super) points: BTreeMap<Watermark, Vec<Vec<u64>>>,
    /// Points that are none any more: an older one was begun to be put back from what was overwritten since.
    passed: BTreeSet<Watermark>,
    doing: Doing,
    /// Whether its last process ended while it put a point back.
    was_restoring: bool,
    spool_flushes: usize,
    /// The number of writes of others to the images, of those that were reported, and of those that a durable record knows.
    strangers: u64,
    reported: u64,
    known: u64,
    received: Option<Vec<u64>>,
    pub(super) can_grow: bool,
    pub(super) tested: Option<Watermark>,
    /// When each cut was current last.
    current_at: BTreeMap<Watermark, Duration>,
    /// When it last took a message, or answered one.
    pub(super) heard_at: Duration,
    life: u128,
    /// The owner whose message is being handled, and the newest one that was answered.
    sender: Option<usize>,
    fence: usize,
    /// What was received since an owner's host was lost.
    has_received: bool,
    /// The cut that is owned here.
    pub(super) owned: Option<Watermark>,
    /// What was promoted, for comparisons with the former owner.
    pub(super) promoted: Option<(Watermark, Vec<Vec<u64>>)>,
    pub(super) is_over: bool,
    refused: Option<Refusal>,
    pub(super) order: Option<(PromoteOrder, Duration)>,
    pub(super) writes: u64,
}

impl StandbyHost {
    pub(super) fn new(random: &mut Random, shape: &Shape) -> Self {
        let all: u64 = shape.sizes.iter().sum();
        let settings = Settings {
            spool_blocks: random.pick(&[all / 3, all, all * 2, 100_000]),
            points_blocks: random.pick(&[Some(all / 2), Some(all), None, Some(all * 10)]),
            kept_by: random.pick(&[KeptBy::Reflink, KeptBy::Reflink, KeptBy::Undo]),
            keep: random.pick(&[
                Keep::NONE,
                Keep { last: 1, hourly: 0, daily: 0 },
                Keep { last: 3, hourly: 1, daily: 1 },
            ]),
        };
        let images: Vec<_> = shape.sizes.iter().map(|_| Disk::new(0)).collect();
        Self {
            machine: None,
            process: 0,
            whereabouts: Whereabouts::at(0),
            settings,
            strangers: 0,
            reported: 0,
            known: 0,
            unnamed: vec![Vec::new(); images.len()],
            images,
            record: None,
            pending: VecDeque::new(),
            backups: Vec::new(),
            is_restored: false,
            is_agreed: false,
            named: BTreeMap::new(),
            points: BTreeMap::new(),
            passed: BTreeSet::new(),
            doing: Doing::Nothing,
            was_restoring: false,
            spool_flushes: 0,
            received: None,
            can_grow: true,
            tested: None,
            current_at: BTreeMap::new(),
            heard_at: Duration::ZERO,
            life: 0,
            sender: None,
            fence: 0,
            has_received: false,
            owned: None,
            promoted: None,
            is_over: false,
            refused: None,
            order: None,
            writes: 0,
        }
    }

    /// Gets the images and the record of a former owner.
    pub(super) fn return_images(&mut self, images: Vec<Disk>, record: StandbyRecord) {
        self.images = images;
        self.record = Some(record);
    }

    pub(super) fn due(&self) -> Option<Duration> {
        self.machine.as_ref().and_then(Standby::poll_timeout).map(|(at, _)| at)
    }

    pub(super) fn record(&self) -> Option<&StandbyRecord> {
        self.machine.as_ref().map(Standby::record)
    }

    /// Returns whether a durable record says that it was promoted.
    pub(super) fn is_promoted(&self) -> bool {
        let standing = self.record.as_ref().map(|record| record.standing);
        matches!(standing, Some(Standing::Promoted { .. }))
    }

    pub(super) fn content(&self) -> Vec<Vec<u64>> {
        self.images.iter().map(Disk::content).collect()
    }

    /// Returns what the host does.
    pub(super) fn phase(&self) -> Phase {
        let Some(record) = self.record() else { return Phase::Down };
        match self.doing {
            Doing::Keeping => Phase::Keeping,
            Doing::Applying => Phase::Applying,
            Doing::Flushing => Phase::Flushing,
            Doing::Restoring => Phase::Restoring,
            Doing::Nothing if self.owned.is_some() || self.is_over => Phase::Ended,
            Doing::Nothing if self.spool_flushes > 0 => Phase::Sealing,
            Doing::Nothing if !self.pending.is_empty() => Phase::Recording,
            Doing::Nothing if record.image == ImageState::Torn && record.sealed.is_empty() => Phase::InPlace,
            Doing::Nothing if self.unnamed.iter().any(|spool| !spool.is_empty()) => Phase::Spooling,
            Doing::Nothing => Phase::Waiting,
        }
    }

    /// Others write to the image.
    pub(super) fn touch(&mut self, random: &mut Random, value: u64) {
        let volume = random.index(self.images.len());
        let block = random.below(self.images[volume].len());
        self.images[volume].write(block, value);
        self.images[volume].sync();
        self.strangers += 1;
    }

    fn versions(&self) -> Vec<u64> {
        self.images.iter().map(|image| image.version).collect()
    }

    pub(super) fn is_touched(&self) -> bool {
        self.strangers != self.known
    }

    /// Writes to an image as the daemon.
    fn write(&mut self, volume: usize, block: u64, value: u64) {
        self.images[volume].write(block, value);
        self.writes += 1;
    }

    fn resize(&mut self, sizes: &[u64]) {
        for (volume, size) in sizes.iter().enumerate() {
            if self.images[volume].len() != *size {
                self.images[volume].resize(*size);
            }
        }
    }

    fn can_have(&self, sizes: &[BlockCount]) -> bool {
        self.can_grow || self.images.iter().zip(sizes).all(|(image, size)| image.len() >= size.0)
    }

    fn grow(&mut self, sizes: &[BlockCount]) {
        let grown: Vec<_> =
            self.images.iter().zip(sizes).map(|(image, size)| image.len().max(size.0)).collect();
        self.resize(&grown);
    }
}

impl World {
    pub(super) fn standby_receives(&mut self, stream: StreamId, message: ToStandby, payload: Vec<u64>) {
        if let ToStandby::Offer { life, .. } = &message {
            self.standby.life = life.0;
            self.notice_touch();
        }
        let life = standby::LifeId(self.standby.life);
        let newest = self
            .standby
            .record()
            .and_then(|record| record.sealed.last().map(|sealed| sealed.watermark).or(record.watermark));
        let sealed = |epoch| Watermark { standby: STANDBY, life, epoch };
        let current = match message {
            ToStandby::Seal { epoch, .. } => self.truth.cut(sealed(epoch)).map(|cut| (sealed(epoch), cut.at)),
            ToStandby::StillCurrent => newest.map(|newest| (newest, self.now)),
            _ => None,
        };
        self.standby.current_at.extend(current);
        self.standby.heard_at = self.now;
        self.standby.has_received = true;
        self.standby.received = Some(payload);
        self.standby.sender = self.owners.iter().position(|owner| owner.stream == Some(stream));
        self.standby_event(Event::Received(stream, message));
        self.standby.received = None;
        self.standby.sender = None;
    }

    pub(super) fn standby_loses_owner(&mut self) {
        self.standby.has_received = false;
        self.standby_event(Event::OwnerLost);
    }

    pub(super) fn standby_event(&mut self, event: Event) {
        let now = self.now;
        if let Some(machine) = &mut self.standby.machine {
            machine.handle_event(now, event);
        }
        self.drain_standby();
    }

    pub(super) fn standby_timeout(&mut self) {
        let now = self.now;
        if let Some(machine) = &mut self.standby.machine {
            machine.handle_timeout(now);
        }
        self.drain_standby();
    }

    fn standby_later(&mut self, task: StandbyTask) {
        let (delay, process) = (self.disk_time(), self.standby.process);
        // Faults strike while something is under way.
        // Few seeds restore a point.
        let percent = match task {
            StandbyTask::Restored(_) => 50,
            _ => self.shape.strikes_percent,
        };
        if !self.is_calm && self.random.percent(percent) {
            self.in_about(delay, Task::Strike);
        }
        self.after(delay, Task::Standby { process, task });
    }

    /// Fails a flush: some of it is lost, and the standby begins again from its record.
    fn standby_flush_fails(&mut self) -> bool {
        if self.is_calm || !self.random.percent(3) {
            return false;
        }
        self.meet(Fault::StandbyFlushFailed);
        let mut random = self.random.fork();
        let host = &mut self.standby;
        host.images.iter_mut().for_each(|image| image.fail_flush(&mut random));
        for entries in host.named.values_mut().flatten().chain(&mut host.unnamed) {
            entries.retain(|entry| entry.is_durable || random.percent(50));
        }
        self.stop_standby();
        self.start_standby();
        true
    }

    pub(super) fn standby_task(&mut self, task: StandbyTask) {
        match task {
            StandbyTask::SpoolFlushed { volume, watermark } => {
                let Some(spools) = self.standby.named.get(&watermark) else { return };
                let _ = spools;
                if self.standby_flush_fails() {
                    return;
                }
                self.standby.spool_flushes = self.standby.spool_flushes.saturating_sub(1);
                if let Some(spools) = self.standby.named.get_mut(&watermark) {
                    spools[volume.index()].iter_mut().for_each(|entry| entry.is_durable = true);
                }
                self.standby_event(Event::SpoolFlushed(volume));
            }
            StandbyTask::PointKept(at) => {
                self.standby.doing = Doing::Nothing;
                if self.standby.is_touched() {
                    self.notice_touch();
                } else {
                    let content = self.standby.content();
                    let is_abandoned =
                        self.standby.record().is_none_or(|record| record.watermark != Some(at));
                    if !is_abandoned && let Some(difference) = self.truth.difference(at, &content) {
                        self.violate(format!("a point is not what the group was: {difference}"));
                    }
                    self.shown.points += 1;
                    self.standby.points.insert(at, content);
                }
                self.standby_event(Event::PointKept);
            }
            StandbyTask::Opened(sizes) => {
                let grown = if self.standby.can_have(&sizes) { Grown::Yes } else { Grown::No };
                if grown == Grown::Yes {
                    self.standby.grow(&sizes);
                }
                self.standby_event(Event::Opened(grown));
            }
            StandbyTask::Applied(sealed) => {
                self.standby.doing = Doing::Nothing;
                if !self.standby.can_have(&sealed.sizes) {
                    return self.standby_event(Event::Applied(Grown::No));
                }
                // A host unlinks the spools of an epoch that was given up only when it has ended applying them.
                let is_given_up = self.standby.record().is_none_or(|record| !record.sealed.contains(&sealed));
                if !is_given_up || self.standby.named.contains_key(&sealed.watermark) {
                    self.apply(&sealed, 100);
                }
                self.standby_event(Event::Applied(Grown::Yes));
            }
            StandbyTask::ImageFlushed(flushes) => {
                if self.standby_flush_fails() {
                    return;
                }
                self.standby.doing = Doing::Nothing;
                let images = self.standby.images.iter_mut().zip(&flushes);
                images.for_each(|(image, flush)| image.end_flush(flush));
                self.standby_event(Event::ImageFlushed);
            }
            StandbyTask::Restored(at) => {
                self.standby.doing = Doing::Nothing;
                self.restore_point(at, 100);
                self.standby_event(Event::PointRestored);
            }
            StandbyTask::Recorded(number) => {
                let versions = self.standby.versions();
                let host = &mut self.standby;
                while host.pending.front().is_some_and(|(pending, _)| *pending <= number) {
                    let Some((_, record)) = host.pending.pop_front() else { break };
                    host.record = Some(record.clone());
                    if record.watermark.is_none() {
                        host.is_restored &= !host.is_agreed;
                        host.known = host.reported;
                    }
                    // What others have changed before that was noticed is not as the record says.
                    let is_known = host.strangers == host.known;
                    let versions = if is_known { versions.clone() } else { Vec::new() };
                    host.backups.push(Backup { record, versions });
                }
                self.standby_event(Event::Durable(number));
            }
        }
    }

    /// Nothing may change the image after the standby has ended.
    fn expect_image_is_free(&mut self) {
        if self.standby.owned.is_some() {
            self.violate("the image of a promoted standby was changed");
        }
        if self.is_consumed {
            self.violate("the image of a standby that a migration uses was changed");
        }
    }

    /// Nothing of a former owner may be taken after the next one was answered.
    fn expect_fenced(&mut self) {
        if self.standby.sender.is_some_and(|sender| sender < self.standby.fence) {
            self.violate("what a former owner sends was taken after the next owner was answered");
        }
    }

    fn drain_standby(&mut self) {
        while let Some(action) = self.standby.machine.as_mut().and_then(Standby::poll_action) {
            self.standby_action(action);
        }
    }

    fn standby_action(&mut self, action: Action) {
        if !matches!(action, Action::Send(..) | Action::Spool(..) | Action::WriteInPlace(..)) {
            self.tell(|_| format!("standby: {action:?}"));
        }
        let volumes = self.standby.images.len();
        match action {
            Action::Send(stream, message) => {
                if let ToOwner::Answer(Answer::Receiving { .. }) = message {
                    self.standby.is_restored = false;
                    let link = self.owners.iter().position(|owner| owner.stream == Some(stream));
                    self.standby.fence = self.standby.fence.max(link.unwrap_or(0));
                    if self.standby.owned.is_some() || self.is_consumed {
                        self.violate("a standby that has ended receives");
                    }
                }
                self.send_to_owner(stream, message);
            }
            Action::Spool(volume, blocks, content) => {
                self.expect_fenced();
                let payload = self.payload(blocks, content);
                let entry = Entry { blocks, payload, is_durable: false };
                self.standby.unnamed[volume.index()].push(entry);
            }
            Action::WriteInPlace(volume, blocks, content) => {
                self.expect_fenced();
                self.expect_image_is_free();
                let durable = self.standby.record.as_ref();
                let is_torn = durable.is_some_and(|record| record.image == ImageState::Torn);
                // What a former owner has is no recovery point.
                let is_point = |at: Watermark| at.epoch > BASE;
                let is_last = durable
                    .is_some_and(|record| record.watermark.is_some_and(is_point) && record.points.is_empty());
                if !is_torn {
                    self.violate("an epoch is written over the image before that is recorded");
                }
                if is_last {
                    self.violate("an epoch is written over the last recovery point");
                }
                let payload = self.payload(blocks, content);
                for (block, value) in blocks.iter().zip(payload) {
                    self.standby.write(volume.index(), block.0, value);
                }
            }
            Action::FlushSpool(volume) => {
                self.standby.spool_flushes += 1;
                let sealing = self.standby.named.last_key_value().map(|(at, _)| *at);
                let named = self.standby.named.keys().copied();
                let sealed = self.standby.record().map_or_else(Vec::new, |record| {
                    record.sealed.iter().map(|sealed| sealed.watermark).collect()
                });
                let watermark = named.filter(|at| !sealed.contains(at)).max_by_key(|at| at.epoch).or(sealing);
                if let Some(watermark) = watermark {
                    self.standby_later(StandbyTask::SpoolFlushed { volume, watermark });
                }
            }
            Action::NameSpools(at) => {
                let spools = std::mem::replace(&mut self.standby.unnamed, vec![Vec::new(); volumes]);
                self.standby.named.insert(at, spools);
            }
            Action::DropUnsealed => {
                self.standby.spool_flushes = 0;
                self.standby.unnamed = vec![Vec::new(); volumes];
                if !self.standby.is_restored {
                    // N.B. Any record that is on its way to the disk may be the one that a restart finds.
                    let host = &self.standby;
                    let pending = host.pending.iter().map(|(_, record)| record);
                    let records = host.record().into_iter().chain(&host.record).chain(pending);
                    let sealed: Vec<_> = records
                        .flat_map(|record| record.sealed.iter().map(|sealed| sealed.watermark))
                        .collect();
                    self.standby.named.retain(|at, _| sealed.contains(at));
                }
            }
            Action::KeepPoint(at, _) => {
                self.standby.doing = Doing::Keeping;
                self.standby_later(StandbyTask::PointKept(at));
            }
            Action::DropPoint(at) => self.drop_point(at),
            Action::RestorePoint(at) => {
                self.standby.doing = Doing::Restoring;
                self.restore_point(at, 40);
                self.standby_later(StandbyTask::Restored(at));
            }
            Action::OpenInPlace(sizes) => self.standby_later(StandbyTask::Opened(sizes)),
            Action::Apply(sealed) => {
                self.standby.doing = Doing::Applying;
                if self.standby.can_have(&sealed.sizes) {
                    self.apply(&sealed, 40);
                }
                self.standby_later(StandbyTask::Applied(sealed));
            }
            Action::FlushImage => {
                self.standby.doing = Doing::Flushing;
                let flushes = self.standby.images.iter().map(Disk::begin_flush).collect();
                self.standby_later(StandbyTask::ImageFlushed(flushes));
            }
            Action::UnlinkSpool(at) => {
                let durable = self.standby.record.as_ref();
                if durable.is_some_and(|record| record.sealed.iter().any(|sealed| sealed.watermark == at)) {
                    self.violate("the spool of a sealed epoch was unlinked");
                }
                self.standby.named.remove(&at);
            }
            Action::MakeDurable(number, record) => {
                self.standby.writes += 1;
                self.standby.pending.push_back((number, record));
                self.standby_later(StandbyTask::Recorded(number));
            }
            Action::Own(at) => self.own(at),
            Action::Measure(sealed) => self.standby_event(Event::Measured(sealed.blocks)),
            Action::Consumed(at) => self.consumed(at),
            Action::Refuse(refusal) => self.standby.refused = Some(refusal),
            Action::Clone(at) => {
                self.standby.tested = Some(at);
                if self.standby.passed.contains(&at) {
                    self.violate("a test is made of a point that is none any more");
                }
                match self.standby.points.get(&at) {
                    None => self.violate("a point that is to be tested does not exist"),
                    Some(point) => {
                        if let Some(difference) = self.truth.difference(at, point) {
                            self.violate(format!("a test is not what the group was: {difference}"));
                        }
                    }
                }
            }
            Action::RefuseTest(_) => {}
            Action::EndTest => self.standby.tested = None,
        }
    }

    fn payload(&mut self, blocks: BlockRange, content: Content) -> Vec<u64> {
        match (content, &self.standby.received) {
            (Content::Payload, Some(payload)) => payload.clone(),
            _ => vec![0; blocks.len() as usize],
        }
    }
}
