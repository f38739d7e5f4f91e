//! Helper threads for work that may sleep: file operations where io_uring is refused, and calls without an asynchronous form
//! (SEEK_DATA, hashing, opening files).
//!
//! A thread is started when work waits and none is idle, and stays until the pool is dropped. Dropping the pool does not wait:
//! work in progress runs to its end and keeps its file and buffer. Other work is dropped, and its caller gets an error.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use futures_channel::oneshot;

use crate::device::IoFuture;
use crate::error::IoError;

pub(super) type Work = Box<dyn FnOnce() + Send>;

pub(super) struct Helpers {
    shared: Arc<Shared>,
    name: &'static str,
    threads_max: usize,
}

struct Shared {
    state: Mutex<HelperPool>,
    work_arrived: Condvar,
}

#[derive(Default)]
struct HelperPool {
    waiting: VecDeque<Work>,
    threads: usize,
    idle: usize,
    closed: bool,
}

impl Helpers {
    pub(super) fn new(name: &'static str, threads_max: usize) -> Self {
        let shared = Shared { state: Mutex::new(HelperPool::default()), work_arrived: Condvar::new() };
        Self { shared: Arc::new(shared), name, threads_max }
    }

    /// Begins `work` on a helper thread, after earlier work; the receiver gets its result. The sender is dropped if the pool is
    /// dropped before the work begins, or if the work panics. Fails with [`IoError::Os`] if there is no thread and none can be
    /// started; `work` is then dropped.
    pub(super) fn submit<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, IoError> {
        let (sender, receiver) = oneshot::channel();
        self.enqueue(Box::new(move || {
            let _ = sender.send(work());
        }))?;
        Ok(receiver)
    }

    pub(super) fn run(self: &Rc<Self>, work: Work) -> IoFuture<'static, ()> {
        let helpers = Rc::clone(self);
        Box::pin(async move { helpers.submit(work)?.await.map_err(|_| IoError::Closed) })
    }

    fn enqueue(&self, work: Work) -> Result<(), IoError> {
        let mut state = self.shared.lock();
        state.waiting.push_back(work);
        if state.idle >= state.waiting.len() {
            drop(state);
            self.shared.work_arrived.notify_one();
            return Ok(());
        }
        if state.threads == self.threads_max {
            return Ok(());
        }
        let shared = Arc::clone(&self.shared);
        match std::thread::Builder::new().name(self.name.to_owned()).spawn(move || shared.run()) {
            Ok(_) => state.threads += 1,
            // The existing threads will take it.
            Err(error) if state.threads > 0 => tracing::debug!(%error, "no further helper thread"),
            Err(error) => {
                state.waiting.pop_back();
                return Err(IoError::from_std("start a helper thread", &error));
            }
        }
        Ok(())
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        let never_begun = std::mem::take(&mut state.waiting);
        drop(state);
        self.shared.work_arrived.notify_all();
        drop(never_begun);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HelperPool> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(work) = state.waiting.pop_front() {
                drop(state);
                // A panic ends the work, as its caller sees, but not the thread.
                if catch_unwind(AssertUnwindSafe(work)).is_err() {
                    tracing::error!("work on a helper thread panicked");
                }
                state = self.lock();
            } else if state.closed {
                return;
            } else {
                state.idle += 1;
                state = self.work_arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::task::{Context, Poll, Wake};

    use super::*;

    #[test]
    fn work_that_waits_for_other_work_finds_a_thread() {
        let helpers = Helpers::new("test", 2);
        let (to_first, from_second) = mpsc::channel();
        let first = helpers.submit(move || from_second.recv().unwrap()).unwrap();
        let second = helpers.submit(move || to_first.send(7).unwrap()).unwrap();
        assert_eq!(block_on(first), Ok(7));
        assert_eq!(block_on(second), Ok(()));
    }

    #[test]
    fn a_panic_is_the_callers_and_leaves_the_thread_alive() {
        let helpers = Helpers::new("test", 1);
        assert!(block_on(helpers.submit(|| panic!("planted")).unwrap()).is_err());
        assert_eq!(block_on(helpers.submit(|| 3).unwrap()), Ok(3));
    }

    #[test]
    fn work_not_begun_when_the_pool_is_dropped_says_so() {
        let helpers = Helpers::new("test", 1);
        let (release, held) = mpsc::channel::<()>();
        let (begun, has_begun) = mpsc::channel();
        let running = helpers
            .submit(move || {
                begun.send(()).unwrap();
                held.recv().is_err()
            })
            .unwrap();
        has_begun.recv().unwrap();
        let waiting = helpers.submit(|| ()).unwrap();
        drop(helpers);
        assert!(block_on(waiting).is_err());
        drop(release);
        assert_eq!(block_on(running), Ok(true), "what has begun runs to its end");
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        struct Thread(std::thread::Thread);
        impl Wake for Thread {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = Arc::new(Thread(std::thread::current())).into();
        let mut future = std::pin::pin!(future);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(value) => return value,
                Poll::Pending => std::thread::park(),
            }
        }
    }
}
