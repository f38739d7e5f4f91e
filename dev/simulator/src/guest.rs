//! A random guest: overlapping writes, reads, flushes and discards, with many requests in flight, across restarts of the daemon.
//!
//! It outlives the daemon: it keeps its requests, and repeats unanswered ones once it is served again, as QEMU does with
//! `reconnect-delay`. A power cut ends it; then it starts again.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::{BlockDevice, BufferPool, ByteRange, Durability, Handle, IoError, ZeroMode};

use lane::Presence;
use rustix::io::Errno;

use crate::checker::content::{self, Began, Content, Leaves, Outcome};
use crate::checker::patience::is_owners_fault;
use crate::disk::SECTOR_BYTES;
use crate::random::Random;
use crate::world::World;

/// The distance of request numbers between two guests of one volume: more than one ever makes.
const BETWEEN_GUESTS: u32 = 1 << 24;

#[derive(Clone, Debug)]
pub(crate) struct GuestSettings {
    pub(crate) size_bytes: u64,
    pub(crate) depth: u32,
    pub(crate) operations: u32,
    pub(crate) pause: Duration,
    /// The alignment of offsets and lengths.
    pub(crate) grain_bytes: u64,
    pub(crate) hot_percent: u64,
    pub(crate) hot_offset: u64,
    /// The number of requests after which other, perhaps long cold blocks are hot; `None`: never.
    pub(crate) hot_for: Option<u32>,
    pub(crate) change_percent: u64,
    /// Whether it accepts late answers of a disk as errors: its hypervisor asks again.
    pub(crate) is_stopped_by_errors: bool,
}

const HOT_BYTES: u64 = 64 << 10;

pub(crate) struct Guest {
    me: Weak<Self>,
    world: Rc<World>,
    number: usize,
    settings: GuestSettings,
    random: RefCell<Random>,
    content: RefCell<Content>,
    requests: RefCell<BTreeMap<u32, Request>>,
    next_request: Cell<u32>,
    answered: Cell<u32>,
    was_late: Cell<bool>,
    connection: RefCell<Option<Connection>>,
    idle_slots: Cell<u32>,
    mood: Cell<Mood>,
    told_of_loss_at: Cell<Option<Duration>>,
    buffers: BufferPool,
}

#[derive(Clone)]
pub(crate) struct Connection {
    pub(crate) device: Rc<dyn BlockDevice>,
    pub(crate) handle: Handle,
    pub(crate) caller: Rc<Caller>,
}

#[derive(Default)]
pub(crate) struct Caller {
    has_left: Cell<bool>,
}

impl Caller {
    pub(crate) fn hang_up(&self) {
        self.has_left.set(true);
    }

    pub(crate) fn is_connected(&self) -> bool {
        !self.has_left.get()
    }
}

impl Presence for Caller {
    fn is_there(&self) -> bool {
        !self.has_left.get()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Busy,
    Quiet,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    what: What,
    began: Option<Began>,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Read(ByteRange),
    Write(ByteRange, Durability),
    Discard(ByteRange),
    Zero(ByteRange, ZeroMode, Durability),
    Flush,
}

impl Guest {
    pub(crate) fn new(
        world: &Rc<World>,
        number: usize,
        settings: GuestSettings,
        random: Random,
        initial: &[u64],
        buffers: BufferPool,
    ) -> Rc<Self> {
        // It ignores everything behind its part of the disk.
        let own = initial.len().min((settings.size_bytes / SECTOR_BYTES) as usize);
        let initial = &initial[..own];
        Rc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            world: Rc::clone(world),
            number,
            idle_slots: Cell::new(settings.depth),
            settings,
            random: RefCell::new(random),
            content: RefCell::new(Content::new(initial)),
            requests: RefCell::default(),
            next_request: Cell::new(1),
            answered: Cell::default(),
            was_late: Cell::default(),
            connection: RefCell::default(),
            mood: Cell::new(Mood::Busy),
            told_of_loss_at: Cell::default(),
            buffers,
        })
    }

    pub(crate) fn connect(&self, connection: Connection) {
        *self.connection.borrow_mut() = Some(connection);
        let unanswered: Vec<_> = self.requests.borrow().keys().copied().collect();
        unanswered.into_iter().for_each(|id| self.submit(id));
        for _ in 0..self.idle_slots.replace(0) {
            self.pause();
        }
    }

    pub(crate) fn disconnect(&self) {
        if let Some(connection) = self.connection.take() {
            connection.caller.hang_up();
        }
    }

    /// Cuts its power: unanswered requests are not repeated.
    pub(crate) fn power_cut(&self) {
        self.disconnect();
        let lost = std::mem::take(&mut *self.requests.borrow_mut());
        self.content.borrow_mut().forget_reads();
        self.idle_slots.set(self.idle_slots.get() + lost.len() as u32);
    }

    pub(crate) fn check(&self, found: &[u64]) {
        let checked = self.content.borrow().check(found);
        self.judge(checked.map_err(|wrong| format!("after a restart volume {}: {wrong}", self.number)));
    }

    pub(crate) fn check_after_power_cut(&self, found: &[u64]) {
        let checked = self.content.borrow_mut().check_after_power_cut(found);
        self.judge(checked.map_err(|wrong| format!("after a power cut volume {}: {wrong}", self.number)));
    }

    /// Writes durably to a sector of its unused disk as another program; returns the sector and its content.
    pub(crate) fn finds_written(&self, random: &mut Random) -> (usize, u64) {
        // An image may be a little larger than the disk that the guest sees.
        let sector = random.below(self.settings.size_bytes / SECTOR_BYTES) as usize;
        let request = self.next_request.get();
        self.next_request.set(request + 1);
        let mut content = self.content.borrow_mut();
        content.change_begins(request, sector, 1, Leaves::Stamp);
        content.change_ends(request, sector, 1, Outcome::DoneDurably);
        (sector, content::token(request, sector))
    }

    pub(crate) fn begin_anew(&self, random: Random, initial: &[u64]) -> Rc<Self> {
        let settings = GuestSettings { operations: self.settings.operations / 2, ..self.settings.clone() };
        let guest = Self::new(&self.world, self.number, settings, random, initial, self.buffers.clone());
        // The number distinguishes its writes from this guest's.
        guest.next_request.set(self.next_request.get() + BETWEEN_GUESTS);
        guest
    }

    pub(crate) fn told_of_loss_at(&self) -> Option<Duration> {
        self.told_of_loss_at.get()
    }

    pub(crate) fn be_busy(&self) {
        self.mood.set(Mood::Busy);
    }

    pub(crate) fn be_quiet(&self) {
        self.mood.set(Mood::Quiet);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.requests.borrow().is_empty()
    }

    pub(crate) fn answered(&self) -> u32 {
        self.answered.get()
    }

    pub(crate) fn has_done_its_work(&self) -> bool {
        self.answered.get() >= self.settings.operations
    }

    pub(crate) fn waits_for(&self) -> String {
        format!("volume {}: {:?}", self.number, self.requests.borrow().values().collect::<Vec<_>>())
    }

    pub(crate) fn was_late(&self) -> bool {
        self.was_late.get()
    }

    fn may_be_late(&self, error: &IoError) -> bool {
        let is_late = error.errno() == Errno::TIMEDOUT;
        self.was_late.set(self.was_late.get() || is_late);
        is_late && self.settings.is_stopped_by_errors
    }

    fn judge(&self, result: Result<(), String>) {
        if let Err(detail) = result {
            self.world.violated("content", || detail);
        }
    }
}

impl Guest {
    fn pause(&self) {
        let mut pause = self.random.borrow_mut().duration(Duration::from_micros(1), self.settings.pause);
        if self.has_done_its_work() {
            // It continues during a migration, ever more slowly, so that the simulation does not get longer.
            let beyond = self.answered.get() - self.settings.operations;
            pause *= 200 * (1 + beyond / 20);
        }
        let me = Weak::clone(&self.me);
        self.world.clock.after(pause, move || {
            if let Some(guest) = me.upgrade() {
                guest.ask();
            }
        });
    }

    fn ask(&self) {
        if self.mood.get() == Mood::Quiet || self.connection.borrow().is_none() {
            self.idle_slots.set(self.idle_slots.get() + 1);
            return;
        }
        let what = self.draw();
        let id = self.next_request.get();
        self.next_request.set(id + 1);
        let mut content = self.content.borrow_mut();
        let began = match what {
            What::Read(_) => Some(content.read_begins()),
            What::Flush => Some(content.flush_begins()),
            What::Write(range, _) => {
                let (first, count) = sectors(range);
                content.change_begins(id, first, count, Leaves::Stamp);
                None
            }
            What::Discard(range) | What::Zero(range, ..) => {
                let (first, count) = sectors(range);
                content.change_begins(id, first, count, Leaves::Zeroes);
                None
            }
        };
        drop(content);
        self.requests.borrow_mut().insert(id, Request { what, began });
        self.submit(id);
    }

    fn draw(&self) -> What {
        let settings = &self.settings;
        let mut random = self.random.borrow_mut();
        let range = self.draw_range(&mut random);
        let durability = |random: &mut Random| {
            if random.percent(10) { Durability::Durable } else { Durability::Volatile }
        };
        if !random.percent(settings.change_percent) {
            return if random.percent(12) { What::Flush } else { What::Read(range) };
        }
        match random.below(100) {
            0..80 => What::Write(range, durability(&mut random)),
            80..90 => What::Discard(range),
            _ => {
                let mode = if random.percent(50) { ZeroMode::MayUnmap } else { ZeroMode::KeepAllocated };
                What::Zero(range, mode, durability(&mut random))
            }
        }
    }

    fn draw_range(&self, random: &mut Random) -> ByteRange {
        let GuestSettings { size_bytes, grain_bytes, hot_percent, hot_offset, hot_for, .. } = self.settings;
        let grains = size_bytes / grain_bytes;
        let (first, within) = if random.percent(hot_percent) {
            let moves = hot_for.map_or(0, |requests| u64::from(self.answered.get() / requests));
            let hot = (hot_offset + moves * HOT_BYTES) % size_bytes;
            (hot / grain_bytes, HOT_BYTES / grain_bytes)
        } else {
            (0, grains)
        };
        let first = (first + random.below(within)).min(grains - 1);
        let longest = if random.percent(10) { (128 << 10) / grain_bytes } else { (16 << 10) / grain_bytes };
        let count = (1 + random.below(longest)).min(grains - first);
        ByteRange::new(first * grain_bytes, count * grain_bytes)
    }

    fn submit(&self, id: u32) {
        let Some(Connection { device, handle, caller }) = self.connection.borrow().clone() else { return };
        let Some(what) = self.requests.borrow().get(&id).map(|request| request.what) else { return };
        let (me, buffers) = (Weak::clone(&self.me), self.buffers.clone());
        handle.spawn(async move {
            let result = carry_out(&device, &buffers, id, what).await;
            if let Some(guest) = me.upgrade().filter(|_| caller.is_there()) {
                guest.answer(id, &result);
            }
        });
    }

    fn answer(&self, id: u32, result: &Result<Vec<u64>, IoError>) {
        let Some(Request { what, began, .. }) = self.requests.borrow_mut().remove(&id) else { return };
        self.world.note("answer", u64::from(id), u64::from(result.is_ok()));
        self.world
            .say(|| format!("guest {} is answered {what:?}: {:?}", self.number, result.as_ref().map(|_| ())));
        self.answered.set(self.answered.get() + 1);
        if let Err(error) = result
            && !is_owners_fault(error)
            && !self.may_be_late(error)
        {
            self.world.violated("patience", || format!("a guest's {what:?} failed: {error}"));
        }
        let mut content = self.content.borrow_mut();
        let checked = match (what, began, result) {
            (What::Read(range), Some(began), Ok(tokens)) => {
                content.read_ends(began, sectors(range).0, tokens.iter().copied())
            }
            (What::Read(_), Some(began), Err(_)) => content.read_ends(began, 0, std::iter::empty()),
            (What::Flush, Some(began), Ok(_)) => {
                content.flush_succeeds(began);
                Ok(())
            }
            (What::Flush, _, Err(_)) => {
                content.flush_fails();
                self.told_of_loss_at.set(Some(self.world.now()));
                Ok(())
            }
            (What::Write(range, durability) | What::Zero(range, _, durability), _, result) => {
                let (first, count) = sectors(range);
                content.change_ends(id, first, count, outcome(durability, result));
                Ok(())
            }
            (What::Discard(range), _, result) => {
                let (first, count) = sectors(range);
                content.change_ends(id, first, count, outcome(Durability::Volatile, result));
                Ok(())
            }
            _ => Ok(()),
        };
        drop(content);
        self.judge(checked.map_err(|wrong| format!("volume {}: {what:?} read wrong: {wrong}", self.number)));
        self.pause();
    }
}

fn outcome(durability: Durability, result: &Result<Vec<u64>, IoError>) -> Outcome {
    match (result, durability) {
        (Err(_), _) => Outcome::Failed,
        (Ok(_), Durability::Durable) => Outcome::DoneDurably,
        (Ok(_), Durability::Volatile) => Outcome::Done,
    }
}

async fn carry_out(
    device: &Rc<dyn BlockDevice>,
    buffers: &BufferPool,
    id: u32,
    what: What,
) -> Result<Vec<u64>, IoError> {
    match what {
        What::Read(range) => {
            let buffer = device.read(range.offset, buffers.take(range.length as usize)).await?;
            let sectors = buffer.as_slice().chunks(SECTOR_BYTES as usize);
            return Ok(sectors
                .map(|sector| sector.first_chunk().map_or(0, |token| u64::from_le_bytes(*token)))
                .collect());
        }
        What::Write(range, durability) => {
            let mut buffer = buffers.take(range.length as usize);
            let first = sectors(range).0;
            if let Some(bytes) = buffer.as_mut_slice() {
                bytes.fill(0);
                for (sector, bytes) in (first..).zip(bytes.chunks_mut(SECTOR_BYTES as usize)) {
                    bytes[..8].copy_from_slice(&content::token(id, sector).to_le_bytes());
                }
            }
            device.write(range.offset, buffer, durability).await?;
        }
        What::Discard(range) => device.discard(range).await?,
        What::Zero(range, mode, durability) => device.write_zeroes(range, mode, durability).await?,
        What::Flush => device.flush().await?,
    }
    Ok(Vec::new())
}

fn sectors(range: ByteRange) -> (usize, usize) {
    ((range.offset / SECTOR_BYTES) as usize, (range.length / SECTOR_BYTES) as usize)
}
