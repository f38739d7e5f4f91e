//! The files of stays: their names, what is written to them in which order, and which of them go. Everything here sleeps.

use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use chronicle::{Epoch, Kept, StayId};
use migration::stay::ImageRecord;
use migration::stay::image::RECORD_BYTES_MAX;
use migration::{StayKey, VolumeId};

use super::marks;
use crate::files::folder_entries::sync_folder_of;
use crate::files::whole_file;

/// Longest file that is read: more than the largest sets take.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// The folder of these files.
#[derive(Clone, Debug)]
pub(super) struct Files {
    folder: PathBuf,
}

impl Files {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// What was kept of a stay, with later marks; `None`: nothing.
    ///
    /// # Errors
    /// The system's; that it cannot be read, and must not be trusted.
    pub(super) fn kept(&self, key: StayKey) -> io::Result<Option<Kept>> {
        let Some(bytes) = whole_file::read(&self.kept_path(key), FILE_BYTES_MAX)? else { return Ok(None) };
        let kept = Kept::decode(&bytes, key.volume.0, key.stay).map_err(io::Error::other)?;
        let marks = self.marks_of(key)?.into_iter();
        let read = marks.map(|(epoch, path)| Ok((epoch, marks::read(&path)?)));
        Ok(Some(kept.with_marks(read.collect::<io::Result<Vec<_>>>()?)))
    }

    /// Puts `kept` durably in the place of what was kept of a stay.
    pub(super) fn keep(&self, key: StayKey, kept: &Kept) -> io::Result<()> {
        whole_file::replace(&self.kept_path(key), &kept.encode(key.volume.0, key.stay))?;
        // N.B. only now: before, a restart would have found an older chronicle, which needs them.
        self.delete_marks(key, kept.through)
    }

    /// Forgets durably what was kept of a stay, with its marks of epochs up to `through`. It takes no space.
    pub(super) fn forget(&self, key: StayKey, through: Epoch) -> io::Result<()> {
        remove(&self.kept_path(key))?;
        // N.B. durably: marks end from here on.
        sync_folder_of(&self.kept_path(key))?;
        self.delete_marks(key, through)
    }

    /// What was remembered of the image in a stay; what cannot be read is nothing.
    pub(super) fn image_record(&self, key: StayKey) -> Option<ImageRecord> {
        let bytes = whole_file::read(&self.image_path(key), RECORD_BYTES_MAX).ok().flatten()?;
        ImageRecord::decode(&bytes, key)
    }

    /// Remembers this of the image durably.
    pub(super) fn record_image(&self, key: StayKey, record: &ImageRecord) -> io::Result<()> {
        whole_file::replace(&self.image_path(key), &record.encode(key))
    }

    /// Remembers durably that a flush of the image has failed; in a full folder, where nothing has been remembered of it yet, that
    /// nothing is.
    pub(super) fn doubt_image(&self, key: StayKey) -> io::Result<()> {
        let recorded = self.record_image(key, &ImageRecord::Failed);
        // An empty file says the same, and takes no room.
        recorded.or_else(|_| empty(&self.image_path(key))).or_else(|_| self.forget_image(key))
    }

    /// Remembers durably nothing of the image.
    pub(super) fn forget_image(&self, key: StayKey) -> io::Result<()> {
        remove(&self.image_path(key))?;
        sync_folder_of(&self.image_path(key))
    }

    /// Deletes what other stays of the volume have left.
    pub(super) fn delete_other_stays(&self, key: StayKey) -> io::Result<()> {
        self.delete_all_but(|of| of.volume != key.volume || of.stay == key.stay)
    }

    /// Deletes everything of a volume.
    pub(super) fn delete_volume(&self, volume: VolumeId) -> io::Result<()> {
        self.delete_all_but(|of| of.volume != volume)?;
        sync_folder_of(&self.folder.join("any"))
    }

    /// Deletes what belongs to no stay that is wanted, also what names none.
    pub(super) fn delete_all_but(&self, is_wanted: impl Fn(StayKey) -> bool) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            let key = entry.file_name().to_str().and_then(key_of);
            if !key.is_some_and(&is_wanted) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }

    pub(super) fn marks_path(&self, key: StayKey, epoch: Epoch) -> PathBuf {
        self.folder.join(format!("{key}.{epoch}.marks"))
    }

    fn delete_marks(&self, key: StayKey, through: Epoch) -> io::Result<()> {
        let over = self.marks_of(key)?.into_iter().filter(|(epoch, _)| *epoch <= through);
        over.map(|(_, path)| path).try_for_each(|path| remove(&path))
    }

    /// The files of marks of a stay, with their epochs.
    fn marks_of(&self, key: StayKey) -> io::Result<Vec<(Epoch, PathBuf)>> {
        let prefix = format!("{key}.");
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            let name = entry.file_name();
            let epoch = name.to_str().and_then(|name| name.strip_prefix(&prefix)?.strip_suffix(".marks"));
            if let Some(epoch) = epoch.and_then(|epoch| epoch.parse().ok()) {
                found.push((Epoch(epoch), entry.path()));
            }
        }
        found.sort();
        Ok(found)
    }

    pub(super) fn presence_path(&self, key: StayKey) -> PathBuf {
        self.folder.join(format!("{key}.presence"))
    }

    fn kept_path(&self, key: StayKey) -> PathBuf {
        self.folder.join(format!("{key}.kept"))
    }

    fn image_path(&self, key: StayKey) -> PathBuf {
        self.folder.join(format!("{key}.image"))
    }
}

/// The stay that a file's name begins with.
fn key_of(name: &str) -> Option<StayKey> {
    let mut parts = name.split('.');
    let (volume, stay, _kind) = (parts.next()?, parts.next()?, parts.next()?);
    let digits =
        volume.as_bytes().chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    let volume = digits.collect::<Option<Vec<u8>>>()?.try_into().ok()?;
    Some(StayKey { volume: VolumeId(volume), stay: StayId::from_str(stay).ok()? })
}

/// Takes a file's content from it, durably.
fn empty(path: &Path) -> io::Result<()> {
    std::fs::OpenOptions::new().write(true).truncate(true).open(path)?.sync_all()
}

/// Removes a file; one that is gone is a success.
fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
