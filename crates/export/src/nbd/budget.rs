//! Bounds the payload that the connections of a server hold.
//!
//! ```text
//!   a connection's payload:  ├── allowance: its own ──┼── beyond: from the common budget ─────┤
//!                                                      if that is too little, it waits in line
//! ```

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Waker;

use crate::nbd::intake::Admission;

pub(super) struct Budget {
    /// Limit of the bytes that are held beyond allowances.
    bytes_max: usize,
    /// Bytes that each share may hold without using the budget.
    allowance: usize,
    bytes_held: Cell<usize>,
    /// Refused shares in order of arrival; the first one is served first.
    line: RefCell<VecDeque<Waiting>>,
    shares_made: Cell<u64>,
}

struct Waiting {
    share: u64,
    bytes: usize,
    waker: Waker,
}

/// The payload of one connection, released when this is dropped.
pub(super) struct Share {
    budget: Rc<Budget>,
    number: u64,
    bytes_max: usize,
    bytes_held: usize,
    is_in_line: bool,
}

impl Budget {
    pub(super) fn new(bytes_max: usize, allowance: usize) -> Rc<Self> {
        let (bytes_held, shares_made) = (Cell::new(0), Cell::new(0));
        Rc::new(Self { bytes_max, allowance, bytes_held, line: RefCell::default(), shares_made })
    }

    pub(super) fn share(self: &Rc<Self>, bytes_max: usize) -> Share {
        let number = self.shares_made.get();
        self.shares_made.set(number + 1);
        Share { budget: Rc::clone(self), number, bytes_max, bytes_held: 0, is_in_line: false }
    }

    fn beyond_allowance(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.allowance)
    }

    /// Returns whether this many bytes are available for a share, in line or not.
    fn has_for(&self, share: u64, bytes: usize) -> bool {
        let is_first = self.line.borrow().front().is_none_or(|first| first.share == share);
        is_first && self.has(bytes)
    }

    fn has(&self, bytes: usize) -> bool {
        let held = self.bytes_held.get();
        // A request larger than the whole budget goes through alone.
        held == 0 || held.saturating_add(bytes) <= self.bytes_max
    }

    fn wait_in_line(&self, share: u64, bytes: usize, waker: &Waker) {
        let mut line = self.line.borrow_mut();
        match line.iter_mut().find(|waiting| waiting.share == share) {
            Some(waiting) => {
                waiting.bytes = bytes;
                waiting.waker.clone_from(waker);
            }
            None => line.push_back(Waiting { share, bytes, waker: waker.clone() }),
        }
    }

    fn leave_line(&self, share: u64) {
        self.line.borrow_mut().retain(|waiting| waiting.share != share);
        // Too few bytes for that share may be enough for the next.
        self.wake_first();
    }

    fn wake_first(&self) {
        if let Some(first) = self.line.borrow().front() {
            first.waker.wake_by_ref();
        }
    }
}

impl Share {
    /// Reserves `bytes`, if that is within both limits or the share is empty.
    ///
    /// If the common limit refuses, `waker` is woken when there is room again. If the share's own limit refuses, its owner
    /// knows when it releases.
    pub(super) fn reserve(&mut self, bytes: usize, waker: &Waker) -> Admission {
        let held = self.bytes_held.saturating_add(bytes);
        if self.bytes_held > 0 && held > self.bytes_max {
            return Admission::Refused;
        }
        let budget = &self.budget;
        let more = budget.beyond_allowance(held) - budget.beyond_allowance(self.bytes_held);
        if more > 0 {
            if !budget.has_for(self.number, more) {
                budget.wait_in_line(self.number, more, waker);
                self.is_in_line = true;
                return Admission::Refused;
            }
            budget.bytes_held.set(budget.bytes_held.get() + more);
        }
        self.bytes_held = held;
        if std::mem::take(&mut self.is_in_line) {
            budget.leave_line(self.number);
        }
        Admission::Granted
    }

    pub(super) fn release(&mut self, bytes: usize) {
        let budget = &self.budget;
        let left = self.bytes_held.saturating_sub(bytes);
        let less = budget.beyond_allowance(self.bytes_held) - budget.beyond_allowance(left);
        self.bytes_held = left;
        if less > 0 {
            budget.bytes_held.set(budget.bytes_held.get() - less);
            budget.wake_first();
        }
    }

    pub(super) fn bytes_held(&self) -> usize {
        self.bytes_held
    }

    /// Leaves the line: nothing more will be reserved, and others need not wait behind it.
    pub(super) fn close(&mut self) {
        if std::mem::take(&mut self.is_in_line) {
            self.budget.leave_line(self.number);
        }
    }

    pub(super) fn is_beyond_allowance(&self) -> bool {
        self.budget.beyond_allowance(self.bytes_held) > 0
    }

    /// Returns whether another share waits for room, and there is none.
    pub(super) fn keeps_others_waiting(&self) -> bool {
        let line = self.budget.line.borrow();
        let is_short = line.front().is_some_and(|first| !self.budget.has(first.bytes));
        is_short && line.iter().any(|waiting| waiting.share != self.number)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.release(self.bytes_held);
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Admission::{Granted, Refused};

    #[test]
    fn a_share_is_granted_its_allowance_whatever_others_hold() {
        let budget = Budget::new(100, 10);
        let waker = Waker::noop();
        let mut first = budget.share(60);
        let mut second = budget.share(200);
        assert_eq!(first.reserve(50, waker), Granted);
        assert_eq!(first.reserve(20, waker), Refused, "its own limit");
        assert_eq!(second.reserve(70, waker), Granted, "40 and 60 are held in common");
        assert_eq!(first.reserve(1, waker), Refused, "the common limit");
        let mut third = budget.share(60);
        assert_eq!(third.reserve(10, waker), Granted, "its allowance");
        assert_eq!(third.reserve(1, waker), Refused);
        assert!(second.keeps_others_waiting());
        drop(second);
        assert_eq!(third.reserve(1, waker), Refused, "the first in the line comes first");
        assert_eq!(first.reserve(1, waker), Granted);
        assert_eq!(third.reserve(1, waker), Granted);
        first.release(51);
        drop(third);
        assert_eq!((budget.bytes_held.get(), budget.line.borrow().len()), (0, 0));
    }

    #[test]
    fn any_number_of_shares_hold_no_more_than_the_limit_and_their_allowances() {
        let budget = Budget::new(1000, 10);
        let mut shares: Vec<_> = (0..1000).map(|_| budget.share(500)).collect();
        for share in &mut shares {
            let _ = share.reserve(300, Waker::noop());
        }
        let held: usize = shares.iter().map(|share| share.bytes_held).sum();
        assert!(held <= 1000 + 1000 * 10, "{held}");
        assert_eq!(shares.iter().filter(|share| share.bytes_held > 0).count(), 3);
        for share in shares.iter_mut().skip(3) {
            assert_eq!(share.reserve(10, Waker::noop()), Granted);
        }
    }

    #[test]
    fn what_is_larger_than_the_limit_goes_through_alone() {
        let budget = Budget::new(100, 10);
        let (mut large, mut other) = (budget.share(500), budget.share(500));
        assert_eq!(other.reserve(20, Waker::noop()), Granted);
        assert_eq!(large.reserve(300, Waker::noop()), Refused);
        other.release(10);
        assert_eq!(large.reserve(300, Waker::noop()), Granted);
        assert_eq!(other.reserve(20, Waker::noop()), Refused);
        drop(large);
        assert_eq!(other.reserve(20, Waker::noop()), Granted);
    }
}
