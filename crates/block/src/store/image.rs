//! An image, in a file or on a block device: found, locked, and asked what it can do, before a lane serves it.
//!
//! ```text
//!   Image::open / create    on a control thread; may sleep
//!        │                  open ► lock ► still the file of that name? ► probe: size, direct I/O, giving space back
//!        │                                                                └── file_kind │ device_kind
//!        ▼
//!   FileStore::new          on the lane's thread; does not sleep
//! ```
//!
//! What is common to both kinds is here and in `store::file`; what differs is in a module for each. A device is never
//! made, deleted or renamed: whoever does that to images asks [`Image::kind`] first.
//!
//! N.B. the file description that is locked is the one that all I/O goes through: the lock is held until the last
//! request in flight has landed, also when the process is killed in between.

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

/// Who may read an image that Sterna makes: its owner. It is a guest's disk.
const CREATE_MODE: u32 = 0o600;

/// How often a held image is tried again: short against what a killed daemon's last writes take (seconds), long
/// against what a try costs.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// What is done with an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is read; others may read it too, unless it is a block device: those are had by one at a time.
    ReadOnly,
    /// It is written; nobody else may.
    ReadWrite,
}

/// Whether to go on waiting for an image that somebody else holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Try again.
    Wait,
    /// Fail with [`ImageError::Locked`].
    GiveUp,
}

/// Whether I/O goes past the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// Past it.
    Direct,
    /// Through it, because the file system has no direct I/O, or wants more than [`ALIGNMENT`](crate::device::ALIGNMENT).
    Buffered,
}

/// Where an image's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// In a regular file.
    File,
    /// On a block device: a disk, a partition, a logical volume.
    Device,
}

/// What a kind tells of one image.
struct Probed {
    size: u64,
    /// `None` if all I/O goes through the page cache.
    direct: Option<Demands>,
    /// Whether a discard makes room for others.
    gives_space_back: bool,
}

/// An image that is open and locked.
pub struct Image {
    path: PathBuf,
    /// The file itself, without the locks of `file`.
    held: Arc<Held>,
    kind: Kind,
    file: Arc<OwnedFd>,
    /// A buffered description of the same file for what lies behind the last whole unit of direct I/O; `None` if
    /// there is no such rest.
    tail: Option<Arc<OwnedFd>>,
    /// Bytes of it that are used: all, unless [`Image::narrowed_to`] said less.
    size: Cell<u64>,
    access: Access,
    caching: Caching,
    /// What offsets and lengths on `file` must be multiples of, in bytes; 1 if buffered.
    io_alignment: u32,
    /// What addresses of memory must be multiples of, in bytes; 1 if buffered.
    memory_alignment: u32,
    gives_space_back: bool,
}

impl Image {
    /// Makes a new, sparse image of `size` zero bytes, open for writing and locked.
    ///
    /// Its name and size survive a power cut when this returns. If it fails, there is no file left behind.
    ///
    /// # Errors
    /// [`ImageError::Exists`], [`ImageError::TooLarge`], [`ImageError::NoSpace`], or what else the system says.
    pub fn create(path: &Path, size: u64) -> Result<Self, ImageError> {
        let fail = |error| ImageError::of("create", path, error);
        let (folder, name) = Folder::of(path).map_err(fail)?;
        let file = folder.create_new(&name, CREATE_MODE).map_err(fail)?;
        Self::create_in(path, file, size, &folder).inspect_err(|_| {
            // What could not be made is not left half-made; if even that fails, the first error says why.
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
    /// A device is opened exclusively (`O_EXCL`), which keeps the system from mounting it meanwhile, besides the locks
    /// that a file gets.
    ///
    /// # Errors
    /// [`ImageError::Locked`] at once if another process, also QEMU, uses it in a way that does not go together;
    /// [`ImageError::DeviceInUse`] if it is mounted or part of another device; [`ImageError::ReadOnlyDevice`],
    /// [`ImageError::SectorTooLarge`]; [`ImageError::NotFound`], [`ImageError::NotRegular`],
    /// [`ImageError::NotPermitted`], or what else the system says.
    pub fn open(path: &Path, access: Access) -> Result<Self, ImageError> {
        Self::open_waiting(path, access, |_| Patience::GiveUp)
    }

    /// Opens and locks an image, waiting while another process holds it.
    ///
    /// `on_held` is told who does, before each wait, and says whether to go on; it is the place to tell the user, and
    /// to keep a deadline. The lock of a daemon that was killed is held until its last writes have landed.
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

    /// As [`Image::open_waiting`], if `finder` says that what is at `path` may be opened.
    ///
    /// # Errors
    /// Those of [`Image::open`]; what `finder` says.
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file itself: to be known again, or given to another user, whatever becomes of its name.
    pub fn held(&self) -> &Arc<Held> {
        &self.held
    }

    /// Where its bytes are.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its size in bytes when it was opened, or what it was narrowed to, or has grown to since.
    pub fn size(&self) -> u64 {
        self.size.get()
    }

    /// What may be done with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether its I/O goes past the page cache.
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

    /// Uses its first `size` bytes only: the volume on a device that is larger. What lies behind is never touched.
    ///
    /// # Errors
    /// [`ImageError::TooSmall`], or what the system says if its end must be opened apart. It is closed then.
    pub fn narrowed_to(mut self, size: u64) -> Result<Self, ImageError> {
        self.check_holds(size)?;
        self.size.set(size);
        self.tail = self.open_tail_if_needed()?;
        Ok(self)
    }

    /// Goes through the page cache, as on a file system without direct I/O.
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

    /// The description that all aligned I/O goes through.
    pub(super) fn file(&self) -> &Arc<OwnedFd> {
        &self.file
    }

    /// The description for what direct I/O cannot reach: the end of a size that is odd to it. It stays when the image
    /// grows, for requests that were on their way to that end.
    pub(super) fn tail(&self) -> Option<&Arc<OwnedFd>> {
        self.tail.as_ref()
    }

    /// Where the part of a request ends that `file` can read and write, if the request ends at `end`.
    pub(super) fn body_end(&self, end: u64) -> u64 {
        if self.tail.is_some() { end - end % u64::from(self.io_alignment) } else { end }
    }

    pub(super) fn memory_alignment(&self) -> usize {
        self.memory_alignment as usize
    }

    pub(super) fn gives_space_back(&self) -> bool {
        self.gives_space_back
    }

    /// Where the part of a range ends that the kernel can zero, if it ends at `end`: a device zeroes whole sectors.
    pub(super) fn zeroing_end(&self, end: u64) -> u64 {
        match self.kind {
            Kind::File => end,
            Kind::Device => self.body_end(end),
        }
    }

    /// Takes note that more of it is used from now on.
    pub(super) fn show(&self, size: u64) {
        self.size.set(size);
    }

    /// What offsets and lengths on `file` must be multiples of, in bytes.
    pub(super) fn io_alignment(&self) -> u32 {
        self.io_alignment
    }

    /// Goes through the page cache from here on: for formats whose units are smaller than those of direct I/O.
    pub(super) fn go_buffered(&mut self) -> std::io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.file)?;
        rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT)?;
        (self.caching, self.io_alignment, self.memory_alignment) = (Caching::Buffered, 1, 1);
        self.tail = None;
        Ok(())
    }

    /// Takes note that the file was made `size` bytes long, a multiple of what direct I/O demands, by who uses all of it.
    pub(super) fn forget_tail(&mut self, size: u64) {
        self.size.set(size);
        self.tail = None;
    }

    /// Opens an image at once; `above` is the image that stands on it, if one does.
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
        // Whoever has a lease on the file must not be waited for.
        flags |= OFlags::NONBLOCK;
        if kind == Kind::Device {
            flags |= OFlags::EXCL;
        }
        // N.B. of what was found: the name may lead elsewhere by now.
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
        // Who held it may have put another file in its place before letting go.
        let named = finder.find(path, above).map_err(fail("find"))?;
        if named.identity() != held.identity() {
            let holder = lock::find_holder(path, Locked::ByFlock);
            return Err(ImageError::Locked { path: path.to_owned(), holder });
        }
        go_blocking(&file).map_err(|errno| fail("set the flags of")(errno.into()))?;
        // As it is now that nobody else changes it.
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

    /// Opens the same file once more, buffered; locked in a way of its own, for its writes may be the last to land.
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

/// Takes O_NONBLOCK back: a ring would answer EAGAIN instead of waiting for the disk.
fn go_blocking(file: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags - OFlags::NONBLOCK)
}
