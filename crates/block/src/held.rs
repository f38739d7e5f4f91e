//! Finds what a path leads to, and holds it by a descriptor, also in folders where others may exchange it.
//!
//! ```text
//!   /  ─►  home  ─►  user  ─►  vm  ─►  disk.img
//!   └─ ours: links here are followed ─┘  └─ others': whoever may write here may lead a link anywhere, so none is followed
//! ```
//! A folder is *ours* if it and all above it belong to root or to this process's user, and nobody else may write there.
//! In a folder with the sticky bit (`/tmp`) the entries of these users are ours.
//!
//! The walk opens one component at a time, each relative to the descriptor of the folder above it. It needs no
//! `openat2`, and so has no other, laxer way for systems without that. What is found stays the same file, whatever
//! becomes of its name: check it, then use that descriptor.

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

/// Who may change what is found under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Root and this process's user alone.
    Ours,
    /// Others as well.
    Others,
}

/// What tells one file from all others, as long as either is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// The file system.
    pub device: u64,
    /// The number within it.
    pub inode: u64,
}

/// Why something that was found is not used.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// A link lies in a folder where others may lead it anywhere.
    #[error(
        "{link} is a link in a folder that others than root may write to, so it is not followed: name what it leads to"
    )]
    Link {
        /// The link.
        link: PathBuf,
    },
    /// It is in a folder of others, and no regular file.
    #[error("{path} is no regular file, and others than root may write to its folder")]
    NotRegular {
        /// What was found.
        path: PathBuf,
    },
    /// It is in a folder of others, and has another name.
    #[error("{path} has more than one name (hard links), and others than root may write to its folder")]
    OtherNames {
        /// What was found.
        path: PathBuf,
    },
    /// The image above it belongs to another user, who may have written its name there.
    #[error(
        "{path} cannot be read by the user {owner}, who owns the image that stands on it and may have named any file there"
    )]
    UnreadBelow {
        /// What was found.
        path: PathBuf,
        /// The owner of the image above.
        owner: u32,
    },
    /// Another file has its name.
    #[error("{path} is another file than before: it was renamed or replaced")]
    Exchanged {
        /// Its path.
        path: PathBuf,
    },
    /// It is no socket.
    #[error("{path} is no socket")]
    NotASocket {
        /// What was found.
        path: PathBuf,
    },
}

impl From<Unfit> for io::Error {
    fn from(unfit: Unfit) -> Self {
        Self::other(unfit)
    }
}

/// A file, socket, device or folder that a path led to, held without being open for reading or writing.
#[derive(Debug)]
pub struct Held {
    descriptor: OwnedFd,
    status: Stat,
    path: PathBuf,
    reach: Reach,
    /// Which users may pass through the folders above it.
    passable: access::Passable,
}

/// Finds what is at a path; a last component that is a link is followed under the same rule as all others.
///
/// # Errors
/// What the system answers; [`Unfit::Link`].
pub fn find(path: &Path) -> io::Result<Held> {
    walk::find(path, walk::Last::Followed)
}

/// As [`find`], and never follows the last component: what is found may be a link.
///
/// # Errors
/// As there.
pub fn find_entry(path: &Path) -> io::Result<Held> {
    walk::find(path, walk::Last::Itself)
}

/// Opens a file for reading only, if it is a regular file.
///
/// # Errors
/// What the system answers; [`Unfit`].
pub fn open_regular(path: &Path) -> io::Result<File> {
    let held = find(path)?;
    if held.kind() != FileType::RegularFile {
        return Err(Unfit::NotRegular { path: held.path }.into());
    }
    held.open(OFlags::RDONLY)
}

impl Held {
    /// The path that leads here without any link.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Who may put something else at [`Held::path`].
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// What tells it from other files.
    pub fn identity(&self) -> Identity {
        Identity { device: self.status.st_dev, inode: self.status.st_ino }
    }

    /// What it was when it was found: owner, mode, size, number of names.
    pub fn status(&self) -> &Stat {
        &self.status
    }

    /// What kind of file it is.
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.status.st_mode)
    }

    /// Refuses what a guest's disk cannot be: in a folder of others all but a regular file with one name.
    ///
    /// A link of another user to a file of root has two names. Devices belong into folders of root.
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

    /// Refuses all but a socket.
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
    /// [`Unfit::Exchanged`]; what the system answers.
    pub fn require_in_place(&self) -> io::Result<()> {
        match find_entry(&self.path) {
            Ok(found) if found.identity() == self.identity() => Ok(()),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Err(Unfit::Exchanged { path: self.path.clone() }.into()),
        }
    }

    /// Looks at it once more: another process may have changed its owner, mode or names since.
    ///
    /// # Errors
    /// What the system answers.
    pub fn look_again(mut self) -> io::Result<Self> {
        self.status = rustix::fs::fstat(&self.descriptor)?;
        Ok(self)
    }

    /// Holds the same file once more.
    ///
    /// # Errors
    /// What the system answers: too many files are open.
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

    /// Opens this very file; `flags` are an access mode, and what else is wanted.
    ///
    /// # Errors
    /// What the system answers.
    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        // The link of the process's own descriptor leads to the file itself, not to what has its name.
        let opened = rustix::fs::open(self.own_link(), flags | OFlags::CLOEXEC, Mode::empty())?;
        Ok(File::from(opened))
    }

    /// A path of this process alone that leads to this very file as long as it is held, for calls that take a path only.
    pub fn own_link(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()).into()
    }

    /// Gives it an owner and a group.
    ///
    /// # Errors
    /// What the system answers.
    pub fn give(&self, user: u32, group: u32) -> io::Result<()> {
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        Ok(rustix::fs::chownat(&self.descriptor, "", Some(user), Some(group), AtFlags::EMPTY_PATH)?)
    }

    /// Gives it an owner; its group stays.
    ///
    /// # Errors
    /// What the system answers.
    pub fn give_user(&self, user: u32) -> io::Result<()> {
        Ok(rustix::fs::chownat(&self.descriptor, "", Some(Uid::from_raw(user)), None, AtFlags::EMPTY_PATH)?)
    }

    /// Sets its permissions; of a link there are none.
    ///
    /// # Errors
    /// What the system answers.
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
