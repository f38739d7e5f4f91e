//! Custody of images: only this module of the daemon deletes and renames images, sets their size, and replaces one by
//! another. Everything here may block.
//!
//! ```text
//!   opened    folder and file, opened once, without following a link
//!   claims    the claims of the journal, chains, marks and other programs: the book of migration::custody
//!   chains    what the images of all stores stand on: headers read and remembered, leads from their names
//!   steps     discard, fence, rename, take back: opened ► locked ► asked ► compared ► done ► synced (Handling)
//!   making    new files: reserved, sized, put into their place
//!   lasting   what images are beyond a restart; the journal says which of them has which name
//!   stacks    what devices, files and exports have in common
//!   freeing   frees the space of a deleted file in small steps
//! ```
//! `migration::custody` decides which step is allowed to which owner, and the order of its parts. `tidy` checks that no other
//! module of the daemon does any of this to an image.

mod chains;
mod claims;
mod freeing;
mod headers;
mod lasting;
mod leads;
mod making;
mod opened;
mod stacks;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lane::ControlFault;
use migration::custody::{Object, Owner, Refused, Step};
use migration::journal::{ImageLocation, Record, State};
use migration::{CommitFault, VolumeId};

use crate::error::RequestError;
use crate::journal::Journal;
use crate::stores::{StoreKind, Stores};

use self::claims::Loops;
pub(crate) use self::claims::is_same;
pub(crate) use self::freeing::{continue_freeing, is_deleted_file};
use self::headers::Headers;
pub(crate) use self::lasting::lasting_at;
pub(crate) use self::making::{allocate, clear_unfinished, set_size};

/// Custody of the images of this host; a clone is another handle to it.
#[derive(Clone)]
pub(crate) struct Custody {
    books: Arc<Books>,
}

struct Books {
    known: Known,
    /// What the files of the stores say that they stand on.
    headers: Headers,
    folders: Mutex<BTreeSet<PathBuf>>,
    /// Images of volumes that were given up here, by path.
    given_up: Mutex<BTreeMap<PathBuf, GivenUp>>,
}

/// A volume that another host has, and that was given up here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GivenUp {
    pub(crate) volume: String,
    /// The name of the other host.
    pub(crate) host: String,
}

/// The source of claims.
enum Known {
    Journal(Journal),
    /// A state without a journal, for tests.
    #[cfg(test)]
    State(Box<Mutex<State>>),
}

/// Why a step on an image was refused or failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CustodyError {
    /// Others use it, or may use it.
    #[error("{path}: {refused}", path = .path.display())]
    Refused { path: PathBuf, refused: Refused },
    #[error("cannot {operation} {path}: {source}", path = .path.display())]
    Io {
        /// The failed operation, as a verb.
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl Custody {
    pub(crate) fn new(journal: Journal, stores: &Stores) -> Self {
        let custody = Self::of(Known::Journal(journal));
        custody.add_stores(stores);
        custody
    }

    fn of(known: Known) -> Self {
        let (headers, folders, given_up) = (Headers::default(), Mutex::default(), Mutex::default());
        Self { books: Arc::new(Books { known, headers, folders, given_up }) }
    }

    /// Looks in the folders of these stores as well: an image in one may stand on an image in another.
    pub(crate) fn add_stores(&self, stores: &Stores) {
        let folders = stores.iter().filter_map(|store| match store.kind() {
            StoreKind::Folder { folder, .. } => Some(folder.path().to_owned()),
            StoreKind::Single(_) => None,
        });
        self.folders().extend(folders);
    }

    /// Notes which images, by path, are those of volumes that were given up here.
    pub(crate) fn set_given_up(&self, images: BTreeMap<PathBuf, GivenUp>) {
        *self.books.given_up.lock().unwrap_or_else(PoisonError::into_inner) = images;
    }

    /// Returns the volume that was given up here and whose image is at this path.
    pub(crate) fn given_up(&self, path: &Path) -> Option<GivenUp> {
        self.books.given_up.lock().unwrap_or_else(PoisonError::into_inner).get(path).cloned()
    }

    #[cfg(test)]
    pub(crate) fn of_state(state: State) -> Self {
        Self::of(Known::State(Box::new(Mutex::new(state))))
    }

    /// Checks whether a step may be taken that is done in another module: serving, releasing, restoring, giving back, advice.
    pub(crate) fn check(&self, step: Step, owner: &Owner, image: &ImageLocation) -> Result<(), CustodyError> {
        let (mut book, object) = self.book_for(&image.place);
        if matches!(owner, Owner::Administrator(_) | Owner::Maker) {
            claims::add_loops(&mut book, step, &object, Loops::Any);
            self.add_loops_below(&mut book, step, image, Loops::Any);
        }
        match book.ask(step, owner, &object) {
            Ok(_) => Ok(()),
            Err(refused) => Err(CustodyError::Refused { path: image.place.name().into(), refused }),
        }
    }

    /// Checks whether the image of a volume may be deleted once the volume is removed.
    pub(crate) fn check_removal(&self, volume: VolumeId, path: &Path) -> Result<(), CustodyError> {
        self.check_deletion(path, &Owner::Volume(volume), |book| book.forget_volume(volume))
    }

    fn headers(&self) -> &Headers {
        &self.books.headers
    }

    fn folders(&self) -> MutexGuard<'_, BTreeSet<PathBuf>> {
        self.books.folders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The folders whose images may stand on an object: those of all stores, and its own.
    fn folders_for(&self, object: &Object) -> BTreeSet<PathBuf> {
        let own = object.place.file().and_then(|path| Path::new(path).parent());
        self.folders().iter().map(PathBuf::as_path).chain(own).map(Path::to_owned).collect()
    }

    fn state(&self) -> State {
        self.read(State::clone)
    }

    fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        match &self.books.known {
            Known::Journal(journal) => journal.read(look),
            #[cfg(test)]
            Known::State(state) => look(&state.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Makes records durable; sleeps.
    fn commit_now(&self, records: Vec<Record>) -> Result<(), CommitFault> {
        match &self.books.known {
            Known::Journal(journal) => journal.commit_now(records),
            #[cfg(test)]
            Known::State(state) => {
                let entry = migration::journal::Entry { at_unix_ms: 0, records };
                let applied = state.lock().unwrap_or_else(PoisonError::into_inner).apply(&entry);
                applied.map_err(|_| CommitFault::NotWritten)
            }
        }
    }
}

impl CustodyError {
    fn io(operation: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { operation, path: path.to_owned(), source }
    }

    /// Returns whether a file has the new name already.
    pub(crate) fn is_taken(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }
}

impl From<CustodyError> for ControlFault {
    fn from(error: CustodyError) -> Self {
        match error {
            CustodyError::Refused { path, refused } => {
                Self { operation: "change", path: path.display().to_string(), detail: refused.to_string() }
            }
            CustodyError::Io { operation, path, source } => {
                Self { operation, path: path.display().to_string(), detail: source.to_string() }
            }
        }
    }
}

impl From<CustodyError> for RequestError {
    fn from(error: CustodyError) -> Self {
        match error {
            CustodyError::Refused { path, refused } => Self::Claimed { path, refused },
            CustodyError::Io { operation, path, source } => Self::storage(operation, &path, &source),
        }
    }
}

impl From<CustodyError> for io::Error {
    fn from(error: CustodyError) -> Self {
        match error {
            CustodyError::Io { source, .. } => source,
            refused @ CustodyError::Refused { .. } => Self::other(refused.to_string()),
        }
    }
}
