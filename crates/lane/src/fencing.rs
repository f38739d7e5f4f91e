//! The fencing token of a volume: what its owner knows requests by that were on their way when a client came.
//!
//! ```text
//!   client ──► A ── W1, bears fence 7 ──► … a link that is silent … ─────────────► B: the fence is 8, W1 is not made
//!      └─ leaves A, comes to B ──► B raises the fence to 8 ──► W1 again, W2
//! ```
//! A client that leaves a host does not know what becomes of the writes that it sent there. Elsewhere it sends them again,
//! and newer ones, and none of the old ones may land on top of those. Therefore:
//!
//! - A change that comes by way of another host bears the fencing token that host was told of. The owner makes none that bears
//!   another one than its present fencing token, but says what that is. The host asks again with it, if the client of that change
//!   is there *at that moment* ([`Presence`]).
//! - Before the first request of a connection, whichever host has that, the owner raises its fencing token, and lets the changes
//!   end that it has let through before, those of its own clients too: a store may turn the order of two writes round that
//!   are under way together. What a connection has sent and nobody has read yet is made only if its client is there.
//!
//! So what bears the present fencing token was sent for a client that was there after the fencing token was raised last, and whoever has come
//! since has not left anything behind.
//!
//! FencingTokens are compared for being the same alone, so a volume's next owner, or the next life of this one, has others.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;

use block::signal::Signal;
use migration::planted::{Bug, broken};
use serde::{Deserialize, Serialize};

/// A fencing token, as hosts tell it to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FencingToken {
    /// Of the lane that raised it: no two lanes, of whatever hosts, have the same.
    life: u64,
    /// Grows with each time that it was raised.
    number: u64,
}

impl FencingToken {
    /// The fencing token that a lane of this life has raised so often.
    pub const fn new(life: u64, number: u64) -> Self {
        Self { life, number }
    }
}

/// What became of a change that bears a fencing token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    Done,
    /// It is not, and will not be: it bears another fencing token than this one, which is the present one.
    Refused(FencingToken),
}

/// Whether the client that a request is from is still there.
pub trait Presence {
    /// Tells whether its connection is open at this moment, and not only as far as its requests have been read. Where
    /// that cannot be known, it is.
    fn is_there(&self) -> bool;
}

/// Somebody who never leaves.
pub(crate) struct Always;

impl Presence for Always {
    fn is_there(&self) -> bool {
        true
    }
}

/// The fencing token of one volume on this host, and the changes that are on either side of it.
#[derive(Default)]
pub struct FencingTokens {
    life: Cell<u64>,
    number: Cell<u64>,
    /// Another host knows the present fencing token.
    is_told: Cell<bool>,
    /// How many clients have come, by whichever host, and how often the volume has.
    arrivals: Cell<u64>,
    /// Changes of this host's clients, from before they wait for anything until they have ended or been sent on.
    own: Ledger,
    /// Changes of this host's clients that were sent on to an owner on another host.
    sent_on: Ledger,
    /// Changes that came by way of other hosts, below the gate.
    forwarded: Ledger,
}

impl FencingTokens {
    /// Begins the life of a lane. `life` is this lane's alone, among those of all hosts.
    pub fn begin(&self, life: u64) {
        self.life.set(life);
    }

    /// The present fencing token, for another host.
    pub(crate) fn tell(&self) -> FencingToken {
        self.is_told.set(true);
        FencingToken::new(self.life.get(), self.number.get())
    }

    /// Tells whether a change that bears this fencing token may be made.
    pub(crate) fn admits(&self, fence: FencingToken) -> bool {
        let is_present = self.is_told.get() && fence == FencingToken::new(self.life.get(), self.number.get());
        is_present || broken(Bug::FenceNotChecked)
    }

    /// Makes what every host knows worthless. What nobody knows needs not be raised.
    fn renew(&self) {
        if self.is_told.replace(false) {
            self.number.set(self.number.get() + 1);
        }
    }

    /// Raises the fencing token for a client that comes; resolves when the changes of other hosts have ended that were let through
    /// before.
    pub(crate) fn raise(&self) -> impl Future<Output = ()> + use<> {
        self.renew();
        self.forwarded.all_before()
    }

    /// A client comes, by whichever host; resolves when the changes of this host's clients have ended that had begun
    /// before: it may have been one of those.
    pub(crate) fn comes(&self) -> impl Future<Output = ()> + use<> {
        self.arrivals.set(self.arrivals.get() + 1);
        self.own.all_before()
    }

    /// Resolves when the changes of this host's clients have ended that had been sent on before: a client that comes by the same
    /// way may have been one of those. Who finds the volume here need not wait for what is elsewhere: it comes back with a fencing token
    /// that is not the present one.
    pub(crate) fn goes_on(&self) -> impl Future<Output = ()> + use<> {
        self.sent_on.all_before()
    }

    /// The volume comes: what bears the fencing token of an earlier stay here is of no stay but that, and clients may have come to
    /// it elsewhere.
    pub(crate) fn changes_hands(&self) {
        self.arrivals.set(self.arrivals.get() + 1);
        self.renew();
    }

    /// How many clients have come, by whichever host, and how often the volume has: as long as it is the same, nobody who
    /// was there is elsewhere.
    pub(crate) fn arrivals(&self) -> u64 {
        self.arrivals.get()
    }

    /// A change of a client of this host begins; it has ended when what is returned is dropped.
    pub(crate) fn enter_own(&self) -> Entry {
        self.own.enter()
    }

    /// A change of a client of this host is sent on; it has ended when what is returned is dropped.
    pub(crate) fn enter_sent_on(&self) -> Entry {
        self.sent_on.enter()
    }

    /// A change of another host begins; it has ended when what is returned is dropped.
    pub(crate) fn enter_forwarded(&self) -> Entry {
        self.forwarded.enter()
    }
}

/// Counts what is under way, so that what has begun before a moment can be waited for.
#[derive(Default)]
struct Ledger {
    current: RefCell<Rc<Cell<usize>>>,
    /// Of earlier moments that somebody waited for, as long as something of them is under way.
    former: RefCell<Vec<Rc<Cell<usize>>>>,
    ended: Rc<Signal>,
}

/// Something that is under way, until this is dropped.
pub(crate) struct Entry {
    count: Rc<Cell<usize>>,
    ended: Rc<Signal>,
}

impl Ledger {
    fn enter(&self) -> Entry {
        let count = Rc::clone(&self.current.borrow());
        count.set(count.get() + 1);
        Entry { count, ended: Rc::clone(&self.ended) }
    }

    fn all_before(&self) -> impl Future<Output = ()> + use<> {
        let mut former = self.former.borrow_mut();
        former.retain(|count| count.get() > 0);
        if self.current.borrow().get() > 0 {
            former.push(self.current.take());
        }
        let (former, ended) = (former.clone(), Rc::clone(&self.ended));
        async move { ended.wait_for(|| former.iter().all(|count| count.get() == 0).then_some(())).await }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.count.set(self.count.get() - 1);
        if self.count.get() == 0 {
            self.ended.notify();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_fence_is_good_until_it_is_raised_and_in_one_life() {
        let fences = FencingTokens::default();
        fences.begin(7);
        assert!(!fences.admits(FencingToken::new(7, 0)), "nobody was told of it");
        let told = fences.tell();
        assert!(fences.admits(told) && !fences.admits(FencingToken::new(8, 0)));
        drop(fences.raise());
        assert!(!fences.admits(told));
        let told = fences.tell();
        drop(fences.raise());
        drop(fences.raise());
        assert_ne!(fences.tell(), told);
    }

    #[test]
    fn who_comes_waits_for_what_began_before_and_for_nothing_else() {
        let fences = FencingTokens::default();
        let (first, second) = (fences.enter_forwarded(), fences.enter_own());
        let mut raised = Box::pin(fences.raise());
        let mut comes = Box::pin(fences.comes());
        let _later = (fences.enter_forwarded(), fences.enter_own());
        assert!(raised.as_mut().now_or_never().is_none() && comes.as_mut().now_or_never().is_none());
        let mut raised_again = Box::pin(fences.raise());
        drop(first);
        assert!(raised.now_or_never().is_some() && comes.as_mut().now_or_never().is_none());
        assert!(raised_again.as_mut().now_or_never().is_none());
        drop(second);
        assert!(comes.now_or_never().is_some());
    }
}
