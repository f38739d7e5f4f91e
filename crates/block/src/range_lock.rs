//! Separates requests on overlapping ranges in time.
//!
//! ```text
//!   claim ──► waits while an earlier claim overlaps it, unless both are shared ──► Claimed ──► dropped: the next
//! ```
//!
//! Overlapping claims are granted in the order they were made, so none starves. All is on one thread. Each request costs a slab
//! entry; claims are compared only while there is an exclusive one.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use slab::Slab;

use crate::device::ByteRange;

/// Grants claims on ranges of one device; a clone refers to the same claims.
#[derive(Clone, Default)]
pub struct RangeLock {
    claims: Rc<RefCell<Claims>>,
}

/// The kinds of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// May overlap other shared claims.
    Shared,
    /// May overlap no other claim.
    Exclusive,
}

#[derive(Default)]
struct Claims {
    entries: Slab<Entry>,
    next: u64,
    exclusive: usize,
}

struct Entry {
    number: u64,
    range: ByteRange,
    claim: Claim,
    /// Woken when an earlier claim is gone; `None` once granted.
    waker: Option<Waker>,
}

impl RangeLock {
    /// Makes a lock without claims.
    pub fn new() -> Self {
        Self::default()
    }

    /// Claims a range, in the order of the calls; the future resolves when it is granted. Dropping the future or its result
    /// gives the claim up.
    pub fn claim(&self, range: ByteRange, claim: Claim) -> Claiming {
        let mut claims = self.claims.borrow_mut();
        let number = claims.next;
        claims.next += 1;
        claims.exclusive += usize::from(claim == Claim::Exclusive);
        let waker = Some(Waker::noop().clone());
        let key = claims.entries.insert(Entry { number, range, claim, waker });
        Claiming { claimed: Some(Claimed { claims: Rc::clone(&self.claims), key }) }
    }
}

/// The future of a claim, which resolves when it is granted.
pub struct Claiming {
    claimed: Option<Claimed>,
}

/// A granted claim; dropping it gives it up.
pub struct Claimed {
    claims: Rc<RefCell<Claims>>,
    key: usize,
}

impl Future for Claiming {
    type Output = Claimed;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Claimed> {
        let is_granted = self
            .claimed
            .as_ref()
            .is_some_and(|claimed| claimed.claims.borrow_mut().try_grant(claimed.key, context.waker()));
        match self.claimed.take_if(|_| is_granted) {
            Some(claimed) => Poll::Ready(claimed),
            None => Poll::Pending,
        }
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        let woken = self.claims.borrow_mut().release(self.key);
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Claims {
    fn try_grant(&mut self, key: usize, waker: &Waker) -> bool {
        let Some(entry) = self.entries.get(key) else { return false };
        let is_blocked = self.exclusive > 0
            && self.entries.iter().any(|(_, other)| other.number < entry.number && other.excludes(entry));
        let Some(entry) = self.entries.get_mut(key) else { return false };
        entry.waker = is_blocked.then(|| waker.clone());
        !is_blocked
    }

    fn release(&mut self, key: usize) -> Vec<Waker> {
        let Some(gone) = self.entries.try_remove(key) else { return Vec::new() };
        // With shared claims only, none waits.
        if self.exclusive == 0 {
            return Vec::new();
        }
        self.exclusive -= usize::from(gone.claim == Claim::Exclusive);
        let later = self.entries.iter_mut().map(|(_, entry)| entry);
        later.filter(|entry| gone.excludes(entry)).filter_map(|entry| entry.waker.clone()).collect()
    }
}

impl Entry {
    fn excludes(&self, other: &Self) -> bool {
        let is_shared = self.claim == Claim::Shared && other.claim == Claim::Shared;
        !is_shared && self.range.overlaps(&other.range)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn claim(lock: &RangeLock, offset: u64, length: u64, claim: Claim) -> Claiming {
        lock.claim(ByteRange::new(offset, length), claim)
    }

    #[test]
    fn shared_claims_overlap_each_other_and_wait_for_exclusive_ones() {
        let lock = RangeLock::new();
        let first = claim(&lock, 0, 10, Claim::Shared).now_or_never().unwrap();
        let second = claim(&lock, 5, 10, Claim::Shared).now_or_never().unwrap();
        let mut exclusive = claim(&lock, 8, 10, Claim::Exclusive);
        assert!((&mut exclusive).now_or_never().is_none());
        drop(first);
        assert!((&mut exclusive).now_or_never().is_none());
        drop(second);
        let exclusive = exclusive.now_or_never().unwrap();
        let mut behind = claim(&lock, 17, 1, Claim::Shared);
        assert!((&mut behind).now_or_never().is_none());
        assert!(claim(&lock, 18, 1, Claim::Exclusive).now_or_never().is_some(), "beside it");
        drop(exclusive);
        assert!(behind.now_or_never().is_some());
    }

    #[test]
    fn later_shared_claims_do_not_overtake_a_waiting_exclusive_one() {
        let lock = RangeLock::new();
        let held = claim(&lock, 0, 10, Claim::Shared).now_or_never().unwrap();
        let exclusive = claim(&lock, 0, 10, Claim::Exclusive);
        let mut later = claim(&lock, 0, 10, Claim::Shared);
        assert!((&mut later).now_or_never().is_none());
        // A claim that is given up blocks no other.
        drop(exclusive);
        assert!(later.now_or_never().is_some());
        drop(held);
        assert!(lock.claims.borrow().entries.is_empty());
        assert_eq!(lock.claims.borrow().exclusive, 0);
    }
}
