//! The requests of one connection that are being executed, polled by the connection's own task.
//!
//! A slot's memory and waker are reused by later requests, so a request needs no allocation here and no task of its own. A
//! completion polls only its own request. (`FuturesUnordered` would allocate for each request, and makes its task run once more
//! after each round of new ones: at depth 1 one more system call a request.)

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

pub(super) struct RequestSet<F> {
    slots: Vec<Slot<F>>,
    free: Vec<usize>,
    woken: Arc<Woken>,
}

struct Slot<F> {
    /// `None` while the slot is free.
    future: Pin<Box<Option<F>>>,
    waker: Waker,
}

/// Slots to be polled; set by wakers, on any thread.
struct Woken {
    /// One bit for each slot.
    words: Box<[AtomicU64]>,
    task: AtomicWaker,
}

struct SlotWaker {
    slot: usize,
    woken: Arc<Woken>,
}

impl<F: Future> RequestSet<F> {
    /// Makes a set for at most `capacity` futures; slots are made as they are needed.
    pub(super) fn with_capacity(capacity: usize) -> Self {
        let words = (0..capacity.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let woken = Arc::new(Woken { words, task: AtomicWaker::new() });
        Self { slots: Vec::new(), free: Vec::new(), woken }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Adds a future and returns its slot. The next [`Self::poll`], which the caller must make, polls it first. The caller
    /// keeps within the capacity.
    pub(super) fn insert(&mut self, future: F) -> usize {
        let slot = self.free.pop().unwrap_or_else(|| {
            let slot = self.slots.len();
            debug_assert!(slot < self.woken.words.len() * 64, "more requests than the set was made for");
            let waker = Waker::from(Arc::new(SlotWaker { slot, woken: Arc::clone(&self.woken) }));
            self.slots.push(Slot { future: Box::pin(None), waker });
            slot
        });
        self.slots[slot].future.set(Some(future));
        self.woken.mark(slot);
        slot
    }

    /// Polls the futures that were woken, each once; `done` gets the slots of the finished ones, and their results.
    ///
    /// The task of `context` is woken when there is more to poll.
    pub(super) fn poll(&mut self, context: &Context<'_>, mut done: impl FnMut(usize, F::Output)) {
        self.woken.task.register(context.waker());
        for word in 0..self.woken.words.len() {
            let mut bits = self.woken.words[word].swap(0, Ordering::AcqRel);
            while bits != 0 {
                let slot = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if let Some(output) = self.poll_slot(slot) {
                    self.free.push(slot);
                    done(slot, output);
                }
            }
        }
    }

    fn poll_slot(&mut self, slot: usize) -> Option<F::Output> {
        let Slot { future, waker } = self.slots.get_mut(slot)?;
        // A late wake-up may find the slot free, or another request in it: polling that once more is harmless.
        let request = future.as_mut().as_pin_mut()?;
        match request.poll(&mut Context::from_waker(waker)) {
            Poll::Ready(output) => {
                future.set(None);
                Some(output)
            }
            Poll::Pending => None,
        }
    }
}

impl Woken {
    fn mark(&self, slot: usize) -> bool {
        let bit = 1 << (slot % 64);
        self.words[slot / 64].fetch_or(bit, Ordering::AcqRel) & bit != 0
    }
}

impl Wake for SlotWaker {
    fn wake(self: Arc<Self>) {
        Self::wake_by_ref(&self);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // If the bit was set already, its setter has woken the task, or is the task's own `poll`.
        if !self.woken.mark(self.slot) {
            self.woken.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use futures_channel::oneshot;

    use super::*;

    struct CountingWaker(AtomicUsize);

    impl Wake for CountingWaker {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn only_what_was_woken_is_polled_and_slots_are_reused() {
        let counter = Arc::new(CountingWaker(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&counter));
        let context = Context::from_waker(&waker);
        let mut set = RequestSet::with_capacity(70);
        let mut finished = Vec::new();
        for round in 0..3 {
            let mut senders = Vec::new();
            for number in 0..70 {
                let (sender, receiver) = oneshot::channel::<usize>();
                senders.push(sender);
                set.insert(receiver);
                assert!(!set.is_empty(), "{number}");
            }
            set.poll(&context, |_, _| panic!("nothing was sent"));
            let wakes_before = counter.0.load(Ordering::SeqCst);
            for (number, sender) in senders.into_iter().enumerate().rev() {
                sender.send(number + round).unwrap();
            }
            assert_eq!(counter.0.load(Ordering::SeqCst), wakes_before + 1, "one wake-up until polled");
            finished.clear();
            set.poll(&context, |_, result: Result<usize, _>| finished.push(result.unwrap()));
            finished.sort_unstable();
            assert_eq!(finished, (round..70 + round).collect::<Vec<_>>());
            assert!(set.is_empty());
            assert_eq!(set.slots.len(), 70);
        }
    }
}
