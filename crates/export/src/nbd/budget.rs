//! How much payload the connections of a server hold, against the limits on it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::Waker;

use crate::nbd::intake::Admission;

/// What all connections hold together.
pub(super) struct Budget {
    bytes_max: usize,
    bytes_held: Cell<usize>,
    /// Connections that were refused; all are woken by the next release, and ask again.
    waiting: RefCell<Vec<Waker>>,
}

/// What one connection holds; given back when it is dropped.
pub(super) struct Share {
    budget: Rc<Budget>,
    bytes_max: usize,
    bytes_held: usize,
}

impl Budget {
    pub(super) fn new(bytes_max: usize) -> Rc<Self> {
        Rc::new(Self { bytes_max, bytes_held: Cell::new(0), waiting: RefCell::default() })
    }

    /// A share that is limited by itself, too.
    pub(super) fn share(self: &Rc<Self>, bytes_max: usize) -> Share {
        Share { budget: Rc::clone(self), bytes_max, bytes_held: 0 }
    }
}

impl Share {
    /// Reserves so many bytes, if that is within both limits or the share is empty.
    ///
    /// If it is the common limit that refuses, `waker` is woken when there is room again; if it is the share's own,
    /// who holds it knows when it releases.
    pub(super) fn reserve(&mut self, bytes: usize, waker: &Waker) -> Admission {
        let budget = &self.budget;
        if self.bytes_held > 0 {
            if self.bytes_held.saturating_add(bytes) > self.bytes_max {
                return Admission::Refused;
            }
            if budget.bytes_held.get().saturating_add(bytes) > budget.bytes_max {
                let mut waiting = budget.waiting.borrow_mut();
                if !waiting.iter().any(|waiting| waiting.will_wake(waker)) {
                    waiting.push(waker.clone());
                }
                return Admission::Refused;
            }
        }
        self.bytes_held += bytes;
        budget.bytes_held.set(budget.bytes_held.get() + bytes);
        Admission::Granted
    }

    /// Gives back so many of the reserved bytes.
    pub(super) fn release(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes_held);
        self.bytes_held -= bytes;
        let budget = &self.budget;
        budget.bytes_held.set(budget.bytes_held.get() - bytes);
        if bytes > 0 && !budget.waiting.borrow().is_empty() {
            for waker in budget.waiting.take() {
                waker.wake();
            }
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.release(self.bytes_held);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_limits_refuse_but_never_a_share_that_holds_nothing() {
        let budget = Budget::new(100);
        let waker = Waker::noop();
        let mut first = budget.share(60);
        let mut second = budget.share(60);
        assert_eq!(first.reserve(50, waker), Admission::Granted);
        assert_eq!(first.reserve(20, waker), Admission::Refused, "its own limit");
        assert_eq!(second.reserve(80, waker), Admission::Granted, "it holds nothing");
        assert_eq!(first.reserve(1, waker), Admission::Refused, "the common limit");
        drop(second);
        assert_eq!(first.reserve(1, waker), Admission::Granted);
        first.release(51);
        assert_eq!(budget.bytes_held.get(), 0);
    }
}
