//! Computes what other users may do with a held file, from the modes of the file and of the folders above it.

use rustix::fs::Stat;

use super::Held;

const READ: u32 = 0o4;
const WRITE: u32 = 0o2;
const PASS: u32 = 0o1;
/// The attribute of a file's access control list, which says more than its mode.
const RIGHTS: &str = "system.posix_acl_access";

/// A user whose rights are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The user's number (UID).
    pub user: u32,
    /// The numbers of all groups, the first one included.
    pub groups: Vec<u32>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Passable(Vec<(u32, u32, u32)>);

impl Passable {
    pub(super) fn through<'a>(folders: impl Iterator<Item = &'a Stat>) -> Self {
        Self(folders.map(|folder| (folder.st_uid, folder.st_gid, folder.st_mode)).collect())
    }

    pub(super) fn and(mut self, folder: &Stat) -> Self {
        self.0.push((folder.st_uid, folder.st_gid, folder.st_mode));
        self
    }
}

impl Held {
    /// Returns whether a user may read it, by its mode. An access control list counts as a refusal unless the user owns the file:
    /// no user may learn more than the system would show.
    pub fn lets_read(&self, user: &User) -> bool {
        self.lets(user, READ)
    }

    /// Returns whether a user may read and write it; as [`Held::lets_read`].
    pub fn lets_write(&self, user: &User) -> bool {
        self.lets(user, READ | WRITE)
    }

    /// Returns whether a user may pass through all folders above it.
    pub fn is_reached_by(&self, user: &User) -> bool {
        self.passable.0.iter().all(|folder| may(user, *folder, PASS))
    }

    fn lets(&self, user: &User, wanted: u32) -> bool {
        let of_file = (self.status.st_uid, self.status.st_gid, self.status.st_mode);
        let is_plain = user.user == 0 || user.user == self.status.st_uid || !self.has_rights_list();
        is_plain && self.is_reached_by(user) && may(user, of_file, wanted)
    }

    fn has_rights_list(&self) -> bool {
        let mut none = [0_u8; 0];
        // By the link of its descriptor: a descriptor that only holds a file cannot be queried itself.
        rustix::fs::getxattr(self.own_link(), RIGHTS, &mut none).is_ok_and(|length| length > 0)
    }
}

/// Returns whether a mode grants a user all of `wanted`; the first class that the user is in decides.
fn may(user: &User, (owner, group, mode): (u32, u32, u32), wanted: u32) -> bool {
    let allowed = if user.user == 0 {
        return true;
    } else if user.user == owner {
        mode >> 6
    } else if user.groups.contains(&group) {
        mode >> 3
    } else {
        mode
    };
    allowed & wanted == wanted
}
