//! Image files as the control plane handles them: looked at, copied in, deleted, fenced. Everything here may sleep.
//!
//! ```text
//!   opening     opens the images of volumes, and makes those of targets
//!   copying     fills a new image from another one
//!   growing     ends a growth that was interrupted
//!   replicas    images that a volume left behind, and that it may come home to
//!   inventory   every image that a migration left and that was kept
//!   half_made   what says of a target that it is not complete
//!   content     everything that lies in a store, and what it is
//! ```

pub(crate) mod content;
pub(crate) mod copying;
pub(crate) mod growing;
pub(crate) mod half_made;
pub(crate) mod inventory;
pub(crate) mod opening;
pub(crate) mod replicas;
mod shrink;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use lane::ControlFault;
use migration::MigrationId;
use migration::journal::ImageLocation;
use migration::recovery::Retirement;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use self::shrink::Doomed;
use crate::fail_point::{self, Step};
use crate::files::folder_entries::{rename_without_replacing, sync_folder_of, with_suffix};

/// Size of the sectors that guests see: the size of every volume is a multiple of it.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// What Sterna rounds sizes up to where nobody says one, and steps of growth: such a volume can move to disks with 4 KiB
/// sectors.
pub(crate) const SIZE_STEP_BYTES: u64 = 4096;
/// Bytes that are copied between two looks at the clock of progress.
const COPY_STEP_BYTES: usize = 4 << 20;

/// Why an image was not copied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    /// The store is full.
    #[error("the store ran out of space while {from} was copied; make room there, or choose another store")]
    NoSpace {
        /// What was copied.
        from: PathBuf,
    },
    /// Reading or writing failed.
    #[error("copy {from} to {to}")]
    Io {
        /// What was copied.
        from: PathBuf,
        /// Where to.
        to: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
}

/// Deletes a half-made or given-up target image; one that is gone is a success. A device and a server's export stay:
/// the journal has fenced them.
pub(crate) fn discard(image: &ImageLocation) -> Result<(), ControlFault> {
    fail_point::before(Step::Discard);
    if let Some(path) = image.place.file().map(Path::new) {
        // N.B. first: an image whose token is there is the one that was offered.
        lane::shared_storage::remove(path).map_err(|error| fault("delete what is beside", path, &error))?;
        delete(path)?;
        // N.B. last: what is left of an image that could not be deleted stays marked.
        half_made::unmark(path).map_err(|error| fault("delete the mark of", path, &error))?;
    }
    fail_point::after(Step::Discard);
    Ok(())
}

/// Deals with a source image whose volume has moved away in `migration`; one that is gone is a success. A device and a
/// server's export stay: the journal has fenced them.
pub(crate) fn retire(
    image: &ImageLocation,
    retirement: Retirement,
    migration: MigrationId,
) -> Result<(), ControlFault> {
    fail_point::before(Step::Retire);
    match (image.place.file().map(Path::new), retirement) {
        (Some(path), Retirement::Delete) => delete(path)?,
        (Some(path), Retirement::Keep) => fence(path, migration)?,
        (None, _) => {}
    }
    fail_point::after(Step::Retire);
    Ok(())
}

/// Where the source's image is kept after `migration`: no autostart of anybody finds it under this name.
pub(crate) fn fenced_path(path: &Path, migration: MigrationId) -> PathBuf {
    with_suffix(path, &format!(".moved-{migration}"))
}

/// Bytes that a file takes in its store.
pub(crate) fn allocated_bytes(path: &Path) -> io::Result<u64> {
    // The unit of st_blocks is 512 bytes, whatever the file system's own is.
    std::fs::metadata(path).map(|metadata| metadata.blocks().saturating_mul(512))
}

/// Makes an empty file that did not exist, marked as half-made: whoever finds it later knows what it is. `Ok(None)`: there is
/// one.
pub(crate) fn reserve(path: &Path) -> io::Result<Option<File>> {
    match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path) {
        Ok(file) => {
            half_made::mark(path).inspect_err(|_| unreserve(path))?;
            Ok(Some(file))
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
    }
}

/// Gives up what [`reserve`] made, while it is still empty and in no journal. What cannot be deleted, the next start does.
pub(crate) fn unreserve(path: &Path) {
    let removed = std::fs::remove_file(path).and_then(|()| half_made::unmark(path));
    if let Err(error) = removed {
        tracing::warn!(path = %path.display(), %error, "an empty file is left over");
    }
}

/// Lets who may use `from` use `to` as well: its owner, group and mode. An image that leaves Sterna again is then its
/// owner's as before. What this user may not give away stays this user's.
pub(crate) fn dress(to: &File, from: &Path) {
    let dressed = std::fs::metadata(from).and_then(|found| {
        if let Err(error) = std::os::unix::fs::fchown(to, Some(found.uid()), Some(found.gid())) {
            tracing::debug!(path = %from.display(), %error, "the owner of an image does not go along");
            return Ok(());
        }
        to.set_permissions(std::fs::Permissions::from_mode(found.permissions().mode() & 0o777))
    });
    if let Err(error) = dressed {
        tracing::warn!(path = %from.display(), %error, "the mode of an image does not go along");
    }
}

/// Copies the data of one file into another that is all zeroes and at least as large; holes stay holes.
///
/// `done` follows the position, for whoever watches. The copy is durable when this returns.
pub(crate) fn copy_into(from: &Path, to: &Path, done: &AtomicU64) -> Result<(), CopyError> {
    copy_data(from, to, done).map_err(|source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            CopyError::NoSpace { from: from.to_owned() }
        }
        _ => CopyError::Io { from: from.to_owned(), to: to.to_owned(), source },
    })
}

fn delete(path: &Path) -> Result<(), ControlFault> {
    let failed = |error: &io::Error| fault("delete", path, error);
    let doomed = Doomed::open(path);
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return found_gone(path).map_err(|error| failed(&error));
        }
        result => result.and_then(|()| sync_folder_of(path)).map_err(|error| failed(&error))?,
    }
    // The name is gone for good; its space comes back without hurry, for a guest may be writing beside it.
    if let Some(doomed) = doomed {
        doomed.free();
    }
    Ok(())
}

fn fence(path: &Path, migration: MigrationId) -> Result<(), ControlFault> {
    let failed = |error: &io::Error| fault("rename", path, error);
    match rename_without_replacing(path, &fenced_path(path, migration)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            found_gone(path).map_err(|error| failed(&error))
        }
        result => result.map_err(|error| failed(&error)),
    }
}

/// A file that is not there is gone only if its folder is there: a store that is not mounted still has it.
fn found_gone(path: &Path) -> io::Result<()> {
    sync_folder_of(path)
}

fn fault(operation: &'static str, path: &Path, error: &io::Error) -> ControlFault {
    ControlFault { operation, path: path.display().to_string(), detail: error.to_string() }
}

fn copy_data(from: &Path, to: &Path, done: &AtomicU64) -> io::Result<()> {
    let source = File::open(from)?;
    let target = OpenOptions::new().write(true).open(to)?;
    let size = source.metadata()?.len();
    let mut position = 0;
    while position < size {
        let Some((start, end)) = next_data(&source, position, size)? else { break };
        position = start;
        while position < end {
            position += copy_step(&source, &target, position, end)?;
            done.store(position, Ordering::Relaxed);
        }
    }
    done.store(size, Ordering::Relaxed);
    target.sync_all()
}

/// The next run of data from `position` on, or `None` if there is none.
fn next_data(file: &File, position: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(position)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // A file system without holes: all of it is data.
        Err(Errno::INVAL) => return Ok(Some((position, size))),
        Err(errno) => return Err(errno.into()),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok(Some((start, end.min(size))))
}

/// Copies a piece at `position`, by the kernel if it can; returns its length, at least 1.
fn copy_step(source: &File, target: &File, position: u64, end: u64) -> io::Result<u64> {
    let length = usize::try_from(end - position).unwrap_or(usize::MAX).min(COPY_STEP_BYTES);
    let (mut read_at, mut write_at) = (position, position);
    let copied = rustix::fs::copy_file_range(
        source.as_fd(),
        Some(&mut read_at),
        target.as_fd(),
        Some(&mut write_at),
        length,
    );
    match copied {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(copied) => Ok(copied as u64),
        Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::PERM) => {
            let mut buffer = vec![0; length];
            source.read_exact_at(&mut buffer, position)?;
            target.write_all_at(&buffer, position)?;
            Ok(length as u64)
        }
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::AtomicU64;

    use migration::MigrationId;
    use migration::journal::ImageLocation;
    use migration::recovery::Retirement;

    use super::{allocated_bytes, copy_into, discard, fenced_path, retire};

    fn location(path: &Path) -> ImageLocation {
        ImageLocation::raw_file("a", path.display().to_string())
    }

    #[test]
    fn images_are_discarded_and_retired_again_and_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.img");
        let image = location(&path);
        for _ in 0..2 {
            discard(&image).unwrap();
            retire(&image, Retirement::Keep, MigrationId(7)).unwrap();
        }
        std::fs::write(&path, b"old").unwrap();
        for _ in 0..2 {
            retire(&image, Retirement::Keep, MigrationId(7)).unwrap();
        }
        let fenced = fenced_path(&path, MigrationId(7));
        assert!(fenced.ends_with("a.img.moved-m7"));
        assert_eq!((path.exists(), std::fs::read(&fenced).unwrap()), (false, b"old".to_vec()));
        // A kept image is never overwritten by another one.
        std::fs::write(&path, b"new").unwrap();
        retire(&image, Retirement::Keep, MigrationId(7)).unwrap_err();
        assert_eq!(std::fs::read(&fenced).unwrap(), b"old");
        retire(&image, Retirement::Delete, MigrationId(7)).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn image_of_a_store_that_is_not_there_is_not_taken_for_deleted() {
        let image = location(Path::new("/nonexistent/store/a.img"));
        let fault = discard(&image).unwrap_err();
        assert!(fault.to_string().starts_with("cannot delete /nonexistent/store/a.img"), "{fault}");
        retire(&image, Retirement::Keep, MigrationId(1)).unwrap_err();
    }

    #[test]
    fn copy_has_the_data_and_the_holes() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        let mut content = vec![0; 9 << 20];
        content[(5 << 20)..(5 << 20) + 10].copy_from_slice(b"0123456789");
        let file = std::fs::File::create(&from).unwrap();
        file.set_len(content.len() as u64).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"0123456789", 5 << 20).unwrap();
        std::fs::File::create(&to).unwrap().set_len(10 << 20).unwrap();
        let done = AtomicU64::new(0);
        copy_into(&from, &to, &done).unwrap();
        content.resize(10 << 20, 0);
        assert!(std::fs::read(&to).unwrap() == content);
        assert_eq!(done.into_inner(), 9 << 20);
        assert!(allocated_bytes(&to).unwrap() <= 128 << 10);
    }
}
