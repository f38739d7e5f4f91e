//! A device in memory: for tests, and for disks that need not outlive the process.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::buffer::{Buffer, PAGE};
use crate::change::Change;
use crate::device::{
    ALIGNMENT, BlockDevice, ByteRange, Extent, ExtentKind, Geometry, IoFuture, ZeroMode, push_extent,
};
use crate::error::IoError;
use crate::growth::{GrowingGeometry, Growth};

/// A sparse disk in memory.
///
/// A request is applied at once when its future is first polled, so requests never tear or overlap. All content is as durable as
/// the process, so a flush does nothing.
pub struct MemoryStore {
    geometry: GrowingGeometry,
    /// Written pages, by index. Missing pages read as zeroes.
    pages: RefCell<BTreeMap<u64, Box<[u8; PAGE]>>>,
}

impl MemoryStore {
    /// Makes a disk of `size` zero bytes with the data plane's alignment.
    pub fn new(size: u64) -> Self {
        Self::with_geometry(Geometry { size, alignment: ALIGNMENT, read_only: false, discards: true })
    }

    /// Makes a disk of zeroes with any geometry.
    pub fn with_geometry(geometry: Geometry) -> Self {
        Self { geometry: GrowingGeometry::new(geometry), pages: RefCell::default() }
    }

    /// Returns the bytes of memory that the disk's content takes.
    pub fn bytes_allocated(&self) -> u64 {
        (self.pages.borrow().len() * PAGE) as u64
    }

    fn fill(&self, offset: u64, buffer: &mut Buffer) -> Result<(), IoError> {
        let range = ByteRange::new(offset, buffer.len() as u64);
        self.geometry.check(range)?;
        let bytes = buffer.as_mut_slice().ok_or(IoError::os("read", rustix::io::Errno::INVAL))?;
        let pages = self.pages.borrow();
        for part in parts(range) {
            let target = &mut bytes[part.of_request()];
            match pages.get(&part.page) {
                Some(page) => target.copy_from_slice(&page[part.of_page()]),
                None => target.fill(0),
            }
        }
        Ok(())
    }

    fn store(&self, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        let range = ByteRange::new(offset, bytes.len() as u64);
        self.geometry.check_write(range)?;
        let mut pages = self.pages.borrow_mut();
        for part in parts(range) {
            let page = pages.entry(part.page).or_insert_with(|| Box::new([0; PAGE]));
            page[part.of_page()].copy_from_slice(&bytes[part.of_request()]);
        }
        Ok(())
    }

    fn zero(&self, range: ByteRange, mode: ZeroMode) -> Result<(), IoError> {
        self.geometry.check_write(range)?;
        let mut pages = self.pages.borrow_mut();
        for part in parts(range) {
            match mode {
                ZeroMode::MayUnmap if part.length == PAGE => drop(pages.remove(&part.page)),
                ZeroMode::MayUnmap => {
                    if let Some(page) = pages.get_mut(&part.page) {
                        page[part.of_page()].fill(0);
                    }
                }
                ZeroMode::KeepAllocated => {
                    pages.entry(part.page).or_insert_with(|| Box::new([0; PAGE]))[part.of_page()].fill(0);
                }
            }
        }
        Ok(())
    }

    fn extents(&self, range: ByteRange) -> Result<Vec<Extent>, IoError> {
        self.geometry.check(range)?;
        let pages = self.pages.borrow();
        let page = PAGE as u64;
        let mut extents = Vec::new();
        let mut position = range.offset;
        for index in pages.range(range.offset / page..range.end().div_ceil(page)).map(|(index, _)| *index) {
            let start = (index * page).max(range.offset);
            push_extent(&mut extents, ByteRange::new(position, start - position), ExtentKind::Hole);
            position = ((index + 1) * page).min(range.end());
            push_extent(&mut extents, ByteRange::new(start, position - start), ExtentKind::Data);
        }
        push_extent(&mut extents, ByteRange::new(position, range.end() - position), ExtentKind::Hole);
        Ok(extents)
    }
}

impl BlockDevice for MemoryStore {
    fn geometry(&self) -> Geometry {
        self.geometry.get()
    }

    fn read(&self, offset: u64, mut buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move { self.fill(offset, &mut buffer).map(|()| buffer) })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move {
            match change {
                Change::Write(offset, data, _) => self.store(offset, data.as_slice()),
                Change::Discard(range) => self.zero(range, ZeroMode::MayUnmap),
                Change::Zero(range, mode, _) => self.zero(range, mode),
            }
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn zeroes_fast(&self, _: ZeroMode) -> bool {
        true
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move { self.extents(range) })
    }

    fn growth(&self) -> Option<&dyn Growth> {
        Some(self)
    }
}

impl Growth for MemoryStore {
    fn capacity(&self) -> IoFuture<'_, Option<u64>> {
        Box::pin(async { Ok(None) })
    }

    fn prepare(&self, _: u64) -> IoFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    fn show(&self, size: u64) {
        self.geometry.show(size);
    }

    fn undo(&self) -> IoFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

struct Part {
    page: u64,
    start: usize,
    length: usize,
    position: usize,
}

impl Part {
    fn of_page(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.length
    }

    fn of_request(&self) -> std::ops::Range<usize> {
        self.position..self.position + self.length
    }
}

fn parts(range: ByteRange) -> impl Iterator<Item = Part> {
    let mut position = 0;
    std::iter::from_fn(move || {
        let left = range.length - position;
        if left == 0 {
            return None;
        }
        let offset = range.offset + position;
        let start = (offset % PAGE as u64) as usize;
        let length = left.min((PAGE - start) as u64);
        let part =
            Part { page: offset / PAGE as u64, start, length: length as usize, position: position as usize };
        position += length;
        Some(part)
    })
}
