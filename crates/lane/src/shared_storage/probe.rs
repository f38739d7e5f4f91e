//! Finds out whether two hosts share a folder, before there is an image to lease. All of this may sleep.
//!
//! ```text
//!   source: a file with a secret in each of its folders, open past the cache, locked ── the secrets ──► target
//!   target: looks into its store's folder: is one there, and is its lock seen? ── Seen ──► source, which removes the files
//! ```
//! It is the proof of a migration ([`super`]) with the roles exchanged: one question is enough, and no host has to keep a state.
//! A file of a killed source is removed by the next source that probes in that folder.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::device::ALIGNMENT;
use block::store::image::Caching;
use block::store::{Access, Image, ImageError};

use super::token::Secret;

/// The prefix of such a file's name. No store takes it for an image.
const PREFIX: &str = ".sterna-probe-";
/// The size of such a file: one unit of direct I/O.
const FILE_BYTES: usize = ALIGNMENT as usize;
/// The mode of the file, as of images.
const MODE: u32 = 0o600;
/// An unlocked file of this age was left over: locking a new one takes no time.
const LEFT_OVER_AGE: Duration = Duration::from_secs(60);

/// A file in a folder that proves to another host that it sees the same folder. Dropping it removes the file.
pub struct Probe {
    secret: Secret,
    image: Image,
}

/// What a host sees of a probe in its own folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// No file: it is another folder.
    Nothing,
    /// The file, without a lock: locks of one host do not count at the other.
    Unlocked,
    /// The file, locked by the other host: its blocks could be written there.
    Locked,
}

impl Probe {
    /// Puts a file into a folder.
    ///
    /// # Errors
    /// The reason why this host could not write images in this folder, as text for the administrator.
    pub fn put(folder: &Path) -> Result<Self, String> {
        let told = |error: io::Error| format!("{} cannot be written to: {error}", folder.display());
        sweep(folder).map_err(told)?;
        let secret = Secret::new().map_err(told)?;
        let path = file(folder, secret);
        let mut made =
            OpenOptions::new().write(true).create_new(true).mode(MODE).open(&path).map_err(told)?;
        let mut content = vec![0; FILE_BYTES];
        content[..secret.0.len()].copy_from_slice(&secret.0);
        let written = made.write_all(&content).and_then(|()| made.sync_all()).map_err(told);
        let opened =
            written.and_then(|()| Image::open(&path, Access::ReadWrite).map_err(|error| error.to_string()));
        match opened {
            Ok(image) if image.caching() == Caching::Direct => Ok(Self { secret, image }),
            other => {
                remove(&path);
                let no_direct = || format!("the file system of {} has no direct I/O", folder.display());
                Err(other.err().unwrap_or_else(no_direct))
            }
        }
    }

    /// Returns the secret that the other host looks for.
    pub fn secret(&self) -> Secret {
        self.secret
    }

    /// Returns the folder that is probed.
    pub fn folder(&self) -> &Path {
        let path = self.image.path();
        path.parent().unwrap_or(path)
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        // N.B. before the lock ends, with the image.
        remove(self.image.path());
    }
}

impl Seen {
    /// Looks for the probe with this secret in a folder.
    pub fn look(folder: &Path, secret: Secret) -> Self {
        let path = file(folder, secret);
        let mut found = Secret([0; 32]);
        let read = File::open(&path).and_then(|file| file.read_exact_at(&mut found.0, 0));
        if read.is_err() || found != secret {
            return Self::Nothing;
        }
        match Image::open(&path, Access::ReadWrite) {
            Err(ImageError::Locked { .. }) => Self::Locked,
            // It may also be gone by now: then the source has stopped waiting.
            Ok(_) | Err(_) => Self::Unlocked,
        }
    }
}

fn file(folder: &Path, secret: Secret) -> PathBuf {
    folder.join(format!("{PREFIX}{}", secret.name()))
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::debug!(path = %path.display(), %error, "the probe file of a folder is left over");
    }
}

fn sweep(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if !entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX)) {
            continue;
        }
        let age = entry.metadata().and_then(|found| found.modified()).ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age >= LEFT_OVER_AGE)
            && Image::open(&entry.path(), Access::ReadWrite).is_ok()
        {
            remove(&entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_known_by_the_file_and_its_lock_and_nothing_is_left() {
        let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let probe = match Probe::put(folder.path()) {
            Ok(probe) => probe,
            Err(reason) => {
                assert!(reason.contains("no direct I/O"), "{reason}");
                return omission::kernel_lacks("direct I/O in the folder of temporary files");
            }
        };
        assert_eq!(probe.folder(), folder.path());
        assert_eq!(Seen::look(folder.path(), probe.secret()), Seen::Locked);
        assert_eq!(Seen::look(folder.path(), Secret([7; 32])), Seen::Nothing);
        // A lookalike without a lock: a snapshot, or a mount with locks of its own.
        let name = probe.image.path().file_name().unwrap();
        std::fs::copy(probe.image.path(), other.path().join(name)).unwrap();
        assert_eq!(Seen::look(other.path(), probe.secret()), Seen::Unlocked);
        std::fs::write(other.path().join(name), [7; 4096]).unwrap();
        assert_eq!(Seen::look(other.path(), probe.secret()), Seen::Nothing);
        // It is left over, but not for long enough.
        drop(Probe::put(other.path()).unwrap());
        assert_eq!(std::fs::read_dir(other.path()).unwrap().count(), 1);
        let left_over = File::options().write(true).open(other.path().join(name)).unwrap();
        left_over.set_modified(std::time::SystemTime::now() - 2 * LEFT_OVER_AGE).unwrap();
        drop((left_over, Probe::put(other.path()).unwrap()));
        assert_eq!(std::fs::read_dir(other.path()).unwrap().count(), 0);
        let secret = probe.secret();
        drop(probe);
        assert_eq!(Seen::look(folder.path(), secret), Seen::Nothing);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(
            Probe::put(&folder.path().join("none")).is_err_and(|why| why.contains("cannot be written to"))
        );
    }
}
