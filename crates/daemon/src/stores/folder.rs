//! A store that is a folder: any number of images, each a file.
//!
//! ```text
//!   NAME.img, NAME.qcow2       the image of volume NAME, or the target of a migration of it
//!   IMAGE.sterna-new           an image that is being made: IMAGE once the journal has the volume
//!   IMAGE.sterna-removed       an image that is being deleted: IMAGE again if the journal still has the volume
//!   IMAGE.moved-mN             the source's image that migration mN left, kept
//!   .IMAGE.partial             marks IMAGE as an incomplete target (images::half_made)
//!   IMAGE.sterna-token-…       shows the target of a migration to a source with the same folder (lane::shared_storage)
//!   IMAGE.sterna-answer-…      the answer of that source
//! ```

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use migration::custody::{Owner, Purpose};
use migration::journal::{ImageFormat, Place, State};
use rustix::fs::{Mode, OFlags};

use super::read_only::is_read_only;
use super::{Space, StoreProblem, Unclaimed};
use crate::custody::Custody;
use crate::files::folder_entries::with_suffix;
use crate::files::lock::FolderLock;
use crate::images::half_made::{self, Marked, Marks};
use crate::names;

const RAW_SUFFIX: &str = ".img";
const QCOW2_SUFFIX: &str = ".qcow2";
/// The suffix of an image that is being made.
const NEW_SUFFIX: &str = ".sterna-new";
/// The suffix of an image that is being deleted.
const REMOVED_SUFFIX: &str = ".sterna-removed";

/// A folder of images, used by one daemon at a time.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// The lock on the folder; `None` while the store cannot be used.
    lock: Mutex<Option<FolderLock>>,
}

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, lock: Mutex::new(None) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn image_path(&self, volume: &str, format: ImageFormat) -> PathBuf {
        let suffix = match format {
            ImageFormat::Raw => RAW_SUFFIX,
            ImageFormat::Qcow2 => QCOW2_SUFFIX,
        };
        self.path.join(format!("{volume}{suffix}"))
    }

    /// Checks that the folder exists, and that only this daemon uses it. May block.
    pub(super) fn check(&self) -> Result<(), StoreProblem> {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Another file system may have been mounted over the locked folder.
        if lock.as_ref().is_some_and(|lock| lock.is_of(&self.path)) {
            return Ok(());
        }
        *lock = None;
        if !self.path.is_dir() {
            let problem = if self.path.exists() { StoreProblem::NoFolder } else { StoreProblem::Missing };
            return Err(problem(self.path.clone()));
        }
        *lock = Some(FolderLock::acquire(&self.path)?);
        Ok(())
    }

    /// Returns the space of its file system. May block.
    pub(super) fn space(&self) -> Result<Space, StoreProblem> {
        self.check()?;
        space_at(&self.path).map_err(|source| StoreProblem::Unreadable { path: self.path.clone(), source })
    }

    /// Makes the folder consistent with the journal, after a daemon was killed.
    pub(super) fn settle(&self, store: &str, custody: &Custody, state: &State) -> std::io::Result<()> {
        let images = state.claimed_records().filter_map(|record| record.image.place.file());
        let known: BTreeSet<&Path> = images.map(Path::new).collect();
        let moving = state.unfinished().flat_map(|(_, migration)| &migration.volumes);
        let awaited = moving.filter_map(|moving| moving.target.place.file());
        let awaited: BTreeSet<&Path> = awaited.map(Path::new).collect();
        for entry in std::fs::read_dir(&self.path)? {
            let path = entry?.path();
            // An unfinished migration deals with its own image.
            let settled = match awaited.contains(path.as_path()) {
                true => Ok(()),
                false => settle_file(custody, &path, &known).and_then(|()| settle_secret(&path, &awaited)),
            };
            if let Err(error) = settled {
                tracing::warn!(store, path = %path.display(), %error, "a left-over file stays");
            }
        }
        if let Err(error) = half_made::settle(&self.path, |image| half_made::is_complete(image, state)) {
            tracing::warn!(store, %error, "cannot remove outdated marks of half-made targets");
        }
        let unknown = if *state == State::default() { self.unknown_images(state)? } else { Vec::new() };
        if !unknown.is_empty() {
            let images = unknown.join(", ");
            tracing::warn!(
                store,
                images,
                "the journal is new and does not know the images of this store; if the data folder was lost, restore it from a \
                 backup, or list the images and make volumes of them: sterna store scan, sterna store import STORE/FILE"
            );
        }
        Ok(())
    }

    /// Returns the images that belong to no volume and no migration of `state`, and who uses them. May block.
    pub(super) fn unclaimed_images(&self, state: &State) -> std::io::Result<Unclaimed> {
        let mut unclaimed = Unclaimed::default();
        for name in self.unknown_images(state)? {
            let opened = open_for_look(&self.path.join(&name));
            let users = opened.and_then(|file| block::store::users_of(&file)).unwrap_or_default();
            match users.as_slice() {
                [] => unclaimed.unused.push(name),
                users => unclaimed.in_use.push(format!("{name}, by {}", users.join(", "))),
            }
        }
        Ok(unclaimed)
    }

    /// Returns the names of images that belong to no volume and no migration of `state`. May block.
    fn unknown_images(&self, state: &State) -> std::io::Result<Vec<String>> {
        let here = state.claimed_records().map(|record| &record.image);
        let moving = state.unfinished().flat_map(|(_, migration)| &migration.volumes);
        let images = here.chain(moving.flat_map(|moving| [&moving.source, &moving.target]));
        // A migration could not retire these, which were out of sight.
        let hidden = state.images.iter().filter(|(_, known)| matches!(known.purpose, Purpose::Hidden(_)));
        let places = images.map(|image| &image.place).chain(hidden.map(|(place, _)| place));
        let known: BTreeSet<&Path> = places.filter_map(Place::file).map(Path::new).collect();
        let (marks, mut unknown) = (Marks::of_folder(&self.path)?, Vec::new());
        for entry in std::fs::read_dir(&self.path)? {
            let entry = entry?;
            let path = entry.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let is_file = entry.file_type()?.is_file();
            let name = name.filter(|name| {
                is_file
                    && image_name(name).is_some()
                    && !known.contains(path.as_path())
                    && marks.marked(&path) == Marked::No
            });
            unknown.extend(name.map(str::to_owned));
        }
        unknown.sort();
        Ok(unknown)
    }
}

/// Opens a file to see whose it is: not to read it, and no link.
fn open_for_look(path: &Path) -> std::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Returns the space of a path's file system. May block.
pub(crate) fn space_at(path: &Path) -> std::io::Result<Space> {
    let told = rustix::fs::statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(told.f_frsize);
    let is_read_only = is_read_only(path)?;
    Ok(Space { total: bytes(told.f_blocks), free: bytes(told.f_bavail), is_read_only })
}

/// Parses the name of an image, `web1.img`: its volume and its format.
pub(crate) fn image_name(name: &str) -> Option<(&str, ImageFormat)> {
    let raw = name.strip_suffix(RAW_SUFFIX).map(|volume| (volume, ImageFormat::Raw));
    let found = raw.or_else(|| Some((name.strip_suffix(QCOW2_SUFFIX)?, ImageFormat::Qcow2)));
    found.filter(|(volume, _)| names::is_of_volume(volume))
}

/// Returns whether this is the name of an image that is being made or deleted.
pub(crate) fn is_unsettled_name(name: &str) -> bool {
    let image = name.strip_suffix(NEW_SUFFIX).or_else(|| name.strip_suffix(REMOVED_SUFFIX));
    image.is_some_and(|image| image_name(image).is_some())
}

/// Returns the name of an image while it is being made.
pub(crate) fn new_path(image: &Path) -> PathBuf {
    with_suffix(image, NEW_SUFFIX)
}

/// Returns the name of an image while it is being deleted.
pub(crate) fn removed_path(image: &Path) -> PathBuf {
    with_suffix(image, REMOVED_SUFFIX)
}

/// Deletes a token or an answer beside the image of an ended migration.
fn settle_secret(path: &Path, awaited: &BTreeSet<&Path>) -> std::io::Result<()> {
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(image) = name.and_then(lane::shared_storage::image_of) else { return Ok(()) };
    if awaited.contains(path.with_file_name(image).as_path()) {
        return Ok(());
    }
    tracing::info!(path = %path.display(), "deleted the file that a migration left beside its image");
    std::fs::remove_file(path)
}

fn settle_file(custody: &Custody, path: &Path, known: &BTreeSet<&Path>) -> std::io::Result<()> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Ok(()) };
    let staged = name.strip_suffix(NEW_SUFFIX).or_else(|| name.strip_suffix(REMOVED_SUFFIX));
    let image = staged.unwrap_or(name);
    if image_name(image).is_none() {
        return Ok(());
    }
    let image = path.with_file_name(image);
    match (staged, known.contains(image.as_path())) {
        // The journal has the volume: it was made, or its removal was not recorded.
        (Some(_), true) => {
            tracing::info!(image = %image.display(), "completed an interrupted change of an image");
            custody.rename(path, &image, &Owner::Housekeeping)?;
        }
        (Some(_), false) => {
            tracing::info!(path = %path.display(), "deleted a left-over of an interrupted change");
            custody.delete(path, &Owner::Housekeeping)?;
        }
        // The target of a migration that did not reach the journal. It is empty, so nothing is lost.
        (None, false)
            if std::fs::symlink_metadata(path)?.is_file() && std::fs::metadata(path)?.len() == 0 =>
        {
            tracing::info!(path = %path.display(), "deleted an empty image that belongs to no volume");
            custody.delete(path, &Owner::Housekeeping)?;
        }
        (None, _) => {}
    }
    Ok(())
}
