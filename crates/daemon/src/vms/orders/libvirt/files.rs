//! The files of a domain's disks on this host: the image that it had, and the copy made for it. Each is identified by device
//! and inode, not by its name.
//!
//! ```text
//!   a copy     made empty at a free path ─► remembered ─► libvirt writes it ─► the disk, or deleted again
//!   an image   that the disk has left ─► a name that nothing starts from
//! ```

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use block::held;
use migration::custody::{Ending, Owner};
use rustix::fs::{FileType, OFlags};

use crate::custody::{Custody, CustodyError};
use crate::files::folder_entries::{sync_folder_of, with_suffix};
use crate::vms::FileIdentity;

/// How many names are tried for an image that is put aside.
const ASIDE_MAX: u32 = 100;
/// These files belong to no volume and no migration.
const OWNER: Owner = Owner::Housekeeping;

/// Makes an empty file at a free path, where there is not even a link. Fails with [`io::ErrorKind::AlreadyExists`] otherwise.
pub(crate) fn make_copy(path: &Path) -> io::Result<FileIdentity> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    sync_folder_of(path)?;
    Ok(FileIdentity::of(&file.metadata()?))
}

/// Deletes a copy, if the file of that name is still the one that was made. Puts it aside instead if a program uses it, or may
/// use it. Fails, and changes nothing, if it is another file.
pub(crate) fn discard_copy(custody: &Custody, path: &Path, vm: &str, made: FileIdentity) -> io::Result<()> {
    let copy = match open_this(path, made) {
        // It is gone only if its folder exists.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return sync_folder_of(path),
        copy => copy?,
    };
    match custody.delete_this(path, Some(&copy), &OWNER) {
        Err(CustodyError::Refused { refused, .. }) => {
            let kept = put_aside(custody, path, vm, Some(made))?.unwrap_or_default();
            tracing::warn!(vm, kept = %kept.display(), %refused, "kept an unused copy of a disk");
            Ok(())
        }
        deleted => Ok(deleted?),
    }
}

/// Renames the former image of a disk, if the file of that name is this image. Returns its new name; `None`: there is no file.
/// Fails, and changes nothing, if it is another file.
pub(crate) fn put_aside(
    custody: &Custody,
    path: &Path,
    vm: &str,
    found: Option<FileIdentity>,
) -> io::Result<Option<PathBuf>> {
    let image = match found.map_or_else(|| open(path), |found| open_this(path, found)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        image => image?,
    };
    for number in 0..ASIDE_MAX {
        let suffix = if number == 0 { format!(".moved-{vm}") } else { format!(".moved-{vm}-{number}") };
        let aside = with_suffix(path, &suffix);
        match custody.rename_this(path, &image, &aside, &OWNER) {
            Ok(Ending::Taken) => return Ok(Some(aside)),
            Ok(Ending::Gone) => return Ok(None),
            Err(error) if error.is_taken() => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

fn open_this(path: &Path, meant: FileIdentity) -> io::Result<File> {
    let file = open(path)?;
    if FileIdentity::of(&file.metadata()?) != meant {
        return Err(io::Error::other(
            "another file has this name: neither the one that Sterna made, nor the domain's disk of before",
        ));
    }
    Ok(file)
}

/// Opens a regular file, and does not follow a link.
fn open(path: &Path) -> io::Result<File> {
    let held = held::find_entry(path)?;
    if held.kind() != FileType::RegularFile {
        return Err(io::Error::other("it is no regular file"));
    }
    held.open(OFlags::RDONLY)
}

#[cfg(test)]
mod tests {
    use migration::journal::State;

    use super::*;

    fn custody() -> Custody {
        Custody::of_state(State::default())
    }

    #[test]
    fn what_a_disk_was_in_is_kept_under_a_name_that_nothing_starts_from() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web1.qcow2");
        for suffix in [".moved-web1", ".moved-web1-1"] {
            std::fs::write(&file, suffix).unwrap();
            let aside = put_aside(&custody(), &file, "web1", FileIdentity::at(&file).ok()).unwrap().unwrap();
            assert!(aside.to_string_lossy().ends_with(suffix) && !file.exists(), "{aside:?}");
            assert_eq!(std::fs::read_to_string(&aside).unwrap(), suffix);
        }
        assert_eq!(put_aside(&custody(), &file, "web1", None).unwrap(), None);
    }

    #[test]
    fn only_the_copy_that_was_made_is_deleted_and_none_is_made_over_a_file_or_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web1.raw");
        let made = make_copy(&file).unwrap();
        assert_eq!(make_copy(&file).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        // Another program puts another file there.
        let other = folder.path().join("other");
        std::fs::write(&other, "somebody's").unwrap();
        std::fs::rename(&other, &file).unwrap();
        assert!(discard_copy(&custody(), &file, "web1", made).is_err());
        assert!(put_aside(&custody(), &file, "web1", Some(made)).is_err());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "somebody's");
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(&other, &file).unwrap();
        assert_eq!(make_copy(&file).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        std::fs::remove_file(&file).unwrap();
        let made = make_copy(&file).unwrap();
        discard_copy(&custody(), &file, "web1", made).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_copy_that_a_program_has_open_is_kept_under_another_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web1.raw");
        let made = make_copy(&file).unwrap();
        let mut program = std::process::Command::new("tail").arg("-f").arg(&file).spawn().unwrap();
        let descriptors = format!("/proc/{}/fd", program.id());
        let has_it = || {
            let open = std::fs::read_dir(&descriptors).unwrap().flatten();
            open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).any(|target| target == file)
        };
        while !has_it() {
            std::thread::yield_now();
        }
        let cleared = discard_copy(&custody(), &file, "web1", made);
        program.kill().unwrap();
        program.wait().unwrap();
        cleared.unwrap();
        assert!(!file.exists() && with_suffix(&file, ".moved-web1").exists());
    }
}
