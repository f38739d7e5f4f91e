//! What the names of images led to when this daemon opened or made them. A name that leads to another file by now is not the image
//! that a volume or a migration means.
//!
//! It is kept for the life of the daemon: after a restart the images are opened anew.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use migration::custody::Identity;

static OPENED: Mutex<BTreeMap<PathBuf, Identity>> = Mutex::new(BTreeMap::new());

/// Notes which file has a name: it is opened for a volume, or has just been made.
pub(super) fn note(path: &Path, identity: Identity) {
    opened().insert(path.to_owned(), identity);
}

/// Forgets a name that leads to no image of ours any more.
pub(super) fn forget(path: &Path) {
    opened().remove(path);
}

/// Returns whether a name leads to another file than the one that was opened by it. A name that was never opened does not.
pub(super) fn is_other(path: &Path, found: &Identity) -> bool {
    opened().get(path).is_some_and(|known| known != found)
}

fn opened() -> MutexGuard<'static, BTreeMap<PathBuf, Identity>> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}
