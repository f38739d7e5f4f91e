//! Locks that keep two daemons from using one folder, and the search for who holds a lock.
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
pub struct FolderLock {
    file: File,
}

/// Why a folder could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error("{folder} is in use by another daemon{}", holder(.process))]
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
    pub fn acquire(folder: &Path) -> Result<Self, LockError> {
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
                let process = read_process(&mut file).or_else(|| holder_of(&path));
                return Err(LockError::Held { folder: folder.to_owned(), process });
            }
            Err(errno) => return Err(failed(errno.into())),
        }
        // For people only: the lock is what counts, so a full disk is no obstacle.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(Self { file })
    }

    /// Tells whether the lock is on the folder that has this path now: another file system may have been mounted.
    pub fn is_of(&self, folder: &Path) -> bool {
        let Ok(locked) = self.file.metadata() else { return false };
        std::fs::metadata(folder.join(LOCK_FILE))
            .is_ok_and(|found| (found.dev(), found.ino()) == (locked.dev(), locked.ino()))
    }
}

/// The process that holds a `flock` on the file, as far as the kernel says.
///
/// A guess for messages: some file systems show other device numbers there.
pub fn holder_of(path: &Path) -> Option<u32> {
    let metadata = std::fs::metadata(path).ok()?;
    let device = metadata.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let file = format!("{major:02x}:{minor:02x}:{}", metadata.ino());
    holder_in(&std::fs::read_to_string("/proc/locks").ok()?, &file)
}

fn holder_in(locks: &str, file: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        // `5: FLOCK  ADVISORY  WRITE 1234 fe:00:131 0 EOF`; who waits has an arrow behind the number.
        let mut words = line.split_whitespace().skip(1);
        let holds = words.next()? == "FLOCK";
        let process = words.nth(2)?.parse().ok()?;
        (holds && words.next()? == file).then_some(process)
    })
}

fn read_process(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(LOCK_FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn holder(process: &Option<u32>) -> String {
    process.map_or_else(String::new, |process| format!(" (process {process})"))
}

#[cfg(test)]
mod tests {
    use super::{FolderLock, LOCK_FILE, LockError, holder_in, holder_of};

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

    #[test]
    fn holder_is_found_in_the_kernels_list() {
        let list = "1: POSIX  ADVISORY  WRITE 11 fe:00:131 0 EOF\n2: FLOCK  ADVISORY  WRITE 22 fe:00:131 0 EOF\n\
                    2: -> FLOCK  ADVISORY  WRITE 33 fe:00:131 0 EOF\nnonsense\n";
        assert_eq!(holder_in(list, "fe:00:131"), Some(22));
        assert_eq!(holder_in(list, "fe:00:13"), None);
        let folder = tempfile::tempdir().unwrap();
        let _lock = FolderLock::acquire(folder.path()).unwrap();
        assert_eq!(holder_of(&folder.path().join(LOCK_FILE)), Some(std::process::id()));
    }
}
