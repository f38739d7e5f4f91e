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
    /// The class that it moves bytes in.
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
    /// `None`: it is not paced.
    terms: Option<Terms>,
    /// Whether it has nothing to copy until [`Mover::resume`].
    rests: bool,
    /// Its number at each of the disks; none: it is not paced, or rests.
    numbers: Vec<(Arc<Store>, u64)>,
    limit: Limit,
    /// The disk that the limit is of: its place among the disks.
    limited_at: usize,
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

    /// Makes a mover that the disks get to know when it asks first, and for which nobody measures guests before.
    #[must_use]
    pub fn when_asked(disks: Stores, terms: Option<Terms>) -> Self {
        let mut mover = Self::default();
        (mover.disks, mover.terms) = (disks, terms);
        mover
    }

    /// Changes what guests may lose; `None`: it is not paced from now on.
    pub fn set_terms(&mut self, now: Duration, terms: Option<Terms>) {
        self.terms = terms;
        self.take_terms(now);
    }

    /// Makes the disks forget it until [`Mover::resume`]: nobody measures guests for a copy that does not run.
    pub fn rest(&mut self) {
        self.rests = true;
        self.not_before = Duration::ZERO;
        self.leave();
    }

    /// Takes it up again after [`Mover::rest`], when it asks next.
    pub fn resume(&mut self) {
        self.rests = false;
    }

    /// Returns what guests may lose to it; `None`: it is not paced, or rests.
    pub fn terms(&self) -> Option<Terms> {
        self.terms.filter(|_| !self.rests)
    }

    fn take_terms(&mut self, now: Duration) {
        self.not_before = Duration::ZERO;
        match self.terms() {
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
        if self.numbers.is_empty() && self.terms().is_some() {
            self.take_terms(now);
        }
        let answers = self.numbers.iter().map(|(store, number)| store.ask(now, *number, bytes));
        let Some((disk, (at, limit))) = answers.enumerate().max_by_key(|(_, (at, _))| *at) else {
            return now;
        };
        (self.limit, self.limited_at, self.not_before) = (limit, disk, at);
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

    /// Returns the place, among its disks, of the one that [`Mover::limit`] is about.
    pub fn limited_at(&self) -> usize {
        self.limited_at
    }

    /// Returns the least rate and the greatest loss of guests at its disks; `None`: it is not paced.
    pub fn status(&self, now: Duration) -> Option<Status> {
        self.numbers.iter().filter_map(|(store, _)| store.status(now)).reduce(Status::and)
    }

    fn leave(&mut self) {
        self.limit = Limit::Disk;
        self.numbers.drain(..).for_each(|(store, number)| store.remove_mover(number));
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_rests_is_forgotten_until_it_is_resumed() {
        let (now, store) = (Duration::from_secs(1), Store::new());
        let terms = Terms { class: MoverClass::Migration, impact: Impact::default() };
        let mut mover = Mover::new(now, Stores::default().and(Arc::clone(&store)), Some(terms));
        assert!(store.status(now).is_some());
        mover.rest();
        assert_eq!((store.status(now), mover.terms()), (None, None));
        // Orders that come meanwhile hold afterwards.
        let strict = Terms { impact: Impact::percent(5).unwrap(), ..terms };
        mover.set_terms(now, Some(strict));
        assert_eq!(store.status(now), None);
        mover.resume();
        assert_eq!(mover.terms(), Some(strict));
        mover.next_start(now, 1);
        assert!(store.status(now).is_some());
        mover.set_terms(now, None);
        assert_eq!(store.status(now), None);
    }
}
