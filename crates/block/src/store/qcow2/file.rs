//! One file of a chain on the lane's thread: I/O through the lane's engine, and the order in which it becomes durable.
//!
//! ```text
//!   data of guests ──────────────► write ───────────────────────────────┐
//!   imago's tables ─► write_table ─► barrier: sync, if anything was ────►├─► engine
//!                        │           written since the last one         │
//!                        └─ first-level table? first all other tables ──┘
//! ```
//!
//! imago writes tables in an order that keeps the image valid when the process is killed, with one exception. It does not sync
//! between them. This file corrects both, because all its writes pass here:
//!
//! - A table is written only after all earlier writes are durable. So refcounts are on the disk before the clusters that they
//!   count, and data before its entry, even after a power cut.
//! - All cached tables are written before an entry of the first-level table, or a header that moves it. Otherwise a new table
//!   would be in use before its refcount is written.
//! - The header and the first-level table are made durable at once: the table that they pointed to before may be reused
//!   for a guest's data.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::{Rc, Weak};

use futures_util::lock::Mutex;
use rustix::io::Errno;

use super::header::{L1_ENTRIES, L1_OFFSET, MAGIC, SIZE, V3_LENGTH};
use super::mapping::Tables;
use crate::buffer::Buffer;
use crate::device::{ALIGNMENT, BlockDevice, ByteRange, Durability, Extent, IoFuture};
use crate::engine::{AllocateMode, Engine};
use crate::error::IoError;
use crate::store::file::FileStore;
use crate::store::image::Image;

/// Writes that begin below this many bytes are of the header.
const HEADER_LENGTH: u64 = V3_LENGTH as u64;

pub(super) struct LaneFile {
    kind: Kind,
    engine: Rc<dyn Engine>,
}

enum Kind {
    /// An image below the top, or a read-only top: it does not change.
    Fixed(FileStore),
    /// A raw image, whose holes are known.
    Raw(FileStore),
    /// The writable top of a chain.
    Growing(Growing),
}

struct Growing {
    image: Image,
    /// The end of the file: reads beyond it yield zeroes. A multiple of direct I/O's alignment.
    end: Cell<u64>,
    completed: Cell<u64>,
    durable: Cell<u64>,
    /// Held during a sync, so that other waiters need not sync.
    syncing: Mutex<()>,
    /// Bytes of a cluster, which are more than the alignment that direct I/O requires of writes.
    cluster_size: u64,
    l1: RefCell<Range<u64>>,
    size_to_say: Cell<Option<u64>>,
    /// The tables, which are written before the file is synced; no tables until the image is open.
    tables: RefCell<Weak<Tables>>,
    /// Cleared if the file system cannot free space.
    gives_back: Cell<bool>,
}

impl LaneFile {
    pub(super) fn fixed(image: Image, engine: &Rc<dyn Engine>) -> Self {
        Self { kind: Kind::Fixed(FileStore::new(image, Rc::clone(engine))), engine: Rc::clone(engine) }
    }

    pub(super) fn raw(image: Image, engine: &Rc<dyn Engine>) -> Self {
        Self { kind: Kind::Raw(FileStore::new(image, Rc::clone(engine))), engine: Rc::clone(engine) }
    }

    /// Makes a writable file, with clusters of `cluster_size` bytes and the first-level table at `l1`.
    pub(super) fn growing(image: Image, cluster_size: u64, l1: Range<u64>, engine: &Rc<dyn Engine>) -> Self {
        let growing = Growing {
            end: Cell::new(image.size()),
            completed: Cell::new(0),
            durable: Cell::new(0),
            syncing: Mutex::new(()),
            cluster_size,
            l1: RefCell::new(l1),
            size_to_say: Cell::new(None),
            tables: RefCell::default(),
            gives_back: Cell::new(image.gives_space_back()),
            image,
        };
        Self { kind: Kind::Growing(growing), engine: Rc::clone(engine) }
    }

    pub(super) fn set_tables(&self, tables: &Rc<Tables>) {
        if let Kind::Growing(growing) = &self.kind {
            *growing.tables.borrow_mut() = Rc::downgrade(tables);
        }
    }

    pub(super) fn set_size_to_say(&self, size: u64) {
        if let Kind::Growing(growing) = &self.kind {
            growing.size_to_say.set(Some(size));
        }
    }

    pub(super) fn image(&self) -> &Image {
        match &self.kind {
            Kind::Fixed(store) | Kind::Raw(store) => store.image(),
            Kind::Growing(growing) => &growing.image,
        }
    }

    pub(super) fn end(&self) -> u64 {
        match &self.kind {
            Kind::Fixed(store) | Kind::Raw(store) => store.image().size(),
            Kind::Growing(growing) => growing.end.get(),
        }
    }

    pub(super) fn alignment(&self) -> u32 {
        match &self.kind {
            Kind::Fixed(_) | Kind::Raw(_) => 1,
            Kind::Growing(growing) => growing.image.io_alignment(),
        }
    }

    /// Fills `buffer` from any offset on; beyond the end of the file it is zero.
    pub(super) async fn read(&self, offset: u64, mut buffer: Buffer) -> Result<Buffer, IoError> {
        let length = buffer.len();
        let available = self.end().saturating_sub(offset).min(length as u64);
        // `end` is at least this, so it does not overflow.
        let unit = self.read_alignment();
        let is_whole = available == length as u64
            && offset.is_multiple_of(unit)
            && (available.is_multiple_of(unit) || offset + available == self.end());
        if is_whole && buffer.is_aligned_to(self.image().memory_alignment()) {
            return self.read_whole(offset, buffer).await;
        }
        if available == 0 {
            buffer.fill_from(&vec![0; length]);
            return Ok(buffer);
        }
        let start = offset - offset % unit;
        let stop = (offset + available).next_multiple_of(unit).min(self.end());
        let around = self.engine.buffers().take((stop - start) as usize);
        let around = self.read_whole(start, around).await?;
        let target = buffer.as_mut_slice().ok_or(IoError::os("read", Errno::INVAL))?;
        let (there, beyond) = target.split_at_mut(available as usize);
        let skipped = (offset - start) as usize;
        there.copy_from_slice(&around.as_slice()[skipped..skipped + there.len()]);
        beyond.fill(0);
        Ok(buffer)
    }

    /// Writes a guest's data; pads a rest that direct I/O cannot write with zeroes. `offset` is a multiple of the alignment.
    pub(super) async fn write(
        &self,
        offset: u64,
        mut data: Buffer,
        durability: Durability,
    ) -> Result<(), IoError> {
        let growing = self.written()?;
        let whole = data.len().next_multiple_of(growing.image.io_alignment() as usize);
        if whole != data.len() || !data.is_aligned_to(growing.image.memory_alignment()) {
            let mut copy = self.engine.buffers().take(whole);
            // Fresh from the pool, so this is the only handle.
            if let Some(target) = copy.as_mut_slice() {
                let (there, rest) = target.split_at_mut(data.len());
                there.copy_from_slice(data.as_slice());
                rest.fill(0);
            }
            data = copy;
        }
        self.engine.write_at(growing.image.file(), offset, data, durability).await?;
        growing.changed(offset + whole as u64);
        Ok(())
    }

    /// Writes a part of a table, after everything that must be durable before. Fails with EIO as well for a table that overlaps
    /// the header or the first-level table.
    pub(super) async fn write_table(&self, offset: u64, mut data: Buffer) -> Result<(), IoError> {
        let growing = self.written()?;
        growing.check_place(offset, &data)?;
        let moved_l1 = if offset == 0 { growing.adjust_header(&mut data) } else { None };
        let is_l1 = growing.l1.borrow().contains(&offset);
        if is_l1 || moved_l1.is_some() {
            let tables = growing.tables.borrow().upgrade();
            if let Some(tables) = tables {
                tables.write_cached().await?;
            }
        }
        self.barrier().await?;
        self.write(offset, data, Durability::Volatile).await?;
        if is_l1 || offset < HEADER_LENGTH {
            self.barrier().await?;
        }
        if let Some(l1) = moved_l1 {
            growing.l1.replace(l1);
        }
        Ok(())
    }

    /// Zeroes a range that no guest reads yet; `false` if only writing zeroes can do it.
    pub(super) async fn zero(&self, offset: u64, length: u64) -> Result<bool, IoError> {
        let growing = self.written()?;
        let length = growing.end.get().saturating_sub(offset).min(length);
        if length == 0 {
            return Ok(true);
        }
        let range = ByteRange::new(offset, length);
        match self.engine.allocate(growing.image.file(), AllocateMode::PunchHole, range).await {
            Ok(()) => {
                growing.changed(0);
                Ok(true)
            }
            Err(IoError::Os { errno: Errno::OPNOTSUPP | Errno::NOSYS, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Zeroes a range and keeps its space; `false` if only writing zeroes can do it.
    pub(super) async fn zero_allocated(&self, offset: u64, length: u64) -> Result<bool, IoError> {
        let growing = self.written()?;
        let range = ByteRange::new(offset, length);
        match self.engine.allocate(growing.image.file(), AllocateMode::ZeroRange, range).await {
            Ok(()) => {
                growing.changed(0);
                Ok(true)
            }
            Err(IoError::Os { errno: Errno::OPNOTSUPP | Errno::NOSYS, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn give_back(&self, offset: u64, length: u64) -> bool {
        let Kind::Growing(growing) = &self.kind else { return false };
        if !growing.gives_back.get() {
            return false;
        }
        match self.zero(offset, length).await {
            Ok(true) => true,
            done => {
                tracing::debug!(path = %growing.image.path().display(), ?done, "space is not given back");
                growing.gives_back.set(false);
                false
            }
        }
    }

    /// Makes durable all changes that had completed when this was called.
    pub(super) async fn sync(&self) -> Result<(), IoError> {
        let Kind::Growing(growing) = &self.kind else { return Ok(()) };
        let completed = growing.completed.get();
        self.engine.sync(growing.image.file()).await?;
        growing.durable.set(growing.durable.get().max(completed));
        Ok(())
    }

    /// Returns data and holes of a range, if they say more than the tables do.
    pub(super) fn holes(&self, range: ByteRange) -> Option<IoFuture<'_, Vec<Extent>>> {
        match &self.kind {
            Kind::Raw(store) => Some(store.allocation(range)),
            Kind::Fixed(_) | Kind::Growing(_) => None,
        }
    }

    /// Like [`LaneFile::sync`], but only if something is not durable; one sync serves all waiters.
    async fn barrier(&self) -> Result<(), IoError> {
        let growing = self.written()?;
        let completed = growing.completed.get();
        if growing.durable.get() >= completed {
            return Ok(());
        }
        let _turn = growing.syncing.lock().await;
        if growing.durable.get() >= completed {
            return Ok(());
        }
        self.sync().await
    }

    fn read_alignment(&self) -> u64 {
        match &self.kind {
            Kind::Fixed(_) | Kind::Raw(_) => ALIGNMENT.into(),
            Kind::Growing(growing) => growing.image.io_alignment().into(),
        }
    }

    fn read_whole(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        match &self.kind {
            Kind::Fixed(store) | Kind::Raw(store) => store.read(offset, buffer),
            Kind::Growing(growing) => self.engine.read_at(growing.image.file(), offset, buffer),
        }
    }

    fn written(&self) -> Result<&Growing, IoError> {
        match &self.kind {
            Kind::Fixed(_) | Kind::Raw(_) => Err(IoError::ReadOnly),
            Kind::Growing(growing) => Ok(growing),
        }
    }
}

impl Growing {
    /// Verifies that a write to the place of the header or the first-level table is meant for these.
    ///
    /// A damaged image can give their clusters to another table. That table must not be mistaken for them: all cached tables are
    /// written before them, and this one would wait for itself. Other tables are written as whole clusters, the first-level table
    /// by parts, and the header begins as headers do.
    fn check_place(&self, offset: u64, data: &Buffer) -> Result<(), IoError> {
        let is_whole = data.len() as u64 >= self.cluster_size;
        let is_header = offset == 0 && data.as_slice().starts_with(&MAGIC);
        if is_whole && !is_header && (offset == 0 || self.l1.borrow().contains(&offset)) {
            let path = self.image.path().display();
            tracing::warn!(%path, offset, "two tables of the image overlap: run `qemu-img check`");
            return Err(IoError::os("write tables", Errno::IO));
        }
        Ok(())
    }

    /// Corrects the size in a header that is to be written; returns the first-level table's place, if the header moves it.
    fn adjust_header(&self, header: &mut Buffer) -> Option<Range<u64>> {
        let bytes = header.as_mut_slice()?;
        if let (Some(size), Some(field)) = (self.size_to_say.get(), bytes.get_mut(SIZE)) {
            field.copy_from_slice(&size.to_be_bytes());
        }
        let (entries, start) = (bytes.get(L1_ENTRIES)?, bytes.get(L1_OFFSET)?);
        let number = |bytes: &[u8]| bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let (entries, start) = (number(entries), number(start));
        let l1 = start..start.saturating_add(entries * 8).next_multiple_of(self.cluster_size);
        (*self.l1.borrow() != l1).then_some(l1)
    }

    fn changed(&self, end: u64) {
        self.completed.set(self.completed.get() + 1);
        self.end.set(self.end.get().max(end));
    }
}

impl Drop for LaneFile {
    fn drop(&mut self) {
        if let Kind::Growing(growing) = &self.kind {
            self.engine.release(growing.image.file());
        }
    }
}
