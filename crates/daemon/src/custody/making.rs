//! Makes new image files: reserves their names, sets their sizes, and puts them into their places.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use migration::custody::{Found, KnownImage, Owner, Step};
use migration::journal::{ImageFormat, ImageLocation};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::lasting::{lasting_of, place_of};
use super::opened::{Lock, Opened, identity_of};
use super::{Custody, CustodyError};
use crate::images::half_made;

impl Custody {
    /// Makes an empty new file, marked as half-made. `Ok(None)`: it exists already. After an error there is no new file.
    pub(crate) fn reserve(&self, path: &Path) -> Result<Option<File>, CustodyError> {
        let failed = |error| CustodyError::io("make", path, error);
        let image = ImageLocation::raw_file("", path.to_string_lossy());
        self.check(Step::Create, &Owner::Maker, &image)?;
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path) {
            Ok(file) => {
                let noted = self.note_new(path, &file);
                noted.inspect_err(|_| self.unreserve(path, &file))?;
                let marked = lasting_of(&file).and_then(|lasting| half_made::mark(path, lasting.as_ref()));
                marked.inspect_err(|_| self.unreserve(path, &file)).map_err(failed)?;
                Ok(Some(file))
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Deletes a file of [`Custody::reserve`] that is still empty and in no journal. If that fails, the next start deletes it.
    pub(crate) fn unreserve(&self, path: &Path, made: &File) {
        let removed = self.delete_this(path, Some(made), &Owner::Maker).map_err(io::Error::from);
        if let Err(error) = removed.and_then(|()| half_made::unmark(path)) {
            tracing::warn!(path = %path.display(), %error, "an empty file is left over");
        }
    }
}

impl Custody {
    /// Records that a new file has been made under an image's unfinished name.
    ///
    /// # Errors
    /// [`CustodyError`]: after a restart the file's owner would be unknown.
    pub(crate) fn note_made(&self, new: &Path, file: impl AsFd) -> Result<(), CustodyError> {
        self.note_new(new, file)
    }

    /// Moves the file `new` to the name beside it which the empty file `reserved` has kept.
    ///
    /// # Errors
    /// The system's error; or another file has the name.
    pub(crate) fn place_made(&self, new: &Path, path: &Path, reserved: &File) -> Result<(), CustodyError> {
        let failed = |error| CustodyError::io("make", path, error);
        let opened = Opened::at(new).map_err(failed)?;
        let name = path.file_name().ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()))?;
        let is_reserved = opened.look_at(name) == Found::There(identity_of(reserved).map_err(failed)?);
        if !is_reserved || reserved.metadata().map_err(failed)?.len() != 0 {
            return Err(failed(io::Error::other("another file has taken its place")));
        }
        // N.B. Recorded before the rename: a restart finds the recorded file, or the empty one, which it recognises as another.
        if let Some(lasting) = opened.lasting().cloned() {
            let place = place_of(path);
            let purpose = self.read(|state| state.purpose_of(&place));
            half_made::mark(path, Some(&lasting)).map_err(failed)?;
            self.note(&place, KnownImage { lasting, purpose })?;
        }
        opened.rename_over(name).map_err(failed)
    }
}

/// Deletes leftovers under an image's unfinished name, which the caller holds. Fails if a program has the file open.
pub(crate) fn clear_unfinished(new: &Path) -> io::Result<()> {
    let opened = Opened::at(new)?;
    match opened.found() {
        Found::Gone => return Ok(()),
        Found::Unknown(why) => return Err(io::Error::other(why.clone())),
        Found::There(_) => {}
    }
    if let Lock::Held(holder) | Lock::Fading(holder) = opened.try_lock()? {
        return Err(io::Error::other(format!("{holder} uses it")));
    }
    opened.unlink()
}

/// Sets the size of a new, empty file.
pub(crate) fn set_size(reserved: &File, size: u64) -> io::Result<()> {
    reserved.set_len(size)
}

/// Allocates all the space that a new image of `bytes` will need; it reads as zeroes before and after.
pub(crate) fn allocate(path: &Path, format: ImageFormat, bytes: u64) -> Result<(), Errno> {
    let file = OpenOptions::new().write(true).open(path);
    let file = file.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    let flags = match format {
        ImageFormat::Raw => FallocateFlags::empty(),
        // Clusters are laid out as they are written, so the space is reserved behind the end of the file.
        ImageFormat::Qcow2 => FallocateFlags::KEEP_SIZE,
    };
    loop {
        match rustix::fs::fallocate(&file, flags, 0, bytes) {
            Err(Errno::INTR) => {}
            allocated => return allocated,
        }
    }
}
