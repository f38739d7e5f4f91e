//! The walk along a path, one component at a time.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::access::Passable;
use super::{Held, Reach, Unfit};

const LINKS_MAX: usize = 40;
/// Holds an entry of any type without opening it: no pipe is waited for, and no device wakes.
const HOLD: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const OTHERS_WRITE: u32 = 0o022;
/// Entries of a folder belong to their owners only.
const STICKY: u32 = 0o1000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Last {
    Followed,
    Itself,
}

struct Step {
    name: OsString,
    descriptor: OwnedFd,
    status: Stat,
    reach: Reach,
}

struct Way {
    steps: Vec<Step>,
    left: VecDeque<OsString>,
    links: usize,
}

pub(super) fn find(path: &Path, last: Last) -> io::Result<Held> {
    let mut way = Way { steps: vec![root()?], left: VecDeque::new(), links: 0 };
    if path.is_relative() {
        let here = std::env::current_dir()?;
        way.push(&here);
    }
    way.push(path);
    way.walk(last)
}

fn root() -> io::Result<Step> {
    let descriptor = rustix::fs::open("/", HOLD | OFlags::DIRECTORY, Mode::empty())?;
    let status = rustix::fs::fstat(&descriptor)?;
    Ok(Step { name: OsString::new(), descriptor, status, reach: Reach::Ours })
}

impl Way {
    fn push(&mut self, path: &Path) {
        self.left.extend(names(path));
    }

    fn walk(mut self, last: Last) -> io::Result<Held> {
        while let Some(name) = self.left.pop_front() {
            if name == ".." {
                self.leave()?;
                continue;
            }
            let entry = self.enter(name)?;
            if FileType::from_raw_mode(entry.status.st_mode) == FileType::Symlink
                && (last == Last::Followed || !self.left.is_empty())
            {
                self.follow(&entry)?;
                continue;
            }
            self.steps.push(entry);
        }
        let path = self.path();
        let passable = Passable::through(self.steps.iter().rev().skip(1).map(|step| &step.status));
        let Some(found) = self.steps.pop() else { return Err(Errno::NOENT.into()) };
        let Step { descriptor, status, reach, .. } = found;
        Ok(Held { descriptor, status, path, reach, passable })
    }

    /// Goes back to the folder that was passed before.
    ///
    /// **N.B.** Not to the folder that is above now: a user who may write there can move a folder elsewhere meanwhile.
    fn leave(&mut self) -> io::Result<()> {
        match self.steps.last() {
            Some(step) if FileType::from_raw_mode(step.status.st_mode) != FileType::Directory => {
                return Err(Errno::NOTDIR.into());
            }
            _ => self.steps.truncate(self.steps.len().saturating_sub(1).max(1)),
        }
        Ok(())
    }

    fn enter(&self, name: OsString) -> io::Result<Step> {
        let Some(folder) = self.steps.last() else { return Err(Errno::NOENT.into()) };
        let descriptor = rustix::fs::openat(&folder.descriptor, &name, HOLD, Mode::empty())?;
        let status = rustix::fs::statat(&descriptor, "", AtFlags::EMPTY_PATH)?;
        let reach = reach_in(folder.reach, &folder.status, &status);
        Ok(Step { name, descriptor, status, reach })
    }

    fn follow(&mut self, link: &Step) -> io::Result<()> {
        if link.reach == Reach::Others || !is_own_user(link.status.st_uid) {
            return Err(Unfit::Link { link: self.path().join(&link.name) }.into());
        }
        self.links += 1;
        if self.links > LINKS_MAX {
            return Err(Errno::LOOP.into());
        }
        let target = rustix::fs::readlinkat(&link.descriptor, "", Vec::new())?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target.is_absolute() {
            self.steps.truncate(1);
        }
        for name in names(&target).into_iter().rev() {
            self.left.push_front(name);
        }
        Ok(())
    }

    fn path(&self) -> PathBuf {
        let names = self.steps.iter().skip(1).map(|step| step.name.as_os_str());
        std::iter::once(OsStr::new("/")).chain(names).collect()
    }
}

/// Returns the components of a path; `..` is kept as one.
fn names(path: &Path) -> Vec<OsString> {
    let named = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    named.collect()
}

/// Returns which users may replace an entry of a folder.
pub(super) fn reach_in(above: Reach, folder: &Stat, entry: &Stat) -> Reach {
    let others_write = folder.st_mode & OTHERS_WRITE != 0;
    // N.B. an access control list shows in the bits of the group.
    let is_kept = !others_write || (folder.st_mode & STICKY != 0 && is_own_user(entry.st_uid));
    if above == Reach::Ours && is_own_user(folder.st_uid) && is_kept { Reach::Ours } else { Reach::Others }
}

/// Returns whether a user is root, or the one that this process runs as.
pub fn is_own_user(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}
