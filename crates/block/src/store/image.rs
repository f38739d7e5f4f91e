//! An image file: found, locked, and asked what it can do, before a lane serves it.
//!
//! ```text
//!   Image::open / create    on a control thread; may sleep
//!        │                  open ► lock ► still the file of that name? ► size ► direct I/O? ► holes?
//!        ▼
//!   FileStore::new          on the lane's thread; does not sleep
//! ```
//!
//! N.B. the file description that is locked is the one that all I/O goes through: the lock is held until the last
//! request in flight has landed, also when the process is killed in between.

use std::fs::OpenOptions;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, FallocateFlags, OFlags, StatxFlags};
use rustix::io::Errno;

use super::lock::{self, Holder, Locked};
use crate::device::ALIGNMENT;

/// Who may read an image that Sterna makes: its owner. It is a guest's disk.
const CREATE_MODE: u32 = 0o600;

/// How often a held image is tried again: short against what a killed daemon's last writes take (seconds), long
/// against what a try costs.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// What is done with an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is read; others may read it too.
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
    /// Through it, because the file system has no direct I/O, or wants more than [`ALIGNMENT`].
    Buffered,
}

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// There is no such file.
    #[error("{path} does not exist")]
    NotFound {
        /// The image.
        path: PathBuf,
    },
    /// There is such a file, and none was expected.
    #[error("{path} exists already")]
    Exists {
        /// The image.
        path: PathBuf,
    },
    /// It is a folder, a device, or something else that is no file.
    #[error("{path} is not a regular file")]
    NotRegular {
        /// The image.
        path: PathBuf,
    },
    /// Somebody else uses it.
    #[error("{path} is in use by {holder}")]
    Locked {
        /// The image.
        path: PathBuf,
        /// Who does, as far as the system tells.
        holder: Holder,
    },
    /// It is smaller than what it is to hold.
    #[error("{path} has {size} bytes and needs {needed}")]
    TooSmall {
        /// The image.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The size that is needed, in bytes.
        needed: u64,
    },
    /// No file of this size fits into the file system.
    #[error("{path}: no file can have {size} bytes here")]
    TooLarge {
        /// The image.
        path: PathBuf,
        /// The size that was asked for, in bytes.
        size: u64,
    },
    /// The file system, or the owner's quota, is full.
    #[error("no space for {path}")]
    NoSpace {
        /// The image.
        path: PathBuf,
    },
    /// We may not open it.
    #[error("no permission to use {path}")]
    NotPermitted {
        /// The image.
        path: PathBuf,
    },
    /// The system refused something else.
    #[error("{operation} {path}")]
    Os {
        /// What was tried, as a verb.
        operation: &'static str,
        /// The image.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
}

/// An image file that is open and locked.
pub struct Image {
    path: PathBuf,
    file: Arc<OwnedFd>,
    /// A buffered description of the same file for what lies behind the last whole unit of direct I/O; `None` if
    /// there is no such rest.
    tail: Option<Arc<OwnedFd>>,
    size: u64,
    access: Access,
    caching: Caching,
    /// What offsets and lengths on `file` must be multiples of, in bytes; 1 if buffered.
    io_alignment: u32,
    /// What addresses of memory must be multiples of, in bytes; 1 if buffered.
    memory_alignment: u32,
    punches_holes: bool,
}

impl Image {
    /// Makes a new, sparse image of `size` zero bytes, open for writing and locked.
    ///
    /// Its name and size survive a power cut when this returns. If it fails, there is no file left behind.
    ///
    /// # Errors
    /// [`ImageError::Exists`], [`ImageError::TooLarge`], [`ImageError::NoSpace`], or what else the system says.
    pub fn create(path: &Path, size: u64) -> Result<Self, ImageError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(CREATE_MODE);
        let file = options.open(path).map_err(|error| ImageError::of("create", path, error))?;
        Self::create_in(path, file, size).inspect_err(|_| {
            // What could not be made is not left half-made; if even that fails, the first error says why.
            let _ = std::fs::remove_file(path);
        })
    }

    fn create_in(path: &Path, file: std::fs::File, size: u64) -> Result<Self, ImageError> {
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
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let synced = std::fs::File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(fail("sync the folder of"))?;
        Self::lock_and_probe(path, file, Access::ReadWrite)
    }

    /// Opens and locks an image.
    ///
    /// # Errors
    /// [`ImageError::Locked`] at once if another process, also QEMU, uses it in a way that does not go together;
    /// [`ImageError::NotFound`], [`ImageError::NotRegular`], [`ImageError::NotPermitted`], or what else the system
    /// says.
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
        mut on_held: impl FnMut(&Holder) -> Patience,
    ) -> Result<Self, ImageError> {
        loop {
            match Self::try_open(path, access) {
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

    /// Its size in bytes, when it was opened.
    pub fn size(&self) -> u64 {
        self.size
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
        if self.size < needed {
            return Err(ImageError::TooSmall { path: self.path.clone(), size: self.size, needed });
        }
        Ok(())
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

    /// The description for what lies from [`Image::body_end`] on.
    pub(super) fn tail(&self) -> Option<&Arc<OwnedFd>> {
        self.tail.as_ref()
    }

    /// Where the part ends that `file` can read and write.
    pub(super) fn body_end(&self) -> u64 {
        if self.tail.is_some() { self.size - self.size % u64::from(self.io_alignment) } else { self.size }
    }

    pub(super) fn memory_alignment(&self) -> usize {
        self.memory_alignment as usize
    }

    pub(super) fn punches_holes(&self) -> bool {
        self.punches_holes
    }

    fn try_open(path: &Path, access: Access) -> Result<Self, ImageError> {
        let mut options = OpenOptions::new();
        // Opening a pipe or a serial line for its type must not wait for a peer.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        options.read(true).write(access == Access::ReadWrite).custom_flags(flags);
        let file = match options.open(path) {
            Ok(file) => file,
            Err(error) if error.raw_os_error() == Some(Errno::ISDIR.raw_os_error()) => {
                return Err(ImageError::NotRegular { path: path.to_owned() });
            }
            Err(error) => return Err(ImageError::of("open", path, error)),
        };
        Self::lock_and_probe(path, file, access)
    }

    fn lock_and_probe(path: &Path, file: std::fs::File, access: Access) -> Result<Self, ImageError> {
        let fail = |operation| move |error| ImageError::of(operation, path, error);
        let metadata = file.metadata().map_err(fail("examine"))?;
        if !metadata.is_file() {
            return Err(ImageError::NotRegular { path: path.to_owned() });
        }
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
        let named = std::fs::metadata(path).map_err(fail("examine"))?;
        if (named.dev(), named.ino()) != (metadata.dev(), metadata.ino()) {
            let holder = lock::find_holder(path, Locked::ByFlock);
            return Err(ImageError::Locked { path: path.to_owned(), holder });
        }
        // As it is now that nobody else changes it.
        let size = rustix::fs::fstat(&file).map_err(|errno| fail("examine")(errno.into()))?.st_size as u64;
        go_blocking(&file).map_err(|errno| fail("set the flags of")(errno.into()))?;
        let direct = go_direct(&file, path);
        let (io_alignment, memory_alignment) = direct.unwrap_or((1, 1));
        let mut image = Self {
            path: path.to_owned(),
            punches_holes: access == Access::ReadWrite && punches_holes(&file, size),
            file: Arc::new(file),
            tail: None,
            size,
            access,
            caching: if direct.is_some() { Caching::Direct } else { Caching::Buffered },
            io_alignment,
            memory_alignment,
        };
        if !size.is_multiple_of(u64::from(io_alignment)) {
            image.tail = Some(Arc::new(image.open_tail()?));
        }
        Ok(image)
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

impl ImageError {
    fn of(operation: &'static str, path: &Path, source: std::io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            std::io::ErrorKind::NotFound => Self::NotFound { path },
            std::io::ErrorKind::AlreadyExists => Self::Exists { path },
            std::io::ErrorKind::PermissionDenied => Self::NotPermitted { path },
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Self::NoSpace { path },
            _ => Self::Os { operation, path, source },
        }
    }
}

/// Takes O_NONBLOCK back: a ring would answer EAGAIN instead of waiting for the disk.
fn go_blocking(file: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags - OFlags::NONBLOCK)
}

/// Turns direct I/O on if the file system has it; returns what it demands of offsets and of memory, in bytes.
fn go_direct(file: &OwnedFd, path: &Path) -> Option<(u32, u32)> {
    let reason = match direct_alignment(file) {
        Err(reason) => reason,
        Ok((io, memory)) => {
            let turned_on = rustix::fs::fcntl_getfl(file)
                .and_then(|flags| rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT));
            match turned_on {
                Ok(()) => return Some((io, memory)),
                Err(_) => "the file system refuses it",
            }
        }
    };
    tracing::info!(path = %path.display(), reason, "no direct I/O");
    None
}

/// What direct I/O on this file demands of offsets and of memory.
fn direct_alignment(file: &OwnedFd) -> Result<(u32, u32), &'static str> {
    let wanted = StatxFlags::DIOALIGN;
    let told = match rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted) {
        Ok(told) if told.stx_mask & wanted.bits() != 0 => (told.stx_dio_offset_align, told.stx_dio_mem_align),
        // The kernel or the file system does not say: the strictest that there is.
        _ => (ALIGNMENT, ALIGNMENT),
    };
    match told {
        (0, _) | (_, 0) => Err("the file system has none"),
        (io, memory) if io > ALIGNMENT || memory > ALIGNMENT => Err("the file system wants larger blocks"),
        (io, memory) => Ok((io, memory)),
    }
}

/// Asks by making a hole behind the end, where there is nothing to lose.
fn punches_holes(file: &OwnedFd, size: u64) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let alignment = u64::from(ALIGNMENT);
    rustix::fs::fallocate(file, flags, size.next_multiple_of(alignment), alignment).is_ok()
}
