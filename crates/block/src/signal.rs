//! Waits on one thread for a condition that another task makes true.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::task::{Poll, Waker};

/// Wakes tasks that wait for a change, in the order they came.
#[derive(Default)]
pub struct Signal {
    waiters: RefCell<Vec<Waker>>,
}

impl Signal {
    /// Makes every waiter check its condition again.
    pub fn notify(&self) {
        // Taken out first: a waker may run code that waits again.
        let waiters = std::mem::take(&mut *self.waiters.borrow_mut());
        waiters.into_iter().for_each(Waker::wake);
    }

    /// Waits until `look` returns something; calls it at once and after each [`Signal::notify`].
    pub fn wait_for<T>(&self, mut look: impl FnMut() -> Option<T>) -> impl Future<Output = T> {
        poll_fn(move |context| match look() {
            Some(found) => Poll::Ready(found),
            None => {
                let mut waiters = self.waiters.borrow_mut();
                if !waiters.iter().any(|waiter| waiter.will_wake(context.waker())) {
                    waiters.push(context.waker().clone());
                }
                Poll::Pending
            }
        })
    }
}
