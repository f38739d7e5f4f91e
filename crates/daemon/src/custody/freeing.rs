//! Frees the space of deleted files in small steps. A file system that frees a large file at once is busy for tens of
//! milliseconds, and delays other writes: those of the guest whose disk has just moved. So a deleted file without a name is kept
//! open and truncated in small steps, with longer pauses.
//!
//! ```text
//!   name gone ──► cut ─ pause ─ cut ─ pause ─ … ─ empty ──► closed
//! ```
//! A crash in between loses nothing: the kernel frees a file without a name and without users.
//!
//! **N.B.** The kernel does that before it lets the last process with the file end, which takes minutes on some disks (a large file
//! on a file system that discards freed blocks at once). Guests would wait for the next daemon meanwhile. So the service manager
//! has the file as well, and the next daemon continues.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use crate::service_manager;

/// The prefix of the service manager's names of deleted files.
const NAME: &str = "deleted.";
/// The first and smallest cut, in bytes.
const STEP_BYTES_MIN: u64 = 1 << 20;
/// The largest cut, in bytes: even for holes, which are cheap, a step is a call that cannot be interrupted.
const STEP_BYTES_MAX: u64 = 1 << 40;
/// The longest duration of a cut: less than a guest notices.
const STEP_MAX: Duration = Duration::from_micros(500);
/// The ratio of a pause to the cut before it.
const PAUSE_PER_STEP: u32 = 4;

#[derive(Debug)]
pub(super) struct Doomed(File);

impl Doomed {
    /// Takes a file whose name is gone.
    pub(super) fn of(file: OwnedFd) -> Self {
        Self(file.into())
    }

    /// Frees the file's space in the background, provided that it has lost its last name and that no program uses it.
    pub(super) fn free(self) {
        self.in_background(|doomed| if doomed.is_unused()? { doomed.free_kept() } else { Ok(()) });
    }

    /// Does the same with a file that an earlier daemon has found unused.
    fn go_on(self) {
        self.in_background(Self::free_kept);
    }

    fn in_background(self, free: impl FnOnce(&Self) -> io::Result<()> + Send + 'static) {
        let freeing = std::thread::Builder::new().name("free-space".to_owned()).spawn(move || {
            if let Err(error) = free(&self) {
                tracing::debug!(%error, "the space of a deleted file is freed at once");
            }
        });
        // Without a thread the file was closed, which frees it too.
        drop(freeing);
    }

    /// Returns whether the file has no name, and no program has opened it meanwhile: that keeps its content.
    fn is_unused(&self) -> io::Result<bool> {
        let metadata = self.0.metadata()?;
        Ok(metadata.nlink() == 0
            && metadata.is_file()
            && block::store::users_of(&self.0.try_clone()?.into())?.is_empty())
    }

    /// Truncates the file while the service manager has it as well.
    fn free_kept(&self) -> io::Result<()> {
        let metadata = self.0.metadata()?;
        let name = format!("{NAME}{}.{}", metadata.dev(), metadata.ino());
        if let Err(error) = service_manager::keep(&name, self.0.as_fd()) {
            tracing::debug!(%error, "the service manager does not keep a deleted file");
        }
        let freed = self.shrink(std::thread::sleep);
        service_manager::keep_no_longer(&name);
        freed
    }

    /// Truncates the file until it is empty; calls `pause` after each cut but the last.
    fn shrink(&self, mut pause: impl FnMut(Duration)) -> io::Result<()> {
        let metadata = self.0.metadata()?;
        if metadata.nlink() > 0 || !metadata.is_file() {
            return Ok(());
        }
        let (mut length, mut step) = (metadata.len(), STEP_BYTES_MIN);
        while length > 0 {
            length = length.saturating_sub(step);
            let began = Instant::now();
            self.0.set_len(length)?;
            let took = began.elapsed();
            step = next_step(step, took);
            if length > 0 {
                pause(took * PAUSE_PER_STEP);
            }
        }
        Ok(())
    }
}

/// Returns whether the service manager keeps a deleted file by this name.
pub(crate) fn is_deleted_file(name: &str) -> bool {
    name.starts_with(NAME)
}

/// Frees the space of a file that an earlier daemon has deleted.
pub(crate) fn continue_freeing(file: OwnedFd) {
    Doomed::of(file).go_on();
}

/// Returns the size of the next cut, given how long the last one took.
fn next_step(step: u64, took: Duration) -> u64 {
    let next = if took > STEP_MAX {
        step / 2
    } else if took < STEP_MAX / 2 {
        step * 2
    } else {
        step
    };
    next.clamp(STEP_BYTES_MIN, STEP_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Doomed, STEP_BYTES_MAX, STEP_BYTES_MIN, STEP_MAX, next_step};

    #[test]
    fn deleted_file_is_cut_to_nothing_with_pauses_between_the_cuts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, vec![1; 3 << 20]).unwrap();
        let doomed = Doomed::of(std::fs::File::options().write(true).open(&path).unwrap().into());
        std::fs::remove_file(&path).unwrap();
        let mut pauses = 0;
        doomed.shrink(|_| pauses += 1).unwrap();
        assert_eq!(doomed.0.metadata().unwrap().len(), 0);
        assert!(pauses >= 1);
    }

    #[test]
    fn file_that_has_another_name_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("a"), folder.path().join("b"));
        std::fs::write(&path, b"abc").unwrap();
        std::fs::hard_link(&path, &other).unwrap();
        let doomed = Doomed::of(std::fs::File::options().write(true).open(&path).unwrap().into());
        std::fs::remove_file(&path).unwrap();
        doomed.shrink(|_| ()).unwrap();
        assert_eq!(std::fs::read(&other).unwrap(), b"abc");
    }

    #[test]
    fn steps_grow_while_they_are_quick_and_shrink_when_they_are_slow() {
        assert_eq!(next_step(8 << 20, STEP_MAX * 2), 4 << 20);
        assert_eq!(next_step(8 << 20, STEP_MAX), 8 << 20);
        assert_eq!(next_step(8 << 20, Duration::ZERO), 16 << 20);
        assert_eq!(next_step(STEP_BYTES_MIN, STEP_MAX * 2), STEP_BYTES_MIN);
        assert_eq!(next_step(STEP_BYTES_MAX, Duration::ZERO), STEP_BYTES_MAX);
    }
}
