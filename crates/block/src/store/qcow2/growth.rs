//! Growth of the disk in an image.
//!
//! ```text
//!   a first-level table for all of it ─► the size in the header ─► the new part reads as zeroes ─► durable
//! ```
//!
//! There may be data behind the former end: of a longer backing file, the old content of a cluster's rest, a machine state that
//! QEMU keeps there, or remains of an earlier attempt. All of it is covered with zeroes before it becomes visible.

use super::header::{L1_BYTES_MAX, SIZE, bytes_per_l2};
use super::image::TABLE_MEMORY_MAX;
use super::mapping::to_ours;
use super::store::Shared;
use crate::buffer::Buffer;
use crate::device::{ALIGNMENT, ByteRange};
use crate::error::IoError;
use crate::range_lock::Claim;

use imago::format::PreallocateMode;
use rustix::io::Errno;

/// The first-level table of a valid image is much smaller than the memory for tables.
const _: () = assert!(L1_BYTES_MAX < TABLE_MEMORY_MAX / 4);

impl Shared {
    pub(super) fn size_max(&self) -> u64 {
        let entries = L1_BYTES_MAX / 8;
        let bytes = entries.saturating_mul(bytes_per_l2(self.cluster_size.trailing_zeros()));
        bytes.min(i64::MAX as u64) / u64::from(ALIGNMENT) * u64::from(ALIGNMENT)
    }

    /// Makes the disk in the image `size` bytes large; the part that guests do not see is zero.
    pub(super) async fn prepare_growth(&self, size: u64) -> Result<(), IoError> {
        if self.geometry.get().read_only {
            return Err(IoError::ReadOnly);
        }
        if size > self.size_max() {
            return Err(IoError::os("grow", Errno::FBIG));
        }
        self.enlarge(size).await?;
        let shown = self.geometry.size();
        let whole = self.zero_head(shown).await?;
        self.unmap(ByteRange::new(whole, size.saturating_sub(whole))).await?;
        self.flush().await
    }

    /// Restores the size that guests see. Tables that have become longer stay so.
    pub(super) async fn undo_growth(&self) -> Result<(), IoError> {
        if self.geometry.get().read_only {
            return Ok(());
        }
        let _alone = self.has_freed.lock().await;
        self.write_size(self.geometry.size()).await
    }

    async fn enlarge(&self, size: u64) -> Result<(), IoError> {
        let mut has_freed = self.has_freed.lock().await;
        // It allocates clusters for the table, and frees those of the present one.
        self.settle_freed(&mut has_freed).await?;
        self.is_dirty.set(true);
        self.tables.top().set_size_to_say(size);
        let grown = self.tables.access().resize_grow(size, PreallocateMode::None).await;
        *has_freed = true;
        self.is_dirty.set(true);
        grown.map_err(|error| to_ours("grow", &error))?;
        self.disk_size.set(self.disk_size.get().max(size));
        // imago already knows of a larger disk after a growth that was undone.
        self.write_size(size).await
    }

    /// Durably writes this size into the header, even if imago knows of a larger disk.
    ///
    /// **N.B.** The caller holds `has_freed`. Without it imago may write the header at the same time, and its
    /// change would be lost.
    async fn write_size(&self, size: u64) -> Result<(), IoError> {
        self.tables.top().set_size_to_say(size);
        let header = self.first_block().await?;
        if header.as_slice().get(SIZE) == Some(&size.to_be_bytes()) {
            return Ok(());
        }
        self.tables.top().write_table(0, header).await
    }

    async fn first_block(&self) -> Result<Buffer, IoError> {
        let length = self.cluster_size.min(u64::from(ALIGNMENT));
        self.tables.top().read(0, self.engine.buffers().take(length as usize)).await
    }

    /// Zeroes the rest of the block in which the disk ends at `end`; returns the end of that block.
    async fn zero_head(&self, end: u64) -> Result<u64, IoError> {
        let unit = u64::from(ALIGNMENT);
        let block = ByteRange::new(end - end % unit, unit);
        if end == block.offset {
            return Ok(end);
        }
        let _claimed = self.claims.claim(self.clusters_around(block), Claim::Exclusive).await;
        let pieces = self.tables.pieces(block).await?;
        let mut whole =
            self.read_pieces(&pieces, block.offset, self.engine.buffers().take(ALIGNMENT as usize)).await?;
        // Fresh from the pool, so this is the only handle.
        if let Some(bytes) = whole.as_mut_slice() {
            bytes[(end - block.offset) as usize..].fill(0);
        }
        self.write_claimed(block, &whole).await?;
        Ok(block.end())
    }
}
