//! Locks that keep two daemons from using one folder.
//!
//! A lock is a `flock` on a file in the folder. The kernel gives it up when the last thread of its holder is gone:
//! a daemon that was killed holds it until no write of it can come any more.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Name of the file that is locked.
const LOCK_FILE: &str = ".sterna-lock";
/// Bytes of a lock file that are read; it holds a process number.
const LOCK_FILE_BYTES_MAX: u64 = 64;

/// The right to use a folder, until it is dropped.
#[derive(Debug)]
pub(crate) struct FolderLock {
    file: File,
}

/// Why a folder could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error("{folder} is in use by {}", holder(.process))]
    Held {
        /// The folder.
        folder: PathBuf,
        /// Who has it, if that could be found out.
        process: Option<u32>,
    },
    /// The lock file cannot be used.
    #[error("{folder} cannot be locked")]
    Io {
        /// The folder.
        folder: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
}

impl FolderLock {
    /// Locks the folder, or says who has it. Does not wait.
    ///
    /// # Errors
    /// [`LockError`].
    pub(crate) fn acquire(folder: &Path) -> Result<Self, LockError> {
        let failed = |source| LockError::Io { folder: folder.to_owned(), source };
        let path = folder.join(LOCK_FILE);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(LockError::Held { folder: folder.to_owned(), process: read_process(&mut file) });
            }
            Err(errno) => return Err(failed(errno.into())),
        }
        // For people only: the lock is what counts, so a full disk is no obstacle.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(Self { file })
    }

    /// Tells whether the lock is on the folder that has this path now: another file system may have been mounted.
    pub(crate) fn is_of(&self, folder: &Path) -> bool {
        let Ok(locked) = self.file.metadata() else { return false };
        std::fs::metadata(folder.join(LOCK_FILE))
            .is_ok_and(|found| (found.dev(), found.ino()) == (locked.dev(), locked.ino()))
    }
}

fn read_process(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(LOCK_FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn holder(process: &Option<u32>) -> String {
    match process {
        // Two spellings of one path.
        Some(process) if *process == std::process::id() => "this daemon under another name".to_owned(),
        Some(process) => format!("another daemon (process {process})"),
        None => "another daemon".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{FolderLock, LOCK_FILE, LockError};

    #[test]
    fn second_lock_is_refused_and_says_who_has_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let first = FolderLock::acquire(folder.path()).unwrap();
        let Err(LockError::Held { process, .. }) = FolderLock::acquire(folder.path()) else {
            panic!("locked twice")
        };
        assert_eq!(process, Some(std::process::id()));
        drop(first);
        FolderLock::acquire(folder.path()).unwrap();
    }

    #[test]
    fn lock_of_a_folder_that_was_replaced_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let lock = FolderLock::acquire(folder.path()).unwrap();
        assert!(lock.is_of(folder.path()));
        std::fs::remove_file(folder.path().join(LOCK_FILE)).unwrap();
        assert!(!lock.is_of(folder.path()));
        FolderLock::acquire(folder.path()).unwrap();
        assert!(!lock.is_of(folder.path()));
    }
}
