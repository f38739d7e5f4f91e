//! The files to which the names of images led when this daemon opened or made them. If a name leads to another file,
//! that is not the image of the volume or the migration. This is kept for the life of the daemon: after a restart
//! the images are opened again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use migration::custody::Identity;

static OPENED: Mutex<BTreeMap<PathBuf, Identity>> = Mutex::new(BTreeMap::new());

/// Notes which file has a name: it is opened for a volume, or has just been made.
pub(super) fn note(path: &Path, identity: Identity) {
    opened().insert(path.to_owned(), identity);
}

/// Forgets a name that belongs to no image of this daemon.
pub(super) fn forget(path: &Path) {
    opened().remove(path);
}

/// Returns whether a name leads to another file than the one that was opened by it. False for a name that was never opened.
pub(super) fn is_other(path: &Path, found: &Identity) -> bool {
    opened().get(path).is_some_and(|known| known != found)
}

fn opened() -> MutexGuard<'static, BTreeMap<PathBuf, Identity>> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}
