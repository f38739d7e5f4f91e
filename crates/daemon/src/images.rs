//! Image files in the control plane: examined, opened, copied in. `crate::custody` renames and deletes
//! them. Everything here may block.
//!
//! ```text
//!   opening     opens the images of volumes, and makes those of targets
//!   copying     fills a new image from another one
//!   sharing     whether an image can share its blocks with a new one
//!   growing     completes an interrupted growth
//!   replicas    images that a volume left behind, for an incremental return
//!   inventory   every image that a migration left and that was kept
//!   half_made   marks of incomplete targets
//!   content     all files of a store, and what they are
//! ```

pub(crate) mod content;
pub(crate) mod copying;
pub(crate) mod far;
pub(crate) mod growing;
pub(crate) mod half_made;
pub(crate) mod inventory;
pub(crate) mod opening;
pub(crate) mod replicas;
pub(crate) mod sharing;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use block::held::Held;
use migration::MigrationId;
use migration::journal::{Place, State};
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;

use crate::files::folder_entries::with_suffix;

/// The size of the sectors that guests see: every volume's size is a multiple of it.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// The unit of default sizes and of steps of growth, so that such a volume can move to disks with 4 KiB sectors.
pub(crate) const SIZE_STEP_BYTES: u64 = 4096;
/// How many bytes are copied between two updates of the progress.
const COPY_STEP_BYTES: usize = 4 << 20;

/// How many names there are for what one migration leaves.
pub(crate) const FENCED_MAX: u32 = 99;

#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    #[error("the store ran out of space while {from} was copied; make room there, or choose another store")]
    NoSpace { from: PathBuf },
    #[error("copy {from} to {to}")]
    Io { from: PathBuf, to: PathBuf, source: io::Error },
}

/// Returns the path of the source's kept image after `migration`: no autostart finds it under this name.
pub(crate) fn fenced_path(path: &Path, migration: MigrationId) -> PathBuf {
    with_suffix(path, &format!(".moved-{migration}"))
}

/// The names under which it may be kept: the first one, or another if a file has that which is not this migration's.
pub(crate) fn fenced_paths(path: &Path, migration: MigrationId) -> impl Iterator<Item = PathBuf> {
    let first = fenced_path(path, migration);
    let others = (2..=FENCED_MAX).map({
        let first = first.clone();
        move |number| with_suffix(&first, &format!("-{number}"))
    });
    std::iter::once(first).chain(others)
}

/// Returns the path at which a migration has kept the image: by the journal, or else the first possible one.
pub(crate) fn kept_path(state: &State, path: &Path, migration: MigrationId) -> PathBuf {
    let is_kept = |kept: &PathBuf| {
        let known = kept.to_str().and_then(|kept| state.images.get(&Place::File(kept.to_owned())));
        known.is_some_and(|known| known.purpose.kept_by() == Some(migration))
    };
    fenced_paths(path, migration).find(is_kept).unwrap_or_else(|| fenced_path(path, migration))
}

pub(crate) fn allocated_bytes(path: &Path) -> io::Result<u64> {
    // The unit of st_blocks is 512 bytes, whatever the file system's own is.
    std::fs::metadata(path).map(|metadata| metadata.blocks().saturating_mul(512))
}

/// Gives `to` the owner, group and mode of `from`, so that an image which leaves Sterna again is its owner's as before. What
/// this user may not give away stays this user's.
pub(crate) fn dress(to: &File, from: &Path) {
    let dressed = std::fs::metadata(from).and_then(|found| {
        if let Err(error) = std::os::unix::fs::fchown(to, Some(found.uid()), Some(found.gid())) {
            tracing::debug!(path = %from.display(), %error, "cannot copy the owner of an image");
            return Ok(());
        }
        to.set_permissions(std::fs::Permissions::from_mode(found.permissions().mode() & 0o777))
    });
    if let Err(error) = dressed {
        tracing::warn!(path = %from.display(), %error, "cannot copy the mode of an image");
    }
}

/// Copies the data of one file into another that is all zeroes and at least as large; holes stay holes. `done` follows the
/// position. The copy is durable when this returns.
pub(crate) fn copy_into(from: &Held, to: &Path, done: &AtomicU64) -> Result<(), CopyError> {
    copy_data(from, to, done).map_err(|source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            CopyError::NoSpace { from: from.path().to_owned() }
        }
        _ => CopyError::Io { from: from.path().to_owned(), to: to.to_owned(), source },
    })
}

fn copy_data(from: &Held, to: &Path, done: &AtomicU64) -> io::Result<()> {
    let source = from.open(OFlags::RDONLY)?;
    let target = OpenOptions::new().write(true).open(to)?;
    let size = source.metadata()?.len();
    // All of it at once, if the file system can share blocks. It cannot if the source ends within a block, and the target does not.
    if rustix::fs::ioctl_ficlone(&target, &source).is_ok() {
        done.store(size, Ordering::Relaxed);
        return target.sync_all();
    }
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

/// Returns the next run of data from `position` on, or `None` if there is none.
fn next_data(file: &File, position: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(position)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // On a file system without holes everything is data.
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
    use std::sync::atomic::AtomicU64;

    use super::{allocated_bytes, copy_into};

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
        copy_into(&block::held::find(&from).unwrap(), &to, &done).unwrap();
        content.resize(10 << 20, 0);
        assert!(std::fs::read(&to).unwrap() == content);
        assert_eq!(done.into_inner(), 9 << 20);
        assert!(allocated_bytes(&to).unwrap() <= 128 << 10);
    }
}
