//! An image, in a file or on a block device: found, locked and probed before a lane serves it.
//!
//! ```text
//!   Image::open / create    on a control thread; may sleep
//!        │                  open ► lock ► still the file of that name? ► probe: size, direct I/O, freeing space
//!        │                                                                └── file_kind │ device_kind
//!        ▼
//!   FileStore::new          on the lane's thread; does not sleep
//! ```
//!
//! The code for both kinds is here and in `store::file`; each kind has a module of its own. A device is never made, deleted or
//! renamed: check [`Image::kind`] before doing that.
//!
//! **N.B.** The locked file description is the one that all I/O goes through. So the lock is held until the last request in
//! flight has landed, even if the process is killed in between.

mod device_kind;
mod direct;
mod error;
mod file_kind;

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use self::direct::Demands;
use super::lock::{self, Holder, Locked};
use crate::held::{ByName, Finder, Folder, Held};

pub use self::device_kind::DeviceUser;
pub use self::error::ImageError;

/// The mode of a new image: only its owner may read a guest's disk.
const CREATE_MODE: u32 = 0o600;

/// How often the lock is tried again: short against a killed daemon's last writes (seconds), long against the cost of a try.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// The use of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only read; other readers are allowed, except on a block device, which has one user at a time.
    ReadOnly,
    /// Written, by one process only.
    ReadWrite,
}

/// Whether to keep waiting for an image that another process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Try the lock again.
    Wait,
    /// Fail with [`ImageError::Locked`].
    GiveUp,
}

/// Whether I/O bypasses the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// I/O bypasses the cache.
    Direct,
    /// I/O goes through the cache: the file system has no direct I/O, or
    /// demands more than [`ALIGNMENT`](crate::device::ALIGNMENT).
    Buffered,
}

/// The place of an image's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The bytes are in a regular file.
    File,
    /// The bytes are on a block device: a disk, a partition, a logical volume.
    Device,
}

struct Probed {
    size: u64,
    direct: Option<Demands>,
    gives_space_back: bool,
}

/// An image that is open and locked.
pub struct Image {
    path: PathBuf,
    /// The file itself, without the locks of `file`.
    held: Arc<Held>,
    kind: Kind,
    file: Arc<OwnedFd>,
    /// A buffered description of the same file for the part behind the last whole unit of direct I/O; `None` if there is none.
    tail: Option<Arc<OwnedFd>>,
    /// Bytes of it that are used: all, unless it was [narrowed](Image::narrowed_to).
    size: Cell<u64>,
    access: Access,
    caching: Caching,
    /// The alignment of offsets and lengths on `file`, in bytes; 1 if buffered.
    io_alignment: u32,
    /// The alignment of memory addresses, in bytes; 1 if buffered.
    memory_alignment: u32,
    gives_space_back: bool,
}

impl Image {
    /// Makes a new, sparse image of `size` zero bytes, open for writing and locked. On return its name and size survive a power
    /// cut. On failure no file is left behind.
    ///
    /// # Errors
    /// [`ImageError::Exists`], [`ImageError::TooLarge`], [`ImageError::NoSpace`], or another error of the system.
    pub fn create(path: &Path, size: u64) -> Result<Self, ImageError> {
        let fail = |error| ImageError::of("create", path, error);
        let (folder, name) = Folder::of(path).map_err(fail)?;
        let file = folder.create_new(&name, CREATE_MODE).map_err(fail)?;
        Self::create_in(path, file, size, &folder).inspect_err(|_| {
            // A half-made image is removed; if even that fails, the first error is returned.
            let _ = folder.remove(&name);
        })
    }

    fn create_in(path: &Path, file: File, size: u64, folder: &Folder) -> Result<Self, ImageError> {
        if size > i64::MAX as u64 {
            return Err(ImageError::TooLarge { path: path.to_owned(), size });
        }
        let fail = |operation| move |error| ImageError::of(operation, path, error);
        file.set_len(size).map_err(|error| match error.kind() {
            std::io::ErrorKind::FileTooLarge | std::io::ErrorKind::InvalidInput => {
                ImageError::TooLarge { path: path.to_owned(), size }
            }
            _ => fail("set the size of")(error),
        })?;
        file.sync_all().map_err(fail("sync"))?;
        folder.sync().map_err(fail("sync the folder of"))?;
        let held = ByName.find(path, None).map_err(fail("find"))?;
        Self::lock_and_probe(path, (file, held), Access::ReadWrite, &ByName, None)
    }

    /// Opens and locks an image: a regular file or a block device.
    ///
    /// A device is also opened exclusively (`O_EXCL`), which keeps the system from mounting it meanwhile.
    ///
    /// # Errors
    /// [`ImageError::Locked`] at once if another process, for example QEMU, uses it in a conflicting way;
    /// [`ImageError::DeviceInUse`] if it is mounted or part of another device; [`ImageError::ReadOnlyDevice`],
    /// [`ImageError::SectorTooLarge`]; [`ImageError::NotFound`], [`ImageError::NotRegular`],
    /// [`ImageError::NotPermitted`], or another error of the system.
    pub fn open(path: &Path, access: Access) -> Result<Self, ImageError> {
        Self::open_waiting(path, access, |_| Patience::GiveUp)
    }

    /// Opens and locks an image, waiting while another process holds it.
    ///
    /// `on_held` is called with the holder before each wait, and decides whether to continue: it can inform the user, and keep a
    /// deadline. A killed daemon's lock is held until its last writes have landed.
    ///
    /// # Errors
    /// Those of [`Image::open`].
    pub fn open_waiting(
        path: &Path,
        access: Access,
        on_held: impl FnMut(&Holder) -> Patience,
    ) -> Result<Self, ImageError> {
        Self::open_found(path, access, &ByName, on_held)
    }

    /// Opens and locks an image like [`Image::open_waiting`], if `finder` permits the file at `path`.
    ///
    /// # Errors
    /// Those of [`Image::open`] and of `finder`.
    pub fn open_found(
        path: &Path,
        access: Access,
        finder: &dyn Finder,
        mut on_held: impl FnMut(&Holder) -> Patience,
    ) -> Result<Self, ImageError> {
        loop {
            match Self::try_open(path, access, finder, None) {
                Err(ImageError::Locked { holder, .. }) if on_held(&holder) == Patience::Wait => {
                    std::thread::sleep(RETRY_INTERVAL);
                }
                result => return result,
            }
        }
    }

    /// Returns the path of the image.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file itself, to identify it or change its owner, even if its name changes.
    pub fn held(&self) -> &Arc<Held> {
        &self.held
    }

    /// Returns the place of its bytes.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns its size in bytes: when it was opened, was narrowed, or has grown.
    pub fn size(&self) -> u64 {
        self.size.get()
    }

    /// Returns the use that it was opened for.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns whether its I/O bypasses the page cache.
    pub fn caching(&self) -> Caching {
        self.caching
    }

    /// Checks that it can hold a volume of `needed` bytes.
    ///
    /// # Errors
    /// [`ImageError::TooSmall`].
    pub fn check_holds(&self, needed: u64) -> Result<(), ImageError> {
        if self.size() < needed {
            return Err(ImageError::TooSmall { path: self.path.clone(), size: self.size(), needed });
        }
        Ok(())
    }

    /// Uses its first `size` bytes only, for a volume on a larger device. The rest is never touched.
    ///
    /// # Errors
    /// [`ImageError::TooSmall`], or the system's error if its end must be opened separately. It is then closed.
    pub fn narrowed_to(mut self, size: u64) -> Result<Self, ImageError> {
        self.check_holds(size)?;
        self.size.set(size);
        self.tail = self.open_tail_if_needed()?;
        Ok(self)
    }

    #[cfg(test)]
    pub(super) fn without_direct_io(mut self) -> Self {
        let flags = rustix::fs::fcntl_getfl(&self.file).unwrap();
        rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT).unwrap();
        Self {
            caching: Caching::Buffered,
            io_alignment: 1,
            memory_alignment: 1,
            tail: self.tail.take_if(|_| false),
            ..self
        }
    }

    pub(super) fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// Returns the description for the end of an odd size, which direct I/O cannot reach. It stays when the image grows, for
    /// requests in flight to that end.
    pub(super) fn tail(&self) -> Option<&Arc<OwnedFd>> {
        self.tail.as_ref()
    }

    /// Returns where the part ends that `file` can read and write, of a request that ends at `end`.
    pub(super) fn body_end(&self, end: u64) -> u64 {
        if self.tail.is_some() { end - end % u64::from(self.io_alignment) } else { end }
    }

    pub(super) fn memory_alignment(&self) -> usize {
        self.memory_alignment as usize
    }

    pub(super) fn gives_space_back(&self) -> bool {
        self.gives_space_back
    }

    /// Returns where the part ends that the kernel can zero, of a range that ends at `end`: a device zeroes whole sectors.
    pub(super) fn zeroing_end(&self, end: u64) -> u64 {
        match self.kind {
            Kind::File => end,
            Kind::Device => self.body_end(end),
        }
    }

    pub(super) fn show(&self, size: u64) {
        self.size.set(size);
    }

    pub(super) fn io_alignment(&self) -> u32 {
        self.io_alignment
    }

    pub(super) fn go_buffered(&mut self) -> std::io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.file)?;
        rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT)?;
        (self.caching, self.io_alignment, self.memory_alignment) = (Caching::Buffered, 1, 1);
        self.tail = None;
        Ok(())
    }

    /// Notes that the file was made `size` bytes long, a multiple of direct I/O's alignment, by a format that uses all of it.
    pub(super) fn forget_tail(&mut self, size: u64) {
        self.size.set(size);
        self.tail = None;
    }

    pub(super) fn try_open(
        path: &Path,
        access: Access,
        finder: &dyn Finder,
        above: Option<&Held>,
    ) -> Result<Self, ImageError> {
        let held = finder.find(path, above).map_err(|error| ImageError::of("find", path, error))?;
        let kind = kind_of(&held).ok_or_else(|| ImageError::NotRegular { path: path.to_owned() })?;
        let mut flags = match access {
            Access::ReadOnly => OFlags::RDONLY,
            Access::ReadWrite => OFlags::RDWR,
        };
        // A process with a lease on the file must not be waited for.
        flags |= OFlags::NONBLOCK;
        if kind == Kind::Device {
            flags |= OFlags::EXCL;
        }
        // N.B. Opens the file that was found: its name may lead to another one by now.
        let file = held.open(flags).map_err(|error| match kind {
            Kind::Device => device_kind::why_not_opened(path, held.status().st_rdev, error),
            Kind::File => ImageError::of("open", path, error),
        })?;
        Self::lock_and_probe(path, (file, held), access, finder, above)
    }

    fn lock_and_probe(
        path: &Path,
        (file, held): (File, Held),
        access: Access,
        finder: &dyn Finder,
        above: Option<&Held>,
    ) -> Result<Self, ImageError> {
        let fail = |operation| move |error| ImageError::of(operation, path, error);
        let kind = kind_of(&held).ok_or_else(|| ImageError::NotRegular { path: path.to_owned() })?;
        let file = OwnedFd::from(file);
        let locked = lock::try_lock(&file, access).map_err(|errno| fail("lock")(errno.into()))?;
        if locked != Locked::Yes {
            drop(file);
            return Err(ImageError::Locked {
                path: path.to_owned(),
                holder: lock::find_holder(path, locked),
            });
        }
        // Its last holder may have put another file in its place.
        let named = finder.find(path, above).map_err(fail("find"))?;
        if named.identity() != held.identity() {
            let holder = lock::find_holder(path, Locked::ByFlock);
            return Err(ImageError::Locked { path: path.to_owned(), holder });
        }
        go_blocking(&file).map_err(|errno| fail("set the flags of")(errno.into()))?;
        // Probed now that no other process can change it.
        let Probed { size, direct, gives_space_back } = match kind {
            Kind::File => file_kind::probe(&file, path, access)?,
            Kind::Device => device_kind::probe(&file, path, access)?,
        };
        let demands = direct.unwrap_or(Demands { io_alignment: 1, memory_alignment: 1 });
        let mut image = Self {
            path: path.to_owned(),
            held: Arc::new(held),
            kind,
            file: Arc::new(file),
            tail: None,
            size: Cell::new(size),
            access,
            caching: if direct.is_some() { Caching::Direct } else { Caching::Buffered },
            io_alignment: demands.io_alignment,
            memory_alignment: demands.memory_alignment,
            gives_space_back,
        };
        image.tail = image.open_tail_if_needed()?;
        Ok(image)
    }

    fn open_tail_if_needed(&self) -> Result<Option<Arc<OwnedFd>>, ImageError> {
        if self.size().is_multiple_of(u64::from(self.io_alignment)) {
            return Ok(None);
        }
        if let Some(tail) = &self.tail {
            return Ok(Some(Arc::clone(tail)));
        }
        Ok(Some(Arc::new(self.open_tail()?)))
    }

    /// Opens the same file once more, buffered. It has a lock of its own, because its writes may be the last to land.
    fn open_tail(&self) -> Result<OwnedFd, ImageError> {
        let fail = |error| ImageError::of("open the end of", &self.path, error);
        // By descriptor, because the name may belong to another file by now.
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let writes = self.access == Access::ReadWrite;
        let file = OwnedFd::from(OpenOptions::new().read(true).write(writes).open(path).map_err(fail)?);
        let locked = if writes { lock::try_lock_tail(&file) } else { Ok(Locked::Yes) };
        match locked.map_err(|errno| fail(errno.into()))? {
            Locked::Yes => Ok(file),
            held => {
                let holder = lock::find_holder(&self.path, held);
                Err(ImageError::Locked { path: self.path.clone(), holder })
            }
        }
    }
}

fn kind_of(held: &Held) -> Option<Kind> {
    match held.kind() {
        FileType::RegularFile => Some(Kind::File),
        FileType::BlockDevice => Some(Kind::Device),
        _ => None,
    }
}

/// Clears O_NONBLOCK: a ring would answer EAGAIN instead of waiting for the disk.
fn go_blocking(file: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags - OFlags::NONBLOCK)
}
