//! Finds images: the top one by the name that an administrator or the journal gave, a backing file by the name
//! in the image above.

use std::io;
use std::path::Path;

use super::walk::is_own_user;
use super::{Held, Reach, Unfit, User, find};

/// Decides which files may be opened as an image.
pub trait Finder {
    /// Finds the image at a path. `above` is the image that names it as its backing file; `None`: this is the top.
    ///
    /// # Errors
    /// The system's error; [`Unfit`] if it may not be opened.
    fn find(&self, path: &Path, above: Option<&Held>) -> io::Result<Held>;
}

/// Finds images that were not verified before.
///
/// **N.B.** The owner of an image can write the name of any file into it. The daemon may be able to read that file, while the
/// owner may not. So below an image of another user, only files that this user may read are opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByName;

impl Finder for ByName {
    fn find(&self, path: &Path, above: Option<&Held>) -> io::Result<Held> {
        let found = find(path)?;
        found.require_image()?;
        match above {
            Some(above) if above.is_in_hands_of_others() && !found.lets_read(&above.owner_and_group()) => {
                Err(Unfit::UnreadBelow { path: path.to_owned(), owner: above.owner() }.into())
            }
            _ => Ok(found),
        }
    }
}

/// Finds images only to read the name of their backing file: none of their content is shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct ToLookAt;

impl Finder for ToLookAt {
    fn find(&self, path: &Path, _: Option<&Held>) -> io::Result<Held> {
        find(path)
    }
}

impl Held {
    /// Returns the user that owns it.
    pub fn owner(&self) -> u32 {
        self.status.st_uid
    }

    fn owner_and_group(&self) -> User {
        User { user: self.owner(), groups: vec![self.status.st_gid] }
    }

    /// Returns whether another user owns it, or may put another file in its place.
    pub fn is_in_hands_of_others(&self) -> bool {
        self.reach == Reach::Others || !is_own_user(self.owner())
    }
}
