//! Reports each failed flush to the writer, even if the writer did not request that flush.
//!
//! ```text
//!   guest or copying ──change, flush──► FlushDebt ──► store
//!   the daemon ─────────────── flush ─────────▲ (FlushDebt::ours)
//! ```
//! A store reports a possible loss of volatile data once: to the flush in progress, or to the next one (a kernel does so for each
//! open file). If that was the daemon's own flush, the writer's next flush would succeed, although its data may be lost. So the
//! writer's next flush fails as well, and the daemon's own flushes fail until then. A flush that fails when nothing has changed
//! since a successful one has lost nothing, and is not reported.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::buffer::Buffer;
use crate::change::Change;
use crate::clone::PlainFile;
use crate::device::{BlockDevice, ByteRange, Durability, Extent, Geometry, IoFuture, ZeroMode};
use crate::error::IoError;
use crate::growth::Growth;

/// A store as its writer sees it.
pub struct FlushDebt {
    inner: Rc<dyn BlockDevice>,
    debt: Rc<Debt>,
}

/// The same store, for the daemon's own flushes.
struct Ours(Rc<FlushDebt>);

#[derive(Default)]
struct Debt {
    /// Changes in flight: unchanged data cannot be lost.
    changing: Cell<u64>,
    /// Changes that have ended. The first one stands for unflushed writes of a killed process before this one.
    changed: Cell<u64>,
    /// How many of the ended ones are durable: a later flush has succeeded.
    durable: Cell<u64>,
    failures: Cell<u64>,
    /// How many of them the writer has learned of.
    told: Cell<u64>,
    error: Cell<Option<IoError>>,
    /// Flushes whose callers have gone before their end; the next flush awaits them.
    abandoned: RefCell<Vec<IoFuture<'static, ()>>>,
}

struct Changing<'a>(&'a Debt);

/// A flush in progress; if it is dropped, the next one awaits it.
struct UnderWay<'a> {
    debt: &'a Debt,
    flush: Option<IoFuture<'static, ()>>,
}

impl FlushDebt {
    /// Makes the filter of a store that is flushed only through it.
    pub fn new(inner: Rc<dyn BlockDevice>) -> Rc<Self> {
        let debt = Debt { changed: Cell::new(1), ..Debt::default() };
        Rc::new(Self { inner, debt: Rc::new(debt) })
    }

    /// Returns the store for the daemon's own flushes.
    pub fn ours(self: &Rc<Self>) -> Rc<dyn BlockDevice> {
        Rc::new(Ours(Rc::clone(self)))
    }

    /// Flushes, and counts the result. A success counts for nothing if another flush has failed meanwhile.
    async fn flush_counted(inner: Rc<dyn BlockDevice>, debt: Rc<Debt>) -> Result<(), IoError> {
        let abandoned = debt.abandoned.take();
        for former in abandoned {
            let former = UnderWay { debt: &debt, flush: Some(former) }.end().await;
            debt.note(former);
        }
        let (before, changed) = (debt.failures.get(), debt.changed.get());
        let flush: IoFuture<'static, ()> = Box::pin(async move { inner.flush().await });
        let result = UnderWay { debt: &debt, flush: Some(flush) }.end().await;
        debt.note(result);
        match debt.error.get() {
            Some(error) if debt.failures.get() > before => result.and(Err(error)),
            _ => {
                if result.is_ok() {
                    debt.durable.set(changed.max(debt.durable.get()));
                }
                result
            }
        }
    }

    fn flush_here(&self) -> impl Future<Output = Result<(), IoError>> + use<> {
        Self::flush_counted(Rc::clone(&self.inner), Rc::clone(&self.debt))
    }

    /// Counts a change until it ends. A durable change may flush the store; then its error is that of a flush.
    fn counted<'a>(&'a self, change: IoFuture<'a, ()>, durability: Durability) -> IoFuture<'a, ()> {
        let under_way = self.debt.begin_change();
        Box::pin(async move {
            let result = change.await;
            let is_stores = |error: IoError| matches!(error, IoError::Os { .. }) && !error.is_no_space();
            if durability == Durability::Durable && result.is_err_and(is_stores) {
                self.debt.note(result);
            }
            drop(under_way);
            result
        })
    }
}

impl Debt {
    fn begin_change(&self) -> Changing<'_> {
        self.changing.set(self.changing.get() + 1);
        Changing(self)
    }

    fn may_lose(&self) -> bool {
        self.changing.get() > 0 || self.changed.get() > self.durable.get()
    }

    fn note(&self, result: Result<(), IoError>) {
        if let Err(error) = result
            && self.may_lose()
        {
            self.failures.set(self.failures.get() + 1);
            self.error.set(Some(error));
        }
    }

    fn owed(&self) -> Option<IoError> {
        self.error.get().filter(|_| self.failures.get() > self.told.get())
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.changing.set(self.0.changing.get() - 1);
        self.0.changed.set(self.0.changed.get() + 1);
    }
}

impl UnderWay<'_> {
    async fn end(mut self) -> Result<(), IoError> {
        let result = match &mut self.flush {
            Some(flush) => flush.as_mut().await,
            None => Ok(()),
        };
        self.flush = None;
        result
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.debt.abandoned.borrow_mut().extend(self.flush.take());
    }
}

impl BlockDevice for FlushDebt {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.inner.read(offset, buffer)
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        let durability = change.durability();
        self.counted(self.inner.change(change), durability)
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let result = self.flush_here().await;
            let owed = self.debt.owed();
            self.debt.told.set(self.debt.failures.get());
            owed.map_or(result, |error| result.and(Err(error)))
        })
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.inner.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.inner.allocation(range)
    }

    fn own_allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.inner.own_allocation(range)
    }

    fn plain_file(&self) -> Option<PlainFile> {
        self.inner.plain_file()
    }

    fn clone_range(&self, from: &PlainFile, range: ByteRange) -> IoFuture<'_, ()> {
        self.counted(self.inner.clone_range(from, range), Durability::Volatile)
    }

    fn growth(&self) -> Option<&dyn Growth> {
        self.inner.growth()
    }
}

impl BlockDevice for Ours {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.0.read(offset, buffer)
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        self.0.change(change)
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            if let Some(error) = self.0.debt.owed() {
                return Err(error);
            }
            self.0.flush_here().await
        })
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.0.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.0.allocation(range)
    }

    fn own_allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.0.own_allocation(range)
    }

    fn plain_file(&self) -> Option<PlainFile> {
        self.0.plain_file()
    }

    fn clone_range(&self, from: &PlainFile, range: ByteRange) -> IoFuture<'_, ()> {
        self.0.clone_range(from, range)
    }

    fn growth(&self) -> Option<&dyn Growth> {
        self.0.growth()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use futures_channel::oneshot;
    use futures_util::FutureExt as _;
    use rustix::io::Errno;

    use super::*;
    use crate::MemoryStore;

    const LOST: IoError = IoError::Os { operation: "flush", errno: Errno::IO };

    struct Slow {
        inner: MemoryStore,
        ends: RefCell<VecDeque<oneshot::Receiver<Result<(), IoError>>>>,
    }

    impl Slow {
        fn new() -> Rc<Self> {
            Rc::new(Self { inner: MemoryStore::new(16 << 10), ends: RefCell::default() })
        }

        fn next_flush(&self) -> oneshot::Sender<Result<(), IoError>> {
            let (end, ended) = oneshot::channel();
            self.ends.borrow_mut().push_back(ended);
            end
        }
    }

    impl BlockDevice for Slow {
        fn geometry(&self) -> Geometry {
            self.inner.geometry()
        }

        fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
            self.inner.read(offset, buffer)
        }

        fn change(&self, change: Change) -> IoFuture<'_, ()> {
            self.inner.change(change)
        }

        fn flush(&self) -> IoFuture<'_, ()> {
            let end = self.ends.borrow_mut().pop_front();
            Box::pin(async move { end.expect("a flush that was expected").await.expect("it ends") })
        }

        fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
            self.inner.allocation(range)
        }
    }

    /// An earlier daemon was killed, and its writes were never flushed.
    #[test]
    fn flushes_beside_one_that_fails_mean_nothing_although_nothing_was_written_here_yet() {
        let store = Slow::new();
        let debt = FlushDebt::new(Rc::clone(&store) as Rc<dyn BlockDevice>);
        let (first_end, second_end) = (store.next_flush(), store.next_flush());
        let (mut first, mut second) = (debt.flush(), debt.flush());
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        first_end.send(Err(LOST)).expect("it is waited for");
        assert_eq!(first.now_or_never(), Some(Err(LOST)));
        second_end.send(Ok(())).expect("it is waited for");
        assert_eq!(second.now_or_never(), Some(Err(LOST)));
        // This failure has lost nothing: all is durable.
        for (end, result) in [(Ok(()), Ok(())), (Err(LOST), Err(LOST)), (Ok(()), Ok(()))] {
            store.next_flush().send(end).expect("it is waited for");
            assert_eq!(debt.flush().now_or_never(), Some(result));
        }
        assert_eq!(debt.debt.failures.get(), 1);
    }
}
