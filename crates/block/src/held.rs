//! Finds the file at a path, and holds it by a descriptor, even in folders where other users may exchange it.
//!
//! ```text
//!   /  ─►  home  ─►  user  ─►  vm  ─►  disk.img
//!   └─ ours: links here are followed ─┘  └─ others': a user who may write here may lead a link anywhere, so none is followed
//! ```
//! A folder is *ours* if it and all above it belong to root or to this process's user, and no other user may write there. In a
//! folder with the sticky bit (`/tmp`) the entries of these two users are ours.
//!
//! The walk opens one component at a time, relative to the descriptor of the folder above it. It needs no `openat2`, and so no
//! laxer fallback for systems without it. The descriptor stays with the same file, even if its name changes: check the file,
//! then use that descriptor.

mod access;
mod folder;
mod image;
#[cfg(test)]
mod tests;
mod walk;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid};

pub use self::access::User;
pub use self::folder::Folder;
pub use self::image::{ByName, Finder, ToLookAt};
pub use self::walk::is_own_user;

/// The users who may change what a name leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Root and this process's user, but no others.
    Ours,
    /// Other users as well as these two.
    Others,
}

/// Identifies a file while it is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// The device number of its file system.
    pub device: u64,
    /// Its inode number in the file system.
    pub inode: u64,
}

/// Why a file that was found is not used.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// A link in a folder where other users may change it.
    #[error(
        "{link} is a link in a folder that users other than root may write to, so it is not followed: name its target instead"
    )]
    Link {
        /// The path of the link.
        link: PathBuf,
    },
    /// No regular file, in a folder of other users.
    #[error("{path} is no regular file, and users other than root may write to its folder")]
    NotRegular {
        /// The path of the file.
        path: PathBuf,
    },
    /// A file with several names, in a folder of other users.
    #[error("{path} has more than one name (hard links), and users other than root may write to its folder")]
    OtherNames {
        /// The path of the file.
        path: PathBuf,
    },
    /// The owner of the image above may not read it, but may have written its name there.
    #[error(
        "{path} cannot be read by the user {owner}, who owns the image that stands on it and may have named any file there"
    )]
    UnreadBelow {
        /// The path of the file.
        path: PathBuf,
        /// The owner of the image above, as a user number.
        owner: u32,
    },
    /// The name leads to another file than before.
    #[error("{path} is another file than before: it was renamed or replaced")]
    Exchanged {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file is no socket.
    #[error("{path} is no socket")]
    NotASocket {
        /// The path of the file.
        path: PathBuf,
    },
}

impl From<Unfit> for io::Error {
    fn from(unfit: Unfit) -> Self {
        Self::other(unfit)
    }
}

/// A file, socket, device or folder, held without being open for reading or writing.
#[derive(Debug)]
pub struct Held {
    descriptor: OwnedFd,
    status: Stat,
    path: PathBuf,
    reach: Reach,
    passable: access::Passable,
}

/// Finds the file at a path; a link as last component is followed under the same rule as all others.
///
/// # Errors
/// The system's error; [`Unfit::Link`].
pub fn find(path: &Path) -> io::Result<Held> {
    walk::find(path, walk::Last::Followed)
}

/// Finds the entry at a path, like [`find`], but without following a link as last component.
pub fn find_entry(path: &Path) -> io::Result<Held> {
    walk::find(path, walk::Last::Itself)
}

/// Opens a regular file for reading only.
///
/// # Errors
/// The system's error; [`Unfit`].
pub fn open_regular(path: &Path) -> io::Result<File> {
    let held = find(path)?;
    if held.kind() != FileType::RegularFile {
        return Err(Unfit::NotRegular { path: held.path }.into());
    }
    held.open(OFlags::RDONLY)
}

impl Held {
    /// Returns its path without any link.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns which users may put something else at [`Held::path`].
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// Returns its identity among all files.
    pub fn identity(&self) -> Identity {
        Identity { device: self.status.st_dev, inode: self.status.st_ino }
    }

    /// Returns its status when it was found: owner, mode, size, number of names.
    pub fn status(&self) -> &Stat {
        &self.status
    }

    /// Returns the type of the file.
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.status.st_mode)
    }

    /// Refuses files that cannot be a guest's disk: in a folder of other users, all but a regular file with one name.
    ///
    /// Another user's hard link to a file of root has two names. Devices belong into folders of root.
    ///
    /// # Errors
    /// [`Unfit::NotRegular`], [`Unfit::OtherNames`].
    pub fn require_image(&self) -> Result<(), Unfit> {
        if self.reach == Reach::Ours {
            return Ok(());
        }
        if self.kind() != FileType::RegularFile {
            return Err(Unfit::NotRegular { path: self.path.clone() });
        }
        if self.status.st_nlink != 1 {
            return Err(Unfit::OtherNames { path: self.path.clone() });
        }
        Ok(())
    }

    /// Refuses any file but a socket.
    ///
    /// # Errors
    /// [`Unfit::NotASocket`].
    pub fn require_socket(&self) -> Result<(), Unfit> {
        match self.kind() {
            FileType::Socket => Ok(()),
            _ => Err(Unfit::NotASocket { path: self.path.clone() }),
        }
    }

    /// Checks that the path still leads to it.
    ///
    /// # Errors
    /// [`Unfit::Exchanged`]; the system's error.
    pub fn require_in_place(&self) -> io::Result<()> {
        match find_entry(&self.path) {
            Ok(found) if found.identity() == self.identity() => Ok(()),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Err(Unfit::Exchanged { path: self.path.clone() }.into()),
        }
    }

    /// Reads its status again: another process may have changed its owner, mode or names.
    pub fn look_again(mut self) -> io::Result<Self> {
        self.status = rustix::fs::fstat(&self.descriptor)?;
        Ok(self)
    }

    /// Duplicates the handle to the same file.
    ///
    /// # Errors
    /// The system's error: too many files are open.
    pub fn try_clone(&self) -> io::Result<Self> {
        let Self { status, path, reach, passable, .. } = self;
        let descriptor = self.descriptor.try_clone()?;
        Ok(Self {
            descriptor,
            status: *status,
            path: path.clone(),
            reach: *reach,
            passable: passable.clone(),
        })
    }

    /// Opens this very file; `flags` hold an access mode and further flags.
    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        // The link of the process's own descriptor leads to the file itself, not to its name.
        let opened = rustix::fs::open(self.own_link(), flags | OFlags::CLOEXEC, Mode::empty())?;
        Ok(File::from(opened))
    }

    /// Returns a path, for this process only, that leads to this very file while it is held. For calls that take only a path.
    pub fn own_link(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()).into()
    }

    /// Changes its owner and group.
    pub fn give(&self, user: u32, group: u32) -> io::Result<()> {
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        Ok(rustix::fs::chownat(&self.descriptor, "", Some(user), Some(group), AtFlags::EMPTY_PATH)?)
    }

    /// Changes its owner; its group stays.
    pub fn give_user(&self, user: u32) -> io::Result<()> {
        Ok(rustix::fs::chownat(&self.descriptor, "", Some(Uid::from_raw(user)), None, AtFlags::EMPTY_PATH)?)
    }

    /// Sets its permissions; a link has none.
    pub fn set_mode(&self, mode: u32) -> io::Result<()> {
        if self.kind() == FileType::Symlink {
            return Err(Unfit::NotRegular { path: self.path.clone() }.into());
        }
        Ok(rustix::fs::chmod(self.own_link(), Mode::from_raw_mode(mode & 0o7777))?)
    }
}

impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
