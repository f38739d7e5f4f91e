//! A held folder: its entries are opened, made, renamed and removed in this very folder, even if its path changes meanwhile.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::access::Passable;
use super::walk::reach_in;
use super::{Held, Reach, Unfit, find};

/// A folder that is held and can be read.
#[derive(Debug)]
pub struct Folder {
    descriptor: OwnedFd,
    status: Stat,
    path: PathBuf,
    reach: Reach,
    above: Passable,
}

impl Folder {
    /// Opens the folder at a path.
    ///
    /// # Errors
    /// The system's error; [`Unfit`] for a link that may not be followed.
    pub fn open(path: &Path) -> io::Result<Self> {
        let held = find(path)?;
        if held.kind() != FileType::Directory {
            return Err(Errno::NOTDIR.into());
        }
        let opened = held.open(OFlags::RDONLY | OFlags::DIRECTORY)?;
        let Held { status, path, reach, passable: above, .. } = held;
        Ok(Self { descriptor: opened.into(), status, path, reach, above })
    }

    /// Opens the folder of a path's last component, and returns that component as well.
    ///
    /// # Errors
    /// Those of [`Folder::open`]; an error if the path ends in no name.
    pub fn of(path: &Path) -> io::Result<(Self, OsString)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let above = path.parent().filter(|above| !above.as_os_str().is_empty());
        Ok((Self::open(above.unwrap_or_else(|| Path::new(".")))?, name.to_owned()))
    }

    /// Returns its path without any link.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns which users may put other entries into it. An entry of a folder with the sticky bit may be ours all the same.
    pub fn reach(&self) -> Reach {
        reach_in(self.reach, &self.status, &self.status)
    }

    /// Returns a path, for this process only, that leads to this very folder while it is held.
    pub fn own_link(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()).into()
    }

    /// Holds an entry of any type; of a link the link itself.
    pub fn find(&self, name: &OsStr) -> io::Result<Held> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let descriptor = rustix::fs::openat(&self.descriptor, one_name(name)?, flags, Mode::empty())?;
        let status = rustix::fs::statat(&descriptor, "", AtFlags::EMPTY_PATH)?;
        let reach = reach_in(self.reach, &self.status, &status);
        let passable = self.above.clone().and(&self.status);
        Ok(Held { descriptor, status, path: self.path.join(name), reach, passable })
    }

    /// Opens a folder in this one that was found here.
    ///
    /// # Errors
    /// The system's error; an error if it is no folder.
    pub fn below(&self, found: &Held) -> io::Result<Self> {
        let opened = found.open(OFlags::RDONLY | OFlags::DIRECTORY)?;
        let above = self.above.clone().and(&self.status);
        let Held { status, path, reach, .. } = found;
        Ok(Self { descriptor: opened.into(), status: *status, path: path.clone(), reach: *reach, above })
    }

    /// Makes a new file, open for reading and writing.
    pub fn create_new(&self, name: &OsStr, mode: u32) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.descriptor, one_name(name)?, flags, Mode::from_raw_mode(mode))?;
        Ok(File::from(made))
    }

    /// Removes an entry that is no folder; a missing entry is no error.
    pub fn remove(&self, name: &OsStr) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.descriptor, one_name(name)?, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            removed => Ok(removed?),
        }
    }

    /// Removes an entry if it is still the held one.
    ///
    /// **N.B.** The system has no such call in one step. In a folder of other users an entry may be exchanged in between and be
    /// removed instead: its exchanger could have removed it as well.
    ///
    /// # Errors
    /// [`Unfit::Exchanged`]; the system's error.
    pub fn remove_held(&self, name: &OsStr, held: &Held) -> io::Result<()> {
        if self.find(name)?.identity() != held.identity() {
            return Err(Unfit::Exchanged { path: self.path.join(name) }.into());
        }
        self.remove(name)
    }

    /// Renames an entry, within this folder or into another held one; replaces an entry of that name.
    pub fn rename(&self, name: &OsStr, folder: &Self, to: &OsStr) -> io::Result<()> {
        let (from, to) = (one_name(name)?, one_name(to)?);
        Ok(rustix::fs::renameat(&self.descriptor, from, &folder.descriptor, to)?)
    }

    /// Returns the names of its entries.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        use std::os::unix::ffi::OsStrExt as _;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.descriptor)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name != "." && name != ".." {
                names.push(name.to_owned());
            }
        }
        Ok(names)
    }

    /// Makes its names durable.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.descriptor)?)
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

fn one_name(name: &OsStr) -> io::Result<&OsStr> {
    let is_one = Path::new(name).components().count() == 1
        && Path::new(name).file_name() == Some(name)
        && !name.as_encoded_bytes().contains(&b'/');
    if is_one { Ok(name) } else { Err(io::ErrorKind::InvalidInput.into()) }
}
