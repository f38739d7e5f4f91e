//! The chunks that arrive from a source: they give way to the guests of the disk here.
//!
//! A chunk waits until the disk's pacer admits it, in order of arrival. The source sees that as a slow answer, and its limit of
//! chunks in flight does the rest. Guests' writes do not come this way, nor do chunks while guests are held for the handover: the
//! source then orders full speed.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use block::Handle;
use futures_util::future::{Either, select};
use pacer::{Impact, Limit, Mover, MoverClass, Stores, Terms};

use super::head::{GivenWay, HeldBack};
use crate::signal::Signal;

/// The chunks of one arriving volume.
pub struct ArrivingChunks {
    handle: Handle,
    mover: RefCell<Mover>,
    /// Those that wait, in order of arrival.
    turns: RefCell<VecDeque<u64>>,
    next_turn: Cell<u64>,
    changed: Signal,
    /// The bytes of chunks that have arrived and are not stored.
    bytes: Cell<u64>,
    limit: Cell<Limit>,
}

impl ArrivingChunks {
    /// Makes the chunks of a volume that arrives on these disks. They do not give way until the source orders it.
    pub fn new(handle: Handle, disks: Stores) -> Rc<Self> {
        let mover = RefCell::new(Mover::new(handle.now(), disks, None));
        Rc::new(Self {
            handle,
            mover,
            turns: RefCell::default(),
            next_turn: Cell::default(),
            changed: Signal::default(),
            bytes: Cell::default(),
            limit: Cell::default(),
        })
    }

    /// Changes what guests of the disk may lose; `None`: chunks do not give way.
    pub(super) fn set_impact(&self, impact: Option<Impact>) {
        let terms = impact.map(|impact| Terms { class: MoverClass::Migration, impact });
        if self.mover.borrow().terms() != terms {
            self.mover.borrow_mut().set_terms(self.handle.now(), terms);
            self.limit.take();
            self.changed.notify();
        }
    }

    /// Returns what giving way does at present.
    pub(super) fn given_way(&self) -> GivenWay {
        let held_back = match self.limit.get() {
            _ if self.turns.borrow().is_empty() => HeldBack::No,
            Limit::Disk => HeldBack::No,
            Limit::Guests => HeldBack::ByGuests,
            Limit::Measuring => HeldBack::Measuring,
        };
        let status = self.mover.borrow().status(self.handle.now());
        GivenWay {
            bytes_arrived: self.bytes.get(),
            held_back,
            is_paced: status.is_some(),
            bytes_per_second: status.map_or(0, |status| status.bytes_per_second as u64),
            loss_permille: status.map_or(0, |status| (status.loss * 1000.0) as u16),
            has_guests: status.is_some_and(|status| status.has_guests),
        }
    }

    pub(super) fn is_paced(&self) -> bool {
        self.mover.borrow().terms().is_some()
    }

    /// Counts a chunk of this many bytes until the result is dropped.
    pub(super) fn arrived(self: &Rc<Self>, bytes: u64) -> Arrived {
        self.bytes.set(self.bytes.get() + bytes);
        Arrived { chunks: Rc::clone(self), bytes }
    }

    /// Returns the most bytes that are written at once.
    pub(super) fn piece_bytes_max(&self) -> Option<u64> {
        self.mover.borrow().chunk_bytes_max(self.handle.now())
    }

    /// Waits until the disk's pacer admits a write of this many bytes. It is counted as in flight until the result is dropped.
    ///
    /// A dropped future gives up its turn.
    pub(super) async fn admit(self: &Rc<Self>, bytes: u64) -> Admitted {
        let turn = Turn::take(self);
        while self.mover.borrow().terms().is_some() {
            if !turn.is_next() {
                self.changed.wait_for(|| (turn.is_next() || !self.is_paced()).then_some(())).await;
                continue;
            }
            let now = self.handle.now();
            let start = self.mover.borrow_mut().next_start(now, bytes);
            self.limit.set(self.mover.borrow().limit());
            if start <= now {
                break;
            }
            let at_full_speed = Box::pin(self.changed.wait_for(|| (!self.is_paced()).then_some(())));
            match select(Box::pin(self.handle.sleep_until(start)), at_full_speed).await {
                Either::Left(_) | Either::Right(_) => {}
            }
        }
        self.mover.borrow_mut().began(self.handle.now(), bytes);
        Admitted { chunks: Rc::clone(self), bytes }
    }
}

/// A chunk that has arrived and is not stored yet.
pub(super) struct Arrived {
    chunks: Rc<ArrivingChunks>,
    bytes: u64,
}

impl Drop for Arrived {
    fn drop(&mut self) {
        self.chunks.bytes.set(self.chunks.bytes.get() - self.bytes);
    }
}

/// A write that the pacer has admitted.
pub(super) struct Admitted {
    chunks: Rc<ArrivingChunks>,
    bytes: u64,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.chunks.mover.borrow_mut().ended(self.chunks.handle.now(), self.bytes);
    }
}

/// A place among the chunks that wait; dropping it lets the next one ask.
struct Turn<'a> {
    chunks: &'a ArrivingChunks,
    number: u64,
}

impl<'a> Turn<'a> {
    fn take(chunks: &'a ArrivingChunks) -> Self {
        let number = chunks.next_turn.get();
        chunks.next_turn.set(number + 1);
        chunks.turns.borrow_mut().push_back(number);
        Self { chunks, number }
    }

    fn is_next(&self) -> bool {
        self.chunks.turns.borrow().front() == Some(&self.number)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.chunks.turns.borrow_mut().retain(|number| *number != self.number);
        self.chunks.changed.notify();
    }
}
