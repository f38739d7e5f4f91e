//! Stores: folders that hold images, each used by one daemon at a time.
//!
//! ```text
//!   NAME.img                  the image of volume NAME, or the target of a migration of it
//!   NAME.img.sterna-new       an image that is being made: NAME.img once the journal knows the volume
//!   NAME.img.sterna-removed   an image that is being deleted: NAME.img again if the journal still knows the volume
//!   NAME.img.moved-mN         the source's image that migration mN left, kept
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use migration::journal::State;

use crate::error::RequestError;
use crate::images::{self, rename_without_replacing, with_suffix};
use crate::lock::{FolderLock, LockError};
use crate::names;

/// Suffix of images.
const IMAGE_SUFFIX: &str = ".img";
/// Added to the name of an image that is being made.
const NEW_SUFFIX: &str = ".sterna-new";
/// Added to the name of an image that is being deleted.
const REMOVED_SUFFIX: &str = ".sterna-removed";

/// All stores of the host.
#[derive(Debug)]
pub(crate) struct Stores {
    by_name: BTreeMap<String, Store>,
}

/// One folder of images.
#[derive(Debug)]
pub(crate) struct Store {
    name: String,
    folder: PathBuf,
    /// The lock on the folder; `None` while the store cannot be used.
    lock: Mutex<Option<FolderLock>>,
}

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreProblem {
    /// The folder is not there.
    #[error("{0} does not exist; create it, or mount its disk")]
    Missing(PathBuf),
    /// The folder cannot be locked.
    #[error(transparent)]
    Locked(#[from] LockError),
    /// The file system cannot be asked for its space.
    #[error("{folder} cannot be examined: {source}")]
    Unreadable {
        /// The folder.
        folder: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
}

/// Space of a file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Space {
    /// All of it.
    pub total: u64,
    /// What this process may still use.
    pub free: u64,
}

impl Stores {
    /// The stores of a configuration. A folder that is not there is no error: its disk may be mounted later.
    pub(crate) fn new(folders: &BTreeMap<String, PathBuf>) -> Self {
        let stores = folders.iter().map(|(name, folder)| {
            let store = Store { name: name.clone(), folder: folder.clone(), lock: Mutex::new(None) };
            (name.clone(), store)
        });
        Self { by_name: stores.collect() }
    }

    /// The stores, by name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Store> {
        self.by_name.values()
    }

    /// The store of that name, whether it can be used or not.
    ///
    /// # Errors
    /// [`RequestError::StoreNotFound`].
    pub(crate) fn get(&self, name: &str) -> Result<&Store, RequestError> {
        self.by_name
            .get(name)
            .ok_or_else(|| RequestError::StoreNotFound { name: name.to_owned(), known: self.known() })
    }

    /// The store of that name, or the only one.
    ///
    /// # Errors
    /// [`RequestError::StoreNotFound`], [`RequestError::StoreNotChosen`].
    pub(crate) fn choose(&self, name: Option<&str>) -> Result<&Store, RequestError> {
        match (name, self.by_name.len()) {
            (Some(name), _) => self.get(name),
            (None, 1) => self.by_name.values().next().ok_or_else(|| self.not_chosen()),
            (None, _) => Err(self.not_chosen()),
        }
    }

    fn not_chosen(&self) -> RequestError {
        RequestError::StoreNotChosen { known: self.known() }
    }

    fn known(&self) -> String {
        self.by_name.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
    }
}

impl Store {
    /// Its name in the configuration.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Its folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the image of a volume is.
    pub(crate) fn image_path(&self, volume: &str) -> PathBuf {
        self.folder.join(format!("{volume}{IMAGE_SUFFIX}"))
    }

    /// Checks that the folder is there, and that it is used by this daemon alone; may sleep.
    ///
    /// # Errors
    /// [`StoreProblem`].
    pub(crate) fn check(&self) -> Result<(), StoreProblem> {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // Another file system may have been mounted over the folder that was locked.
        if lock.as_ref().is_some_and(|lock| lock.is_of(&self.folder)) {
            return Ok(());
        }
        *lock = None;
        if !self.folder.is_dir() {
            return Err(StoreProblem::Missing(self.folder.clone()));
        }
        *lock = Some(FolderLock::acquire(&self.folder)?);
        Ok(())
    }

    /// As [`Store::check`], and names the store in the error.
    ///
    /// # Errors
    /// [`RequestError::StoreUnusable`].
    pub(crate) fn require(&self) -> Result<(), RequestError> {
        self.check().map_err(|problem| RequestError::StoreUnusable { name: self.name.clone(), problem })
    }

    /// Space of its file system; may sleep.
    ///
    /// # Errors
    /// [`StoreProblem`].
    pub(crate) fn space(&self) -> Result<Space, StoreProblem> {
        self.check()?;
        let unreadable = |errno: rustix::io::Errno| StoreProblem::Unreadable {
            folder: self.folder.clone(),
            source: errno.into(),
        };
        let told = rustix::fs::statvfs(&self.folder).map_err(unreadable)?;
        let bytes = |blocks: u64| blocks.saturating_mul(told.f_frsize);
        Ok(Space { total: bytes(told.f_blocks), free: bytes(told.f_bavail) })
    }

    /// Checks that so many bytes are free.
    ///
    /// # Errors
    /// [`RequestError::NoSpace`], [`RequestError::StoreUnusable`].
    pub(crate) fn require_space(&self, needed: u64) -> Result<(), RequestError> {
        let space = self.space();
        let space =
            space.map_err(|problem| RequestError::StoreUnusable { name: self.name.clone(), problem })?;
        if space.free < needed {
            return Err(RequestError::NoSpace { store: self.name.clone(), free: space.free, needed });
        }
        Ok(())
    }

    /// Brings the folder in line with the journal, after a daemon that was killed.
    ///
    /// To be called before any volume is served, with the interrupted migrations ended.
    pub(crate) fn settle(&self, state: &State) -> std::io::Result<()> {
        let known: BTreeSet<&Path> = state
            .volumes
            .values()
            .filter_map(|volume| volume.record.image.place.file())
            .map(Path::new)
            .collect();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if let Err(error) = settle_file(&path, &known) {
                tracing::warn!(store = %self.name, path = %path.display(), %error, "a left-over file stays");
            }
        }
        Ok(())
    }
}

/// Name of an image while it is being made.
pub(crate) fn new_path(image: &Path) -> PathBuf {
    with_suffix(image, NEW_SUFFIX)
}

/// Name of an image while it is being deleted.
pub(crate) fn removed_path(image: &Path) -> PathBuf {
    with_suffix(image, REMOVED_SUFFIX)
}

fn settle_file(path: &Path, known: &BTreeSet<&Path>) -> std::io::Result<()> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Ok(()) };
    let staged = name.strip_suffix(NEW_SUFFIX).or_else(|| name.strip_suffix(REMOVED_SUFFIX));
    let image = staged.unwrap_or(name);
    let is_image = image.strip_suffix(IMAGE_SUFFIX).is_some_and(|volume| names::check(volume).is_ok());
    if !is_image {
        return Ok(());
    }
    let image = path.with_file_name(image);
    match (staged, known.contains(image.as_path())) {
        // The journal knows the volume: it was made, or its removal was not recorded.
        (Some(_), true) => {
            tracing::info!(image = %image.display(), "an interrupted change of an image is completed");
            rename_without_replacing(path, &image)
        }
        (Some(_), false) => {
            tracing::info!(path = %path.display(), "a left-over of an interrupted change is deleted");
            std::fs::remove_file(path)
        }
        // The target of a migration that did not get as far as the journal. It is empty: nothing is lost.
        (None, false)
            if std::fs::symlink_metadata(path)?.is_file() && std::fs::metadata(path)?.len() == 0 =>
        {
            tracing::info!(path = %path.display(), "an empty image that belongs to no volume is deleted");
            std::fs::remove_file(path)
        }
        (None, _) => Ok(()),
    }?;
    images::sync_folder_of(path)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use chronicle::Generation;
    use migration::VolumeId;
    use migration::journal::{Entry, ExportSettings, ImageLocation, Record, State, VolumeRecord};

    use super::{Stores, new_path, removed_path};
    use crate::error::RequestError;

    fn stores(folder: &Path) -> Stores {
        Stores::new(&BTreeMap::from([("a".to_owned(), folder.to_owned())]))
    }

    fn state_with(path: &Path) -> State {
        let image = ImageLocation::raw_file("a", path.display().to_string());
        let record = VolumeRecord {
            volume: VolumeId([1; 16]),
            name: "v".into(),
            size_bytes: 3,
            block_size_bytes: 4096,
            image,
            generation: Generation(0),
            export: ExportSettings::default(),
        };
        let mut state = State::default();
        state.apply(&Entry { at_unix_ms: 0, records: vec![Record::VolumeAdded(record)] }).unwrap();
        state
    }

    #[test]
    fn interrupted_changes_are_completed_or_undone_as_the_journal_says() {
        let folder = tempfile::tempdir().unwrap();
        let stores = stores(folder.path());
        let store = stores.get("a").unwrap();
        let image = store.image_path("v");
        for staged in [new_path(&image), removed_path(&image)] {
            std::fs::write(&staged, b"abc").unwrap();
            store.settle(&state_with(&image)).unwrap();
            assert_eq!((staged.exists(), std::fs::read(&image).unwrap()), (false, b"abc".to_vec()));
            std::fs::rename(&image, &staged).unwrap();
            store.settle(&State::default()).unwrap();
            assert_eq!((staged.exists(), image.exists()), (false, false));
        }
    }

    #[test]
    fn files_of_others_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let stores = stores(folder.path());
        let store = stores.get("a").unwrap();
        let kept = ["other.img", "notes.txt", "v.img.moved-m1", ".x.img.sterna-new", "sterna-new", "v.qcow2"];
        for name in kept {
            std::fs::write(folder.path().join(name), b"abc").unwrap();
        }
        std::fs::write(folder.path().join("empty.txt"), b"").unwrap();
        std::fs::write(folder.path().join("reserved.img"), b"").unwrap();
        store.settle(&State::default()).unwrap();
        for name in kept.into_iter().chain(["empty.txt"]) {
            assert!(folder.path().join(name).exists(), "{name}");
        }
        assert!(!folder.path().join("reserved.img").exists());
    }

    #[test]
    fn store_without_a_folder_has_a_problem_until_the_folder_is_there() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("later");
        let stores = stores(&folder);
        let store = stores.get("a").unwrap();
        let error = store.require().unwrap_err();
        assert!(
            error.message().ends_with("does not exist; create it, or mount its disk"),
            "{}",
            error.message()
        );
        std::fs::create_dir(&folder).unwrap();
        store.require().unwrap();
        let space = store.space().unwrap();
        assert!(space.free > 0 && space.free <= space.total);
        assert!(matches!(store.require_space(u64::MAX), Err(RequestError::NoSpace { .. })));
        // Another daemon cannot have it at the same time.
        assert!(matches!(
            super::Store { name: "b".into(), folder, lock: None.into() }.require(),
            Err(RequestError::StoreUnusable { .. })
        ));
    }

    #[test]
    fn only_store_need_not_be_named() {
        let one = stores(Path::new("/a"));
        assert_eq!(one.choose(None).unwrap().name(), "a");
        assert!(matches!(one.choose(Some("b")), Err(RequestError::StoreNotFound { .. })));
        let two =
            Stores::new(&BTreeMap::from([("a".to_owned(), "/a".into()), ("b".to_owned(), "/b".into())]));
        let error = two.choose(None).unwrap_err();
        assert_eq!(error.message(), "say in which store: --store with one of a, b");
    }
}
