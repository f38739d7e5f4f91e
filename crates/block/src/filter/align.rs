//! Accepts any byte range over a device that takes whole blocks only.
//!
//! ```text
//!   aligned       ──► shared claim on its range ───────────────────────────────► as it came
//!   not aligned   ──► exclusive claim on its blocks ──► read the edges ──► whole blocks are written
//! ```
//!
//! Without claims, of two writes to different parts of one block one could get lost: each reads the block, changes its part, and
//! writes the other part back as it was. Reads need no claim: they may see writes in flight either way.

use std::rc::Rc;

use futures_channel::oneshot;
use futures_util::future::try_join;

use crate::buffer::{Buffer, BufferPool};
use crate::change::Change;
use crate::device::{
    BlockDevice, ByteRange, Durability, Extent, Geometry, IoFuture, ZeroMode, check_range, check_write,
};
use crate::error::IoError;
use crate::executor::Handle;
use crate::range_lock::{Claim, RangeLock};

/// A device with an alignment of one byte.
pub struct Align {
    shared: Rc<Shared>,
    handle: Handle,
}

/// The claims on the blocks of one volume. All access to these blocks passes through filters of one aligner.
#[derive(Clone)]
pub struct Aligner {
    buffers: BufferPool,
    handle: Handle,
    writes: Rc<RangeLock>,
}

impl Aligner {
    /// Makes an aligner without claims, which assembles blocks in memory of `buffers`.
    ///
    /// A write to parts of blocks runs as a task of `handle`. It continues when its future is dropped: half of it must not land
    /// on top of later writes to the same blocks.
    pub fn new(buffers: BufferPool, handle: Handle) -> Self {
        Self { buffers, handle, writes: Rc::new(RangeLock::new()) }
    }

    /// Puts a filter over `inner`.
    pub fn over(&self, inner: Rc<dyn BlockDevice>) -> Align {
        let alignment = u64::from(inner.geometry().alignment);
        let (buffers, writes) = (self.buffers.clone(), Rc::clone(&self.writes));
        let shared = Shared { inner, alignment, buffers, writes };
        Align { shared: Rc::new(shared), handle: self.handle.clone() }
    }
}

struct Shared {
    inner: Rc<dyn BlockDevice>,
    alignment: u64,
    buffers: BufferPool,
    writes: Rc<RangeLock>,
}

impl Align {
    /// Puts a filter with claims of its own over `inner`; see [`Aligner`].
    pub fn new(inner: Rc<dyn BlockDevice>, buffers: BufferPool, handle: Handle) -> Self {
        Aligner::new(buffers, handle).over(inner)
    }

    fn run_to_the_end(
        &self,
        request: impl Future<Output = Result<(), IoError>> + 'static,
    ) -> IoFuture<'static, ()> {
        let handle = self.handle.clone();
        Box::pin(async move {
            let (sender, receiver) = oneshot::channel();
            handle.spawn(async move {
                let _ = sender.send(request.await);
            });
            receiver.await.map_err(|_| IoError::Closed)?
        })
    }
}

impl BlockDevice for Align {
    fn geometry(&self) -> Geometry {
        self.shared.geometry()
    }

    fn read(&self, offset: u64, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        let range = ByteRange::new(offset, buffer.len() as u64);
        let shared = &self.shared;
        if shared.is_aligned(range) {
            return shared.inner.read(offset, buffer);
        }
        Box::pin(async move {
            check_range(&shared.geometry(), range)?;
            if buffer.is_empty() {
                return Ok(buffer);
            }
            let blocks = shared.blocks_around(range);
            let whole = shared.inner.read(blocks.offset, shared.take(blocks)).await?;
            let start = (offset - blocks.offset) as usize;
            buffer.fill_from(&whole.as_slice()[start..start + buffer.len()]);
            Ok(buffer)
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        let range = change.range();
        if self.shared.is_aligned(range) {
            return Box::pin(async move {
                let _claimed = self.shared.writes.claim(range, Claim::Shared).await;
                self.shared.inner.change(change).await
            });
        }
        let shared = Rc::clone(&self.shared);
        self.run_to_the_end(async move {
            check_write(&shared.geometry(), range)?;
            let _claimed = shared.writes.claim(shared.blocks_around(range), Claim::Exclusive).await;
            match &change {
                Change::Write(_, data, durability) => shared.merge(range, data.as_slice(), *durability).await,
                // Whole blocks are passed on; the edges are written with zeroes.
                Change::Discard(_) | Change::Zero(..) => {
                    let within = shared.blocks_within(range);
                    shared.zero_edges(range, within, change.durability()).await?;
                    shared.inner.change(change.part(within)).await
                }
            }
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        self.shared.inner.flush()
    }

    /// The answer of the device below: of an unaligned range only the edges are written.
    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.shared.inner.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        let shared = &self.shared;
        if shared.is_aligned(range) {
            return shared.inner.allocation(range);
        }
        Box::pin(async move {
            let blocks = shared.checked_blocks_around(range)?;
            Ok(cut(shared.inner.allocation(blocks).await?, range))
        })
    }

    fn own_allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        let shared = &self.shared;
        if shared.is_aligned(range) {
            return shared.inner.own_allocation(range);
        }
        Box::pin(async move {
            let blocks = shared.checked_blocks_around(range)?;
            Ok(cut(shared.inner.own_allocation(blocks).await?, range))
        })
    }
}

impl Shared {
    fn geometry(&self) -> Geometry {
        Geometry { alignment: 1, ..self.inner.geometry() }
    }

    /// Returns whether the device below takes the range as it is, or refuses it for a reason other than alignment.
    fn is_aligned(&self, range: ByteRange) -> bool {
        let end = range.end();
        let ends_well = end.is_multiple_of(self.alignment) || end == self.geometry().size;
        range.offset.is_multiple_of(self.alignment) && ends_well
    }

    fn blocks_around(&self, range: ByteRange) -> ByteRange {
        let start = range.offset - range.offset % self.alignment;
        let end = range.end().next_multiple_of(self.alignment).min(self.geometry().size);
        ByteRange::new(start, if range.length == 0 { 0 } else { end - start })
    }

    /// As [`Self::blocks_around`], for an unchecked range.
    fn checked_blocks_around(&self, range: ByteRange) -> Result<ByteRange, IoError> {
        check_range(&self.geometry(), range)?;
        Ok(self.blocks_around(range))
    }

    fn blocks_within(&self, range: ByteRange) -> ByteRange {
        let start = range.offset.next_multiple_of(self.alignment).min(self.geometry().size);
        let end = if range.end() == self.geometry().size {
            range.end()
        } else {
            range.end() - range.end() % self.alignment
        };
        if end <= start {
            // The start may lie behind the range; an empty range is valid at 0.
            return ByteRange::new(0, 0);
        }
        ByteRange::new(start, end - start)
    }

    fn take(&self, range: ByteRange) -> Buffer {
        // No request is larger than memory, which holds its data.
        self.buffers.take(range.length as usize)
    }

    /// Writes the blocks around `range` with `bytes` in it. The caller holds an exclusive claim on them.
    async fn merge(&self, range: ByteRange, bytes: &[u8], durability: Durability) -> Result<(), IoError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let blocks = self.blocks_around(range);
        let mut whole = self.take(blocks);
        let (first, last) = try_join(self.first_edge(blocks, range), self.last_edge(blocks, range)).await?;
        // Fresh from the pool, so this is the only handle.
        if let Some(target) = whole.as_mut_slice() {
            if let Some(block) = first {
                target[..block.len()].copy_from_slice(block.as_slice());
            }
            if let Some(block) = last {
                let start = target.len() - block.len();
                target[start..].copy_from_slice(block.as_slice());
            }
            let start = (range.offset - blocks.offset) as usize;
            target[start..start + bytes.len()].copy_from_slice(bytes);
        }
        self.inner.write(blocks.offset, whole, durability).await
    }

    async fn first_edge(&self, blocks: ByteRange, range: ByteRange) -> Result<Option<Buffer>, IoError> {
        let first = ByteRange::new(blocks.offset, self.alignment.min(blocks.length));
        if range.offset == first.offset && range.end() >= first.end() {
            return Ok(None);
        }
        self.inner.read(first.offset, self.take(first)).await.map(Some)
    }

    async fn last_edge(&self, blocks: ByteRange, range: ByteRange) -> Result<Option<Buffer>, IoError> {
        let start = (blocks.end() - 1) - (blocks.end() - 1) % self.alignment;
        if start == blocks.offset || range.end() == blocks.end() {
            return Ok(None);
        }
        let last = ByteRange::new(start, blocks.end() - start);
        self.inner.read(last.offset, self.take(last)).await.map(Some)
    }

    /// Zeroes the parts of `range` outside of `within`, its whole blocks.
    async fn zero_edges(
        &self,
        range: ByteRange,
        within: ByteRange,
        durability: Durability,
    ) -> Result<(), IoError> {
        let (before, after) = if within.length == 0 {
            (range, ByteRange::new(range.end(), 0))
        } else {
            let before = ByteRange::new(range.offset, within.offset - range.offset);
            (before, ByteRange::new(within.end(), range.end() - within.end()))
        };
        for edge in [before, after] {
            self.merge(edge, &vec![0; edge.length as usize], durability).await?;
        }
        Ok(())
    }
}

fn cut(mut extents: Vec<Extent>, range: ByteRange) -> Vec<Extent> {
    for extent in &mut extents {
        let (start, end) = (extent.range.offset.max(range.offset), extent.range.end().min(range.end()));
        extent.range = ByteRange::new(start, end.saturating_sub(start));
    }
    extents.retain(|extent| extent.range.length > 0);
    extents
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::Duration;

    use futures_util::future::{Either, join, select};

    use super::*;
    use crate::engine::{self, EngineChoice, EngineDriver};
    use crate::executor::Executor;
    use crate::filter::{Delay, DelaySwitch, Operation, Operations};
    use crate::store::MemoryStore;

    fn over_a_slow_disk<F: Future<Output = ()> + 'static>(
        body: impl FnOnce(Rc<Align>, DelaySwitch, Handle, Rc<MemoryStore>) -> F,
    ) {
        let (driver, engine) = engine::open(EngineChoice::Threads).unwrap();
        let mut executor: Executor<EngineDriver> = Executor::new(driver);
        let handle = executor.handle();
        let memory = Rc::new(MemoryStore::new(1 << 16));
        let (delay, switch) = Delay::new(Rc::clone(&memory) as Rc<dyn BlockDevice>, handle.clone());
        let align = Rc::new(Align::new(Rc::new(delay), engine.buffers().clone(), handle.clone()));
        executor.run(body(align, switch, handle, memory));
    }

    fn bytes(value: u8, length: usize) -> Buffer {
        Buffer::copy_of(&vec![value; length])
    }

    #[test]
    fn writes_to_parts_of_one_block_at_the_same_time_both_survive() {
        over_a_slow_disk(|align, switch, _, _| async move {
            switch
                .set_latency(Operations::of(&[Operation::Read, Operation::Write]), Duration::from_millis(1));
            let writes = join(
                align.write(0, bytes(1, 512), Durability::Volatile),
                align.write(512, bytes(2, 512), Durability::Volatile),
            );
            let (first, second) = writes.await;
            assert_eq!((first, second), (Ok(()), Ok(())));
            let read = align.read(0, Buffer::zeroed(1024)).await.unwrap();
            assert_eq!((read.as_slice()[511], read.as_slice()[512]), (1, 2));
        });
    }

    #[test]
    fn a_whole_block_written_while_a_part_of_it_is_merged_is_not_undone() {
        over_a_slow_disk(|align, switch, handle, _| async move {
            // The whole block arrives when the merge has read its block, and its write takes long.
            switch.set_latency(Operations::of(&[Operation::Write]), Duration::from_millis(10));
            let merged = align.write(100, bytes(1, 10), Durability::Volatile);
            let whole = async {
                handle.sleep(Duration::from_millis(2)).await;
                switch.clear();
                align.write(0, bytes(2, 4096), Durability::Volatile).await
            };
            let (merged, whole) = join(merged, whole).await;
            assert_eq!((merged, whole), (Ok(()), Ok(())));
            let read = align.read(0, Buffer::zeroed(4096)).await.unwrap();
            assert_eq!(
                (read.as_slice()[0], read.as_slice()[4095]),
                (2, 2),
                "bytes that only the whole block has"
            );
        });
    }

    #[test]
    fn a_merge_whose_future_is_dropped_does_not_undo_what_is_written_after_it() {
        over_a_slow_disk(|align, switch, handle, _| async move {
            switch.hang(Operations::of(&[Operation::Write]));
            let merged = align.write(100, bytes(1, 10), Durability::Volatile);
            assert!(matches!(select(merged, handle.sleep(Duration::from_millis(2))).await, Either::Right(_)));
            // Its old neighbours now hang in the disk's queue.
            let done = Rc::new(RefCell::new(false));
            let (seen, task) = (Rc::clone(&done), Rc::clone(&align));
            handle.spawn(async move {
                task.write(0, bytes(2, 4096), Durability::Volatile).await.unwrap();
                *seen.borrow_mut() = true;
            });
            handle.sleep(Duration::from_millis(2)).await;
            assert!(!*done.borrow(), "it waits for what hangs");
            switch.release();
            while !*done.borrow() {
                handle.sleep(Duration::from_millis(1)).await;
            }
            let read = align.read(0, Buffer::zeroed(4096)).await.unwrap();
            assert!(read.as_slice().iter().all(|byte| *byte == 2));
        });
    }

    #[test]
    fn a_discard_gives_whole_blocks_back_and_zeroes_the_rest() {
        over_a_slow_disk(|align, _, _, memory| async move {
            align.write(0, bytes(7, 4 * 4096), Durability::Volatile).await.unwrap();
            align.discard(ByteRange::new(100, 3 * 4096)).await.unwrap();
            assert_eq!(memory.bytes_allocated(), 2 * 4096);
            let read = align.read(0, Buffer::zeroed(4 * 4096)).await.unwrap();
            let expected = |index: usize| if (100..100 + 3 * 4096).contains(&index) { 0 } else { 7 };
            assert!(read.as_slice().iter().enumerate().all(|(index, byte)| *byte == expected(index)));
        });
    }
}
