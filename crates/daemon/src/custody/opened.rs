//! A file and its folder, opened once. All operations use these descriptors.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use block::store::Access;
use migration::custody::{Found, Identity, Lasting};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::lasting::{lasting_at, lasting_of, lasting_of_folder, place_of};

pub(super) enum Lock {
    /// It is locked, or this daemon has it open already.
    Got,
    /// This program holds it.
    Held(String),
    /// It is locked, and no process here has it open. Either requests of an ended daemon or of a just closed lane are on their
    /// way, or another machine has it.
    Fading(String),
}

/// The folder of an image, and the image, if there is one.
pub(super) struct Opened {
    folder: OwnedFd,
    name: OsString,
    /// `None`: nothing has the name, or it is not a file that can be opened.
    file: Option<OwnedFd>,
    found: Found,
    lasting: Option<Lasting>,
}

impl Opened {
    /// Opens the folder of `path`, and the file. Follows no link at `path`, and no link above it that another user may have put
    /// there. If the folder cannot be opened, nothing is known of the image.
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        let folder = block::held::find(folder.unwrap_or_else(|| Path::new(".")))?;
        let folder = OwnedFd::from(folder.open(OFlags::RDONLY | OFlags::DIRECTORY)?);
        let mut opened = Self { folder, name, file: None, found: Found::Gone, lasting: None };
        match opened.open_file() {
            Ok(file) => {
                let stat = rustix::fs::fstat(&file)?;
                opened.found = match FileType::from_raw_mode(stat.st_mode) {
                    FileType::RegularFile => Found::There(identity(&stat)),
                    _ => Found::Unknown("it is no file".to_owned()),
                };
                opened.lasting = lasting_of(&file)?;
                opened.file = Some(file);
            }
            Err(Errno::NOENT) => {}
            // Operations apply to the link itself.
            Err(Errno::LOOP) => {
                opened.found = opened.look();
                opened.lasting = lasting_at(&place_of(path))?;
            }
            Err(errno) => opened.found = Found::Unknown(io::Error::from(errno).to_string()),
        }
        Ok(opened)
    }

    /// Does not block on a device or a pipe.
    fn open_file(&self) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.folder, &self.name, flags | OFlags::RDWR, Mode::empty()) {
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => {
                rustix::fs::openat(&self.folder, &self.name, flags | OFlags::RDONLY, Mode::empty())
            }
            opened => opened,
        }
    }

    pub(super) fn found(&self) -> &Found {
        &self.found
    }

    /// Returns its identity across restarts; `None`: it is unknown.
    pub(super) fn lasting(&self) -> Option<&Lasting> {
        self.lasting.as_ref()
    }

    /// Returns the folder's identity across restarts; `None`: it is unknown.
    pub(super) fn folder_lasting(&self) -> io::Result<Option<Lasting>> {
        lasting_of_folder(&self.folder)
    }

    pub(super) fn file(&self) -> Option<&OwnedFd> {
        self.file.as_ref()
    }

    /// Returns the file, which is then closed after its folder.
    pub(super) fn into_file(self) -> Option<OwnedFd> {
        self.file
    }

    /// Returns what has the name at this moment.
    pub(super) fn look(&self) -> Found {
        self.look_at(&self.name)
    }

    pub(crate) fn look_at(&self, name: &OsStr) -> Found {
        match rustix::fs::statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Found::There(identity(&stat)),
            Err(Errno::NOENT) => Found::Gone,
            Err(errno) => Found::Unknown(io::Error::from(errno).to_string()),
        }
    }

    /// Locks the file until this is closed; a link has nothing to lock.
    pub(super) fn try_lock(&self) -> io::Result<Lock> {
        let Some(file) = &self.file else { return Ok(Lock::Got) };
        let Some(holder) = block::store::try_hold(file, Access::ReadWrite)? else { return Ok(Lock::Got) };
        let is_seen = !block::store::users_of(file)?.is_empty();
        Ok(match is_seen {
            true => Lock::Held(holder.to_string()),
            // The claims cover this daemon's own uses.
            false if block::store::is_ours(file)? => Lock::Got,
            false => Lock::Fading(holder.to_string()),
        })
    }

    pub(super) fn unlink(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty())?)
    }

    /// Renames the image in its folder, if the new name is free.
    pub(super) fn rename_to_free(&self, name: &OsStr) -> io::Result<()> {
        let (folder, from) = (self.folder.as_fd(), self.name.as_os_str());
        match rustix::fs::renameat_with(folder, from, folder, name, RenameFlags::NOREPLACE) {
            // Some file systems do not support the flag. The folder belongs to this daemon.
            Err(Errno::INVAL | Errno::NOSYS) if self.look_at(name) == Found::Gone => self.rename_over(name),
            renamed => Ok(renamed?),
        }
    }

    /// Renames the image over another file in its folder.
    pub(super) fn rename_over(&self, name: &OsStr) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.folder, &self.name, &self.folder, name)?)
    }

    /// Makes the names of the folder durable.
    pub(super) fn sync_folder(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.folder)?)
    }
}

/// Returns the identity of a file, whatever its name.
pub(super) fn identity(stat: &Stat) -> Identity {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::BlockDevice => Identity::Device(stat.st_rdev),
        _ => Identity::File { device: stat.st_dev, inode: stat.st_ino },
    }
}

pub(super) fn identity_of(file: impl AsFd) -> io::Result<Identity> {
    Ok(identity(&rustix::fs::fstat(file)?))
}
