//! A small single-threaded executor: the tasks and timers of one lane, over a driver.
//!
//! ```text
//!   run ─► ready tasks, in the order they were woken ─► due timers ─► nothing left: Driver::park(next deadline)
//!                     ▲                                                     │ completions wake tasks
//!                     └─────────────────────────────────────────────────────┘
//! ```
//!
//! Product and simulator differ in the driver: the product parks in `io_uring_enter` or `epoll_wait`, the simulator moves a
//! virtual clock to its next event. Tasks stay on their thread; a waker may be used from any.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use slab::Slab;

/// Tasks polled between two calls of the driver, so that tasks which wake each other do not starve completions.
const POLLS_PER_TURN: usize = 64;

/// The source of an executor's events and time.
pub trait Driver {
    /// Returns the time since an arbitrary origin; never goes backwards.
    fn now(&self) -> Duration;

    /// Handles completions, waiting for one until `deadline` (`None`: without limit) or until unparked. With a past deadline,
    /// submits and collects without waiting.
    fn park(&mut self, deadline: Option<Duration>);

    /// Returns what ends a `park` from another thread, or prevents the next one from waiting.
    fn unparker(&self) -> Arc<dyn Unpark>;
}

/// Ends a driver's `park`; may be called from any thread.
pub trait Unpark: Send + Sync {
    /// Ends the current `park`, or makes the next one return at once.
    fn unpark(&self);
}

/// Runs the tasks of one thread.
pub struct Executor<D> {
    driver: D,
    handle: Handle,
}

/// Spawns tasks and returns the time; a clone refers to the same executor.
#[derive(Clone)]
pub struct Handle {
    inner: Rc<Inner>,
}

struct Inner {
    now: std::cell::Cell<Duration>,
    tasks: RefCell<Slab<TaskSlot>>,
    timers: RefCell<BTreeMap<TimerKey, Waker>>,
    timer_sequence: std::cell::Cell<u64>,
    ready: Arc<ReadyQueue>,
}

struct TaskSlot {
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    waker: Arc<TaskWaker>,
}

struct ReadyQueue {
    woken: Mutex<VecDeque<Arc<TaskWaker>>>,
    /// Set while the executor is in `park`: only then must a wake-up unpark it.
    parked: AtomicBool,
    unparker: Arc<dyn Unpark>,
}

struct TaskWaker {
    /// Slot of the task. Slots are reused, so wakers are compared before a poll.
    slot: usize,
    queued: AtomicBool,
    ready: Arc<ReadyQueue>,
}

/// When a timer is due, and its number: timers of the same instant fire in the order they were set.
type TimerKey = (Duration, u64);

impl<D: Driver> Executor<D> {
    /// Makes an executor over `driver`.
    pub fn new(driver: D) -> Self {
        let ready = Arc::new(ReadyQueue {
            woken: Mutex::new(VecDeque::new()),
            parked: AtomicBool::new(false),
            unparker: driver.unparker(),
        });
        let inner = Inner {
            now: std::cell::Cell::new(driver.now()),
            tasks: RefCell::new(Slab::new()),
            timers: RefCell::new(BTreeMap::new()),
            timer_sequence: std::cell::Cell::new(0),
            ready,
        };
        Self { driver, handle: Handle { inner: Rc::new(inner) } }
    }

    /// Returns a handle for tasks of this executor.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Returns the driver, for its owner.
    pub fn driver(&mut self) -> &mut D {
        &mut self.driver
    }

    /// Runs until `main` is done; other tasks stay for the next call, or are dropped with the executor.
    pub fn run<T: 'static>(&mut self, main: impl Future<Output = T> + 'static) -> T {
        let result = Rc::new(RefCell::new(None));
        let slot = Rc::clone(&result);
        self.handle.spawn(async move {
            let value = main.await;
            *slot.borrow_mut() = Some(value);
        });
        loop {
            self.poll_ready();
            if let Some(value) = result.borrow_mut().take() {
                return value;
            }
            self.park();
        }
    }

    /// Runs until `stop` returns true; checks it before tasks are polled, and again before each wait.
    pub fn run_until(&mut self, mut stop: impl FnMut() -> bool) {
        while !stop() {
            self.poll_ready();
            if stop() {
                return;
            }
            self.park();
        }
    }

    /// Drops every task without polling it again, like a `kill -9`.
    pub fn drop_tasks(&mut self) {
        // A task's destructor may spawn or wake, so the tasks are taken out first.
        let tasks: Vec<_> = {
            let mut slab = self.handle.inner.tasks.borrow_mut();
            slab.drain().collect()
        };
        drop(tasks);
        self.handle.inner.timers.borrow_mut().clear();
        self.handle.inner.ready.lock().clear();
    }

    /// Runs one turn: polls ready tasks, fires due timers, parks if there is nothing to do.
    pub fn turn(&mut self) {
        self.poll_ready();
        self.park();
    }

    fn poll_ready(&mut self) {
        self.handle.inner.now.set(self.driver.now());
        self.handle.inner.fire_timers();
        for _ in 0..POLLS_PER_TURN {
            let Some(waker) = self.handle.inner.ready.pop() else { break };
            self.handle.inner.poll(&waker);
        }
    }

    fn park(&mut self) {
        let ready = &self.handle.inner.ready;
        ready.parked.store(true, Ordering::SeqCst);
        let deadline =
            if ready.is_empty() { self.handle.inner.next_deadline() } else { Some(Duration::ZERO) };
        self.driver.park(deadline);
        ready.parked.store(false, Ordering::SeqCst);
    }
}

impl<D> Drop for Executor<D> {
    fn drop(&mut self) {
        // Tasks hold handles to the executor that holds them, and so do those that their destructors spawn.
        loop {
            let tasks: Vec<_> = self.handle.inner.tasks.borrow_mut().drain().collect();
            if tasks.is_empty() {
                return;
            }
            drop(tasks);
        }
    }
}

impl Handle {
    /// Starts a task; it is polled for the first time on a later turn of the loop.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let inner = &self.inner;
        let mut tasks = inner.tasks.borrow_mut();
        let entry = tasks.vacant_entry();
        let waker = Arc::new(TaskWaker {
            slot: entry.key(),
            queued: AtomicBool::new(false),
            ready: Arc::clone(&inner.ready),
        });
        entry.insert(TaskSlot { future: Some(Box::pin(future)), waker: Arc::clone(&waker) });
        drop(tasks);
        waker.wake();
    }

    /// Returns the time at the start of this turn, since the driver's origin.
    pub fn now(&self) -> Duration {
        self.inner.now.get()
    }

    /// Waits until `deadline`; a past deadline lets other tasks run once.
    pub fn sleep_until(&self, deadline: Duration) -> Sleep {
        Sleep { handle: self.clone(), deadline, timer: None }
    }

    /// Waits for `duration` from the start of this turn.
    pub fn sleep(&self, duration: Duration) -> Sleep {
        self.sleep_until(self.now().saturating_add(duration))
    }
}

/// The future of [`Handle::sleep_until`]; dropping it removes its timer.
pub struct Sleep {
    handle: Handle,
    deadline: Duration,
    timer: Option<TimerKey>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.timer.is_some() && self.handle.now() >= self.deadline {
            return Poll::Ready(());
        }
        let timer = self.handle.inner.set_timer(self.timer, self.deadline, context.waker());
        self.timer = Some(timer);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(timer) = self.timer {
            self.handle.inner.timers.borrow_mut().remove(&timer);
        }
    }
}

impl Inner {
    /// Sets a timer, or only replaces the waker of an existing one.
    fn set_timer(&self, known: Option<TimerKey>, at: Duration, waker: &Waker) -> TimerKey {
        let key = known.unwrap_or_else(|| {
            let sequence = self.timer_sequence.get();
            self.timer_sequence.set(sequence + 1);
            (at, sequence)
        });
        // A future that is polled together with others is polled often, mostly with the same waker.
        self.timers
            .borrow_mut()
            .entry(key)
            .and_modify(|known| known.clone_from(waker))
            .or_insert_with(|| waker.clone());
        key
    }

    fn fire_timers(&self) {
        loop {
            let mut timers = self.timers.borrow_mut();
            let Some(first) = timers.first_entry().filter(|first| first.key().0 <= self.now.get()) else {
                return;
            };
            let waker = first.remove();
            drop(timers);
            waker.wake();
        }
    }

    fn next_deadline(&self) -> Option<Duration> {
        self.timers.borrow().first_key_value().map(|((at, _), _)| *at)
    }

    fn poll(&self, waker: &Arc<TaskWaker>) {
        waker.queued.store(false, Ordering::SeqCst);
        let future = self.tasks.borrow_mut().get_mut(waker.slot).and_then(|task| {
            // A late wake-up of an ended task must not poll the task that now has its slot.
            if Arc::ptr_eq(&task.waker, waker) { task.future.take() } else { None }
        });
        let Some(mut future) = future else { return };
        let std_waker = Waker::from(Arc::clone(waker));
        let polled = future.as_mut().poll(&mut Context::from_waker(&std_waker));
        let mut tasks = self.tasks.borrow_mut();
        match polled {
            Poll::Pending => {
                if let Some(task) = tasks.get_mut(waker.slot) {
                    task.future = Some(future);
                }
            }
            Poll::Ready(()) => {
                let task = tasks.try_remove(waker.slot);
                drop(tasks);
                drop((task, future));
            }
        }
    }
}

impl ReadyQueue {
    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Arc<TaskWaker>>> {
        self.woken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pop(&self) -> Option<Arc<TaskWaker>> {
        self.lock().pop_front()
    }

    fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        Self::wake_by_ref(&self);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.queued.swap(true, Ordering::SeqCst) {
            return;
        }
        self.ready.lock().push_back(Arc::clone(self));
        // N.B. the executor sets `parked` before its last check of the queue, and this pushes before it reads `parked`: one of
        // the two sees the other.
        if self.ready.parked.load(Ordering::SeqCst) {
            self.ready.unparker.unpark();
        }
    }
}

#[cfg(test)]
mod tests;
