//! A volume in a raw image: a file or a block device.
//!
//! ```text
//!   0                                             body end     size
//!   ├──────────── the locked description ────────────┼── tail ──┤
//!                 direct I/O if available               a second, buffered description: only if the size is no
//!                                                       multiple of direct I/O's alignment
//! ```

mod growth;

use std::cell::Cell;
use std::os::fd::{AsFd as _, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::image::{Access, Image, Kind};
use crate::buffer::Buffer;
use crate::change::Change;
use crate::clone::{self, PlainFile};
use crate::device::{
    ALIGNMENT, BlockDevice, ByteRange, Durability, Extent, ExtentKind, Geometry, IoFuture, ZeroMode,
    push_extent,
};
use crate::engine::{AllocateMode, Engine, run_blocking};
use crate::error::IoError;
use crate::growth::{GrowingGeometry, Growth};

/// Zeroes written at a time if the file system cannot make them: enough to keep a disk busy, and few enough to share
/// its queue with guests.
const ZERO_PIECE: usize = 256 << 10;

/// Extents described one by one; the rest is reported as data, which is always allowed. Bounds the answer for a badly fragmented
/// image to 1.5 MiB.
const EXTENTS_MAX: usize = 65_536;

/// A raw image as a device.
pub struct FileStore {
    image: Image,
    engine: Rc<dyn Engine>,
    geometry: GrowingGeometry,
    punch_hole: Cell<Ability>,
    zero_range: Cell<Ability>,
}

/// Whether the file system supports a kind of `fallocate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ability {
    Untried,
    Known,
    Missing,
}

impl FileStore {
    /// Makes a store that serves `image` through `engine`.
    pub fn new(image: Image, engine: Rc<dyn Engine>) -> Self {
        let geometry = Geometry {
            size: image.size(),
            alignment: ALIGNMENT,
            read_only: image.access() == Access::ReadOnly,
            discards: image.gives_space_back(),
        };
        // A file was tested when it was opened; a device may free space and still not guarantee zeroes.
        let is_tried = image.kind() == Kind::File && image.gives_space_back();
        let punch_hole = if is_tried { Ability::Known } else { Ability::Untried };
        Self {
            image,
            engine,
            geometry: GrowingGeometry::new(geometry),
            punch_hole: Cell::new(punch_hole),
            zero_range: Cell::new(Ability::Untried),
        }
    }

    /// Returns the image that it serves.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Reads in several calls of the engine: a range with a tail, or into unaligned memory.
    async fn read_in_parts(&self, offset: u64, mut buffer: Buffer) -> Result<Buffer, IoError> {
        let (body, tail) = self.cut(offset, buffer.len());
        let target = buffer.as_mut_slice().ok_or(IoError::os("read", Errno::INVAL))?;
        if body > 0 {
            let part = self.engine.buffers().take(body);
            let part = self.engine.read_at(self.image.file(), offset, part).await?;
            target[..body].copy_from_slice(part.as_slice());
        }
        if let Some(file) = tail {
            let part = self.engine.buffers().take(target.len() - body);
            let part = self.engine.read_at(file, offset + body as u64, part).await?;
            target[body..].copy_from_slice(part.as_slice());
        }
        Ok(buffer)
    }

    async fn write_in_parts(
        &self,
        offset: u64,
        data: &Buffer,
        durability: Durability,
    ) -> Result<(), IoError> {
        let (body, tail) = self.cut(offset, data.len());
        if body > 0 {
            let mut part = data.slice(0, body);
            if !part.is_aligned_to(self.image.memory_alignment()) {
                part = self.engine.buffers().take(body);
                part.fill_from(&data.as_slice()[..body]);
            }
            self.engine.write_at(self.image.file(), offset, part, durability).await?;
        }
        if let Some(file) = tail {
            let part = data.slice(body, data.len() - body);
            self.engine.write_at(file, offset + body as u64, part, durability).await?;
        }
        Ok(())
    }

    fn cut(&self, offset: u64, length: usize) -> (usize, Option<&Arc<OwnedFd>>) {
        let body_end = self.image.body_end(offset + length as u64);
        let in_body = body_end.saturating_sub(offset).min(length as u64) as usize;
        (in_body, self.image.tail().filter(|_| in_body < length))
    }

    fn is_one_part(&self, offset: u64, buffer: &Buffer) -> bool {
        let end = offset + buffer.len() as u64;
        self.image.body_end(end) == end && buffer.is_aligned_to(self.image.memory_alignment())
    }

    async fn zero(&self, range: ByteRange, mode: ZeroMode, durability: Durability) -> Result<(), IoError> {
        self.geometry.check_write(range)?;
        self.zero_checked(range, mode).await?;
        match durability {
            Durability::Volatile => Ok(()),
            Durability::Durable => self.engine.sync(self.image.file()).await,
        }
    }

    async fn zero_checked(&self, range: ByteRange, mode: ZeroMode) -> Result<(), IoError> {
        if range.length == 0 {
            return Ok(());
        }
        let end = self.image.zeroing_end(range.end()).max(range.offset);
        let (body, rest) =
            (ByteRange::new(range.offset, end - range.offset), ByteRange::new(end, range.end() - end));
        if body.length > 0 && !self.zero_by_system(body, mode).await? {
            self.write_zero_pieces(body).await?;
        }
        self.write_zero_pieces(rest).await
    }

    /// Lets the file system or the device zero; `false` if it cannot.
    async fn zero_by_system(&self, range: ByteRange, mode: ZeroMode) -> Result<bool, IoError> {
        Ok(mode == ZeroMode::MayUnmap
            && self.allocate(AllocateMode::PunchHole, &self.punch_hole, range).await?
            || self.allocate(AllocateMode::ZeroRange, &self.zero_range, range).await?)
    }

    async fn allocate(
        &self,
        mode: AllocateMode,
        ability: &Cell<Ability>,
        range: ByteRange,
    ) -> Result<bool, IoError> {
        if ability.get() == Ability::Missing {
            return Ok(false);
        }
        match self.engine.allocate(self.image.file(), mode, range).await {
            Ok(()) => {
                ability.set(Ability::Known);
                Ok(true)
            }
            Err(IoError::Os { errno: Errno::OPNOTSUPP | Errno::NOSYS, .. }) => {
                tracing::debug!(path = %self.image.path().display(), ?mode, "not known to the file system");
                ability.set(Ability::Missing);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    async fn write_zero_pieces(&self, range: ByteRange) -> Result<(), IoError> {
        if range.length == 0 {
            return Ok(());
        }
        let zeroes = Buffer::zeroed(ZERO_PIECE.min(usize::try_from(range.length).unwrap_or(ZERO_PIECE)));
        let mut offset = range.offset;
        while offset < range.end() {
            let length = (zeroes.len() as u64).min(range.end() - offset);
            let piece = zeroes.slice(0, length as usize);
            self.write_in_parts(offset, &piece, Durability::Volatile).await?;
            offset += length;
        }
        Ok(())
    }
}

impl BlockDevice for FileStore {
    fn geometry(&self) -> Geometry {
        self.geometry.get()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        if let Err(error) = self.geometry.check(ByteRange::new(offset, buffer.len() as u64)) {
            return Box::pin(std::future::ready(Err(error)));
        }
        if self.is_one_part(offset, &buffer) {
            return self.engine.read_at(self.image.file(), offset, buffer);
        }
        Box::pin(self.read_in_parts(offset, buffer))
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        match change {
            Change::Write(offset, data, durability) => {
                if let Err(error) = self.geometry.check_write(ByteRange::new(offset, data.len() as u64)) {
                    return Box::pin(std::future::ready(Err(error)));
                }
                if self.is_one_part(offset, &data) {
                    return self.engine.write_at(self.image.file(), offset, data, durability);
                }
                Box::pin(async move { self.write_in_parts(offset, &data, durability).await })
            }
            Change::Discard(range) => Box::pin(self.zero(range, ZeroMode::MayUnmap, Durability::Volatile)),
            Change::Zero(range, mode, durability) => Box::pin(self.zero(range, mode, durability)),
        }
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        // One file has one cache: this also syncs writes through the tail's description.
        self.engine.sync(self.image.file())
    }

    /// Returns true only for what the system has already done successfully. A hole costs no data on either kind of image. A
    /// device that cannot zero has the kernel write zeroes, which cannot be seen.
    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        let is_known = |ability: &Cell<Ability>| ability.get() == Ability::Known;
        let makes_holes = mode == ZeroMode::MayUnmap && is_known(&self.punch_hole);
        makes_holes || self.image.kind() == Kind::File && is_known(&self.zero_range)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.geometry.check(range)?;
            if self.image.kind() == Kind::Device {
                // A device does not report which parts are in use.
                let mut extents = Vec::new();
                push_extent(&mut extents, range, ExtentKind::Data);
                return Ok(extents);
            }
            let file = Arc::clone(self.image.file());
            run_blocking(&self.engine, move || extents_of(&file, range)).await?
        })
    }

    fn plain_file(&self) -> Option<PlainFile> {
        (self.image.kind() == Kind::File).then(|| PlainFile(Arc::clone(self.image.file())))
    }

    fn clone_range(&self, from: &PlainFile, range: ByteRange) -> IoFuture<'_, ()> {
        let (from, to) = (Arc::clone(&from.0), Arc::clone(self.image.file()));
        Box::pin(async move {
            self.geometry.check_write(range)?;
            // N.B. Both files, and so their locks, are held until the call is over, even if the future is dropped.
            let work = move || clone::clone_range(to.as_fd(), from.as_fd(), range);
            let cloned = run_blocking(&self.engine, work).await?;
            cloned.map_err(|errno| IoError::os("clone", errno))
        })
    }

    fn growth(&self) -> Option<&dyn Growth> {
        Some(self)
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        self.engine.release(self.image.file());
        if let Some(tail) = self.image.tail() {
            self.engine.release(tail);
        }
    }
}

fn extents_of(file: &OwnedFd, range: ByteRange) -> Result<Vec<Extent>, IoError> {
    let mut extents = Vec::new();
    let mut position = range.offset;
    while position < range.end() {
        if extents.len() >= EXTENTS_MAX {
            push_extent(&mut extents, ByteRange::new(position, range.end() - position), ExtentKind::Data);
            break;
        }
        let data = seek(file, SeekFrom::Data(position))?.min(range.end());
        push_extent(&mut extents, ByteRange::new(position, data - position), ExtentKind::Hole);
        if data == range.end() {
            break;
        }
        let hole = seek(file, SeekFrom::Hole(data))?.min(range.end());
        push_extent(&mut extents, ByteRange::new(data, hole - data), ExtentKind::Data);
        position = hole;
    }
    Ok(extents)
}

/// Returns where the next data or hole begins; `u64::MAX` if there is none. Moves the description's position, which is not used.
fn seek(file: &OwnedFd, to: SeekFrom) -> Result<u64, IoError> {
    match rustix::fs::seek(file, to) {
        Ok(position) => Ok(position),
        Err(Errno::NXIO) => Ok(u64::MAX),
        Err(errno) => Err(IoError::os("find holes", errno)),
    }
}

#[cfg(test)]
mod tests;
