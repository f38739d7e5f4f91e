//! Files and devices, the acts of strangers on them, and the daemon's view.

use std::collections::{BTreeMap, BTreeSet};

use migration::VolumeId;
use migration::custody::{DeviceName, Found, Identity, Lasting};
use migration::journal::Place;
use migration::stay::Look;

use crate::random::Random;

pub(super) const DEVICES: [&str; 2] = ["/dev/one", "/dev/by-id/one"];

pub(super) type ObjectId = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) volume: Option<VolumeId>,
    pub(super) writes: u64,
    version: u64,
}

#[derive(Clone, Debug)]
struct Object {
    content: Content,
    base: Option<String>,
    /// Its header is temporarily unreadable.
    is_dark: bool,
}

#[derive(Clone, Debug)]
struct Stranger {
    object: ObjectId,
    sees: Content,
    /// It runs on another machine: only its lock is visible here.
    is_remote: bool,
}

pub(super) enum Base {
    Nothing,
    Dark,
    On(String),
}

pub(super) struct Files {
    random: Random,
    names: BTreeMap<String, ObjectId>,
    objects: BTreeMap<ObjectId, Object>,
    strangers: Vec<Stranger>,
    /// Files of others, which must stay untouched.
    precious: BTreeSet<ObjectId>,
    /// Files that strangers have put under the names of images, and that no administrator has accepted.
    owned_by_others: BTreeSet<ObjectId>,
    /// Inodes of new files that were reused from deleted ones.
    inodes: BTreeMap<ObjectId, u64>,
    pub(super) marks: BTreeSet<String>,
    pub(super) locked: Option<ObjectId>,
    made: ObjectId,
}

impl Files {
    pub(super) fn new(random: Random) -> Self {
        let mut files = Self {
            random,
            names: BTreeMap::new(),
            objects: BTreeMap::new(),
            strangers: Vec::new(),
            precious: BTreeSet::new(),
            owned_by_others: BTreeSet::new(),
            inodes: BTreeMap::new(),
            marks: BTreeSet::new(),
            locked: None,
            made: 0,
        };
        let device = files.make(DEVICES[0], None);
        files.names.insert(DEVICES[1].to_owned(), device);
        files
    }

    pub(super) fn make(&mut self, name: &str, base: Option<String>) -> ObjectId {
        self.made += 1;
        let content = Content { volume: None, writes: 0, version: 0 };
        self.objects.insert(self.made, Object { content, base, is_dark: false });
        self.names.insert(name.to_owned(), self.made);
        self.made
    }

    pub(super) fn at(&self, name: &str) -> Option<ObjectId> {
        self.names.get(name).copied()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.names.keys().cloned().collect()
    }

    pub(super) fn content(&self, object: ObjectId) -> Option<Content> {
        self.objects.get(&object).map(|found| found.content)
    }

    pub(super) fn write(&mut self, object: ObjectId, volume: VolumeId, writes: u64) {
        if let Some(found) = self.objects.get_mut(&object) {
            found.content = Content { volume: Some(volume), writes, version: found.content.version + 1 };
        }
    }

    pub(super) fn base_of(&self, name: &str) -> Base {
        match self.at(name).and_then(|object| self.objects.get(&object)) {
            Some(Object { is_dark: true, .. }) => Base::Dark,
            Some(Object { base: Some(base), .. }) => Base::On(base.clone()),
            _ => Base::Nothing,
        }
    }

    pub(super) fn look(&self, place: &Place) -> Found {
        self.at(place.name()).map_or(Found::Gone, |object| Found::There(self.identity(object)))
    }

    pub(super) fn identity(&self, object: ObjectId) -> Identity {
        let is_device = self.at(DEVICES[0]) == Some(object);
        if is_device { Identity::Device(object) } else { Identity::File { device: 1, inode: object } }
    }

    /// Returns the identity across restarts. A new file may have the inode of a deleted one.
    pub(super) fn lasting(&self, name: &str) -> Option<Lasting> {
        let object = self.at(name)?;
        if DEVICES.contains(&name) {
            let name = DeviceName::Own("one".to_owned());
            return Some(Lasting::Device { name, seen: None });
        }
        let inode = self.inodes.get(&object).copied().unwrap_or(object);
        Some(Lasting::File { inode, born: Some((i64::try_from(object).ok()?, 0)) })
    }

    /// Simulates a stranger who copies another file to a name, whose file moves away. The copy may get a deleted file's
    /// inode. Returns the new file.
    pub(super) fn swap(&mut self, name: &str) -> Option<ObjectId> {
        let object = self.names.remove(name)?;
        let other = self.make(name, None);
        if self.random.percent(50) {
            self.inodes.insert(other, self.inodes.get(&object).copied().unwrap_or(object));
            // Its owner, not the daemon, deletes the former file.
            self.owned_by_others.remove(&object);
        } else {
            self.names.insert(format!("/t/away-{other}"), object);
        }
        self.owned_by_others.insert(other);
        Some(other)
    }

    /// Simulates a stranger who makes a file.
    pub(super) fn put_of_others(&mut self, name: &str) {
        let object = self.make(name, None);
        self.owned_by_others.insert(object);
    }

    /// Simulates a stranger who gives a file a second name.
    pub(super) fn link(&mut self, name: &str) {
        let Some(object) = self.at(name) else { return };
        let links = self.names.keys().filter(|name| name.starts_with("/t/link-")).count();
        self.names.entry(format!("/t/link-{links}")).or_insert(object);
    }

    /// Returns whether a stranger has put this file under the name of an image.
    pub(super) fn is_of_others(&self, object: ObjectId) -> bool {
        self.owned_by_others.contains(&object)
    }

    /// Forgets which files are strangers'.
    pub(super) fn forget_others(&mut self) {
        self.owned_by_others.clear();
    }

    /// Simulates an administrator who accepts a file as the image.
    pub(super) fn accept(&mut self, object: ObjectId) {
        self.owned_by_others.remove(&object);
    }

    pub(super) fn appearance(&self, name: &str) -> Option<Look> {
        let object = self.at(name)?;
        let content = self.content(object)?;
        let (which, state) = (object.to_le_bytes().into(), content.version.to_le_bytes().into());
        Some(Look { which, state, changed_at: 0, touched_at: Some(0) })
    }

    pub(super) fn unlink(&mut self, name: &str) {
        let Some(object) = self.names.remove(name) else { return };
        if !self.names.values().any(|other| *other == object) {
            self.objects.remove(&object);
        }
    }

    pub(super) fn rename(&mut self, from: &str, to: &str) {
        let Some(object) = self.names.get(from).copied() else { return };
        self.unlink(to);
        self.names.remove(from);
        self.names.insert(to.to_owned(), object);
    }

    pub(super) fn is_held(&self, object: ObjectId) -> bool {
        self.strangers.iter().any(|stranger| stranger.object == object)
    }

    pub(super) fn is_seen_open(&self, object: ObjectId) -> bool {
        self.strangers.iter().any(|stranger| stranger.object == object && !stranger.is_remote)
    }

    pub(super) fn open_by_stranger(&mut self, name: &str) {
        let Some(object) = self.at(name).filter(|object| self.locked != Some(*object)) else { return };
        let Some(sees) = self.content(object) else { return };
        let is_remote = self.random.percent(50);
        self.strangers.push(Stranger { object, sees, is_remote });
    }

    pub(super) fn close_strangers(&mut self) {
        let keep = self.random.percent(30);
        self.strangers.retain(|_| keep);
    }

    pub(super) fn exchange(&mut self, name: &str) {
        let Some(object) = self.names.remove(name) else { return };
        let precious = self.make(name, None);
        self.names.insert(format!("/t/away-{precious}"), object);
        self.precious.insert(precious);
    }

    /// Treats exchanged files like others once the step is over.
    pub(super) fn forget_precious(&mut self) {
        self.precious.clear();
    }

    pub(super) fn change_light(&mut self) {
        let is_dark = self.random.percent(50);
        for object in self.objects.values_mut().filter(|object| object.base.is_some()) {
            object.is_dark = is_dark;
        }
    }

    pub(super) fn wronged(&self) -> Vec<String> {
        let is_linked = |object: &ObjectId| self.names.values().any(|other| other == object);
        let lost = self.precious.iter().filter(|object| !is_linked(object));
        let swapped = self.owned_by_others.iter().filter(|object| !is_linked(object));
        let lost = lost.chain(swapped).map(|object| format!("file {object} of somebody else is gone"));
        let strangers = self.strangers.iter().filter(|stranger| {
            !is_linked(&stranger.object) || self.content(stranger.object) != Some(stranger.sees)
        });
        let strangers = strangers
            .map(|stranger| format!("file {} is not what it was, and a program reads it", stranger.object));
        lost.chain(strangers).collect()
    }
}
