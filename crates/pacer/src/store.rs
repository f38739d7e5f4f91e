//! The pacer of one disk, shared by all threads that copy from or to it, or serve guests of it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::gauge::Reading;
use crate::mover::{Limit, Terms};
use crate::pacer::{Guests, Mode, Pacer, Sample, Status};

const UNWATCHED: u64 = 0;
const BUSY: u64 = 1;

/// One disk, with its pacer.
#[derive(Default)]
pub struct Store {
    /// The pacer's mode for the gauges, without the lock: 0, 1, or the nanosecond since which the disk is calm.
    mode: AtomicU64,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    pacer: Pacer,
    readings: Vec<Arc<Reading>>,
    movers: u64,
}

impl Store {
    /// Makes the pacer of one disk.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Returns what the pacer does; `None` while nothing is copied.
    pub fn status(&self, now: Duration) -> Option<Status> {
        if self.mode() == Mode::Unwatched {
            return None;
        }
        let inner = self.lock();
        Some(inner.pacer.status(now, inner.guests()))
    }

    pub(crate) fn mode(&self) -> Mode {
        match self.mode.load(Ordering::Acquire) {
            UNWATCHED => Mode::Unwatched,
            BUSY => Mode::Busy,
            since => Mode::Calm(Duration::from_nanos(since)),
        }
    }

    pub(crate) fn add_reading(&self, reading: &Arc<Reading>) {
        self.lock().readings.push(Arc::clone(reading));
    }

    pub(crate) fn remove_reading(&self, reading: &Arc<Reading>) {
        self.lock().readings.retain(|known| !Arc::ptr_eq(known, reading));
    }

    pub(crate) fn take(&self, samples: &[Sample]) {
        self.lock().pacer.take(samples);
    }

    pub(crate) fn add_mover(&self, now: Duration, terms: Terms) -> u64 {
        self.with(|inner| {
            inner.movers += 1;
            let id = inner.movers;
            inner.pacer.add(now, id, terms);
            id
        })
    }

    pub(crate) fn remove_mover(&self, id: u64) {
        self.with(|inner| inner.pacer.remove(id));
    }

    pub(crate) fn set_terms(&self, id: u64, terms: Terms) {
        self.with(|inner| inner.pacer.set_terms(id, terms));
    }

    pub(crate) fn ask(&self, now: Duration, id: u64, bytes: u64) -> (Duration, Limit) {
        self.with(|inner| {
            let guests = inner.guests();
            inner.pacer.ask(now, guests, id, bytes)
        })
    }

    pub(crate) fn began(&self, now: Duration, id: u64, bytes: u64) {
        self.with(|inner| {
            let guests = inner.guests();
            inner.pacer.began(now, guests, id, bytes);
        });
    }

    pub(crate) fn ended(&self, now: Duration, id: u64, bytes: u64) {
        self.with(|inner| {
            let guests = inner.guests();
            inner.pacer.ended(now, guests, id, bytes);
        });
    }

    pub(crate) fn abandoned(&self, id: u64, bytes: u64) {
        self.with(|inner| inner.pacer.abandoned(id, bytes));
    }

    pub(crate) fn chunk_bytes_max(&self, now: Duration) -> Option<u64> {
        let mut inner = self.lock();
        let guests = inner.guests();
        inner.pacer.chunk_bytes_max(now, guests)
    }

    /// Changes the pacer, and tells the gauges.
    fn with<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = self.lock();
        let result = change(&mut inner);
        let mode = match inner.pacer.mode() {
            Mode::Unwatched => UNWATCHED,
            Mode::Busy => BUSY,
            Mode::Calm(since) => nanos(since),
        };
        self.mode.store(mode, Ordering::Release);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn guests(&self) -> Guests {
        let mut guests = Guests::default();
        for reading in &self.readings {
            let one = reading.look();
            guests.in_flight += one.in_flight;
            guests.oldest = guests.oldest.into_iter().chain(one.oldest).min();
            guests.seen = guests.seen.into_iter().chain(one.seen).max();
        }
        guests
    }
}

/// Returns the nanoseconds of a time, kept apart from the small numbers that stand for something else.
pub(crate) fn nanos(time: Duration) -> u64 {
    (time.as_nanos() as u64).max(BUSY + 1)
}

impl fmt::Debug for Store {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Store").field("mode", &self.mode()).finish_non_exhaustive()
    }
}

/// The disks that a copy reads or writes; none: it is not paced.
#[derive(Clone, Debug, Default)]
pub struct Stores(Vec<Arc<Store>>);

impl Stores {
    /// Adds a disk, unless it is there.
    #[must_use]
    pub fn and(mut self, store: Arc<Store>) -> Self {
        if !self.0.iter().any(|known| Arc::ptr_eq(known, &store)) {
            self.0.push(store);
        }
        self
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Store>> {
        self.0.iter()
    }
}

impl PartialEq for Stores {
    fn eq(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(a, b)| Arc::ptr_eq(a, b))
    }
}

impl Eq for Stores {}
