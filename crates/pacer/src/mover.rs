//! One copy, as the pacers of its disks know it.

use std::sync::Arc;
use std::time::Duration;

use crate::class::MoverClass;
use crate::law::Impact;
use crate::pacer::Status;
use crate::store::{Store, Stores};

/// What a mover is, and what guests may lose to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// Its class.
    pub class: MoverClass,
    /// What guests of its disks may lose. Among several movers the least counts for all.
    pub impact: Impact,
}

/// What limits a mover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Limit {
    /// Nothing but the disks.
    #[default]
    Disk,
    /// The guests of a disk.
    Guests,
    /// The pause in which guests are measured.
    Measuring,
}

/// A copy that asks before each chunk. When it is dropped, the pacers forget it.
#[derive(Debug, Default)]
pub struct Mover {
    disks: Stores,
    /// Its number at each of the disks; none: it is not paced.
    numbers: Vec<(Arc<Store>, u64)>,
    limit: Limit,
    /// Until when the last answer holds.
    not_before: Duration,
}

impl Mover {
    /// Makes a mover between these disks; without terms it is not paced.
    #[must_use]
    pub fn new(now: Duration, disks: Stores, terms: Option<Terms>) -> Self {
        let mut mover = Self::default();
        mover.disks = disks;
        mover.set_terms(now, terms);
        mover
    }

    /// Changes what guests may lose; `None`: it is not paced from now on.
    pub fn set_terms(&mut self, now: Duration, terms: Option<Terms>) {
        self.not_before = Duration::ZERO;
        match terms {
            None => self.leave(),
            Some(terms) if self.numbers.is_empty() => {
                let number = |store: &Arc<Store>| (Arc::clone(store), store.add_mover(now, terms));
                self.numbers = self.disks.iter().map(number).collect();
            }
            Some(terms) => self.numbers.iter().for_each(|(store, number)| store.set_terms(*number, terms)),
        }
    }

    /// Returns the earliest start of a chunk of this many bytes; `now` if it may start at once. At that time the caller asks again.
    pub fn next_start(&mut self, now: Duration, bytes: u64) -> Duration {
        if let Some(at) = self.holds_until(now) {
            return at;
        }
        let answers = self.numbers.iter().map(|(store, number)| store.ask(now, *number, bytes));
        let Some((at, limit)) = answers.max_by_key(|(at, _)| *at) else { return now };
        (self.limit, self.not_before) = (limit, at);
        at
    }

    /// Returns until when no chunk begins, by the last answer; `None`: the caller has to ask. It takes no lock.
    pub fn holds_until(&self, now: Duration) -> Option<Duration> {
        (now < self.not_before).then_some(self.not_before)
    }

    /// A chunk has begun.
    pub fn began(&mut self, now: Duration, bytes: u64) {
        self.numbers.iter().for_each(|(store, number)| store.began(now, *number, bytes));
    }

    /// A chunk has ended.
    pub fn ended(&mut self, now: Duration, bytes: u64) {
        self.not_before = Duration::ZERO;
        self.numbers.iter().for_each(|(store, number)| store.ended(now, *number, bytes));
    }

    /// A chunk that had begun never reached the disks.
    pub fn abandoned(&mut self, bytes: u64) {
        self.numbers.iter().for_each(|(store, number)| store.abandoned(*number, bytes));
    }

    /// Returns the most bytes of the next chunk; `None`: as many as the caller likes.
    pub fn chunk_bytes_max(&self, now: Duration) -> Option<u64> {
        self.numbers.iter().filter_map(|(store, _)| store.chunk_bytes_max(now)).min()
    }

    /// Returns what limits it.
    pub fn limit(&self) -> Limit {
        self.limit
    }

    /// Returns the least rate and the greatest loss of guests at its disks; `None`: it is not paced.
    pub fn status(&self, now: Duration) -> Option<Status> {
        let of_disks = self.numbers.iter().filter_map(|(store, _)| store.status(now));
        of_disks.reduce(|a, b| Status {
            bytes_per_second: a.bytes_per_second.min(b.bytes_per_second),
            loss: a.loss.max(b.loss),
            has_guests: a.has_guests || b.has_guests,
        })
    }

    fn leave(&mut self) {
        self.numbers.drain(..).for_each(|(store, number)| store.remove_mover(number));
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.leave();
    }
}
