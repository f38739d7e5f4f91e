//! What an image is beyond a restart, and whether a name leads to the image that the journal means.
//!
//! ```text
//!   made, opened, renamed ──► Record::ImageKnown ──► State::images
//!   promised, served, renamed, deleted, taken home:  judge(what is known, what was found) ──► Confirmed │ Unrecorded │ Exchanged
//! ```
//! Numbers of file systems and of devices change with a start of the machine. So a file is told by its number in its file system and
//! by when it was made, and a device by what it says of itself. The file system itself is not compared: a copy of it, block by block,
//! holds the same files.

use serde::{Deserialize, Serialize};

use crate::identity::MigrationId;
use crate::journal::{Place, Record, State};
use crate::planted::{Bug, broken};

/// What an image is, whatever it is called, also after a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lasting {
    /// A file.
    File {
        /// Its number in its file system.
        inode: u64,
        /// When it was made: seconds since 1970 and nanoseconds. `None`: the file system does not say.
        born: Option<(i64, u32)>,
    },
    /// A block device.
    Device {
        /// What it says of itself, or where it is.
        name: DeviceName,
        /// The start of the machine in which it was seen, and its number in that start. `None`: the system does not count devices.
        seen: Option<(String, u64)>,
    },
}

/// By what a block device is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceName {
    /// Its own number: no other device has it.
    Own(String),
    /// Where it is connected. It has no number of its own, and another device may come to its place.
    Position(String),
}

/// What the journal knows of the image that has a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownImage {
    /// What it is.
    pub lasting: Lasting,
    /// What it has the name for.
    pub purpose: Purpose,
}

/// What an image has its name for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// A volume or a migration uses it by this name.
    Use,
    /// A migration has left it, and it was kept by this name.
    Kept(MigrationId),
    /// It is being made or deleted.
    Passing,
}

/// Whether a name leads to the image that the journal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It does.
    Confirmed,
    /// The journal has nothing recorded of what has the name.
    Unrecorded,
    /// Something else has the name, or nobody can tell that it is the same.
    Exchanged,
}

/// Decides whether what was found under a name is what the journal knows by it. `None`: nothing is known, or nothing can be said of
/// what was found.
pub fn judge(known: Option<&KnownImage>, found: Option<&Lasting>) -> Verdict {
    match (known, found) {
        (None, _) => Verdict::Unrecorded,
        (Some(known), Some(found)) if known.lasting.is(found) => Verdict::Confirmed,
        // N.B. what cannot be told is not taken for the same.
        (Some(_), _) => Verdict::Exchanged,
    }
}

/// What is to be done before an image is served or filled that was opened by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Nothing: it is the one.
    Use,
    /// It is noted, durably: nothing is known of that name yet.
    Note(KnownImage),
    /// It is not used: it is another one.
    Refuse,
}

/// Decides what is to be done with what was opened by a name.
pub fn opening(known: Option<&KnownImage>, found: Option<Lasting>) -> Opening {
    match (judge(known, found.as_ref()), found) {
        (Verdict::Exchanged, _) if !broken(Bug::ExchangedServed) => Opening::Refuse,
        (Verdict::Unrecorded, Some(lasting)) => Opening::Note(KnownImage { lasting, purpose: Purpose::Use }),
        _ => Opening::Use,
    }
}

/// Decides whether what was filled under a name may be promised: the name has to lead there. What a server exports is known to the
/// server.
pub fn may_promise(place: &Place, known: Option<&KnownImage>, found: Option<&Lasting>) -> bool {
    matches!(place, Place::Nbd(_))
        || judge(known, found) == Verdict::Confirmed
        || broken(Bug::ExchangedPromised)
}

impl Lasting {
    /// Tells whether both are certainly the same image.
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

/// Whether a device at the same position can be the same. In one start of the machine each device has a number of its own.
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
    /// Forgets what was known of images whose names nobody has a use for.
    pub(crate) fn forget_images(&mut self) {
        let mut known = std::mem::take(&mut self.images);
        let used: std::collections::BTreeSet<&Place> = self.used_places().collect();
        known.retain(|place, image| match image.purpose {
            Purpose::Use => used.contains(place),
            Purpose::Kept(migration) => self.migrations.contains_key(&migration),
            Purpose::Passing => true,
        });
        self.images = known;
    }

    /// Which image has which name, as the records that follow a snapshot.
    pub(crate) fn image_records(&self) -> impl Iterator<Item = Record> {
        let known = self.images.iter().filter(|_| !broken(Bug::ImagesForgottenAtStart));
        known.map(|(place, known)| Record::ImageKnown { place: place.clone(), known: known.clone() })
    }

    /// What a name is given for.
    pub fn purpose_of(&self, place: &Place) -> Purpose {
        if self.used_places().any(|used| used == place) { Purpose::Use } else { Purpose::Passing }
    }

    /// Names that were given to new files are used from now on.
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
        // A file system that says nothing of it has the number alone.
        let without = known(file(7, None));
        assert_eq!(judge(Some(&without), Some(&file(7, None))), Verdict::Confirmed);
        assert_eq!(judge(Some(&without), Some(&file(7, Some((5, 9))))), Verdict::Exchanged);
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
