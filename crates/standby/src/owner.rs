//! The owner's side of one standby: it cuts, keeps, sends, and forgets what the standby has.
//!
//! ```text
//!   serving ──Answer: Promoted──► diverged: it serves, and sends nothing
//!
//!   open epoch, sent early if only the disk has much of it
//!    └──cut──► frozen ──Begin, Ready, Extent…, Seal──► sealed ──Acknowledged──► own stores flushed ──► forgotten
//!                 └── mixed: merged, with all later ones, into the open epoch
//! ```
//! A write passes this machine before it is submitted (law 1), so that nothing which an epoch has to carry is overwritten before it
//! is kept. No write waits longer than [`Settings::wait_max`] for that (law 7).

mod agreement;
mod catching_up;
mod epochs;
mod flushes;
mod sending;
mod status;
mod writes;

use std::time::Duration;

use chronicle::{BlockCount, BlockRange, Epoch, Generation, LayeredBitmap};

pub use status::{BehindBecause, State};

use crate::content::Place;
use crate::identity::{LifeId, StandbyId, VolumeIndex};
use crate::outbox::Outbox;
use crate::planted::{Bug, broken};
use crate::record::OwnerRecord;
use crate::wire::{StreamId, ToOwner, ToStandby};
use catching_up::CatchUp;
use epochs::Epochs;
use flushes::Flushes;
use sending::Stream;
use status::Ages;
use writes::Writes;

/// Numbers a write of a guest, for its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WriteId(pub u64);

/// Numbers a read of a volume that this machine has ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReadId(pub u64);

/// What a guest does to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteKind {
    /// It writes.
    Write,
    /// It discards, or writes zeroes.
    Zero,
}

/// How an operation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it was to.
    Done,
    /// With an error. A write may have changed any part of its range.
    Failed,
}

/// What an order or a caller fixes for one replication.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The time between two cuts.
    pub every: Duration,
    /// When the first cut is due ([`crate::spread::first_cut`]).
    pub first_cut: Duration,
    /// The greatest age of the standby's state before it is behind.
    pub rpo: Duration,
    /// The longest time that a write waits for a copy of what it overwrites (`mirror_wait_max`).
    pub wait_max: Duration,
    /// The number of blocks that the ring keeps.
    pub ring_blocks: u64,
    /// The number of blocks that the spool file keeps.
    pub spool_blocks: u64,
    /// The number of blocks of one message.
    pub extent_blocks: u64,
    /// The number of blocks that only the disk may have when an epoch is cut. If it has more, they are sent before the cut.
    pub catch_up_blocks: u64,
}

/// What is known of the writes since the acknowledged epoch.
#[derive(Clone, Debug)]
pub enum History {
    /// These blocks of each volume may have been written since. The sets have the volumes' sizes.
    Since(Vec<LayeredBitmap>),
    /// Nothing is known, or the journal was restored. This life is drawn anew; sizes of the volumes.
    Forgotten(LifeId, Vec<BlockCount>),
}

/// Whether all blocks of a group are at its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completeness {
    /// They are.
    Complete,
    /// Some are fetched after a handover by post-copy. Nothing is cut before they are here (case 19).
    Incomplete,
}

/// What a new owner is told of a replication.
#[derive(Clone, Debug)]
pub struct HandedOn {
    /// The record for the new owner, of the next generation.
    pub record: OwnerRecord,
    /// What the standby may lack, of each volume.
    pub missing: Vec<LayeredBitmap>,
}

/// What happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// A guest asks for a write. It must not be submitted before [`Action::Pass`].
    WriteAsked {
        /// Its number.
        write: WriteId,
        /// The volume.
        volume: VolumeIndex,
        /// Whole blocks of the volume.
        blocks: BlockRange,
        /// What it does.
        kind: WriteKind,
    },
    /// A write that has passed has ended at the store. The payload is at hand until the actions are polled.
    WriteEnded {
        /// Its number.
        write: WriteId,
        /// Its result.
        outcome: Outcome,
    },
    /// A read of [`Action::CopyBefore`] or of [`Action::SendExtent`] has ended.
    ReadEnded {
        /// Its number.
        read: ReadId,
        /// Its result.
        outcome: Outcome,
    },
    /// A volume has grown to a size. No write to the new part was asked for before.
    Grown {
        /// The volume.
        volume: VolumeIndex,
        /// The size in blocks.
        size: BlockCount,
    },
    /// All gates of the group are closed ([`Action::CloseGates`]).
    GatesClosed,
    /// All stores of the group are flushed ([`Action::FlushStores`]).
    StoresFlushed,
    /// [`Action::FlushStores`] has failed: earlier writes may be lost (law 6).
    FlushFailed,
    /// Another flush of a store has failed, for example a guest's: earlier writes may be lost (law 6).
    GuestFlushFailed,
    /// The standby has other content in these blocks, and nobody knows why: they are sent again.
    Doubted {
        /// The volume that has them.
        volume: VolumeIndex,
        /// The blocks that differ.
        blocks: BlockRange,
    },
    /// A stream begins. Both sides have a process that lives.
    StreamBegins(StreamId),
    /// A message of the standby's host.
    Received(StreamId, ToOwner),
    /// The pacer and the link allow this many more blocks. It replaces what is left of an earlier permission.
    MaySend(u64),
    /// The record of this number is durable.
    Durable(u64),
    /// An administrator pauses the replication.
    Paused,
    /// An administrator resumes it.
    Resumed,
    /// Blocks are still fetched after a handover, at a restart. Nothing is cut before [`Event::Completed`].
    Incomplete,
    /// All blocks are at the owner.
    Completed,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Submit a write.
    Pass(WriteId),
    /// Let no write of any volume pass, and report [`Event::GatesClosed`]. Writes in flight go on.
    CloseGates,
    /// Open the gates. The epoch has ended for all volumes.
    OpenGates {
        /// The epoch that has ended.
        ended: Epoch,
    },
    /// Keep the payload of a write that has just ended, under its epoch. It replaces what is kept there.
    ///
    /// The caller drops what is kept of a block under the open epoch when it submits another write to it.
    Keep {
        /// The epoch.
        epoch: Epoch,
        /// The volume.
        volume: VolumeIndex,
        /// The blocks of the payload.
        blocks: BlockRange,
        /// The ring, or the spool.
        place: Place,
    },
    /// Read blocks, keep them in the spool under an epoch, and report [`Event::ReadEnded`]. A write waits for it.
    CopyBefore {
        /// The number of the read.
        read: ReadId,
        /// The epoch.
        epoch: Epoch,
        /// The volume.
        volume: VolumeIndex,
        /// The blocks.
        blocks: BlockRange,
    },
    /// Move what is kept under an epoch to a later one, except for blocks that are kept there already.
    Merge {
        /// The epoch that is no recovery point.
        from: Epoch,
        /// The epoch that takes it over.
        into: Epoch,
    },
    /// Drop what is kept under this epoch.
    Release(Epoch),
    /// Send a message that has no payload.
    Send(StreamId, ToStandby),
    /// Send an extent. If its place is the disk, read it and then report [`Event::ReadEnded`].
    SendExtent {
        /// The stream.
        stream: StreamId,
        /// The number of the read.
        read: ReadId,
        /// The epoch under which the payload is kept.
        epoch: Epoch,
        /// The volume.
        volume: VolumeIndex,
        /// The blocks.
        blocks: BlockRange,
        /// Where the payload is.
        place: Place,
    },
    /// Flush all stores of the group, and report the result.
    FlushStores,
    /// Make a record durable, and report [`Event::Durable`].
    MakeDurable(u64, OwnerRecord),
    /// The chronicle may forget what was written up to this epoch: the standby and the own stores have it.
    Forget {
        /// The epoch.
        through: Epoch,
    },
    /// The state has changed: tell the administrator.
    Tell(State),
}

/// Who owns the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// This host alone.
    Serving,
    /// This host, and the one where the standby was promoted.
    Diverged,
}

/// Why nothing is cut. One reason does not end the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pauses {
    /// An administrator has ordered it. Nothing is sent either.
    is_ordered: bool,
    /// Blocks are still fetched after a handover.
    is_filling: bool,
}

/// When the epoch is cut.
#[derive(Debug)]
struct Cuts {
    next: Duration,
    /// Whether the gates are being closed.
    is_at_barrier: bool,
}

/// Which numbers of epochs may leave the host: those that a durable record reserves (law 8).
#[derive(Debug)]
struct Numbers {
    durable: Epoch,
    /// Records that are not durable yet, with the highest number that each reserves.
    written: Vec<(u64, Epoch)>,
}

/// A replication of a group of volumes, which are served here, to one standby. Whether they may be served is decided before
/// ([`crate::asking`]).
#[derive(Debug)]
pub struct Replication {
    settings: Settings,
    record: OwnerRecord,
    phase: Phase,
    pauses: Pauses,
    /// The first epoch whose end lets the chronicle forget: it, and no earlier one, carries what was missing when this process began,
    /// and what the last failed flush may have lost.
    carried_by: Epoch,
    cuts: Cuts,
    /// Whether the next cut waits until what only the disk has was sent.
    catch_up: Option<CatchUp>,
    epochs: Epochs,
    writes: Writes,
    flushes: Flushes,
    stream: Option<Stream>,
    ages: Ages,
    numbers: Numbers,
    outbox: Outbox<Action>,
}

/// The number of epochs that one record reserves: at an interval of a second a record a minute.
const NUMBERS: u64 = 64;
/// The greatest number of frozen epochs. More are not cut: the open one grows instead.
const FROZEN_MAX: usize = 8;

impl Replication {
    /// Orders a standby of a group that is served here. The standby lacks everything.
    pub fn begin(settings: Settings, standby: StandbyId, life: LifeId, sizes: Vec<BlockCount>) -> Self {
        let generation = Generation(1);
        let record =
            OwnerRecord { standby, generation, life, acknowledged: None, numbered_through: Epoch(0) };
        Self::restart(settings, record, History::Forgotten(life, sizes))
    }

    /// Continues from a record. **N.B.** `history` must be [`History::Forgotten`] if the journal was restored from a backup, or if
    /// an image was changed by others: then numbers begin again, in another life (cases 5 and 22).
    pub fn restart(settings: Settings, mut record: OwnerRecord, history: History) -> Self {
        let (sizes, missing) = match history {
            History::Since(missing) => {
                (missing.iter().map(LayeredBitmap::blocks).collect::<Vec<_>>(), Some(missing))
            }
            History::Forgotten(life, sizes) => {
                if !broken(Bug::LifeNotCompared) {
                    record.life = life;
                }
                record.acknowledged = None;
                record.numbered_through = Epoch(0);
                (sizes, None)
            }
        };
        let first = record.numbered_through.next();
        let mut epochs = Epochs::new(first, &sizes, settings.ring_blocks, settings.spool_blocks);
        match &missing {
            Some(missing) => epochs.lacks(missing),
            None if broken(Bug::LifeNotCompared) => {}
            None => epochs.lacks_all(),
        }
        // A process before may have left writes in the store's cache. Those that the standby has confirmed were flushed.
        let unflushed =
            missing.unwrap_or_else(|| sizes.iter().map(|size| LayeredBitmap::full(*size)).collect());
        let mut replication = Self {
            cuts: Cuts { next: settings.first_cut, is_at_barrier: false },
            phase: Phase::Serving,
            pauses: Pauses::default(),
            carried_by: first,
            catch_up: None,
            epochs,
            writes: Writes::default(),
            flushes: Flushes { unflushed, under_way: None, next: None },
            stream: None,
            ages: Ages::default(),
            numbers: Numbers { durable: record.numbered_through, written: Vec::new() },
            outbox: Outbox::new(),
            settings,
            record,
        };
        replication.reserve_numbers();
        replication
    }

    /// Continues at a new owner, which was told what the standby lacks (case 18).
    pub fn take_over(settings: Settings, handed: HandedOn, completeness: Completeness) -> Self {
        let HandedOn { record, mut missing } = handed;
        if broken(Bug::HandedOnAsComplete) {
            missing.iter_mut().for_each(LayeredBitmap::clear);
        }
        let mut new = Self::restart(settings, record, History::Since(missing));
        if completeness == Completeness::Incomplete && !broken(Bug::IncompleteCut) {
            new.pauses.is_filling = true;
        }
        new
    }

    /// Returns what the next owner must be told durably. The group's writes have ended, and its stores are flushed.
    pub fn hand_on(&self) -> HandedOn {
        let mut record = self.record.clone();
        record.generation = record.generation.next();
        record.acknowledged = self.ages.acknowledged.or(record.acknowledged);
        HandedOn { record, missing: self.epochs.missing() }
    }

    /// Returns the blocks that may differ from the standby's promoted image because they were written here (case 3). Those that
    /// were written there since the promotion differ as well.
    pub fn written_since_confirmed(&self) -> Vec<LayeredBitmap> {
        self.epochs.missing()
    }

    /// Returns the blocks of each volume that its chronicle must not forget: the standby has not confirmed them, or the volume's own
    /// store may lose them in a power cut.
    pub fn unforgotten(&self) -> Vec<LayeredBitmap> {
        let mut unforgotten = self.epochs.missing();
        let covered = self.flushes.under_way.iter().flat_map(|(_, covered)| covered.iter().enumerate());
        for (volume, blocks) in self.flushes.unflushed.iter().enumerate().chain(covered) {
            unforgotten[volume].union_with(blocks);
        }
        unforgotten
    }

    /// Returns whether the standby has no cut that is known here: everything is sent.
    pub fn lacks_everything(&self) -> bool {
        self.ages.acknowledged.is_none()
    }

    /// Returns the epoch that is open.
    pub fn open_epoch(&self) -> Epoch {
        self.epochs.open_number()
    }

    /// Returns the record as it was given out last.
    pub fn record(&self) -> &OwnerRecord {
        &self.record
    }

    /// Returns the next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.outbox.pop()
    }

    /// Returns when [`Replication::handle_timeout`] is due, and the reason.
    pub fn poll_timeout(&self) -> (Duration, &'static str) {
        let cut = (self.cuts.next, "the next cut");
        // Behind closed gates no write passes, however long it has waited.
        let wait = self.writes.deadline(self.settings.wait_max).filter(|_| !self.cuts.is_at_barrier);
        wait.map(|at| (at, "a write waits for a copy of what it overwrites")).into_iter().fold(cut, Ord::min)
    }

    /// Handles an event.
    pub fn handle_event(&mut self, now: Duration, event: Event) {
        match event {
            Event::WriteAsked { write, volume, blocks, kind } => {
                self.writes.ask(write, volume, blocks, kind);
            }
            Event::WriteEnded { write, outcome } => self.end_write(write, outcome),
            Event::ReadEnded { read, outcome } => self.end_read(read, outcome),
            Event::Grown { volume, size } => {
                self.epochs.grow(volume, size);
                self.flushes.unflushed[volume.index()].grow(size);
            }
            Event::GatesClosed => self.cut(now),
            Event::StoresFlushed => self.end_flush(),
            Event::FlushFailed => {
                self.fail_flush();
                self.end_flush();
            }
            Event::GuestFlushFailed => self.fail_flush(),
            Event::Doubted { volume, blocks } => self.epochs.change_open(volume, blocks),
            Event::StreamBegins(stream) => self.offer(stream),
            Event::Received(stream, message) => self.receive(now, stream, &message),
            Event::MaySend(blocks) => {
                self.stream.iter_mut().for_each(|stream| stream.may_send = blocks);
            }
            Event::Durable(sequence) => {
                self.outbox.durable(sequence);
                let is_durable = |(number, _): &mut (u64, Epoch)| *number <= sequence;
                let durable =
                    self.numbers.written.extract_if(.., is_durable).map(|(_, through)| through).max();
                self.numbers.durable = self.numbers.durable.max(durable.unwrap_or_default());
            }
            Event::Paused => self.pauses.is_ordered = true,
            Event::Resumed => self.pauses.is_ordered = false,
            Event::Incomplete => self.pauses.is_filling = !broken(Bug::IncompleteCut),
            Event::Completed => self.pauses.is_filling = false,
        }
        self.go_on(now);
    }

    /// Handles a deadline of [`Replication::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Duration) {
        if now >= self.cuts.next {
            // Intervals that were missed are not made up for.
            let late = now - self.cuts.next;
            let every = self.settings.every.max(Duration::from_millis(1));
            let missed = u32::try_from(late.as_millis() / every.as_millis()).unwrap_or(u32::MAX);
            self.cuts.next += every.saturating_mul(missed.saturating_add(1));
            self.end_interval(now);
        }
        self.go_on(now);
    }

    fn go_on(&mut self, now: Duration) {
        self.pass_writes(now);
        self.send(now);
        self.end_catching_up();
        if let Some(state) = self.ages.changed(self.state(now)) {
            self.outbox.push(Action::Tell(state));
        }
    }

    /// Cuts if there is something to cut; otherwise tells the standby that it is current.
    fn end_interval(&mut self, now: Duration) {
        let is_idle = self.epochs.open_is_empty();
        self.stream.iter_mut().for_each(Stream::try_again);
        if let Some(id) = self.stream.as_ref().filter(|stream| stream.is_unsure()).map(|stream| stream.id) {
            self.send_offer(id);
        }
        if self.pauses != Pauses::default() || self.phase != Phase::Serving || self.cuts.is_at_barrier {
            return;
        }
        if is_idle && !broken(Bug::IdleEpochSent) {
            if self.epochs.frozen_len() == 0
                && let Some(stream) = self.stream.as_mut().filter(|stream| stream.is_agreed())
                && stream.tell_current(now)
            {
                if broken(Bug::CurrentUnheard) {
                    self.ages.as_of = Some(now);
                }
                self.outbox.push(Action::Send(stream.id, ToStandby::StillCurrent));
            }
        } else if !self.has_to_catch_up() {
            self.close_gates();
        }
    }

    /// Begins to cut, if it is possible; returns whether it is.
    fn close_gates(&mut self) -> bool {
        let may_cut = self.pauses == Pauses::default() && self.phase == Phase::Serving;
        if !may_cut || self.cuts.is_at_barrier || self.epochs.frozen_len() >= FROZEN_MAX {
            return false;
        }
        self.cuts.is_at_barrier = true;
        self.outbox.push(Action::CloseGates);
        true
    }

    /// Ends the open epoch of all volumes. No write is between the gates and the stores' queues.
    fn cut(&mut self, now: Duration) {
        if !std::mem::take(&mut self.cuts.is_at_barrier) {
            return;
        }
        let ended = self.epochs.freeze(now);
        self.outbox.push(Action::OpenGates { ended });
        if ended.next() >= self.record.numbered_through {
            self.reserve_numbers();
        }
    }

    fn reserve_numbers(&mut self) {
        self.record.numbered_through = Epoch(self.record.numbered_through.0 + NUMBERS);
        self.make_durable();
    }

    fn make_durable(&mut self) {
        let number = self.outbox.next_record();
        self.numbers.written.push((number, self.record.numbered_through));
        self.outbox.push(Action::MakeDurable(number, self.record.clone()));
    }
}
