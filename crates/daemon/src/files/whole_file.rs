//! Files that are read and replaced as a whole.
//!
//! ```text
//!   a process writes ──► page cache ──sync──► disk
//!        │ killed           │ read by the next process: believe() syncs first, read() does not
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::files::folder_entries::sync_folder_of;

/// A file that an earlier process may have left in the page cache, in part or as a whole.
pub(crate) trait Left {
    /// Makes the content and the name durable.
    fn settle(&self) -> io::Result<()>;

    /// Returns the content; `None`: there is no file.
    fn content(&self, bytes_max: u64) -> io::Result<Option<Vec<u8>>>;
}

impl Left for Path {
    fn settle(&self) -> io::Result<()> {
        match open(self) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            opened => opened?.sync_all()?,
        }
        sync_folder_of(self)
    }

    fn content(&self, bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
        read(self, bytes_max)
    }
}

/// Reads a file of this daemon that is to be acted upon; `None`: there is no file. **N.B.** A killed process may have
/// written or renamed it without syncing. If this daemon acted on content that a power cut can still revert, other hosts
/// would know what this host has forgotten. Errors: those of the system, also if the file cannot be made durable; or it
/// has more than `bytes_max` bytes.
pub(crate) fn believe(left: &(impl Left + ?Sized), bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
    left.settle()?;
    left.content(bytes_max)
}

/// Reads a file; `None`: there is none. Fails if it has more than `bytes_max` bytes.
pub(crate) fn read(path: &Path, bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    content(file, bytes_max).map(Some)
}

/// Opens a file to read it. Fails if it is none: whoever opens a pipe waits for its other end.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
    }
    Ok(file)
}

/// Reads the rest of an open file. Fails like [`read`].
pub(crate) fn content(file: File, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    // One more byte shows that there is more.
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut content)?;
    if content.len() as u64 > bytes_max {
        let message = format!("it has more than {bytes_max} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(content)
}

/// Replaces a file: after a power cut there is the old one or the new one. Only its owner may read it, whatever the umask,
/// because it may name hosts or the command of a VM. After an error it is the old file or the new one.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    replace_with(path, |_| Ok(content.to_vec()))
}

/// Does the same with a content that depends on the new file itself.
pub(crate) fn replace_with(
    path: &Path,
    content: impl FnOnce(&File) -> io::Result<Vec<u8>>,
) -> io::Result<()> {
    let begun = unfinished(path);
    // A leftover may have been made with another mode.
    match fs::remove_file(&begun) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&begun)?;
    let content = content(&file)?;
    file.write_all(&content)?;
    file.sync_all()?;
    fs::rename(&begun, path)?;
    sync_folder_of(path)
}

/// Returns the name under which a file is written before it gets its own. N.B. it holds the whole name: two files of one folder may
/// differ in their extensions alone, and be replaced at the same time.
pub(crate) fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    PathBuf::from(name)
}

/// A simulated file whose end is only in the page cache when its process is killed.
#[cfg(test)]
pub(crate) mod page_cache {
    use std::cell::RefCell;
    use std::io;

    use super::Left;

    /// A file as processes read it, and as a power cut leaves it.
    pub(crate) struct Cached {
        pub(crate) seen: Vec<u8>,
        pub(crate) durable: RefCell<Vec<u8>>,
        pub(crate) syncs: io::Result<()>,
    }

    impl Cached {
        pub(crate) fn new(seen: &[u8], durable: &[u8]) -> Self {
            Self { seen: seen.to_vec(), durable: RefCell::new(durable.to_vec()), syncs: Ok(()) }
        }
    }

    impl Left for Cached {
        fn settle(&self) -> io::Result<()> {
            self.syncs.as_ref().map_err(io::Error::kind)?;
            self.durable.borrow_mut().clone_from(&self.seen);
            Ok(())
        }

        fn content(&self, _: u64) -> io::Result<Option<Vec<u8>>> {
            Ok(Some(self.seen.clone()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::page_cache::Cached;
    use super::{believe, read, replace};

    #[test]
    fn what_is_believed_is_what_a_power_cut_leaves() {
        let cached = Cached::new(b"released", b"rel");
        let believed = believe(&cached, 9).unwrap().unwrap();
        assert_eq!(believed, *cached.durable.borrow());
        let cached = Cached { syncs: Err(io::ErrorKind::StorageFull.into()), ..cached };
        assert!(believe(&cached, 9).is_err(), "what cannot be made durable is not believed");
    }

    #[test]
    fn a_file_is_read_and_replaced_as_a_whole_within_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list.json");
        assert_eq!(read(&path, 9).unwrap(), None);
        replace(&path, b"one").unwrap();
        replace(&path, b"second").unwrap();
        assert_eq!(read(&path, 6).unwrap().unwrap(), b"second");
        assert_eq!(read(&path, 5).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn nobody_but_its_owner_may_read_a_file_that_is_replaced() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list.json");
        // The file and an unfinished replacement, which other users may read.
        for left in [&path, &super::unfinished(&path)] {
            std::fs::write(left, b"old").unwrap();
            std::fs::set_permissions(left, std::fs::Permissions::from_mode(0o644)).unwrap();
        }
        replace(&path, b"new").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
