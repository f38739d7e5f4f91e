//! The files of a domain's disks on this host: the image that it had, and the copy that is made for it. Each is known by what it
//! is, not by its name.
//!
//! ```text
//!   a copy     made empty where nothing is ─► remembered ─► libvirt writes it ─► the disk, or taken away again
//!   an image   that the disk has left ─► a name that nothing starts from
//! ```

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::files::folder_entries::{rename_without_replacing, sync_folder_of, with_suffix};
use crate::vms::FileIdentity;

/// Names that are tried for an image that is put aside.
const ASIDE_MAX: u32 = 100;
/// What is not the disk, while it is looked at once more and deleted.
const DISCARDED: &str = ".sterna-discarded";

/// Makes an empty file where there is nothing, not even a link.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`]; or it cannot be made.
pub(super) fn make_copy(path: &Path) -> io::Result<FileIdentity> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    sync_folder_of(path)?;
    Ok(FileIdentity::of(&file.metadata()?))
}

/// Deletes a copy, if the file of that name is still the one that was made.
///
/// # Errors
/// It is another one, which stays; or it cannot be deleted.
pub(super) fn discard_copy(path: &Path, made: FileIdentity) -> io::Result<()> {
    let aside = with_suffix(path, DISCARDED);
    // N.B. Renamed first: what comes to this name meanwhile is not deleted.
    rename_without_replacing(path, &aside)?;
    match FileIdentity::at(&aside) {
        Ok(found) if found == made => {
            std::fs::remove_file(&aside)?;
            sync_folder_of(path)
        }
        _ => {
            rename_without_replacing(&aside, path)?;
            Err(io::Error::other("it is not the copy that was made"))
        }
    }
}

/// Puts aside what a disk was in, if the file of that name is the one that is meant. Returns its new name.
///
/// # Errors
/// It is another one, or cannot be renamed: it stays.
pub(super) fn put_aside(path: &Path, vm: &str, found: Option<FileIdentity>) -> io::Result<Option<PathBuf>> {
    let at = match FileIdentity::at(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        at => at?,
    };
    if found.is_some_and(|found| found != at) {
        return Err(io::Error::other("it is not the image that the domain had"));
    }
    for number in 0..ASIDE_MAX {
        let suffix = if number == 0 { format!(".moved-{vm}") } else { format!(".moved-{vm}-{number}") };
        let aside = with_suffix(path, &suffix);
        match rename_without_replacing(path, &aside) {
            Ok(()) => return Ok(Some(aside)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_disk_was_in_is_kept_under_a_name_that_nothing_starts_from() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web1.qcow2");
        for suffix in [".moved-web1", ".moved-web1-1"] {
            std::fs::write(&file, suffix).unwrap();
            let aside = put_aside(&file, "web1", FileIdentity::at(&file).ok()).unwrap().unwrap();
            assert!(aside.to_string_lossy().ends_with(suffix) && !file.exists(), "{aside:?}");
            assert_eq!(std::fs::read_to_string(&aside).unwrap(), suffix);
        }
        assert_eq!(put_aside(&file, "web1", None).unwrap(), None);
    }

    #[test]
    fn only_the_copy_that_was_made_is_deleted_and_none_is_made_over_a_file_or_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web1.raw");
        let made = make_copy(&file).unwrap();
        assert_eq!(make_copy(&file).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        // Somebody puts another file there.
        let other = folder.path().join("other");
        std::fs::write(&other, "somebody's").unwrap();
        std::fs::rename(&other, &file).unwrap();
        assert!(discard_copy(&file, made).is_err());
        assert!(put_aside(&file, "web1", Some(made)).is_err());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "somebody's");
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(&other, &file).unwrap();
        assert_eq!(make_copy(&file).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        std::fs::remove_file(&file).unwrap();
        let made = make_copy(&file).unwrap();
        discard_copy(&file, made).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
