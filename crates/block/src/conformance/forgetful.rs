//! A store that fails a flush and drops what was not durable, like a disk behind a failing cache; and a check of
//! the devices above it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use rustix::io::Errno;

use crate::buffer::Buffer;
use crate::change::Change;
use crate::device::{BlockDevice, ByteRange, Durability, Extent, Geometry, IoFuture};
use crate::error::IoError;
use crate::store::MemoryStore;

const LOST: IoError = IoError::Os { operation: "flush", errno: Errno::IO };

/// A store in memory. A flush that fails loses what was not durable; a later flush does not bring it back.
pub struct Forgetful {
    seen: MemoryStore,
    durable: MemoryStore,
    changed: RefCell<Vec<ByteRange>>,
    failing: Cell<u32>,
}

impl Forgetful {
    /// Makes a store of `size` zero bytes.
    pub fn new(size: u64) -> Rc<Self> {
        Rc::new(Self {
            seen: MemoryStore::new(size),
            durable: MemoryStore::new(size),
            changed: RefCell::default(),
            failing: Cell::new(0),
        })
    }

    /// Makes the next `count` flushes fail.
    pub fn fail_flushes(&self, count: u32) {
        self.failing.set(count);
    }

    /// Returns the content that a power cut leaves.
    pub async fn durable_content(&self) -> Vec<u8> {
        let size = self.durable.geometry().size as usize;
        let read = self.durable.read(0, Buffer::zeroed(size)).await;
        read.map(|buffer| buffer.as_slice().to_vec()).unwrap_or_default()
    }

    async fn copy(from: &MemoryStore, to: &MemoryStore, ranges: Vec<ByteRange>) -> Result<(), IoError> {
        for range in ranges {
            let data = from.read(range.offset, Buffer::zeroed(range.length as usize)).await?;
            to.write(range.offset, data, Durability::Volatile).await?;
        }
        Ok(())
    }

    async fn changed(
        &self,
        range: ByteRange,
        durability: Durability,
        change: IoFuture<'_, ()>,
    ) -> Result<(), IoError> {
        change.await?;
        match durability {
            Durability::Durable => Self::copy(&self.seen, &self.durable, vec![range]).await,
            Durability::Volatile => {
                self.changed.borrow_mut().push(range);
                Ok(())
            }
        }
    }
}

impl BlockDevice for Forgetful {
    fn geometry(&self) -> Geometry {
        self.seen.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        self.seen.read(offset, buffer)
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        let (range, durability) = (change.range(), change.durability());
        Box::pin(self.changed(range, durability, self.seen.change(change)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let changed = std::mem::take(&mut *self.changed.borrow_mut());
            if self.failing.get() > 0 {
                self.failing.set(self.failing.get() - 1);
                // Reads see the former content as well.
                Self::copy(&self.durable, &self.seen, changed).await?;
                return Err(LOST);
            }
            Self::copy(&self.seen, &self.durable, changed).await
        })
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.seen.allocation(range)
    }
}

/// Checks that a device over a store reports a failed flush to its writer, once, and never reports lost data as durable.
/// `over` makes the device.
///
/// # Panics
/// If the device does not.
pub async fn check_failed_flushes(name: &str, over: impl Fn(Rc<dyn BlockDevice>) -> Rc<dyn BlockDevice>) {
    let block = |byte| Buffer::copy_of(&[byte; 4096]);
    let store = Forgetful::new(16 << 10);
    let device = over(Rc::clone(&store) as Rc<dyn BlockDevice>);
    let write = |offset, byte| device.write(offset, block(byte), Durability::Volatile);
    assert_eq!(write(0, 1).await, Ok(()), "{name}");
    assert_eq!(device.flush().await, Ok(()), "{name}");
    assert_eq!(write(4096, 2).await, Ok(()), "{name}");
    store.fail_flushes(1);
    assert_eq!(device.flush().await, Err(LOST), "{name}: a flush that fails is told");
    assert_eq!(write(8192, 3).await, Ok(()), "{name}");
    assert_eq!(device.flush().await, Ok(()), "{name}: it is told once");
    let content = store.durable_content().await;
    assert_eq!([content[0], content[4096], content[8192]], [1, 0, 3], "{name}: what was lost is not there");
}
