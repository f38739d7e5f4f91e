//! The contract of a block device, for its callers and its implementors.

use std::future::Future;
use std::pin::Pin;

pub use chronicle::ByteRange;

use crate::buffer::Buffer;
use crate::change::Change;
use crate::clone::PlainFile;
use crate::error::IoError;
use crate::growth::Growth;

/// The boxed future of one request, which stays on its thread.
pub type IoFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, IoError>> + 'a>>;

/// The alignment of requests below the `align` filter, in bytes: offsets and lengths are multiples of it, or end at the end of
/// the device. It is the strictest direct-I/O alignment of the disks that Sterna serves. So a volume can move from a store with
/// 512-byte sectors to one with 4 KiB sectors.
pub const ALIGNMENT: u32 = 4096;

/// Reads and writes a fixed number of bytes at offsets.
///
/// # What callers may rely on
/// - A request touches exactly its range. Requests in flight at the same time may be applied in any order, even where they
///   overlap. A caller that needs an order awaits the first before it submits the second.
/// - After a change (`write`, `write_zeroes`, `discard`) has succeeded, every later read sees it. It survives a power cut only
///   once a `flush` that was *submitted after it completed* has succeeded, or if it was [`Durability::Durable`].
/// - A write that failed may have been applied in whole, in part (by sectors) or not at all.
/// - After a successful `discard` or `write_zeroes` the range reads as zeroes.
///
/// # What implementors must keep
/// - A request that is out of range or misaligned fails with the error of that name and changes nothing; [`check_range`] checks
///   that. A request of no bytes succeeds.
/// - A future may be dropped at any moment. The request may still be applied later. Until that is over its buffer stays valid,
///   and an image file stays locked (design §5.9).
/// - No call blocks the thread: neither in the method nor in the future.
pub trait BlockDevice {
    /// Returns size, alignment and abilities. All but the size are constant while the device lives. The size may grow: before a
    /// caller refuses a range by an earlier size, it asks again.
    fn geometry(&self) -> Geometry;

    /// Fills all of `buffer` from `offset` on and returns it. `buffer` must be the only handle
    /// to its memory ([`Buffer::is_unique`]).
    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer>;

    /// Makes a change to the content.
    fn change(&self, change: Change) -> IoFuture<'_, ()>;

    /// Makes durable all changes that had completed when this was called.
    fn flush(&self) -> IoFuture<'_, ()>;

    /// Writes all of `data` at `offset`: a [`Change::Write`]. Implement [`BlockDevice::change`] instead of this.
    fn write(&self, offset: u64, data: Buffer, durability: Durability) -> IoFuture<'_, ()> {
        self.change(Change::Write(offset, data, durability))
    }

    /// Makes the range read as zeroes and frees its space if the store can: a [`Change::Discard`].
    fn discard(&self, range: ByteRange) -> IoFuture<'_, ()> {
        self.change(Change::Discard(range))
    }

    /// Makes the range read as zeroes: a [`Change::Zero`].
    fn write_zeroes(&self, range: ByteRange, mode: ZeroMode, durability: Durability) -> IoFuture<'_, ()> {
        self.change(Change::Zero(range, mode, durability))
    }

    /// Returns whether `write_zeroes` in this mode costs less than writing as many zero bytes, except for the blocks
    /// at its two ends.
    ///
    /// The answer is immediate: false if the device would have to try. It holds for requests submitted before control returns to
    /// the executor, because the store below may change later.
    fn zeroes_fast(&self, _mode: ZeroMode) -> bool {
        false
    }

    /// Describes the range as extents, in order, without gaps, covering it exactly.
    ///
    /// The answer may be older than writes in flight. A device that does not know answers [`ExtentKind::Data`] for everything.
    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>>;

    /// Distinguishes the device's own data in the range ([`ExtentKind::Data`], even if it reads as zeroes) from the parts where
    /// its backing file shows ([`ExtentKind::Hole`]); otherwise as [`BlockDevice::allocation`]. A device without a backing file
    /// has only its own data.
    fn own_allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(std::future::ready(Ok(vec![Extent { range, kind: ExtentKind::Data }])))
    }

    /// Returns the file that is the device, byte by byte: ranges of it can be cloned into another device. `None`: there is no
    /// such file, or something lies between that its requests must pass.
    fn plain_file(&self) -> Option<PlainFile> {
        None
    }

    /// Makes a range the same as that of another device's [`BlockDevice::plain_file`], by sharing its blocks: a change as a write
    /// is, acknowledged as [`Durability::Volatile`]. After an error the range may have been cloned or not.
    fn clone_range(&self, _from: &PlainFile, _range: ByteRange) -> IoFuture<'_, ()> {
        Box::pin(std::future::ready(Err(IoError::Unsupported)))
    }

    /// Returns the means to enlarge the device; `None` if there is none.
    fn growth(&self) -> Option<&dyn Growth> {
        None
    }
}

/// The properties of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes; need not be a multiple of `alignment`.
    pub size: u64,
    /// The alignment of requests in bytes, a power of two; a request may also end at the end of the device.
    pub alignment: u32,
    /// Whether every write is refused.
    pub read_only: bool,
    /// Whether `discard` frees space (it always zeroes).
    pub discards: bool,
}

/// When a write may be acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The write is acknowledged as soon as later reads see it.
    Volatile,
    /// The write is acknowledged once it survives a power cut (FUA).
    Durable,
}

/// The effect of zeroing on allocated space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroMode {
    /// Space may be freed: the range may become a hole.
    MayUnmap,
    /// Space stays allocated (NBD's NO_HOLE).
    KeepAllocated,
}

/// A run of bytes with the same allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The bytes that it covers.
    pub range: ByteRange,
    /// The kind of its allocation.
    pub kind: ExtentKind,
}

/// The state of an extent as known without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Allocated, with any content.
    Data,
    /// Allocated, and reads as zeroes.
    Zero,
    /// Not allocated, and reads as zeroes.
    Hole,
}

/// Checks a request against a device's size and alignment.
///
/// # Errors
/// [`IoError::OutOfRange`] or [`IoError::Misaligned`].
pub fn check_range(geometry: &Geometry, range: ByteRange) -> Result<(), IoError> {
    let ByteRange { offset, length } = range;
    let size = geometry.size;
    match offset.checked_add(length) {
        Some(end) if end <= size => {
            let alignment = u64::from(geometry.alignment);
            if offset % alignment != 0 || (end % alignment != 0 && end != size) {
                return Err(IoError::Misaligned { offset, length, alignment: geometry.alignment });
            }
            Ok(())
        }
        _ => Err(IoError::OutOfRange { offset, length, size }),
    }
}

/// Checks a write: as [`check_range`], and refuses read-only devices.
///
/// # Errors
/// Those of [`check_range`], and [`IoError::ReadOnly`].
pub fn check_write(geometry: &Geometry, range: ByteRange) -> Result<(), IoError> {
    if geometry.read_only {
        return Err(IoError::ReadOnly);
    }
    check_range(geometry, range)
}

/// Appends an extent to a list. Merges it with the last one if they touch and are of the same kind; skips an empty one.
pub fn push_extent(extents: &mut Vec<Extent>, range: ByteRange, kind: ExtentKind) {
    if range.length == 0 {
        return;
    }
    match extents.last_mut() {
        Some(last) if last.kind == kind && last.range.end() == range.offset => {
            last.range.length += range.length;
        }
        _ => extents.push(Extent { range, kind }),
    }
}
