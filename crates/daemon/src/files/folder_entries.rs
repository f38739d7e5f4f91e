//! The names of files in their folders: made durable, and never taken from another file.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::RenameFlags;
use rustix::io::Errno;

/// Renames a file unless there is one of the new name, durably.
pub(crate) fn rename_without_replacing(from: &Path, to: &Path) -> io::Result<()> {
    let here = rustix::fs::CWD;
    match rustix::fs::renameat_with(here, from, here, to, RenameFlags::NOREPLACE) {
        // Some file systems do not know the flag; the store is ours alone.
        Err(Errno::INVAL | Errno::NOSYS) if !to.exists() => std::fs::rename(from, to)?,
        result => result?,
    }
    sync_folder_of(to)
}

/// Makes the names in the folder of `path` durable.
pub(crate) fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or_else(|| Path::new(".")))?.sync_all()
}

/// Adds to a path's file name.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
