//! Slows requests down on purpose: by latency, by a rate, or by hanging until released.
//!
//! ```text
//!   request ──► hung? wait for release ──► latency, and its turn at the rate ──► the device below
//! ```
//!
//! Ships with the product: the demo uses a slow store, and tests use a store that hangs.

use std::future::poll_fn;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use super::{Operation, Operations};
use crate::buffer::Buffer;
use crate::change::Change;
use crate::device::{BlockDevice, ByteRange, Extent, Geometry, IoFuture, ZeroMode};
use crate::executor::Handle;
use crate::growth::Growth;

/// Delays requests as its switch is set.
pub struct Delay {
    inner: Rc<dyn BlockDevice>,
    handle: Handle,
    switch: DelaySwitch,
}

/// The settings of a [`Delay`], which can be changed while it works, from any thread; clones share them. Requests that already
/// sleep do so to their end.
#[derive(Clone)]
pub struct DelaySwitch {
    state: Arc<Mutex<DelayState>>,
}

struct DelayState {
    /// The added latency, by [`Operation`] as a number.
    latency: [Duration; Operation::COUNT],
    rate: Option<Rate>,
    request_rate: Option<Rate>,
    hung: Operations,
    hanging: usize,
    /// The tasks to wake for them; a task may have several such requests.
    waiting: Vec<Waker>,
}

struct Rate {
    operations: Operations,
    per_second: NonZeroU64,
    /// When the requests so far have passed at this rate.
    busy_until: Duration,
}

impl Delay {
    /// Puts the filter over `inner`, without any delay.
    pub fn new(inner: Rc<dyn BlockDevice>, handle: Handle) -> (Self, DelaySwitch) {
        let switch = DelaySwitch::new();
        (Self::with(switch.clone(), inner, handle), switch)
    }

    /// Puts the filter over `inner`. Devices with the same switch share its rates.
    pub fn with(switch: DelaySwitch, inner: Rc<dyn BlockDevice>, handle: Handle) -> Self {
        Self { inner, handle, switch }
    }

    async fn hold(&self, operation: Operation, length: u64) {
        let mut hanging = None;
        poll_fn(|context| {
            let mut state = self.switch.lock();
            if !state.hung.contains(operation) {
                return Poll::Ready(());
            }
            if hanging.is_none() {
                state.hanging += 1;
                hanging = Some(Hanging { switch: &self.switch });
            }
            if !state.waiting.iter().any(|known| known.will_wake(context.waker())) {
                state.waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
        drop(hanging);
        let now = self.handle.now();
        let until = self.switch.lock().through_at(now, operation, length);
        if until > now {
            self.handle.sleep_until(until).await;
        }
    }
}

struct Hanging<'a> {
    switch: &'a DelaySwitch,
}

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        self.switch.lock().hanging -= 1;
    }
}

impl Default for DelaySwitch {
    fn default() -> Self {
        Self::new()
    }
}

impl DelaySwitch {
    /// Makes a switch that delays no request.
    pub fn new() -> Self {
        Self { state: Arc::new(Mutex::new(DelayState::new())) }
    }

    /// Adds at least `latency` to requests of these kinds, and none to others; replaces earlier latencies.
    pub fn set_latency(&self, operations: Operations, latency: Duration) {
        let mut state = self.lock();
        state.latency = [Duration::ZERO; Operation::COUNT];
        state.set_latency(operations, latency);
    }

    /// Adds at least `latency` to requests of these kinds; leaves those of other kinds as they are.
    pub fn set_latency_of(&self, operations: Operations, latency: Duration) {
        self.lock().set_latency(operations, latency);
    }

    /// Limits requests of these kinds together to this rate; replaces an earlier one.
    pub fn set_rate(&self, operations: Operations, bytes_per_second: NonZeroU64) {
        self.lock().rate = Some(Rate::new(operations, bytes_per_second));
    }

    /// Limits the number of requests of these kinds per second, together; replaces an earlier limit.
    pub fn set_request_rate(&self, operations: Operations, requests_per_second: NonZeroU64) {
        self.lock().request_rate = Some(Rate::new(operations, requests_per_second));
    }

    /// Removes all latencies and rates.
    pub fn clear(&self) {
        let mut state = self.lock();
        state.latency = [Duration::ZERO; Operation::COUNT];
        (state.rate, state.request_rate) = (None, None);
    }

    /// Holds all requests of these kinds, and no others, until [`DelaySwitch::release`].
    pub fn hang(&self, operations: Operations) {
        self.set_hung(operations);
    }

    /// Releases all requests that hang.
    pub fn release(&self) {
        self.set_hung(Operations::of(&[]));
    }

    /// Returns the number of requests that hang.
    pub fn hanging(&self) -> usize {
        self.lock().hanging
    }

    fn set_hung(&self, operations: Operations) {
        let mut state = self.lock();
        state.hung = operations;
        let woken = std::mem::take(&mut state.waiting);
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    fn lock(&self) -> MutexGuard<'_, DelayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockDevice for Delay {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.hold(Operation::Read, buffer.len() as u64).await;
            self.inner.read(offset, buffer).await
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let bytes = if let Change::Write(_, data, _) = &change { data.len() as u64 } else { 0 };
            self.hold(Operation::of(&change), bytes).await;
            self.inner.change(change).await
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            self.hold(Operation::Flush, 0).await;
            self.inner.flush().await
        })
    }

    fn growth(&self) -> Option<&dyn Growth> {
        self.inner.growth()
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.inner.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.hold(Operation::Allocation, 0).await;
            self.inner.allocation(range).await
        })
    }

    fn own_allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.hold(Operation::Allocation, 0).await;
            self.inner.own_allocation(range).await
        })
    }
}

impl DelayState {
    fn new() -> Self {
        Self {
            latency: [Duration::ZERO; Operation::COUNT],
            rate: None,
            request_rate: None,
            hung: Operations::of(&[]),
            hanging: 0,
            waiting: Vec::new(),
        }
    }

    fn set_latency(&mut self, operations: Operations, latency: Duration) {
        for (operation, set) in Operation::EACH.into_iter().zip(&mut self.latency) {
            if operations.contains(operation) {
                *set = latency;
            }
        }
    }

    fn through_at(&mut self, now: Duration, operation: Operation, length: u64) -> Duration {
        let after_latency = now.saturating_add(self.latency[operation as usize]);
        let rates = [(&mut self.rate, length), (&mut self.request_rate, 1)];
        let after_rates = rates.into_iter().filter_map(|(rate, amount)| {
            let rate = rate.as_mut().filter(|rate| rate.operations.contains(operation))?;
            Some(rate.take(now, amount))
        });
        after_rates.fold(after_latency, Duration::max)
    }
}

impl Rate {
    fn new(operations: Operations, per_second: NonZeroU64) -> Self {
        Self { operations, per_second, busy_until: Duration::ZERO }
    }

    fn take(&mut self, now: Duration, amount: u64) -> Duration {
        let taken = Duration::from_secs_f64(amount as f64 / self.per_second.get() as f64);
        self.busy_until = self.busy_until.max(now).saturating_add(taken);
        self.busy_until
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::device::Durability;
    use crate::engine::{self, EngineChoice, EngineDriver};
    use crate::executor::Executor;
    use crate::store::MemoryStore;

    #[test]
    fn what_hangs_is_counted_until_it_is_released_or_dropped() {
        let (driver, _engine) = engine::open(EngineChoice::Threads).unwrap();
        let mut executor: Executor<EngineDriver> = Executor::new(driver);
        let handle = executor.handle();
        executor.run(async move {
            let (delay, switch) = Delay::new(Rc::new(MemoryStore::new(1 << 16)), handle);
            switch.hang(Operations::of(&[Operation::Write, Operation::Flush]));
            assert!(delay.read(0, Buffer::zeroed(4096)).now_or_never().is_some());
            let write = || delay.write(0, Buffer::zeroed(4096), Durability::Volatile);
            let (mut first, mut second, mut flush) = (write(), write(), delay.flush());
            for _ in 0..3 {
                assert!((&mut first).now_or_never().is_none());
                assert!((&mut second).now_or_never().is_none());
                assert!((&mut flush).now_or_never().is_none());
            }
            assert_eq!(switch.hanging(), 3);
            drop(second);
            assert_eq!(switch.hanging(), 2);
            let elsewhere = switch.clone();
            let thread = std::thread::spawn(move || elsewhere.hang(Operations::of(&[Operation::Flush])));
            assert_eq!(first.await, Ok(()), "writes do not hang any more");
            thread.join().unwrap();
            assert!((&mut flush).now_or_never().is_none());
            switch.release();
            assert_eq!((flush.await, switch.hanging()), (Ok(()), 0));
        });
    }

    #[test]
    fn requests_share_the_rate_and_latencies_overlap() {
        let mut state = DelayState::new();
        state.set_latency(Operations::ALL, Duration::from_millis(10));
        let at = Duration::from_secs(5);
        let after = |milliseconds| at + Duration::from_millis(milliseconds);
        assert_eq!(state.through_at(at, Operation::Write, 1 << 20), after(10));
        assert_eq!(state.through_at(at, Operation::Write, 1 << 20), after(10));
        let bytes_per_second = NonZeroU64::new(1000).unwrap();
        let operations = Operations::of(&[Operation::Write]);
        state.rate = Some(Rate::new(operations, bytes_per_second));
        assert_eq!(state.through_at(at, Operation::Write, 100), after(100));
        assert_eq!(state.through_at(at, Operation::Write, 100), after(200));
        assert_eq!(state.through_at(at, Operation::Read, 100), after(10), "not limited");
        assert_eq!(
            state.through_at(after(900), Operation::Write, 100),
            after(1000),
            "idle time is not saved up"
        );
    }

    #[test]
    fn requests_are_counted_whatever_their_length_and_each_kind_has_its_latency() {
        let mut state = DelayState::new();
        state.set_latency(Operations::of(&[Operation::Flush]), Duration::from_millis(30));
        state.set_latency(Operations::of(&[Operation::Read]), Duration::from_millis(2));
        let requests_per_second = NonZeroU64::new(100).unwrap();
        state.request_rate =
            Some(Rate::new(Operations::of(&[Operation::Read, Operation::Write]), requests_per_second));
        let at = Duration::from_secs(5);
        let after = |milliseconds| at + Duration::from_millis(milliseconds);
        assert_eq!(state.through_at(at, Operation::Write, 4096), after(10));
        assert_eq!(state.through_at(at, Operation::Read, 1 << 30), after(20));
        assert_eq!(state.through_at(at, Operation::Flush, 0), after(30), "it is in no rate");
        assert_eq!(state.through_at(after(500), Operation::Read, 4096), after(510));
        assert_eq!(state.through_at(at, Operation::Allocation, 0), at);
    }
}
