//! The folder of one standby in its store: a folder of root's own, whose files are reached through its descriptor only.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, IFlags, Mode, OFlags, fchmod, fchown, flock, fstat,
    ioctl_getflags, mkdirat, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;

/// The folder of all standbys in a store.
const PARENT: &str = ".sterna-standbys";
const NEW: OFlags = OFlags::RDWR.union(OFlags::CREATE).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A file from outside the folder, which is locked.
pub(super) struct Foreign {
    path: PathBuf,
    file: File,
}

impl Foreign {
    /// Returns its length in bytes, and the hash of an exported image.
    pub(super) fn hash(&self) -> io::Result<(u64, String)> {
        let length = self.file.metadata()?.len();
        Ok((length, super::exported::hash(&self.file, length, &|_| true)?))
    }
}

/// An open folder. Names are those of its files.
pub(super) struct Folder(OwnedFd);

impl Folder {
    /// Opens the folder of a standby in the store at `store`; makes it if it is not there.
    pub(super) fn open(store: &Path, standby: &str) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let store = openat(CWD, store, flags, Mode::empty())?;
        let parent = enter(&store, PARENT)?;
        Ok(Self(enter(&parent, standby)?))
    }

    /// Opens a file for reading and writing. Fails with [`io::ErrorKind::NotFound`].
    pub(super) fn file(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(openat(&self.0, name, flags, Mode::empty())?))
    }

    /// Opens a file, or makes it.
    pub(super) fn file_or_new(&self, name: &str) -> io::Result<File> {
        Ok(File::from(openat(&self.0, name, NEW, Mode::RUSR | Mode::WUSR)?))
    }

    /// Makes a file that is empty, in place of one that has the name.
    pub(super) fn new_file(&self, name: &str) -> io::Result<File> {
        self.remove(name)?;
        Ok(File::from(openat(&self.0, name, NEW | OFlags::EXCL, Mode::RUSR | Mode::WUSR)?))
    }

    /// Deletes a file. One that is not there is a success.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.0, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.0, from, &self.0, to)?)
    }

    /// Moves a file out to a path of the same file system that no file has, and makes that durable. Does nothing if it was moved.
    pub(super) fn move_out(&self, from: &str, to: &Path) -> io::Result<()> {
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&self.0, from, CWD, to, flags) {
            Ok(()) => {}
            Err(Errno::NOENT) if to.exists() => {}
            Err(error) => return Err(error.into()),
        }
        crate::files::folder_entries::sync_folder_of(to)?;
        self.sync()
    }

    /// Moves a file at a path of the same file system into the folder, durably. Does nothing if the folder has it.
    pub(super) fn move_in(&self, from: &Path, to: &str) -> io::Result<()> {
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(CWD, from, &self.0, to, flags) {
            Ok(()) => {}
            Err(Errno::NOENT) if statat(&self.0, to, AtFlags::SYMLINK_NOFOLLOW).is_ok() => {}
            Err(error) => return Err(error.into()),
        }
        self.sync()?;
        crate::files::folder_entries::sync_folder_of(from)
    }

    /// Opens a file that is to be taken in, and checks that nobody else has a part in it.
    pub(super) fn foreign(&self, path: &Path) -> io::Result<Foreign> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(CWD, path, flags, Mode::empty())?;
        let found = fstat(&file)?;
        let refused = |text: String| Err(io::Error::other(text));
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return refused(format!("{} is no file", path.display()));
        }
        if found.st_nlink != 1 {
            return refused(format!("{} has other names (hard links): copy it", path.display()));
        }
        if found.st_dev != fstat(&self.0)?.st_dev {
            return refused(format!("{} is on another file system: copy it into the store", path.display()));
        }
        // A file system without attributes has no such files.
        let is_fixed = |flags: IFlags| flags.intersects(IFlags::IMMUTABLE | IFlags::APPEND);
        if ioctl_getflags(&file).is_ok_and(is_fixed) {
            return refused(format!("{} cannot be moved (chattr -i -a)", path.display()));
        }
        // N.B. What has it open for writing could change it later.
        if let Some(user) = block::store::users_of(&file)?.first() {
            return refused(format!("{user} has {} open", path.display()));
        }
        let file = File::from(file);
        match lock(&file) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                refused(format!("{} is locked by another program", path.display()))
            }
            locked => locked.map(|()| Foreign { path: path.to_owned(), file }),
        }
    }

    /// Gives a file this length and this user as its owner, and moves it into the folder, durably, in place of one that has the name.
    pub(super) fn take_in(&self, foreign: &Foreign, to: &str, length: u64) -> io::Result<()> {
        let Foreign { path, file } = foreign;
        fchown(file, Some(rustix::process::geteuid()), None)?;
        fchmod(file, Mode::RUSR | Mode::WUSR)?;
        file.set_len(length)?;
        file.sync_all()?;
        self.remove(to)?;
        self.move_in(path, to)?;
        let (found, there) = (fstat(file)?, statat(&self.0, to, AtFlags::SYMLINK_NOFOLLOW)?);
        if (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino) {
            return Ok(());
        }
        self.remove(to)?;
        Err(io::Error::other("another file has taken its name meanwhile, and is deleted"))
    }

    /// Gives a file a second name at a path of the same file system that no file has, and makes that durable.
    pub(super) fn link_out(&self, from: &str, to: &Path) -> io::Result<()> {
        rustix::fs::linkat(&self.0, from, CWD, to, AtFlags::empty())?;
        crate::files::folder_entries::sync_folder_of(to)
    }

    /// Deletes a file, and its second name at a path. Another file at that path stays.
    pub(super) fn remove_both(&self, name: &str, path: &Path) -> io::Result<()> {
        let here = match statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(()),
            found => found?,
        };
        match statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino) => {
                unlinkat(CWD, path, AtFlags::empty())?;
                crate::files::folder_entries::sync_folder_of(path)?;
            }
            Ok(_) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        self.remove(name)
    }

    /// Returns the free bytes of its file system, and all.
    pub(super) fn space(&self) -> io::Result<(u64, u64)> {
        let found = rustix::fs::fstatvfs(&self.0)?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Ok((bytes(found.f_bavail), bytes(found.f_blocks)))
    }

    /// Makes the names of its files durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.0)?)
    }

    /// Returns the names of its files.
    pub(super) fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.0)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Deletes the folder of a standby in the store at `store`, with all files.
    pub(super) fn delete(store: &Path, standby: &str) -> io::Result<()> {
        let folder = Self::open(store, standby)?;
        for name in folder.names()? {
            folder.remove(&name)?;
        }
        let store = openat(CWD, store, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let parent = enter(&store, PARENT)?;
        unlinkat(&parent, standby, AtFlags::REMOVEDIR)?;
        rustix::fs::fsync(&parent)?;
        Ok(())
    }
}

/// Returns the path of the folder of a standby in the store at `store`.
pub(in crate::standbys) fn folder_of(store: &Path, standby: &str) -> PathBuf {
    store.join(PARENT).join(standby)
}

/// Takes the lock of an image, so that other programs that ask see it in use.
pub(super) fn lock(image: &File) -> io::Result<()> {
    flock(image.as_fd(), FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from)
}

/// Opens a folder in another one, made if it is not there. **N.B.** Others may write to the store's folder: a name that is not a
/// folder of this user alone is refused.
fn enter(parent: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    match mkdirat(parent, name, Mode::RWXU) {
        Ok(()) => rustix::fs::fsync(parent)?,
        Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = openat(parent, name, flags, Mode::empty())?;
    let found = fstat(&folder)?;
    let is_ours = found.st_uid == rustix::process::geteuid().as_raw() && found.st_mode & 0o077 == 0;
    if is_ours {
        return Ok(folder);
    }
    let reason = format!(
        "the folder {name} is not this user's alone: remove it, or give it to the daemon's user with mode 0700"
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
}
