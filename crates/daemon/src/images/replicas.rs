//! Images that volumes left behind when they went to other hosts, and with which an incremental return may begin.
//!
//! ```text
//!   handed over, the image kept ──► record(): its generation, and the attributes of its file
//!   the volume returns ───────────► take(): unchanged? Then it becomes the target, and the record is deleted
//! ```
//! A file with another size, mtime or ctime has been touched, so it is not trusted and the volume is copied
//! completely. (A comparison block by block would trust more files; there is none.) A replica ends when it may be
//! written. Everything here may block.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use migration::custody::Ending;
use migration::journal::{ImageFormat, ImageLocation};
use serde::{Deserialize, Serialize};

use crate::custody::CustodyError;
use crate::files::folder_entries::sync_folder_of;
use crate::files::whole_file;

const FOLDER: &str = "replicas";
const VERSION: u32 = 2;
/// The longest record: many times the usual length.
const RECORD_BYTES_MAX: u64 = 64 << 10;

/// The facts about a replica besides its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Facts {
    /// The volume's identity, 32 hexadecimal digits.
    pub(crate) volume: String,
    /// The migration by which the volume left.
    pub(crate) departure: u64,
    /// The generation of the replica, which ended with the handover.
    pub(crate) generation: u64,
    pub(crate) size_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    facts: Facts,
    image: PathBuf,
    look: Look,
}

/// The attributes of a file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Look {
    size_bytes: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
}

/// Returns whether an incremental return can begin with a kept image: a raw file in a store. The content of a qcow2 file may
/// still be rearranged when it is closed, and an image that was served in place belongs to its owner.
pub(crate) fn is_replica(image: &ImageLocation) -> bool {
    image.place.file().is_some() && image.format == ImageFormat::Raw && !image.is_adopted()
}

/// Records durably that `image` has these `facts`. After an error it is a kept image without a record.
pub(crate) fn record(data_dir: &Path, image: &Path, facts: Facts) -> io::Result<()> {
    let folder = data_dir.join(FOLDER);
    match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => sync_folder_of(&folder)?,
    }
    let path = record_path(data_dir, &facts.volume);
    let look = Look::at(image)?;
    let record = Record { version: VERSION, facts, image: image.to_owned(), look };
    whole_file::replace(&path, &serde_json::to_vec_pretty(&record)?)
}

/// Makes the replica of a volume of `size_bytes` the file at `path`, by `take`, which gets its present path. Returns the
/// replica's facts; `None`: the folder has none that can be trusted, or a program uses it. Deletes the record, unless the
/// replica is in use. After an error the file at `path` may be either of them.
pub(crate) fn take(
    data_dir: &Path,
    volume: &str,
    size_bytes: u64,
    path: &Path,
    take: impl FnOnce(&Path) -> Result<Ending, CustodyError>,
) -> io::Result<Option<Facts>> {
    let record = record_path(data_dir, volume);
    let bytes = match std::fs::metadata(&record) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
        Ok(found) if found.len() > RECORD_BYTES_MAX => return Err(io::ErrorKind::FileTooLarge.into()),
        Ok(_) => std::fs::read(&record)?,
    };
    // N.B. The record is removed durably before anything else: the image may be written from here on.
    std::fs::remove_file(&record)?;
    sync_folder_of(&record)?;
    let Ok(Record { version, facts, image, look }) = serde_json::from_slice(&bytes) else { return Ok(None) };
    let fits = version == VERSION && facts.volume == volume && facts.size_bytes == size_bytes;
    if !fits || image.parent() != path.parent() {
        return Ok(None);
    }
    match Look::at(&image) {
        Ok(found) if found == look => {}
        Ok(_) => {
            tracing::warn!(image = %image.display(), "the kept image was changed; it is not used");
            return Ok(None);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    match take(&image) {
        Ok(Ending::Taken) => Ok(Some(facts)),
        Ok(Ending::Gone) => Ok(None),
        Err(CustodyError::Refused { refused, .. }) => {
            tracing::warn!(image = %image.display(), %refused, "the kept image is left as it is; the volume is copied \
                completely");
            // It is unchanged, and may be used another time.
            whole_file::replace(&record, &bytes)?;
            Ok(None)
        }
        Err(CustodyError::Io { source, .. }) => Err(source),
    }
}

/// Returns whether [`take`] would find a replica of the volume for the file at `path`. Changes nothing; may block.
pub(crate) fn would_take(data_dir: &Path, volume: &str, size_bytes: u64, path: &Path) -> bool {
    records(data_dir).unwrap_or_default().into_iter().any(|(_, record)| {
        record.facts.volume == volume
            && record.facts.size_bytes == size_bytes
            && record.image.parent() == path.parent()
            && Look::at(&record.image).is_ok_and(|found| found == record.look)
    })
}

/// Returns whether the image at `path` is recorded and unchanged, so that a return may begin with it.
pub(crate) fn is_untouched(data_dir: &Path, path: &Path) -> bool {
    let known = records(data_dir).unwrap_or_default().into_iter().find(|(_, record)| record.image == path);
    known.is_some_and(|(_, record)| Look::at(path).is_ok_and(|found| found == record.look))
}

/// Deletes the record of the image at `path` durably, if there is one.
pub(crate) fn forget(data_dir: &Path, path: &Path) -> io::Result<()> {
    let known = records(data_dir)?.into_iter().filter(|(_, record)| record.image == path);
    for (record, _) in known {
        std::fs::remove_file(&record)?;
        sync_folder_of(&record)?;
    }
    Ok(())
}

/// Returns all valid records, and their paths.
fn records(data_dir: &Path) -> io::Result<Vec<(PathBuf, Record)>> {
    let entries = match std::fs::read_dir(data_dir.join(FOLDER)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let Some(bytes) = whole_file::read(&path, RECORD_BYTES_MAX)? else { continue };
        // Records of other versions are ignored, here as in [`take`].
        let record = serde_json::from_slice::<Record>(&bytes).ok().filter(|record| record.version == VERSION);
        found.extend(record.map(|record| (path, record)));
    }
    Ok(found)
}

impl Look {
    fn at(path: &Path) -> io::Result<Self> {
        let metadata = std::fs::symlink_metadata(path)?;
        Ok(Self {
            size_bytes: metadata.size(),
            mtime: (metadata.mtime(), metadata.mtime_nsec()),
            ctime: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

fn record_path(data_dir: &Path, volume: &str) -> PathBuf {
    data_dir.join(FOLDER).join(format!("{volume}.json"))
}

#[cfg(test)]
mod tests {
    use migration::custody::{Kind, Refused, Step};

    use super::*;

    const VOLUME: &str = "0707";

    /// Makes a data folder and a kept image.
    fn kept() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let (image, target) = (folder.path().join("v.img.moved-m1"), folder.path().join("v.img"));
        std::fs::write(&image, b"old").unwrap();
        std::fs::write(&target, b"").unwrap();
        let facts = Facts { volume: VOLUME.to_owned(), departure: 7, generation: 4, size_bytes: 3 };
        for _ in 0..2 {
            record(folder.path(), &image, facts.clone()).unwrap();
        }
        (folder, image, target)
    }

    /// Takes it like custody without further claims.
    fn taken(data_dir: &Path, volume: &str, size: u64, target: &Path) -> Option<Facts> {
        let rename = |kept: &Path| {
            std::fs::rename(kept, target).unwrap();
            Ok(Ending::Taken)
        };
        take(data_dir, volume, size, target, rename).unwrap()
    }

    #[test]
    fn an_image_that_is_used_may_be_taken_another_time() {
        let (folder, image, target) = kept();
        let used = |kept: &Path| {
            let claims = vec![Kind::Foreign { holder: "qemu-nbd (process 7)".to_owned() }];
            let refused = Refused { step: Step::TakeBack, claims };
            Err(CustodyError::Refused { path: kept.to_owned(), refused })
        };
        assert_eq!(take(folder.path(), VOLUME, 3, &target, used).unwrap(), None);
        assert!(is_untouched(folder.path(), &image));
        assert!(taken(folder.path(), VOLUME, 3, &target).is_some());
    }

    #[test]
    fn what_was_kept_is_taken_once() {
        let (folder, image, target) = kept();
        let facts = taken(folder.path(), VOLUME, 3, &target).unwrap();
        assert_eq!((facts.departure, facts.generation), (7, 4));
        assert_eq!((std::fs::read(&target).unwrap(), image.exists()), (b"old".to_vec(), false));
        assert_eq!(taken(folder.path(), VOLUME, 3, &target), None);
    }

    #[test]
    fn a_replica_of_another_size_or_volume_is_none() {
        for (volume, size) in [(VOLUME, 4), ("0808", 3)] {
            let (folder, image, target) = kept();
            assert_eq!(taken(folder.path(), volume, size, &target), None);
            assert!(image.exists() && std::fs::read(&target).unwrap().is_empty());
        }
    }

    #[test]
    fn a_record_of_another_version_is_not_believed_and_its_image_stays() {
        let (folder, image, target) = kept();
        let record = record_path(folder.path(), VOLUME);
        let text = std::fs::read_to_string(&record).unwrap();
        let newer =
            text.replace(&format!("\"version\": {VERSION}"), &format!("\"version\": {}", VERSION + 1));
        assert_ne!(newer, text);
        std::fs::write(&record, newer).unwrap();
        assert!(!is_untouched(folder.path(), &image));
        assert_eq!(taken(folder.path(), VOLUME, 3, &target), None);
        assert_eq!(std::fs::read(&image).unwrap(), b"old");
    }

    #[test]
    fn what_is_forgotten_is_not_come_home_to() {
        let (folder, image, target) = kept();
        assert!(is_untouched(folder.path(), &image) && !is_untouched(folder.path(), &target));
        for _ in 0..2 {
            forget(folder.path(), &image).unwrap();
        }
        assert!(!is_untouched(folder.path(), &image) && image.exists());
        assert_eq!(taken(folder.path(), VOLUME, 3, &target), None);
        forget(&folder.path().join("nowhere"), &image).unwrap();
    }

    #[test]
    fn a_file_that_somebody_touched_is_not_trusted() {
        // Its mtime can be restored, its ctime cannot.
        let (folder, image, target) = kept();
        let before = Look::at(&image).unwrap();
        let mtime = std::fs::metadata(&image).unwrap().modified().unwrap();
        // The clock of a file system may stand still for some milliseconds.
        while Look::at(&image).unwrap() == before {
            std::fs::write(&image, b"nEw").unwrap();
            std::fs::File::options().write(true).open(&image).unwrap().set_modified(mtime).unwrap();
        }
        assert!(!is_untouched(folder.path(), &image));
        assert_eq!(taken(folder.path(), VOLUME, 3, &target), None);
    }
}
