//! A volume in a qcow2 image, on the lane's thread.
//!
//! ```text
//!   request ─► claim ─► tables in memory, and all in place? ─yes─► engine, directly into or out of the file
//!                 │                              └─no─► a task of its own:
//!                 │                                     load tables │ allocate, write, commit │ discard
//!                 └─ shared for reads and for writes in place; exclusive, by whole clusters, for the rest
//! ```
//!
//! imago keeps the tables; guests' data bypasses it. It requires that no I/O is in flight to a freed cluster:
//! the claims ensure that.
//!
//! **N.B.** A change is acknowledged only when the tables that lead to it are in the file. So an acknowledged change survives the
//! process, though not a power cut without a flush.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;

use futures_util::FutureExt;
use futures_util::future::try_join_all;
use futures_util::lock::Mutex;
use rustix::io::Errno;

use super::allocate::SLOTS;
use super::extents;
use super::finish::{Finish, as_task, finish};
use super::image::Qcow2Image;
use super::mapping::{Piece, Place, Tables};
use crate::buffer::Buffer;
use crate::change::Change;
use crate::device::{ALIGNMENT, BlockDevice, ByteRange, Durability, Extent, Geometry, IoFuture, ZeroMode};
use crate::engine::Engine;
use crate::error::IoError;
use crate::executor::Handle;
use crate::growth::{GrowingGeometry, Growth};
use crate::range_lock::{Claim, RangeLock};
use crate::store::image::Access;

/// A qcow2 image as a device.
pub struct Qcow2Store {
    shared: Rc<Shared>,
    handle: Handle,
}

pub(super) struct Shared {
    pub(super) tables: Rc<Tables>,
    pub(super) engine: Rc<dyn Engine>,
    pub(super) geometry: GrowingGeometry,
    /// Size in bytes of the disk in the image: more than guests see while it grows.
    pub(super) disk_size: Cell<u64>,
    pub(super) cluster_size: u64,
    pub(super) has_backing: bool,
    /// Whether an entry can mark a cluster as zero: from version 3 on.
    pub(super) has_zero_flags: bool,
    pub(super) claims: RangeLock,
    /// Each is held during an allocation or discard in some of the second-level tables.
    pub(super) slots: [Mutex<()>; SLOTS],
    /// Held while clusters are allocated or freed. The value: whether freed clusters may still be referred to by the tables in
    /// the file. Taken after a slot.
    pub(super) has_freed: Mutex<bool>,
    /// Whether tables in memory are newer than those in the file, or will be when requests in flight have ended.
    pub(super) is_dirty: Cell<bool>,
    flushing: Mutex<()>,
    /// Number of the last such round that has begun.
    rounds_begun: Cell<u64>,
    /// Number of the last round that has succeeded.
    round_ended: Cell<u64>,
}

impl Qcow2Store {
    /// Makes a store that serves `image` through `engine`, with tasks of `handle`.
    ///
    /// # Errors
    /// The errors of reading the tables of the chain.
    pub async fn open(image: Qcow2Image, handle: &Handle, engine: &Rc<dyn Engine>) -> Result<Self, IoError> {
        let is_written = image.access() == Access::ReadWrite;
        let disk_size = Cell::new(image.header.size);
        let geometry = GrowingGeometry::new(Geometry {
            size: image.size(),
            alignment: ALIGNMENT,
            read_only: !is_written,
            discards: is_written,
        });
        let (cluster_size, has_backing) = (image.cluster_size(), image.has_backing());
        let has_zero_flags = image.header.version >= 3;
        let tables = Tables::open(image, engine).await?;
        let shared = Shared {
            tables,
            engine: Rc::clone(engine),
            geometry,
            disk_size,
            cluster_size,
            has_backing,
            has_zero_flags,
            claims: RangeLock::new(),
            slots: Default::default(),
            has_freed: Mutex::new(false),
            is_dirty: Cell::new(false),
            flushing: Mutex::new(()),
            rounds_begun: Cell::new(0),
            round_ended: Cell::new(0),
        };
        Ok(Self { shared: Rc::new(shared), handle: handle.clone() })
    }

    fn write_data(&self, offset: u64, data: Buffer, durability: Durability) -> IoFuture<'_, ()> {
        let range = ByteRange::new(offset, data.len() as u64);
        let (shared, handle) = (Rc::clone(&self.shared), self.handle.clone());
        Box::pin(self.finish(async move {
            shared.geometry.check_write(range)?;
            if range.length == 0 {
                return Ok(());
            }
            let claimed = shared.claims.claim(range, Claim::Shared).await;
            if let Some(pieces) = shared.tables.pieces(range).now_or_never()
                && let pieces = pieces?
                && pieces.iter().all(|piece| matches!(piece.place, Place::Own { .. }))
            {
                return shared.write_in_place(&pieces, offset, &data, durability).await;
            }
            drop(claimed);
            let writer = Rc::clone(&shared);
            as_task(&handle, async move { writer.write_allocating(range, &data).await }).await?;
            shared.settle(durability).await
        }))
    }

    fn zero(&self, range: ByteRange, mode: ZeroMode, durability: Durability) -> IoFuture<'_, ()> {
        let (shared, handle) = (Rc::clone(&self.shared), self.handle.clone());
        Box::pin(self.finish(async move {
            shared.geometry.check_write(range)?;
            if range.length == 0 {
                return Ok(());
            }
            let writer = Rc::clone(&shared);
            as_task(&handle, async move {
                match mode {
                    ZeroMode::MayUnmap => writer.unmap(range).await,
                    ZeroMode::KeepAllocated => writer.zero_allocated(range).await,
                }
            })
            .await?;
            shared.settle(durability).await
        }))
    }

    fn finish<T: 'static>(&self, request: impl Future<Output = T> + 'static) -> Finish<T> {
        finish(&self.handle, request)
    }
}

impl BlockDevice for Qcow2Store {
    fn geometry(&self) -> Geometry {
        self.shared.geometry.get()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let range = ByteRange::new(offset, buffer.len() as u64);
        Box::pin(async move {
            let shared = &self.shared;
            shared.geometry.check(range)?;
            let claimed = shared.claims.claim(range, Claim::Shared).await;
            if let Some(pieces) = shared.tables.pieces(range).now_or_never()
                && let pieces = pieces?
                && !pieces.iter().any(|piece| matches!(piece.place, Place::Packed))
            {
                return shared.read_pieces(&pieces, offset, buffer).await;
            }
            let shared = Rc::clone(shared);
            as_task(&self.handle, async move {
                let _claimed = claimed;
                let pieces = shared.tables.pieces(range).await?;
                shared.read_pieces(&pieces, offset, buffer).await
            })
            .await
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        match change {
            Change::Write(offset, data, durability) => self.write_data(offset, data, durability),
            Change::Discard(range) => self.zero(range, ZeroMode::MayUnmap, Durability::Volatile),
            Change::Zero(range, mode, durability) => self.zero(range, mode, durability),
        }
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        let shared = Rc::clone(&self.shared);
        Box::pin(self.finish(async move { shared.flush().await }))
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.shared.geometry.check(range)?;
            let shared = Rc::clone(&self.shared);
            as_task(&self.handle, async move { extents::of_range(&shared.tables, range).await }).await
        })
    }

    fn own_allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.shared.geometry.check(range)?;
            let shared = Rc::clone(&self.shared);
            as_task(&self.handle, async move { extents::of_top(&shared.tables, range).await }).await
        })
    }

    fn growth(&self) -> Option<&dyn Growth> {
        Some(self)
    }
}

impl Growth for Qcow2Store {
    fn capacity(&self) -> IoFuture<'_, Option<u64>> {
        Box::pin(std::future::ready(Ok(Some(self.shared.size_max()))))
    }

    fn prepare(&self, size: u64) -> IoFuture<'_, ()> {
        let (shared, handle) = (Rc::clone(&self.shared), self.handle.clone());
        Box::pin(async move { as_task(&handle, async move { shared.prepare_growth(size).await }).await })
    }

    fn show(&self, size: u64) {
        self.shared.geometry.show(size);
    }

    fn undo(&self) -> IoFuture<'_, ()> {
        let (shared, handle) = (Rc::clone(&self.shared), self.handle.clone());
        Box::pin(async move { as_task(&handle, async move { shared.undo_growth().await }).await })
    }
}

impl Shared {
    pub(super) async fn read_pieces(
        &self,
        pieces: &[Piece],
        start: u64,
        mut buffer: Buffer,
    ) -> Result<Buffer, IoError> {
        if let [piece] = pieces {
            return self.read_piece(piece, buffer).await;
        }
        let parts = pieces.iter().filter(|piece| !matches!(piece.place, Place::Zero)).map(|piece| async {
            let part = self.engine.buffers().take(piece.range.length as usize);
            Ok((piece.range.offset, self.read_piece(piece, part).await?))
        });
        let parts = try_join_all(parts).await?;
        let target = buffer.as_mut_slice().ok_or(IoError::os("read", Errno::INVAL))?;
        for piece in pieces.iter().filter(|piece| matches!(piece.place, Place::Zero)) {
            let from = (piece.range.offset - start) as usize;
            target[from..from + piece.range.length as usize].fill(0);
        }
        for (offset, part) in parts {
            let from = (offset - start) as usize;
            target[from..from + part.len()].copy_from_slice(part.as_slice());
        }
        Ok(buffer)
    }

    async fn read_piece(&self, piece: &Piece, mut buffer: Buffer) -> Result<Buffer, IoError> {
        match &piece.place {
            Place::Own { offset } => self.tables.top().read(*offset, buffer).await,
            Place::Shared { file, offset } => file.read(*offset, buffer).await,
            Place::Packed => self.tables.unpack(piece.range, buffer).await,
            Place::Zero => {
                buffer.as_mut_slice().ok_or(IoError::os("read", Errno::INVAL))?.fill(0);
                Ok(buffer)
            }
        }
    }

    /// Writes pieces that are all in place. The caller holds a claim on them.
    async fn write_in_place(
        &self,
        pieces: &[Piece],
        start: u64,
        data: &Buffer,
        durability: Durability,
    ) -> Result<(), IoError> {
        // Durable data is useless while the entry that leads to it is not durable.
        let (each, after) = match self.tables_are_durable() {
            true => (durability, Durability::Volatile),
            false => (Durability::Volatile, durability),
        };
        let writes = pieces.iter().filter_map(|piece| {
            let Place::Own { offset } = piece.place else { return None };
            let part = data.slice((piece.range.offset - start) as usize, piece.range.length as usize);
            Some(self.tables.top().write(offset, part, each))
        });
        try_join_all(writes).await?;
        self.settle(after).await
    }

    /// Completes a change before its acknowledgement: writes the tables that lead to it into the file. A guest may outlive the
    /// daemon, and so must acknowledged changes. Concurrent callers share the work.
    async fn settle(&self, durability: Durability) -> Result<(), IoError> {
        match durability {
            Durability::Volatile if self.tables_are_durable() => Ok(()),
            Durability::Volatile | Durability::Durable => self.flush().await,
        }
    }

    /// Makes durable all changes that had completed when this was called: first data, then the tables in their order
    /// ([`super::file`]), then a sync.
    pub(super) async fn flush(&self) -> Result<(), IoError> {
        if self.tables_are_durable() {
            return self.tables.top().sync().await;
        }
        let begun = self.rounds_begun.get();
        let _turn = self.flushing.lock().await;
        if self.round_ended.get() > begun {
            // A later round of another request covers this one.
            return Ok(());
        }
        let round = begun.max(self.rounds_begun.get()) + 1;
        self.rounds_begun.set(round);
        // Before the tables are examined: concurrent changes set it again.
        self.is_dirty.set(false);
        let written = async {
            self.tables.write_cached().await?;
            self.tables.top().sync().await
        };
        match written.await {
            Ok(()) => self.round_ended.set(round),
            Err(error) => {
                self.is_dirty.set(true);
                return Err(error);
            }
        }
        Ok(())
    }

    fn tables_are_durable(&self) -> bool {
        !self.is_dirty.get() && self.flushing.try_lock().is_some()
    }
}
