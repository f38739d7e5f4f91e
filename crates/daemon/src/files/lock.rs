//! Locks that keep two daemons from using one folder. A lock is a `flock` on a file in the folder. The kernel releases it when
//! the last thread of its holder has ended. So a killed daemon holds the lock until none of its writes can land.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

const LOCK_FILE: &str = ".sterna-lock";
/// How many bytes of a lock file are read; it contains a process number.
const LOCK_FILE_BYTES_MAX: u64 = 64;

/// How long the lock of an ending process is waited for. Its last writes took 4.5 s in one observed case.
const ENDING_MAX: Duration = Duration::from_secs(30);
/// How long any other lock is waited for: its holder may have been killed a moment ago.
const KILLED_MAX: Duration = Duration::from_secs(1);
const LOCK_POLL: Duration = Duration::from_millis(20);
/// How often the lock is tried while guests wait.
const ANNOUNCED_POLL: Duration = Duration::from_millis(1);
/// The flag of an ending process (`PF_EXITING`), in the ninth field of `/proc/PID/stat`.
const EXITING: u64 = 4;

/// The right to use a folder, until it is dropped.
#[derive(Debug)]
pub(crate) struct FolderLock {
    file: File,
}

/// Whether a lock's holder is known to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It has announced its end.
    Announced,
    /// The kernel shows whether it is ending.
    ToBeSeen,
}

/// Why a folder could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has locked the folder.
    #[error("{folder} is in use by {}", holder(.process))]
    Held {
        /// The path of the folder.
        folder: PathBuf,
        /// The number of that process, if it could be found out.
        process: Option<u32>,
    },
    /// The lock file cannot be used.
    #[error("{folder} cannot be locked")]
    Io {
        /// The path of the folder.
        folder: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}

pub(crate) fn is_lock_file(name: &str) -> bool {
    name == LOCK_FILE
}

impl FolderLock {
    /// Locks the folder without waiting, or returns which process has it.
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
        // For messages only: the lock is what counts, so a full disk is no obstacle.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(Self { file })
    }

    /// Locks the folder; if its holder is about to end, waits for that and logs it.
    pub(crate) async fn acquire_after_its_holder(folder: &Path, ending: Ending) -> Result<Self, LockError> {
        let began = Instant::now();
        let mut has_said = ending == Ending::Announced;
        let (longest, poll) = match ending {
            Ending::Announced => (Some(ENDING_MAX), ANNOUNCED_POLL),
            Ending::ToBeSeen => (None, LOCK_POLL),
        };
        loop {
            match Self::acquire(folder) {
                Err(LockError::Held { process, .. })
                    if began.elapsed() < longest.unwrap_or_else(|| patience(process)) =>
                {
                    if !std::mem::replace(&mut has_said, true) {
                        let holder = holder(&process);
                        tracing::warn!(folder = %folder.display(), holder, "waiting for the data folder");
                    }
                    tokio::time::sleep(poll).await;
                }
                result => return result,
            }
        }
    }

    /// Returns whether the lock is on the folder with this path: another file system may have been mounted there.
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

fn patience(process: Option<u32>) -> Duration {
    let Some(process) = process else { return KILLED_MAX };
    match std::fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) if !is_ending(&stat) => KILLED_MAX,
        // The process has ended, but its requests to the kernel may not have.
        _ => ENDING_MAX,
    }
}

/// Returns whether a process is ending or a zombie, from `/proc/PID/stat`.
fn is_ending(stat: &str) -> bool {
    // Its name may contain anything, also brackets.
    let Some((_, fields)) = stat.rsplit_once(") ") else { return false };
    let mut fields = fields.split(' ');
    let state = fields.next();
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or(0);
    matches!(state, Some("Z" | "X")) || flags & EXITING != 0
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
    use super::*;

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
    fn a_process_is_ending_when_the_kernel_says_so() {
        let stat = |state: &str, flags: u64| format!("7 (a) b) {state} 1 7 7 0 -1 {flags} 100 0 0");
        assert!(!is_ending(&stat("S", 0x0040_0000)));
        assert!(is_ending(&stat("Z", 0x0040_0000)));
        assert!(is_ending(&stat("D", 0x0040_0004)));
        let own = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert!(!is_ending(&own));
        assert_eq!(patience(Some(std::process::id())), KILLED_MAX);
        // No process has this number.
        assert_eq!(patience(Some(u32::MAX)), ENDING_MAX);
    }

    #[tokio::test]
    async fn the_lock_of_a_holder_that_ends_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let first = FolderLock::acquire(folder.path()).unwrap();
        let path = folder.path().to_owned();
        let second =
            tokio::spawn(async move { FolderLock::acquire_after_its_holder(&path, Ending::ToBeSeen).await });
        tokio::task::yield_now().await;
        drop(first);
        second.await.unwrap().unwrap();
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
