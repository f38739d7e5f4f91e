//! The contract of a block device, for those who call one and for those who write one.

use std::future::Future;
use std::pin::Pin;

pub use chronicle::ByteRange;

use crate::buffer::Buffer;
use crate::change::Change;
use crate::error::IoError;
use crate::growth::Growth;

/// The boxed future of one request. It stays on the thread that made it.
pub type IoFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, IoError>> + 'a>>;

/// Offsets and lengths of every request below the `align` filter are multiples of this many bytes (or end exactly
/// at the end of the device): the strictest direct-I/O alignment of the disks that Sterna serves, so that a volume
/// can move from a store with 512-byte sectors to one with 4 KiB sectors.
pub const ALIGNMENT: u32 = 4096;

/// Reads and writes a fixed number of bytes at offsets.
///
/// # What callers may rely on
/// - A request touches exactly its range. Requests in flight at the same time may be applied in any order, also
///   where they overlap: who needs an order waits for the first before submitting the second.
/// - After a change (`write`, `write_zeroes`, `discard`) has succeeded, every later read sees it. It survives a power cut
///   only once a `flush` that was *submitted after it completed* has succeeded, or if it was [`Durability::Durable`].
/// - A write that failed may have been applied in whole, in part (by sectors) or not at all.
/// - After a successful `discard` or `write_zeroes` the range reads as zeroes.
///
/// # What implementors must keep
/// - A request that is out of range or misaligned fails with the error of that name and changes nothing;
///   [`check_range`] tells. A request of no bytes succeeds.
/// - A future may be dropped at any moment. The request may then still be applied, later; its buffer stays valid
///   until that is over, and an image file stays locked until then (design §5.9).
/// - No call blocks the thread: neither in the method nor in the future.
pub trait BlockDevice {
    /// Returns size, alignment and abilities; the same at every call while the device lives, but for the size, which
    /// may grow: whoever checks a range against a size that was asked for earlier asks again before refusing it.
    fn geometry(&self) -> Geometry;

    /// Fills the whole of `buffer` from `offset` on and gives it back.
    ///
    /// `buffer` must be the only handle to its memory ([`Buffer::is_unique`]).
    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer>;

    /// Makes a change.
    fn change(&self, change: Change) -> IoFuture<'_, ()>;

    /// Makes everything durable that had completed when this was called.
    fn flush(&self) -> IoFuture<'_, ()>;

    /// Writes the whole of `data` at `offset`: a [`Change::Write`], which is to be implemented by [`BlockDevice::change`].
    fn write(&self, offset: u64, data: Buffer, durability: Durability) -> IoFuture<'_, ()> {
        self.change(Change::Write(offset, data, durability))
    }

    /// Makes the range read as zeroes and gives its space back where the store can: a [`Change::Discard`].
    fn discard(&self, range: ByteRange) -> IoFuture<'_, ()> {
        self.change(Change::Discard(range))
    }

    /// Makes the range read as zeroes: a [`Change::Zero`].
    fn write_zeroes(&self, range: ByteRange, mode: ZeroMode, durability: Durability) -> IoFuture<'_, ()> {
        self.change(Change::Zero(range, mode, durability))
    }

    /// Tells whether `write_zeroes` in this mode costs less than writing as many zero bytes, up to the blocks at its
    /// two ends.
    ///
    /// It is answered at once, so who would have to try says no. It is true for requests that are submitted before
    /// control goes back to the executor: the store below may change later.
    fn zeroes_fast(&self, _mode: ZeroMode) -> bool {
        false
    }

    /// Describes the range as extents, in order, without gaps, covering it exactly.
    ///
    /// The answer may be older than writes in flight. Who cannot tell says [`ExtentKind::Data`] for everything.
    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>>;

    /// Tells apart what of the range the device has itself ([`ExtentKind::Data`], also where that reads as zeroes) and
    /// where it shows what it stands on ([`ExtentKind::Hole`]); otherwise as [`BlockDevice::allocation`].
    ///
    /// A device that stands on nothing has everything itself.
    fn own_allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(std::future::ready(Ok(vec![Extent { range, kind: ExtentKind::Data }])))
    }

    /// The way to make it larger; `None` if there is none.
    fn growth(&self) -> Option<&dyn Growth> {
        None
    }
}

/// What a device is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes; need not be a multiple of `alignment`.
    pub size: u64,
    /// Requests start at multiples of this many bytes, and end at one or at the end of the device. A power of two.
    pub alignment: u32,
    /// Whether every write is refused.
    pub read_only: bool,
    /// Whether `discard` gives space back (it always zeroes).
    pub discards: bool,
}

/// When a write may be acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// As soon as later reads see it.
    Volatile,
    /// Once it survives a power cut (FUA).
    Durable,
}

/// What becomes of the space under zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroMode {
    /// May be given back: the range may become a hole.
    MayUnmap,
    /// Stays allocated (NBD's NO_HOLE).
    KeepAllocated,
}

/// A run of bytes with the same allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it lies.
    pub range: ByteRange,
    /// What is there.
    pub kind: ExtentKind,
}

/// What is known of an extent without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Allocated; may hold anything.
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

/// Appends an extent to a list, as one with the last if they touch and are of the same kind; an empty one is left
/// out.
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
