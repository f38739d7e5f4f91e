//! The files of residencies: their names, the order of writes, and their deletion. Everything here blocks.

use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::sync::{Arc, Mutex, PoisonError};

use chronicle::{Epoch, Kept, StayId};
use migration::stay::ImageRecord;
use migration::stay::image::RECORD_BYTES_MAX;
use migration::{StayKey, VolumeId};

use super::marks;
use crate::files::folder_entries::sync_folder_of;
use crate::files::whole_file;

/// The longest file that is read: longer than the largest sets.
const FILE_BYTES_MAX: u64 = 1 << 30;

#[derive(Clone, Debug)]
pub(super) struct Files {
    folder: PathBuf,
    /// Held while the record of an image is changed: lanes that end, migrations that begin and failed flushes change it.
    changing: Arc<Mutex<()>>,
}

impl Files {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, changing: Arc::default() }
    }

    /// Returns the recorded chronicle of a residency, with later marks; `None`: there is none.
    pub(super) fn kept(&self, key: StayKey) -> io::Result<Option<Kept>> {
        let Some(bytes) = whole_file::read(&self.kept_path(key), FILE_BYTES_MAX)? else { return Ok(None) };
        let kept = Kept::decode(&bytes, key.volume.0, key.stay).map_err(io::Error::other)?;
        let marks = self.marks_of(key)?.into_iter();
        let read = marks.map(|(epoch, path)| Ok((epoch, marks::read(&path)?)));
        Ok(Some(kept.with_marks(read.collect::<io::Result<Vec<_>>>()?)))
    }

    /// Replaces the recorded chronicle of a residency durably.
    pub(super) fn keep(&self, key: StayKey, kept: &Kept) -> io::Result<()> {
        whole_file::replace(&self.kept_path(key), &kept.encode(key.volume.0, key.stay))?;
        // N.B. The marks are deleted last: a restart before that finds the older chronicle, which needs them.
        self.delete_marks(key, kept.through)
    }

    /// Deletes the recorded chronicle of a residency durably, with its marks of epochs up to `through`. Needs no space.
    pub(super) fn forget(&self, key: StayKey, through: Epoch) -> io::Result<()> {
        remove(&self.kept_path(key))?;
        // N.B. The removal is durable before the marks are deleted.
        sync_folder_of(&self.kept_path(key))?;
        self.delete_marks(key, through)
    }

    /// Returns the recorded attributes of the image in a residency; `None` also for an unreadable file.
    pub(super) fn image_record(&self, key: StayKey) -> Option<ImageRecord> {
        let bytes = whole_file::read(&self.image_path(key), RECORD_BYTES_MAX).ok().flatten()?;
        ImageRecord::decode(&bytes, key)
    }

    /// Replaces the record of the image durably by what `change` makes of it; `None`: it stays.
    pub(super) fn change_image(
        &self,
        key: StayKey,
        change: impl FnOnce(Option<ImageRecord>) -> Option<ImageRecord>,
    ) -> io::Result<()> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        change(self.image_record(key)).map_or(Ok(()), |record| self.record_image(key, &record))
    }

    fn record_image(&self, key: StayKey, record: &ImageRecord) -> io::Result<()> {
        whole_file::replace(&self.image_path(key), &record.encode(key))
    }

    /// Records durably that a flush of the image has failed. In a full folder without an earlier record, makes sure
    /// that there is no record.
    pub(super) fn doubt_image(&self, key: StayKey) -> io::Result<()> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let recorded = self.record_image(key, &ImageRecord::Failed);
        // An empty file says the same, and takes no space.
        recorded.or_else(|_| empty(&self.image_path(key))).or_else(|_| self.forget_image(key))
    }

    /// Deletes the record of the image durably.
    pub(super) fn forget_image(&self, key: StayKey) -> io::Result<()> {
        remove(&self.image_path(key))?;
        sync_folder_of(&self.image_path(key))
    }

    pub(super) fn delete_other_stays(&self, key: StayKey) -> io::Result<()> {
        self.delete_all_but(|of| of.volume != key.volume || of.stay == key.stay)
    }

    pub(super) fn delete_volume(&self, volume: VolumeId) -> io::Result<()> {
        self.delete_all_but(|of| of.volume != volume)?;
        sync_folder_of(&self.folder.join("any"))
    }

    /// Deletes files of unwanted residencies, and files that name no residency.
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

    /// Returns the mark files of a residency, with their epochs.
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

fn key_of(name: &str) -> Option<StayKey> {
    let mut parts = name.split('.');
    let (volume, stay, _kind) = (parts.next()?, parts.next()?, parts.next()?);
    let digits =
        volume.as_bytes().chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    let volume = digits.collect::<Option<Vec<u8>>>()?.try_into().ok()?;
    Some(StayKey { volume: VolumeId(volume), stay: StayId::from_str(stay).ok()? })
}

/// Truncates a file durably.
fn empty(path: &Path) -> io::Result<()> {
    std::fs::OpenOptions::new().write(true).truncate(true).open(path)?.sync_all()
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
