//! Custody of images: the one place of the daemon that deletes images, renames them, gives them a size, or puts one into another's
//! place. Everything here may sleep.
//!
//! ```text
//!   opened    folder and file, opened once, without following a link
//!   claims    what the journal, chains, marks and other programs say of the file: the book of migration::custody
//!   steps     discard, fence, rename, take back: opened ► locked ► asked ► compared ► done ► synced (Handling)
//!   making    new files: reserved, sized, put into their place
//!   names     what names led to when images were opened by them
//!   freeing   gives the space of a deleted file back bit by bit
//! ```
//! Which step whom is allowed, and in which order it is done, `migration::custody` decides. `tidy` sees to it that no other module
//! of the daemon does any of this to an image.

mod claims;
mod freeing;
mod making;
mod names;
mod opened;
mod steps;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::held::{Held, Identity};
use lane::ControlFault;
use migration::VolumeId;
use migration::custody::{Owner, Refused, Step};
use migration::journal::{ImageLocation, State};

use crate::error::RequestError;
use crate::journal::Journal;

pub(crate) use self::making::{allocate, clear_unfinished, place_made, set_size};

/// Custody of the images of this host; a clone is another handle to it.
#[derive(Clone)]
pub(crate) struct Custody {
    books: Arc<Books>,
}

struct Books {
    known: Known,
}

/// What says whose images are.
enum Known {
    Journal(Journal),
    /// For tests of what asks: nothing else is known.
    #[cfg(test)]
    State(Box<State>),
}

/// Why nothing was done to an image.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CustodyError {
    /// Others use it, or may.
    #[error("{path}: {refused}", path = .path.display())]
    Refused { path: PathBuf, refused: Refused },
    /// The system has answered so.
    #[error("cannot {operation} {path}: {source}", path = .path.display())]
    Io {
        /// What was tried, as a verb.
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl Custody {
    /// Begins with what the journal says at each step.
    pub(crate) fn new(journal: Journal) -> Self {
        Self { books: Arc::new(Books { known: Known::Journal(journal) }) }
    }

    /// As if a journal said this.
    #[cfg(test)]
    pub(crate) fn of_state(state: State) -> Self {
        Self { books: Arc::new(Books { known: Known::State(Box::new(state)) }) }
    }

    /// Checks whether a step may be taken that is done elsewhere: serving, releasing, restoring, giving back, advice.
    ///
    /// # Errors
    /// [`CustodyError::Refused`].
    pub(crate) fn check(&self, step: Step, owner: &Owner, image: &ImageLocation) -> Result<(), CustodyError> {
        let (book, object) = self.book_for(&image.place);
        match book.ask(step, owner, &object) {
            Ok(_) => Ok(()),
            Err(refused) => Err(CustodyError::Refused { path: image.place.name().into(), refused }),
        }
    }

    /// Checks whether the image of a volume may be deleted once the volume is removed.
    ///
    /// # Errors
    /// [`CustodyError::Refused`].
    pub(crate) fn check_removal(&self, volume: VolumeId, path: &Path) -> Result<(), CustodyError> {
        self.check_deletion(path, &Owner::Volume(volume), |book| book.forget_volume(volume))
    }

    fn state(&self) -> State {
        match &self.books.known {
            Known::Journal(journal) => journal.read(State::clone),
            #[cfg(test)]
            Known::State(state) => State::clone(state),
        }
    }
}

/// Notes which file an image was opened as: a file that comes to its name later is not deleted or renamed for it.
pub(crate) fn note_opened(path: &Path, image: &Held) {
    let Identity { device, inode } = image.identity();
    names::note(path, migration::custody::Identity::File { device, inode });
}

impl CustodyError {
    fn io(operation: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { operation, path: path.to_owned(), source }
    }

    /// Whether there is a file of the new name already.
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
