//! How images are found: the top by the name that an administrator or the journal gave, what it stands on by what it says itself.

use std::io;
use std::path::Path;

use super::walk::is_own_user;
use super::{Held, Reach, Unfit, User, find};

/// Says what may be opened as an image.
pub trait Finder {
    /// Finds the image at a path. `above` is the image that names this one as what it stands on; `None`: this is the top.
    ///
    /// # Errors
    /// What the system answers; [`Unfit`]: it may not be opened.
    fn find(&self, path: &Path, above: Option<&Held>) -> io::Result<Held>;
}

/// Finds images that nobody has proved before.
///
/// **N.B.** Whoever owns an image can write into it the name of any file. The daemon may read that file, and the image's owner may not. So
/// below an image of another user only what that user may read is opened.
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

/// Finds images of which only is asked what they stand on: nothing of them is shown to anybody.
#[derive(Clone, Copy, Debug, Default)]
pub struct ToLookAt;

impl Finder for ToLookAt {
    fn find(&self, path: &Path, _: Option<&Held>) -> io::Result<Held> {
        find(path)
    }
}

impl Held {
    /// The user that owns it.
    pub fn owner(&self) -> u32 {
        self.status.st_uid
    }

    /// Its owner, in its group alone.
    fn owner_and_group(&self) -> User {
        User { user: self.owner(), groups: vec![self.status.st_gid] }
    }

    /// Whether another user owns it, or may put another file in its place.
    pub fn is_in_hands_of_others(&self) -> bool {
        self.reach == Reach::Others || !is_own_user(self.owner())
    }
}
