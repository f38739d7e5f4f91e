//! A disk in memory that can hold requests, and that records them.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use block::store::memory::MemoryStore;
use block::{
    BlockDevice, Buffer, ByteRange, Change, Durability, Extent, Geometry, IoError, IoFuture, ZeroMode,
};
use rustix::io::Errno;

pub(crate) struct TestDevice {
    store: MemoryStore,
    probe: Probe,
}

#[derive(Clone, Default)]
pub(crate) struct Probe {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    size: u64,
    held: bool,
    zeroes_slowly: bool,
    failing: Option<Errno>,
    waiting: usize,
    waiting_max: usize,
    wakers: Vec<Waker>,
    writes: Vec<(ByteRange, Durability)>,
    /// Bytes written since the last flush and not durable by themselves.
    bytes_volatile: u64,
    flushes: usize,
}

impl Probe {
    pub(crate) fn hold(&self) {
        self.state().held = true;
    }

    pub(crate) fn let_go(&self) {
        let mut state = self.state();
        state.held = false;
        state.wakers.drain(..).for_each(Waker::wake);
    }

    pub(crate) fn fail_with(&self, errno: Errno) {
        self.state().failing = Some(errno);
    }

    /// Grows the disk to this many bytes: at most twice the first size.
    pub(crate) fn grow(&self, size: u64) {
        self.state().size = size;
    }

    /// Makes zeroing take as long as writing zeroes from now on.
    pub(crate) fn zero_slowly(&self) {
        self.state().zeroes_slowly = true;
    }

    fn zeroes_fast(&self) -> bool {
        !self.state().zeroes_slowly
    }

    pub(crate) fn waiting(&self) -> usize {
        self.state().waiting
    }

    pub(crate) fn waiting_max(&self) -> usize {
        self.state().waiting_max
    }

    pub(crate) fn writes(&self) -> Vec<(ByteRange, Durability)> {
        self.state().writes.clone()
    }

    pub(crate) fn bytes_volatile(&self) -> u64 {
        self.state().bytes_volatile
    }

    pub(crate) fn flushes(&self) -> usize {
        self.state().flushes
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn record(&self, range: ByteRange, durability: Durability) {
        let mut state = self.state();
        state.writes.push((range, durability));
        if durability == Durability::Volatile {
            state.bytes_volatile += range.length;
        }
    }

    async fn pass(&self) -> Result<(), IoError> {
        let mut waits = false;
        poll_fn(|context| {
            let mut state = self.state();
            if state.held {
                if !waits {
                    waits = true;
                    state.waiting += 1;
                    state.waiting_max = state.waiting_max.max(state.waiting);
                }
                state.wakers.push(context.waker().clone());
                return Poll::Pending;
            }
            state.waiting -= usize::from(waits);
            Poll::Ready(state.failing.map_or(Ok(()), |errno| Err(IoError::os("test", errno))))
        })
        .await
    }
}

impl TestDevice {
    pub(crate) fn new(size: u64) -> (Self, Probe) {
        let probe = Probe::default();
        probe.grow(size);
        let geometry = Geometry { size: 2 * size, alignment: 1, read_only: false, discards: true };
        (Self { store: MemoryStore::with_geometry(geometry), probe: probe.clone() }, probe)
    }
}

impl BlockDevice for TestDevice {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.probe.state().size, ..self.store.geometry() }
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            self.probe.pass().await?;
            assert!(buffer.is_unique(), "the contract of read");
            self.store.read(offset, buffer).await
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move {
            if matches!(change, Change::Write(..)) {
                self.probe.pass().await?;
            }
            self.probe.record(change.range(), change.durability());
            self.store.change(change).await
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        let mut state = self.probe.state();
        state.flushes += 1;
        state.bytes_volatile = 0;
        drop(state);
        self.store.flush()
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.probe.zeroes_fast() && self.store.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.store.allocation(range)
    }
}
