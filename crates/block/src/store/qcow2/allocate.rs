//! Requests that change the tables of an image: writes to clusters that are not its own yet, discards, zeroes.
//!
//! ```text
//!   write:    own cluster? ─────────────────────────────► write
//!             still zero, or written whole ────────────► prepare ─► write ─► commit
//!             partly written over data below, shared or
//!             compressed: read the cluster, merge, whole ► prepare ─► write ─► commit
//!   discard:  free the space in the file ─► mark as zero           only whole clusters; the edges are written
//! ```
//!
//! Each request here is a task that holds an exclusive claim on whole clusters.
//!
//! **N.B.** One cluster is prepared at a time. If several were, imago could place a new refcount block into a cluster freed
//! before, and write it in an order that a crash would expose.

use std::rc::Rc;

use futures_util::lock::MutexGuard;
use rustix::io::Errno;

use super::header::bytes_per_l2;
use super::mapping::{Piece, Place, to_ours};
use super::storage::{discard_to_backing, discard_to_zero};
use super::store::Shared;
use crate::buffer::Buffer;
use crate::device::{ByteRange, Durability};
use crate::error::IoError;
use crate::range_lock::Claim;

/// Concurrent requests that may change second-level tables. Requests on one table wait for each other anyway. A request keeps its
/// table in memory until it ends, and imago fails when all of its 128 tables are in use.
pub(super) const SLOTS: usize = 16;

/// Zeroes written at a time if only writing can zero, as in the raw store.
const ZERO_PIECE: u64 = 256 << 10;

impl Shared {
    pub(super) async fn write_allocating(&self, range: ByteRange, data: &Buffer) -> Result<(), IoError> {
        let _claimed = self.claims.claim(self.clusters_around(range), Claim::Exclusive).await;
        self.write_claimed(range, data).await
    }

    pub(super) async fn unmap(&self, range: ByteRange) -> Result<(), IoError> {
        let _claimed = self.claims.claim(self.clusters_around(range), Claim::Exclusive).await;
        let mut position = range.offset;
        while position < range.end() {
            let piece = self.tables.piece(ByteRange::new(position, range.end() - position)).await?;
            if matches!(piece.place, Place::Zero) {
                position = piece.range.end();
                continue;
            }
            // Pieces of images below may begin and end within a cluster of the top.
            let touched = self.clusters_around(piece.range);
            let (start, end) = (touched.offset.max(range.offset), touched.end().min(range.end()));
            let whole = self.clusters_within(ByteRange::new(start, end - start));
            self.write_zeroes_claimed(ByteRange::new(start, whole.offset - start)).await?;
            self.discard_clusters(&piece, whole).await?;
            self.write_zeroes_claimed(ByteRange::new(whole.end(), end - whole.end())).await?;
            position = end;
        }
        Ok(())
    }

    pub(super) async fn zero_allocated(&self, range: ByteRange) -> Result<(), IoError> {
        let _claimed = self.claims.claim(self.clusters_around(range), Claim::Exclusive).await;
        let mut position = range.offset;
        while position < range.end() {
            let piece = self.tables.piece(ByteRange::new(position, range.end() - position)).await?;
            let end = self.end_of_part(&piece, range);
            let is_made = match piece.place {
                Place::Own { offset } => self.tables.top().zero_allocated(offset, end - position).await?,
                _ => false,
            };
            if !is_made {
                self.write_zeroes_claimed(ByteRange::new(position, end - position)).await?;
            }
            position = end;
        }
        Ok(())
    }

    async fn write_zeroes_claimed(&self, range: ByteRange) -> Result<(), IoError> {
        let zeroes = Buffer::zeroed(range.length.min(ZERO_PIECE) as usize);
        let mut position = range.offset;
        while position < range.end() {
            let length = ZERO_PIECE.min(range.end() - position);
            let piece = zeroes.slice(0, length as usize);
            self.write_claimed(ByteRange::new(position, length), &piece).await?;
            position += length;
        }
        Ok(())
    }

    pub(super) async fn write_claimed(&self, range: ByteRange, data: &Buffer) -> Result<(), IoError> {
        let mut position = range.offset;
        while position < range.end() {
            let piece = self.tables.piece(ByteRange::new(position, range.end() - position)).await?;
            let end = self.end_of_part(&piece, range);
            let part = data.slice((position - range.offset) as usize, (end - position) as usize);
            match piece.place {
                Place::Own { offset } => self.tables.top().write(offset, part, Durability::Volatile).await?,
                place => self.write_new_cluster(position, part, &place).await?,
            }
            position = end;
        }
        Ok(())
    }

    /// Returns where the present step of a request for `range` ends: at the end of the top's own clusters, or
    /// of one other cluster.
    fn end_of_part(&self, piece: &Piece, range: ByteRange) -> u64 {
        match piece.place {
            Place::Own { .. } => piece.range.end(),
            _ => self.cluster_at(piece.range.offset).end().min(range.end()),
        }
    }

    /// Writes a part of a cluster, now at `place`, into a newly allocated one.
    async fn write_new_cluster(&self, position: u64, data: Buffer, place: &Place) -> Result<(), IoError> {
        let cluster = self.cluster_at(position);
        let (position, data) = match data.len() as u64 == cluster.length {
            true => (position, data),
            false => self.merged(cluster, position, data).await?,
        };
        let _slot = self.slot(cluster.offset).await;
        self.is_dirty.set(true);
        let access = self.tables.access();
        let length = data.len() as u64;
        let mut has_freed = self.has_freed.lock().await;
        self.settle_freed(&mut has_freed).await?;
        let prepared = access.prepare_data_mapping(position, length, true).await;
        drop(has_freed);
        let prepared = prepared.map_err(|error| to_ours("allocate", &error))?;
        if prepared.length() < length {
            return Err(IoError::os("allocate", Errno::IO));
        }
        self.tables.top().write(prepared.offset(), data, Durability::Volatile).await?;
        let mut has_freed = self.has_freed.lock().await;
        let committed = access.commit_data_mapping(prepared).await;
        *has_freed |= self.frees(place);
        // A concurrent flush has not seen it.
        self.is_dirty.set(true);
        committed.map_err(|error| to_ours("allocate", &error))
    }

    /// Returns the content of a whole cluster with `data` merged in; only `data` if the cluster was zero.
    async fn merged(
        &self,
        cluster: ByteRange,
        position: u64,
        data: Buffer,
    ) -> Result<(u64, Buffer), IoError> {
        let pieces = self.tables.pieces(cluster).await?;
        if pieces.iter().all(|piece| matches!(piece.place, Place::Zero)) {
            return Ok((position, data));
        }
        let buffer = self.engine.buffers().take(cluster.length as usize);
        let mut whole = self.read_pieces(&pieces, cluster.offset, buffer).await?;
        let target = whole.as_mut_slice().ok_or(IoError::os("write", Errno::INVAL))?;
        let from = (position - cluster.offset) as usize;
        target[from..from + data.len()].copy_from_slice(data.as_slice());
        Ok((cluster.offset, whole))
    }

    /// Zeroes whole clusters of a piece.
    ///
    /// The top's own clusters free their space in the file system, but stay allocated for later writes. So no refcount changes,
    /// and no other data can be placed where the tables in the file still point. If that is impossible, the clusters are freed.
    async fn discard_clusters(&self, piece: &Piece, clusters: ByteRange) -> Result<(), IoError> {
        let mut is_kept = false;
        if let Place::Own { offset } = piece.place
            && self.has_zero_flags
        {
            let place = offset + clusters.offset - piece.range.offset;
            is_kept = self.tables.top().give_back(place, clusters.length).await;
        }
        let mut position = clusters.offset;
        while position < clusters.end() {
            let rest = ByteRange::new(position, clusters.end() - position);
            let done = match is_kept {
                true => self.keep_as_zero(rest).await,
                false => self.free(rest, &piece.place).await,
            };
            match done {
                Ok(end) if end > position => position = end,
                Ok(_) | Err(IoError::Os { errno: Errno::OPNOTSUPP, .. }) => {
                    return self.write_zeroes_claimed(rest).await;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn keep_as_zero(&self, clusters: ByteRange) -> Result<u64, IoError> {
        let _slot = self.slot(clusters.offset).await;
        self.is_dirty.set(true);
        let done = self.tables.keep_as_zero(clusters).await;
        self.is_dirty.set(true);
        done
    }

    async fn free(&self, clusters: ByteRange, place: &Place) -> Result<u64, IoError> {
        let _slot = self.slot(clusters.offset).await;
        let mut has_freed = self.has_freed.lock().await;
        self.is_dirty.set(true);
        let access = self.tables.access();
        let mut done = discard_to_zero(access, clusters).await;
        if !self.has_zero_flags && !self.has_backing {
            // An unallocated cluster is zero as well.
            done = discard_to_backing(access, clusters).await;
        }
        *has_freed |= self.frees(place);
        self.is_dirty.set(true);
        done
    }

    fn frees(&self, place: &Place) -> bool {
        match place {
            Place::Own { .. } | Place::Packed => true,
            Place::Shared { file, .. } => Rc::ptr_eq(file, self.tables.top()),
            Place::Zero => false,
        }
    }

    /// Before an allocation, writes the tables so that freed clusters are unused in the file as well.
    ///
    /// **N.B.** Otherwise, after a power cut, old entries could lead to the data that was written next.
    pub(super) async fn settle_freed(&self, has_freed: &mut bool) -> Result<(), IoError> {
        if *has_freed {
            self.tables.write_cached().await?;
            self.tables.top().sync().await?;
            *has_freed = false;
        }
        Ok(())
    }

    /// Waits for the turn to change the second-level table that describes a byte of the disk.
    async fn slot(&self, position: u64) -> MutexGuard<'_, ()> {
        let table = position / bytes_per_l2(self.cluster_size.trailing_zeros());
        self.slots[(table % SLOTS as u64) as usize].lock().await
    }

    fn cluster_at(&self, position: u64) -> ByteRange {
        let start = position - position % self.cluster_size;
        ByteRange::new(start, self.cluster_size.min(self.disk_size.get() - start))
    }

    pub(super) fn clusters_around(&self, range: ByteRange) -> ByteRange {
        let start = range.offset - range.offset % self.cluster_size;
        ByteRange::new(start, range.end().next_multiple_of(self.cluster_size) - start)
    }

    /// Returns the whole clusters within a range, cut at the end of the disk; an empty range at its start if there are none.
    fn clusters_within(&self, range: ByteRange) -> ByteRange {
        let start = range.offset.next_multiple_of(self.cluster_size);
        let end = match range.end() == self.disk_size.get() {
            true => range.end(),
            false => range.end() - range.end() % self.cluster_size,
        };
        match start < end {
            true => ByteRange::new(start, end - start),
            false => ByteRange::new(range.offset, 0),
        }
    }
}
