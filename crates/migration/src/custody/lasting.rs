//! The identity of an image across restarts, and whether a name leads to the image that the journal means.
//!
//! ```text
//!   made, opened, renamed ──► Record::ImageKnown ──► State::images
//!   promised, served, renamed, deleted, taken home:  judge(what is known, what was found) ──► Confirmed │ Unrecorded │ Exchanged
//! ```
//! Numbers of file systems and of devices change when the machine restarts. Therefore a file's identity is its inode and the time
//! of its creation, and a device's is its own serial number or its position. The file system is not compared: its block-by-block
//! copy holds the same files.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::identity::MigrationId;
use crate::journal::{Place, Record, State};
use crate::planted::{Bug, broken};

/// The identity of an image across restarts, independent of its names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lasting {
    /// A regular file, a link or a folder.
    File {
        /// The inode in its file system.
        inode: u64,
        /// Time of creation: seconds since 1970 and nanoseconds. `None`: the file system does not record it.
        born: Option<(i64, u32)>,
    },
    /// A block device or a partition.
    Device {
        /// The device's own name, or its position.
        name: DeviceName,
        /// The machine's start in which the device was seen, and the device's number in that start. `None`: the
        /// system does not count devices.
        seen: Option<(String, u64)>,
    },
}

/// The name by which a block device is recognised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceName {
    /// The device's own number, which no other device has.
    Own(String),
    /// The place of its connection. The device has no number of its own, and another one may take its place.
    Position(String),
}

/// The journal's record of the image under a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownImage {
    /// The identity of the image.
    pub lasting: Lasting,
    /// The purpose of the name.
    pub purpose: Purpose,
}

/// Why an image has its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// A volume or a migration uses the image by this name.
    Use,
    /// A migration has left the image, and it was kept by this name.
    Kept(MigrationId),
    /// The image is being made or deleted.
    Passing,
    /// Like [`Purpose::Kept`], but the image existed before it was served: Sterna does not delete it.
    Given(MigrationId),
    /// A migration could not retire the image: it was out of sight, or its folder took no change.
    Hidden(MigrationId),
    /// It is the folder of images, not an image.
    Folder,
}

impl Purpose {
    /// Returns the migration that kept the image by this name.
    pub fn kept_by(self) -> Option<MigrationId> {
        match self {
            Self::Kept(migration) | Self::Given(migration) => Some(migration),
            Self::Use | Self::Passing | Self::Hidden(_) | Self::Folder => None,
        }
    }
}

/// The result of comparing the image under a name with the journal's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The name leads to the recorded image.
    Confirmed,
    /// The journal has no record of this name.
    Unrecorded,
    /// Another image has the name, or the comparison is impossible.
    Exchanged,
}

/// Compares the image `found` under a name with the journal's record of the name. `None`: there is no record,
/// or the identity is unknown.
pub fn judge(known: Option<&KnownImage>, found: Option<&Lasting>) -> Verdict {
    match (known, found) {
        (None, _) => Verdict::Unrecorded,
        (Some(known), Some(found)) if known.lasting.is(found) => Verdict::Confirmed,
        // The name is free for others.
        (Some(KnownImage { purpose: Purpose::Hidden(_), .. }), _) => Verdict::Unrecorded,
        // N.B. an unknown identity is not taken for the same.
        (Some(_), _) => Verdict::Exchanged,
    }
}

/// Returns whether a name that is missing in a folder is gone. Another file system may be mounted over the folder `known`, and
/// the image is under it.
pub fn is_gone(known: Option<&KnownImage>, folder: Option<&Lasting>) -> bool {
    judge(known, folder) != Verdict::Exchanged
}

/// The action before an image that was opened by its name is served or filled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Use it: the name leads to the recorded image.
    Use,
    /// Record it durably first: the journal has no record of the name.
    Note(KnownImage),
    /// Do not use it: it is another image.
    Refuse,
}

/// Decides about an image that was opened by a name.
pub fn opening(known: Option<&KnownImage>, found: Option<Lasting>) -> Opening {
    match (judge(known, found.as_ref()), found) {
        (Verdict::Exchanged, _) if !broken(Bug::ExchangedServed) => Opening::Refuse,
        (Verdict::Unrecorded, Some(lasting)) => Opening::Note(KnownImage { lasting, purpose: Purpose::Use }),
        _ => Opening::Use,
    }
}

/// Returns whether a target that was filled under a name may be promised: the name must lead to it. For an
/// export, only the server knows.
pub fn may_promise(place: &Place, known: Option<&KnownImage>, found: Option<&Lasting>) -> bool {
    matches!(place, Place::Nbd(_))
        || judge(known, found) == Verdict::Confirmed
        || broken(Bug::ExchangedPromised)
}

impl Lasting {
    /// Returns whether both are certainly the same image.
    pub fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File { inode, born }, Self::File { inode: other_inode, born: other_born }) => {
                inode == other_inode && (born == other_born || broken(Bug::BirthNotCompared))
            }
            (Self::Device { name, seen }, Self::Device { name: other_name, seen: other_seen }) => {
                name == other_name && (matches!(name, DeviceName::Own(_)) || fits(seen, other_seen))
            }
            _ => false,
        }
    }
}

/// Returns whether devices at the same position can be the same. Within one start of the machine each device has its own number.
fn fits(seen: &Option<(String, u64)>, other: &Option<(String, u64)>) -> bool {
    match (seen, other) {
        (Some((start, number)), Some((other_start, other_number))) => {
            start != other_start || number == other_number
        }
        (None, None) => true,
        _ => false,
    }
}

impl State {
    /// Forgets images whose names are not in use.
    pub(crate) fn forget_images(&mut self) {
        let mut known = std::mem::take(&mut self.images);
        let used: std::collections::BTreeSet<&Place> = self.used_places().collect();
        known.retain(|place, image| match image.purpose {
            Purpose::Use => used.contains(place),
            Purpose::Kept(migration) => self.migrations.contains_key(&migration),
            // Until the image is deleted, or the name is another's.
            Purpose::Passing | Purpose::Given(_) | Purpose::Hidden(_) => true,
            Purpose::Folder => used.iter().any(|used| is_in(used, place)),
        });
        self.images = known;
    }

    /// Returns the record of the folder of an image.
    pub fn folder_of(&self, image: &Place) -> Option<&KnownImage> {
        let folder = Path::new(image.file()?).parent()?.to_str()?;
        let known = self.images.get(&Place::File(folder.to_owned()));
        known.filter(|known| known.purpose == Purpose::Folder)
    }

    /// Returns the records of images, which follow a snapshot.
    pub(crate) fn image_records(&self) -> impl Iterator<Item = Record> {
        let known = self.images.iter().filter(|_| !broken(Bug::ImagesForgottenAtStart));
        known.map(|(place, known)| Record::ImageKnown { place: place.clone(), known: known.clone() })
    }

    /// Returns the purpose of a name: whether a volume or a migration uses it.
    pub fn purpose_of(&self, place: &Place) -> Purpose {
        if self.used_places().any(|used| used == place) { Purpose::Use } else { Purpose::Passing }
    }

    /// Marks the names of new files as used.
    pub(crate) fn use_images<'a>(&mut self, places: impl IntoIterator<Item = &'a Place>) {
        for place in places {
            if let Some(known) = self.images.get_mut(place) {
                known.purpose = Purpose::Use;
            }
        }
    }

    fn used_places(&self) -> impl Iterator<Item = &Place> {
        let here = self.claimed_records().map(|record| &record.image.place);
        let unfinished = self.unfinished().flat_map(|(_, migration)| &migration.volumes);
        here.chain(unfinished.flat_map(|moving| [&moving.source.place, &moving.target.place]))
    }
}

fn is_in(image: &Place, folder: &Place) -> bool {
    let parent = image.file().and_then(|path| Path::new(path).parent());
    parent.is_some() && parent == folder.file().map(Path::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(inode: u64, born: Option<(i64, u32)>) -> Lasting {
        Lasting::File { inode, born }
    }

    fn known(lasting: Lasting) -> KnownImage {
        KnownImage { lasting, purpose: Purpose::Use }
    }

    #[test]
    fn a_file_is_the_one_that_was_made_then_and_has_the_number() {
        let image = known(file(7, Some((5, 9))));
        let judged = |found| judge(Some(&image), Some(&found));
        assert_eq!(judged(file(7, Some((5, 9)))), Verdict::Confirmed);
        for other in [file(8, Some((5, 9))), file(7, Some((5, 10))), file(7, Some((6, 9))), file(7, None)] {
            assert_eq!(judged(other.clone()), Verdict::Exchanged, "{other:?}");
        }
        assert_eq!(judge(Some(&image), None), Verdict::Exchanged);
        assert_eq!(judge(None, Some(&file(7, None))), Verdict::Unrecorded);
        // The inode alone is compared if a file has no time of creation.
        let without = known(file(7, None));
        assert_eq!(judge(Some(&without), Some(&file(7, None))), Verdict::Confirmed);
        assert_eq!(judge(Some(&without), Some(&file(7, Some((5, 9))))), Verdict::Exchanged);
    }

    #[test]
    fn a_missing_name_is_gone_only_in_the_folder_that_is_known() {
        let folder = |inode| file(inode, Some((5, 9)));
        let recorded = KnownImage { lasting: folder(2), purpose: Purpose::Folder };
        assert!(is_gone(Some(&recorded), Some(&folder(2))));
        assert!(!is_gone(Some(&recorded), Some(&folder(3))), "something is mounted over it");
        assert!(!is_gone(Some(&recorded), None));
        assert!(is_gone(None, Some(&folder(3))), "nothing is known of it");

        let place = |path: &str| Place::File(path.to_owned());
        let mut state = State::default();
        state.images.insert(place("/s"), recorded.clone());
        assert_eq!(state.folder_of(&place("/s/v.img")), Some(&recorded));
        assert_eq!(state.folder_of(&place("/t/v.img")), None);
        state.forget_images();
        assert!(state.images.is_empty(), "no image in it is used");
    }

    #[test]
    fn a_hidden_image_is_remembered_and_its_name_is_free_for_another() {
        let hidden = KnownImage { lasting: file(7, None), purpose: Purpose::Hidden(MigrationId(3)) };
        assert_eq!(judge(Some(&hidden), Some(&file(7, None))), Verdict::Confirmed);
        assert_eq!(judge(Some(&hidden), Some(&file(8, None))), Verdict::Unrecorded);
        let mut state = State::default();
        state.images.insert(Place::File("/s/v.img".to_owned()), hidden);
        state.forget_images();
        assert_eq!(state.images.len(), 1);
    }

    #[test]
    fn a_device_is_the_one_that_has_the_number_or_was_not_exchanged_at_its_position() {
        let device = |name: &DeviceName, start: &str, number| Lasting::Device {
            name: name.clone(),
            seen: Some((start.to_owned(), number)),
        };
        let (own, other) = (DeviceName::Own("naa.5".into()), DeviceName::Own("naa.6".into()));
        assert!(device(&own, "one", 3).is(&device(&own, "two", 4)));
        assert!(!device(&own, "one", 3).is(&device(&other, "one", 3)));
        let place = DeviceName::Position("pci0000:00/virtio2".into());
        assert!(device(&place, "one", 3).is(&device(&place, "one", 3)));
        assert!(device(&place, "one", 3).is(&device(&place, "two", 4)), "the machine was started anew");
        assert!(!device(&place, "one", 3).is(&device(&place, "one", 4)), "another one came to its position");
        assert!(!device(&place, "one", 3).is(&device(&own, "one", 3)));
        assert!(!device(&own, "one", 3).is(&file(3, None)));
    }
}
