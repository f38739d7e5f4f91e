//! imago's storage trait, over a file of the lane.
//!
//! imago wants storage that may be sent to other threads, and a lane's engine stays on its own. So a storage holds a key, and the
//! file is in a table of its thread. On any other thread it fails, but it is never used there.
//!
//! Data that passes here is copied: imago lends its memory, and an engine keeps its buffers beyond a dropped future. Only tables
//! pass here; the data of guests does not ([`super::store`]).

// UNSAFETY: imago declares its requests without alignment checks as unsafe functions, so the implementations must be unsafe as
// well; they do nothing unsafe. It also requires callers not to use discarded clusters.
#![expect(unsafe_code, reason = "a trait of imago has unsafe functions")]

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::thread::ThreadId;

use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use imago::{FormatAccess, Storage, StorageOpenOptions};
use slab::Slab;

use super::file::LaneFile;
use super::mapping::to_ours;
use crate::device::ByteRange;
use crate::engine::Engine;
use crate::error::IoError;

thread_local! {
    static FILES: RefCell<Slab<Entry>> = const { RefCell::new(Slab::new()) };
}

struct Entry {
    file: Rc<LaneFile>,
    engine: Rc<dyn Engine>,
}

pub(super) struct LaneStorage {
    key: usize,
    thread: ThreadId,
    path: PathBuf,
    alignment: usize,
    helper: CommonStorageHelper,
}

impl LaneStorage {
    pub(super) fn new(file: Rc<LaneFile>, engine: Rc<dyn Engine>) -> Self {
        let (path, alignment) = (file.image().path().to_owned(), file.alignment() as usize);
        let key = FILES.with_borrow_mut(|files| files.insert(Entry { file, engine }));
        let thread = std::thread::current().id();
        Self { key, thread, path, alignment, helper: CommonStorageHelper::default() }
    }

    /// Returns the file behind it. Fails with [`IoError::Closed`] on another thread.
    pub(super) fn file(&self) -> Result<Rc<LaneFile>, IoError> {
        self.entry(|entry| Rc::clone(&entry.file))
    }

    fn entry<T>(&self, use_it: impl FnOnce(&Entry) -> T) -> Result<T, IoError> {
        if self.thread != std::thread::current().id() {
            return Err(IoError::Closed);
        }
        FILES.with_borrow(|files| files.get(self.key).map(use_it)).ok_or(IoError::Closed)
    }

    fn parts(&self) -> io::Result<(Rc<LaneFile>, Rc<dyn Engine>)> {
        self.entry(|entry| (Rc::clone(&entry.file), Rc::clone(&entry.engine))).map_err(to_std)
    }
}

impl Drop for LaneStorage {
    fn drop(&mut self) {
        if self.thread == std::thread::current().id() {
            // The file's destructor runs outside of the borrow. At the thread's end the table may be gone already.
            let removed = FILES.try_with(|files| files.borrow_mut().try_remove(self.key));
            drop(removed);
        }
    }
}

impl Storage for LaneStorage {
    fn req_align(&self) -> usize {
        self.alignment
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.file().map_err(to_std)?.end())
    }

    fn resolve_relative_path<P: AsRef<Path>>(&self, _: P) -> io::Result<PathBuf> {
        // The chain was opened before; no name in a header is followed here.
        Err(io::ErrorKind::Unsupported.into())
    }

    async fn open(_: StorageOpenOptions) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    async unsafe fn pure_readv(&self, mut target: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let (file, engine) = self.parts()?;
        let length = usize::try_from(target.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let buffer = file.read(offset, engine.buffers().take(length)).await.map_err(to_std)?;
        target.copy_from_slice(buffer.as_slice());
        Ok(())
    }

    async unsafe fn pure_writev(&self, data: IoVector<'_>, offset: u64) -> io::Result<()> {
        let (file, engine) = self.parts()?;
        let length = usize::try_from(data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut buffer = engine.buffers().take(length);
        let target = buffer.as_mut_slice().ok_or(io::ErrorKind::InvalidInput)?;
        data.copy_into_slice(target);
        file.write_table(offset, buffer).await.map_err(to_std)
    }

    async unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        let (file, _) = self.parts()?;
        match file.zero(offset, length).await.map_err(to_std)? {
            true => Ok(()),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    async fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    async fn sync(&self) -> io::Result<()> {
        let (file, _) = self.parts()?;
        file.sync().await.map_err(to_std)
    }

    async fn settle_writes(&self) -> io::Result<()> {
        // Requests that change an image run to their end (`super::finish`), and hold their claims until then: none is in flight
        // to a freed cluster.
        Ok(())
    }

    async unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }
}

impl fmt::Debug for LaneStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LaneStorage({})", self.path.display())
    }
}

impl fmt::Display for LaneStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())
    }
}

/// Zeroes whole clusters of a range and frees their allocation; returns where it stopped. The caller holds an
/// exclusive claim on them.
pub(super) async fn discard_to_zero(
    access: &FormatAccess<LaneStorage>,
    range: ByteRange,
) -> Result<u64, IoError> {
    // SAFETY: imago requires that no earlier mapping of these clusters is in use; requests with one hold claims on them.
    let done = unsafe { access.inner().discard_to_zero_unsafe(range.offset, range.length) }.await;
    done_up_to(range, done)
}

/// Frees whole clusters of a range, so that the image below shows; returns where it stopped. The caller holds an
/// exclusive claim on them.
pub(super) async fn discard_to_backing(
    access: &FormatAccess<LaneStorage>,
    range: ByteRange,
) -> Result<u64, IoError> {
    // SAFETY: as in `discard_to_zero`.
    let done = unsafe { access.inner().discard_to_backing_unsafe(range.offset, range.length) }.await;
    done_up_to(range, done)
}

fn done_up_to(range: ByteRange, done: io::Result<(u64, u64)>) -> Result<u64, IoError> {
    let (start, length) = done.map_err(|error| to_ours("discard", &error))?;
    // All are whole clusters, so nothing is left out in front.
    Ok(if start == range.offset { start + length } else { range.offset })
}

fn to_std(error: IoError) -> io::Error {
    io::Error::from(error.errno())
}
