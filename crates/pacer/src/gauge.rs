//! The requests of one volume's guests, as its disks' pacers see them.
//!
//! It belongs to one thread. While nothing is copied from or to the disks, a request costs one load.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::class::RequestClass;
use crate::pacer::{Beside, Guests, Mode, Sample};
use crate::store::{Store, nanos};

/// Samples are given to the pacer when there are this many …
const SAMPLES_HELD: usize = 32;
/// … or when the first of them is this old.
const HELD_FOR: Duration = Duration::from_millis(5);

/// Measures the requests of one volume's guests.
#[derive(Default)]
pub struct Gauge {
    reading: Arc<Reading>,
    inner: RefCell<Inner>,
}

#[derive(Default)]
struct Inner {
    stores: Vec<Joined>,
    /// The arrivals of requests in flight.
    in_flight: Vec<Option<Duration>>,
    free: Vec<usize>,
}

struct Joined {
    store: Arc<Store>,
    held: Vec<Sample>,
    since: Duration,
}

/// A request in flight.
pub struct Ticket<'a> {
    gauge: &'a Gauge,
    /// `None`: it is not measured.
    slot: Option<usize>,
}

impl Gauge {
    /// Measures for this disk from now on, too.
    pub fn join(&self, store: &Arc<Store>) {
        let mut inner = self.inner.borrow_mut();
        if inner.stores.iter().any(|joined| Arc::ptr_eq(&joined.store, store)) {
            return;
        }
        store.add_reading(&self.reading);
        inner.stores.push(Joined { store: Arc::clone(store), held: Vec::new(), since: Duration::ZERO });
    }

    /// No longer measures for this disk.
    pub fn leave(&self, store: &Arc<Store>) {
        store.remove_reading(&self.reading);
        self.inner.borrow_mut().stores.retain(|joined| !Arc::ptr_eq(&joined.store, store));
    }

    /// A request arrives. [`Ticket::ended`] measures it; a dropped ticket does not.
    pub fn arrived(&self, now: Duration) -> Ticket<'_> {
        let mut inner = self.inner.borrow_mut();
        let is_watched = inner.stores.iter().any(|joined| joined.store.mode() != Mode::Unwatched);
        let slot = is_watched.then(|| inner.insert(now));
        drop(inner);
        if slot.is_some() {
            self.reading.arrived(now);
        }
        Ticket { gauge: self, slot }
    }
}

impl Drop for Gauge {
    fn drop(&mut self) {
        for joined in &self.inner.borrow().stores {
            joined.store.remove_reading(&self.reading);
        }
    }
}

impl Ticket<'_> {
    /// The request has ended.
    pub fn ended(mut self, now: Duration, class: RequestClass) {
        let Some(slot) = self.slot.take() else { return };
        let mut inner = self.gauge.inner.borrow_mut();
        let Some(arrived) = inner.remove(slot) else { return };
        self.gauge.reading.ended(now, arrived, &inner);
        let latency = now.saturating_sub(arrived);
        for joined in &mut inner.stores {
            let beside = match joined.store.mode() {
                Mode::Calm(since) if arrived >= since => Beside::Nobody,
                Mode::Busy | Mode::Calm(_) => Beside::Us,
                Mode::Unwatched => continue,
            };
            joined.hold(now, Sample { class, latency, beside });
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        let mut inner = self.gauge.inner.borrow_mut();
        if let Some(arrived) = inner.remove(slot) {
            self.gauge.reading.left(arrived, &inner);
        }
    }
}

impl Inner {
    fn insert(&mut self, arrived: Duration) -> usize {
        match self.free.pop() {
            Some(slot) => {
                self.in_flight[slot] = Some(arrived);
                slot
            }
            None => {
                self.in_flight.push(Some(arrived));
                self.in_flight.len() - 1
            }
        }
    }

    fn remove(&mut self, slot: usize) -> Option<Duration> {
        let arrived = self.in_flight.get_mut(slot)?.take()?;
        self.free.push(slot);
        Some(arrived)
    }

    fn oldest(&self) -> Option<Duration> {
        self.in_flight.iter().flatten().min().copied()
    }
}

impl Joined {
    fn hold(&mut self, now: Duration, sample: Sample) {
        if self.held.is_empty() {
            self.since = now;
        }
        self.held.push(sample);
        if self.held.len() >= SAMPLES_HELD || now.saturating_sub(self.since) >= HELD_FOR {
            self.store.take(&self.held);
            self.held.clear();
        }
    }
}

/// What other threads see of a gauge.
#[derive(Default)]
pub(crate) struct Reading {
    in_flight: AtomicU32,
    /// Nanoseconds; 0: none is in flight.
    oldest: AtomicU64,
    /// Nanoseconds; 0: never.
    seen: AtomicU64,
}

impl Reading {
    pub(crate) fn look(&self) -> Guests {
        let time = |cell: &AtomicU64| match cell.load(Ordering::Relaxed) {
            0 => None,
            at => Some(Duration::from_nanos(at)),
        };
        Guests {
            in_flight: self.in_flight.load(Ordering::Relaxed),
            oldest: time(&self.oldest),
            seen: time(&self.seen),
        }
    }

    fn arrived(&self, now: Duration) {
        if self.in_flight.fetch_add(1, Ordering::Relaxed) == 0 {
            self.oldest.store(nanos(now), Ordering::Relaxed);
        }
        self.seen.store(nanos(now), Ordering::Relaxed);
    }

    fn ended(&self, now: Duration, arrived: Duration, inner: &Inner) {
        self.seen.store(nanos(now), Ordering::Relaxed);
        self.left(arrived, inner);
    }

    fn left(&self, arrived: Duration, inner: &Inner) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        if self.oldest.load(Ordering::Relaxed) >= nanos(arrived) {
            self.oldest.store(inner.oldest().map_or(0, nanos), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class::MoverClass;
    use crate::law::Impact;
    use crate::mover::Terms;

    fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    #[test]
    fn the_oldest_request_in_flight_is_known_whatever_the_order_of_their_ends() {
        let (store, gauge) = (Store::new(), Gauge::default());
        gauge.join(&store);
        let mover = store.add_mover(ms(1), Terms { class: MoverClass::Migration, impact: Impact::default() });
        let (a, b, c) = (gauge.arrived(ms(1)), gauge.arrived(ms(2)), gauge.arrived(ms(3)));
        assert_eq!((gauge.reading.look().in_flight, gauge.reading.look().oldest), (3, Some(ms(1))));
        a.ended(ms(4), RequestClass::FLUSH);
        assert_eq!(gauge.reading.look().oldest, Some(ms(2)));
        c.ended(ms(5), RequestClass::FLUSH);
        assert_eq!(gauge.reading.look().oldest, Some(ms(2)));
        // A connection that broke drops its requests.
        drop(b);
        assert_eq!((gauge.reading.look().in_flight, gauge.reading.look().oldest), (0, None));
        assert_eq!(gauge.reading.look().seen, Some(ms(5)));
        store.remove_mover(mover);
        assert_eq!(gauge.arrived(ms(6)).slot, None);
    }

    #[test]
    fn a_gauge_that_is_gone_is_not_asked() {
        let store = Store::new();
        let gauge = Gauge::default();
        gauge.join(&store);
        gauge.join(&store);
        let reading = Arc::downgrade(&gauge.reading);
        drop(gauge);
        assert!(reading.upgrade().is_none());
    }
}
