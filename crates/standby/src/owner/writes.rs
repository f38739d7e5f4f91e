//! Writes of guests on their way through the machine: claims, and copies of what they overwrite.
//!
//! ```text
//!   asked ─► held: gates, an overlapping write, a read of the disk ─► passed, in flight ─► ended: kept under its epoch
//!                    └── wait_max: the epoch that is read becomes a mixture
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use chronicle::{BlockIndex, BlockRange, Epoch};

use super::epochs::Merged;
use super::{Action, Outcome, Phase, ReadId, Replication, WriteId, WriteKind};
use crate::content::Place;
use crate::identity::VolumeIndex;
use crate::planted::{Bug, broken};
use crate::wire::StreamId;

/// A write that waits.
#[derive(Debug)]
struct Held {
    write: WriteId,
    volume: VolumeIndex,
    blocks: BlockRange,
    kind: WriteKind,
    /// Since when it waits for reads; `None`: it waits for none.
    since: Option<Duration>,
}

/// A write that was passed.
#[derive(Debug)]
struct InFlight {
    volume: VolumeIndex,
    blocks: BlockRange,
    kind: WriteKind,
    /// The epoch in which it was recorded, before it was submitted.
    epoch: Epoch,
    /// Whether a flush has failed since: a part of it may be lost although it succeeds.
    may_be_lost: bool,
}

/// A read of a volume.
#[derive(Debug)]
struct Reading {
    volume: VolumeIndex,
    blocks: BlockRange,
    epoch: Epoch,
    purpose: Purpose,
}

/// What a read is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// It is sent.
    Send(StreamId),
    /// It is kept.
    Keep,
    /// It was to be kept under an epoch that has become a mixture.
    Nothing,
}

/// All writes and reads that have not ended.
#[derive(Debug, Default)]
pub(super) struct Writes {
    held: VecDeque<Held>,
    in_flight: BTreeMap<WriteId, InFlight>,
    reading: BTreeMap<ReadId, Reading>,
    last_read: u64,
}

impl Writes {
    pub(super) fn ask(&mut self, write: WriteId, volume: VolumeIndex, blocks: BlockRange, kind: WriteKind) {
        self.held.push_back(Held { write, volume, blocks, kind, since: None });
    }

    pub(super) fn deadline(&self, wait_max: Duration) -> Option<Duration> {
        self.held.iter().filter_map(|held| held.since).min().map(|since| since + wait_max)
    }

    pub(super) fn in_flight(&self) -> impl Iterator<Item = (VolumeIndex, BlockRange)> {
        self.in_flight.values().map(|write| (write.volume, write.blocks))
    }

    /// Notes that a flush has failed.
    pub(super) fn fail_flush(&mut self) {
        self.in_flight.values_mut().for_each(|write| write.may_be_lost = true);
    }

    /// Returns whether a write that an epoch has to carry has not ended.
    pub(super) fn is_awaited(&self, epoch: Epoch) -> bool {
        !broken(Bug::WriteInFlightNotAwaited) && self.in_flight.values().any(|write| write.epoch <= epoch)
    }

    /// Returns whether a stream still reads what it has to send.
    pub(super) fn is_read_for(&self, stream: StreamId) -> bool {
        self.reading.values().any(|read| read.purpose == Purpose::Send(stream))
    }

    /// Returns the first part of a range that no write in flight changes and no read sends, or where the first of these ends.
    pub(super) fn undisturbed(
        &self,
        volume: VolumeIndex,
        blocks: BlockRange,
    ) -> Result<BlockRange, BlockIndex> {
        let is_sent = |read: &&Reading| matches!(read.purpose, Purpose::Send(_));
        let reads = self.reading.values().filter(is_sent).map(|read| (read.volume, read.blocks));
        let reads = reads.filter(|_| !broken(Bug::EarlyReadTwice));
        let writes = self.in_flight().filter(|_| !broken(Bug::EarlyBesideWrite));
        let overlaps =
            |(other, range): &(VolumeIndex, BlockRange)| *other == volume && range.overlaps(&blocks);
        match writes.chain(reads).filter(overlaps).map(|(_, range)| range).min_by_key(|range| range.start) {
            None => Ok(blocks),
            Some(first) if first.start > blocks.start => Ok(BlockRange::new(blocks.start.0, first.start.0)),
            Some(first) => Err(first.end),
        }
    }

    /// Begins a read of what a stream sends.
    pub(super) fn read_to_send(
        &mut self,
        stream: StreamId,
        epoch: Epoch,
        volume: VolumeIndex,
        blocks: BlockRange,
        place: Place,
    ) -> ReadId {
        let purpose = Purpose::Send(stream);
        if place == Place::Disk {
            self.read(Reading { volume, blocks, epoch, purpose })
        } else {
            ReadId(self.last_read)
        }
    }

    fn read(&mut self, reading: Reading) -> ReadId {
        self.last_read += 1;
        self.reading.insert(ReadId(self.last_read), reading);
        ReadId(self.last_read)
    }

    /// Returns whether a write overlaps one in flight, or one that has asked before.
    fn is_claimed(&self, index: usize) -> bool {
        let held = &self.held[index];
        let is_same =
            |volume: VolumeIndex, blocks: &BlockRange| volume == held.volume && blocks.overlaps(&held.blocks);
        let in_flight = self.in_flight.values().any(|write| is_same(write.volume, &write.blocks));
        let before = self.held.iter().take(index).any(|other| is_same(other.volume, &other.blocks));
        (in_flight || before) && !broken(Bug::ClaimsNotTaken)
    }

    /// Returns the epoch of a read that a change of a range would disturb.
    fn read_of(&self, volume: VolumeIndex, blocks: BlockRange) -> impl Iterator<Item = Epoch> {
        let overlaps = move |read: &&Reading| read.volume == volume && read.blocks.overlaps(&blocks);
        let counts = |read: &&Reading| read.purpose != Purpose::Nothing;
        self.reading.values().filter(counts).filter(overlaps).map(|read| read.epoch)
    }

    /// Notes that an epoch is not needed any more: what is read for it is not kept.
    pub(super) fn release(&mut self, epoch: Epoch) {
        let keeps = |read: &&mut Reading| read.epoch == epoch && read.purpose == Purpose::Keep;
        self.reading.values_mut().filter(keeps).for_each(|read| read.purpose = Purpose::Nothing);
    }

    fn merge(&mut self, merged: &Merged) {
        for write in self.in_flight.values_mut().filter(|write| merged.from.contains(&write.epoch)) {
            write.epoch = merged.into;
        }
        for read in self.reading.values_mut().filter(|read| merged.from.contains(&read.epoch)) {
            read.epoch = merged.into;
            if read.purpose == Purpose::Keep {
                read.purpose = Purpose::Nothing;
            }
        }
    }
}

impl Replication {
    /// Passes every write that has nothing to wait for, in the order of asking.
    pub(super) fn pass_writes(&mut self, now: Duration) {
        if self.cuts.is_at_barrier || !matches!(self.phase, Phase::Serving | Phase::Diverged) {
            return;
        }
        let mut index = 0;
        while index < self.writes.held.len() {
            if self.writes.is_claimed(index) || self.waits_for_reads(now, index) {
                index += 1;
                continue;
            }
            let Some(held) = self.writes.held.remove(index) else { break };
            let Held { write, volume, blocks, kind, .. } = held;
            self.overwrite(volume, blocks);
            self.epochs.change_open(volume, blocks);
            self.flushes.unflushed[volume.index()].insert(blocks);
            let epoch = self.epochs.open_number();
            self.writes.in_flight.insert(write, InFlight { volume, blocks, kind, epoch, may_be_lost: false });
            self.outbox.push(Action::Pass(write));
        }
    }

    /// Returns whether a write waits until what it overwrites is read; begins the reads.
    fn waits_for_reads(&mut self, now: Duration, index: usize) -> bool {
        let held = &self.writes.held[index];
        let (volume, blocks) = (held.volume, held.blocks);
        if held.since.is_some_and(|since| now >= since + self.settings.wait_max) {
            return false;
        }
        let mut waits = self.writes.read_of(volume, blocks).any(|epoch| self.epochs.is_frozen(epoch));
        // A read that is under way covers a part only: what is left is read as well.
        let mut rest = blocks;
        while let Some((epoch, run)) = self.epochs.first_exposed(volume, rest) {
            let is_read = self.writes.read_of(volume, run).any(|other| other == epoch);
            if !is_read {
                if self.epochs.take_spool(run.len()).is_none() {
                    break;
                }
                let reading = Reading { volume, blocks: run, epoch, purpose: Purpose::Keep };
                let read = self.writes.read(reading);
                self.outbox.push(Action::CopyBefore { read, epoch, volume, blocks: run });
            }
            waits = true;
            rest = BlockRange::new(run.end.0, blocks.end.0);
        }
        if waits {
            self.writes.held[index].since.get_or_insert(now);
        }
        waits
    }

    /// Prepares for a change of a range on the disk: what frozen epochs have only there is gone.
    pub(super) fn overwrite(&mut self, volume: VolumeIndex, blocks: BlockRange) {
        let exposed = self.epochs.first_exposed(volume, blocks).map(|(epoch, _)| epoch);
        let read = self.writes.read_of(volume, blocks).filter(|epoch| self.epochs.is_frozen(*epoch)).min();
        if let Some(epoch) = exposed.into_iter().chain(read).min()
            && !broken(Bug::MixtureSealed)
        {
            self.mix(epoch);
        }
        self.epochs.overwrite(volume, blocks);
    }

    /// Merges an epoch and all later ones into the open one.
    pub(super) fn mix(&mut self, epoch: Epoch) {
        self.catch_up = None;
        let merged = self.epochs.mix(epoch);
        self.writes.merge(&merged);
        for from in merged.from {
            self.outbox.push(Action::Merge { from, into: merged.into });
        }
    }

    pub(super) fn end_write(&mut self, write: WriteId, outcome: Outcome) {
        let Some(ended) = self.writes.in_flight.remove(&write) else { return };
        let InFlight { volume, blocks, kind, epoch, may_be_lost } = ended;
        match (outcome, kind) {
            // Its blocks stay in the epoch, and are read from the disk.
            (Outcome::Failed, _) => {}
            (Outcome::Done, _) if may_be_lost => {}
            (Outcome::Done, WriteKind::Zero) => self.epochs.zero(epoch, volume, blocks),
            (Outcome::Done, WriteKind::Write) => {
                if let Some(place) = self.epochs.take_room(blocks.len()) {
                    self.epochs.content_mut(epoch, volume).keep(blocks, place);
                    self.outbox.push(Action::Keep { epoch, volume, blocks, place });
                }
            }
        }
    }

    pub(super) fn end_read(&mut self, read: ReadId, outcome: Outcome) {
        let Some(Reading { volume, blocks, epoch, purpose }) = self.writes.reading.remove(&read) else {
            return;
        };
        match (purpose, outcome) {
            (Purpose::Send(_), Outcome::Done) => {}
            (Purpose::Send(stream), Outcome::Failed) => {
                self.epochs.content_mut(epoch, volume).mark_unsent(blocks);
                self.stream.iter_mut().filter(|this| this.id == stream).for_each(super::Stream::hold);
            }
            (Purpose::Keep, Outcome::Done) => {
                self.epochs.content_mut(epoch, volume).keep(blocks, Place::Spool);
                self.outbox.push(Action::Keep { epoch, volume, blocks, place: Place::Spool });
            }
            (Purpose::Keep, Outcome::Failed) => {
                self.epochs.give_spool_back(blocks.len());
                self.mix(epoch);
            }
            (Purpose::Nothing, _) => self.epochs.give_spool_back(blocks.len()),
        }
    }
}
