//! The fencing token of a volume: the owner uses it to recognise requests that were in flight when a client arrived.
//!
//! ```text
//!   client ──► A ── W1, bears fence 7 ──► … a link that is silent … ─────────────► B: the fence is 8, W1 is not made
//!      └─ leaves A, comes to B ──► B raises the fence to 8 ──► W1 again, W2
//! ```
//! A client that leaves a host does not know whether its writes there were made. It repeats them at another host, and sends newer
//! ones. No old write may land on top of those. Therefore:
//!
//! - A change that arrives by another host bears the fencing token that this host was given. The owner makes only changes with
//!   its present token, and answers others with that token. The forwarding host repeats the change with the new token if the
//!   change's client is connected *at that moment* ([`Presence`]).
//! - Before the first request of a connection, at any host, the owner raises its token. It then waits for all changes that it let
//!   through before, including those of its own clients: a store may reorder two concurrent writes. Requests that a connection
//!   has sent and that were not read yet are made only if its client is still connected.
//!
//! So a change with the present token was sent for a client that was connected after the token was last raised. A client that has
//! come since left no writes behind.
//!
//! Tokens are only compared for equality, so the volume's next owner, or this one's next life, has different ones.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;

use block::signal::Signal;
use migration::planted::{Bug, broken};
use serde::{Deserialize, Serialize};

/// A fencing token, as hosts send it to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FencingToken {
    /// The lane that raised it: no two lanes of any hosts have the same.
    life: u64,
    number: u64,
}

impl FencingToken {
    /// Makes the token that a lane of this life has raised `number` times.
    pub const fn new(life: u64, number: u64) -> Self {
        Self { life, number }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    Done,
    /// The change was not made, and will not be: its token differs from this one, which is present.
    Refused(FencingToken),
}

/// Answers whether the client of a request is still connected.
pub trait Presence {
    /// Returns whether the connection is open at this moment, even if its requests have not all been read. Returns true where
    /// that cannot be known.
    fn is_there(&self) -> bool;
}

pub(crate) struct Always;

impl Presence for Always {
    fn is_there(&self) -> bool {
        true
    }
}

/// The fencing token of one volume on this host, and the changes before and after it.
#[derive(Default)]
pub struct FencingTokens {
    life: Cell<u64>,
    number: Cell<u64>,
    /// Whether another host knows the present token.
    is_told: Cell<bool>,
    /// How many clients have arrived, by any host, plus how often the volume has.
    arrivals: Cell<u64>,
    /// Changes of local clients, from before their first wait until they have ended or were forwarded.
    own: Ledger,
    /// Changes of local clients that were forwarded to an owner on another host.
    sent_on: Ledger,
    /// Changes of other hosts' clients, below the gate.
    forwarded: Ledger,
}

impl FencingTokens {
    /// Begins the life of a lane. `life` differs from that of every lane on every host.
    pub fn begin(&self, life: u64) {
        self.life.set(life);
    }

    pub(crate) fn tell(&self) -> FencingToken {
        self.is_told.set(true);
        FencingToken::new(self.life.get(), self.number.get())
    }

    pub(crate) fn admits(&self, fence: FencingToken) -> bool {
        let is_present = self.is_told.get() && fence == FencingToken::new(self.life.get(), self.number.get());
        is_present || broken(Bug::FenceNotChecked)
    }

    /// Invalidates the tokens of all hosts. A token that no host knows needs no raise.
    fn renew(&self) {
        if self.is_told.replace(false) {
            self.number.set(self.number.get() + 1);
        }
    }

    /// Raises the token for a new client; resolves when earlier changes of other hosts have ended.
    pub(crate) fn raise(&self) -> impl Future<Output = ()> + use<> {
        self.renew();
        self.forwarded.all_before()
    }

    /// Notes a new client, by any host. Resolves when earlier changes of local clients have ended, because the client
    /// may have made those.
    pub(crate) fn comes(&self) -> impl Future<Output = ()> + use<> {
        self.arrivals.set(self.arrivals.get() + 1);
        self.own.all_before()
    }

    /// Resolves when earlier forwarded changes of local clients have ended, because a new client that is forwarded as well may
    /// have made them. Not needed if the volume is here: forwarded changes then come back with an outdated token.
    pub(crate) fn goes_on(&self) -> impl Future<Output = ()> + use<> {
        self.sent_on.all_before()
    }

    /// Notes that the volume has arrived: tokens of an earlier residency are invalid, and other hosts may have new clients.
    pub(crate) fn changes_hands(&self) {
        self.arrivals.set(self.arrivals.get() + 1);
        self.renew();
    }

    /// Returns how many clients have arrived, by any host, plus how often the volume has. While it stays the same, no earlier
    /// client is at another host.
    pub(crate) fn arrivals(&self) -> u64 {
        self.arrivals.get()
    }

    pub(crate) fn enter_own(&self) -> Entry {
        self.own.enter()
    }

    pub(crate) fn enter_sent_on(&self) -> Entry {
        self.sent_on.enter()
    }

    pub(crate) fn enter_forwarded(&self) -> Entry {
        self.forwarded.enter()
    }
}

/// Counts changes in flight, so that those which began before a moment can be waited for.
#[derive(Default)]
struct Ledger {
    current: RefCell<Rc<Cell<usize>>>,
    /// One counter for each earlier moment that a task waits for, until the changes that began before it have ended.
    former: RefCell<Vec<Rc<Cell<usize>>>>,
    ended: Rc<Signal>,
}

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
