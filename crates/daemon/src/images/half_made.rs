//! Marks of incomplete targets: a file beside the image. It is also useful to an administrator who has lost the journal.
//!
//! ```text
//!   IMAGE made, empty ─► .IMAGE.partial ─► filled … ─► the journal has an owner, and nothing is missing ─► mark deleted
//!                                              └─► discarded: the image goes, then its mark
//! ```
//! While there is a journal, it decides what an image is, and a contradicting mark is only a leftover. A killed daemon may
//! leave one; [`settle`] deletes it. A mark names its image by its identity: another file that has come to the name may lack
//! nothing. It is not served, since a copied store has other identities too, and not deleted. A half-made image that somebody
//! has renamed in its folder is found by its identity, and a mark that would go follows it. Everything here may block.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use migration::custody::{self, Lasting};
use migration::journal::{Place, Record, State};
use rustix::fs::OFlags;

use crate::files::folder_entries::sync_folder_of;
use crate::images::inventory;
use crate::journal::Journal;
use crate::stores::is_unsettled_name;

/// The suffix of marks, and of other programs' incomplete files.
pub(crate) const SUFFIX: &str = ".partial";
/// The first bytes of a mark: another program's file with such a name marks nothing.
const MAGIC: &[u8] = b"sterna: half-made\n";
/// More than the longest mark has.
const TEXT_BYTES_MAX: u64 = 1 << 10;
const EXPLANATION: &[u8] =
    b"A migration fills the image beside this file and has not completed it. See: sterna store scan\n";

/// What the mark beside a file says of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Marked {
    /// There is no mark.
    No,
    /// It is the half-made image.
    Itself,
    /// Another file had its name when the mark was made, or nobody knows which.
    Other,
    /// It is a half-made image that had this name when the mark was made.
    Renamed(PathBuf),
}

/// The files that the marks of a folder name, each with the image beside which its mark is.
#[derive(Debug, Default)]
pub(crate) struct Marks(BTreeMap<Vec<u8>, PathBuf>);

impl Marks {
    /// Reads the marks of a folder. Fails if it cannot be read.
    pub(crate) fn of_folder(folder: &Path) -> io::Result<Self> {
        let mut marks = BTreeMap::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if let (Some(image), Some(named)) = (image_of(&path), named_by(&path)) {
                marks.insert(named, image);
            }
        }
        Ok(Self(marks))
    }

    /// Returns what the marks of the folder say of the file at `path` in it.
    pub(crate) fn marked(&self, path: &Path) -> Marked {
        let beside = marked_beside(path);
        // Sterna has given such a name itself, and knows what it means.
        if beside != Marked::No || self.0.is_empty() || is_ours(path) {
            return beside;
        }
        let image = self.0.get(words(identity(path).as_ref()).as_bytes());
        image.filter(|image| *image != path).map_or(Marked::No, |image| Marked::Renamed(image.clone()))
    }
}

/// Marks the image that has the name `path`, or is about to have it, as half-made, durably together with the image's name. After
/// an error there is no mark, or one that a power cut may remove.
pub(crate) fn mark(path: &Path, image: Option<&Lasting>) -> io::Result<()> {
    let mark = mark_of(path);
    // A leftover of an image with this name is written anew. It is a mark at each moment, because its beginning stays.
    let (mut options, is_there) = (OpenOptions::new(), is_mark(&mark));
    if is_there {
        follow(&mark)?;
    }
    let opened = if is_there {
        options.write(true).custom_flags(OFlags::NOFOLLOW.bits() as i32).open(&mark)
    } else {
        options.write(true).create_new(true).mode(0o600).open(&mark)
    };
    let mut file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            let why = format!("{} is there, a file that is not Sterna's: move it away", mark.display());
            io::Error::new(error.kind(), why)
        }
        _ => error,
    })?;
    let text = [MAGIC, EXPLANATION, words(image).as_bytes()].concat();
    let written =
        file.write_all(&text).and_then(|()| file.set_len(text.len() as u64)).and_then(|()| file.sync_all());
    written.and_then(|()| sync_folder_of(path)).inspect_err(|_| {
        if !is_there {
            drop(remove(&mark));
        }
    })
}

/// The line of a mark that names its image.
fn words(image: Option<&Lasting>) -> String {
    match image {
        Some(Lasting::File { inode, born: Some((seconds, nanoseconds)) }) => {
            format!("inode {inode}, born {seconds}.{nanoseconds:09}\n")
        }
        Some(Lasting::File { inode, born: None }) => format!("inode {inode}\n"),
        _ => String::new(),
    }
}

/// Returns what the marks in its folder say of the file at `path`.
pub(crate) fn marked(path: &Path) -> Marked {
    let marks = path.parent().and_then(|folder| Marks::of_folder(folder).ok());
    marks.unwrap_or_default().marked(path)
}

/// Returns what the mark beside the file at `path` says of it.
fn marked_beside(path: &Path) -> Marked {
    let Some(said) = text_of(&mark_of(path)) else { return Marked::No };
    let named = words(identity(path).as_ref());
    if !named.is_empty() && said[MAGIC.len()..].ends_with(named.as_bytes()) {
        Marked::Itself
    } else {
        Marked::Other
    }
}

/// Removes the mark of the image at `path`, if there is one.
pub(crate) fn unmark(path: &Path) -> io::Result<()> {
    if is_mark(&mark_of(path)) { remove(&mark_of(path)) } else { Ok(()) }
}

pub(crate) fn is_marked(path: &Path) -> bool {
    marked(path) != Marked::No
}

/// Returns the image that the file at `path` marks; `None`: it is not a mark.
pub(crate) fn image_of(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.as_bytes().strip_prefix(b".")?.strip_suffix(SUFFIX.as_bytes())?;
    let is_name = !name.is_empty() && name != b"." && name != b"..";
    (is_name && is_mark(path)).then(|| path.with_file_name(std::ffi::OsStr::from_bytes(name)))
}

/// Deletes outdated marks: of images that are gone, and of complete ones. A mark that cannot be deleted stays, which is logged.
/// Fails if the folder cannot be read.
/// **N.B.** `is_complete` must ask the journal at the time of the call, because another image may have the name since.
pub(crate) fn settle(folder: &Path, is_complete: impl Fn(&Path) -> bool) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let Some(image) = image_of(&path) else { continue };
        let is_gone =
            std::fs::symlink_metadata(&image).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if (is_gone || is_complete(&image))
            && let Err(error) = remove(&path)
        {
            tracing::warn!(path = %path.display(), %error, "cannot delete the mark of a complete image");
        }
    }
    Ok(())
}

/// Returns whether the journal says that the image is complete.
pub(crate) fn is_complete(image: &Path, state: &State) -> bool {
    image.to_str().is_some_and(|image| custody::is_complete(&Place::File(image.to_owned()), state))
}

/// Removes the marks of the images that these records make complete, durably except for the folder's entry.
pub(crate) fn unmark_completed(journal: &Journal, records: &[Record]) {
    for place in journal.read(|state| custody::completed_by(records, state)) {
        let Some(path) = place.file().map(Path::new) else { continue };
        if let Err(error) = unmark(path) {
            tracing::warn!(path = %path.display(), %error, "cannot delete the mark of a complete image yet");
        }
    }
}

fn mark_of(image: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(image.file_name().unwrap_or_default());
    name.push(SUFFIX);
    image.with_file_name(name)
}

fn is_mark(path: &Path) -> bool {
    text_of(path).is_some()
}

/// Returns the text of a mark; `None`: it is not one.
fn text_of(path: &Path) -> Option<Vec<u8>> {
    // Neither waits for nor follows what is not a file.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let mut text = Vec::new();
    let is_read = file.metadata().is_ok_and(|found| found.is_file())
        && file.take(TEXT_BYTES_MAX).read_to_end(&mut text).is_ok();
    (is_read && text.starts_with(MAGIC)).then_some(text)
}

/// Returns the line by which a mark names its file, if that can be compared in a folder: an inode alone may be another file's.
fn named_by(mark: &Path) -> Option<Vec<u8>> {
    let text = text_of(mark)?;
    let line = text.split_inclusive(|byte| *byte == b'\n').next_back()?;
    (line.starts_with(b"inode ") && line.windows(7).any(|part| part == b", born ")).then(|| line.to_vec())
}

/// Returns the identity of the file at `path`, if there is one.
fn identity(path: &Path) -> Option<Lasting> {
    crate::custody::lasting_at(&Place::File(path.to_string_lossy().into_owned())).ok().flatten()
}

/// Returns whether Sterna gives such names to images that it keeps, makes or deletes.
fn is_ours(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| inventory::parse(name).is_some() || is_unsettled_name(name))
}

/// Marks the file that `mark` names by its present name, if somebody has renamed it in its folder.
fn follow(mark: &Path) -> io::Result<()> {
    let (Some(named), Some(image)) = (named_by(mark), image_of(mark)) else { return Ok(()) };
    let is_it = |path: &Path| words(identity(path).as_ref()).as_bytes() == named;
    let Some(folder) = image.parent().filter(|_| !is_it(&image)) else { return Ok(()) };
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if !is_ours(&path) && is_it(&path) && marked_beside(&path) == Marked::No {
            tracing::warn!(
                from = %image.display(), to = %path.display(), "a half-made image was renamed by hand; it stays marked"
            );
            return self::mark(&path, identity(&path).as_ref());
        }
    }
    Ok(())
}

/// Removes a mark. The file that it names stays marked if it has another name by now.
fn remove(mark: &Path) -> io::Result<()> {
    follow(mark)?;
    match std::fs::remove_file(mark) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use chronicle::Generation;
    use migration::filling::Manifest;
    use migration::journal::{
        Entry, ExportSettings, Hollow, ImageLocation, MigratingVolume, Outcome, Record, Side, State, Summary,
        VolumeRecord,
    };
    use migration::{Attempt, HostId, MigrationId, VolumeId};

    use super::*;

    fn lasting(image: &Path) -> Option<Lasting> {
        crate::custody::lasting_at(&Place::File(image.display().to_string())).unwrap()
    }

    #[test]
    fn a_mark_is_of_the_file_that_it_was_made_for_and_not_of_the_name() {
        let folder = tempfile::tempdir().unwrap();
        let (image, other) = (folder.path().join("v.img"), folder.path().join("other"));
        std::fs::write(&image, b"").unwrap();
        std::fs::write(&other, b"precious").unwrap();
        assert_eq!(marked(&image), Marked::No);
        mark(&image, None).unwrap();
        assert_eq!(marked(&image), Marked::Other);
        mark(&image, lasting(&image).as_ref()).unwrap();
        assert_eq!(marked(&image), Marked::Itself);
        std::fs::rename(&other, &image).unwrap();
        assert_eq!(marked(&image), Marked::Other);
        std::fs::remove_file(&image).unwrap();
        assert_eq!(marked(&image), Marked::Other);
    }

    #[test]
    fn a_half_made_image_that_was_renamed_stays_marked_when_its_mark_goes() {
        let folder = tempfile::tempdir().unwrap();
        let (image, renamed) = (folder.path().join("v.img"), folder.path().join("w.img"));
        let make = || {
            std::fs::write(&image, b"a half").unwrap();
            mark(&image, lasting(&image).as_ref()).unwrap();
            std::fs::rename(&image, &renamed).unwrap();
            assert_eq!(marked(&renamed), Marked::Renamed(image.clone()));
        };
        let check = |what: &str| {
            assert_eq!(marked(&renamed), Marked::Itself, "{what}");
            std::fs::remove_file(&renamed).unwrap();
            settle(folder.path(), |_| false).unwrap();
        };
        make();
        settle(folder.path(), |_| false).unwrap();
        assert!(!folder.path().join(".v.img.partial").exists());
        check("a start finds no image of the mark's name");
        make();
        unmark(&image).unwrap();
        check("the migration has ended");
        make();
        std::fs::write(&image, b"a new one").unwrap();
        mark(&image, lasting(&image).as_ref()).unwrap();
        assert_eq!(marked(&image), Marked::Itself);
        check("another migration makes an image of that name");
        assert!(!is_marked(&renamed) && is_marked(&image));
    }

    #[test]
    fn names_that_sterna_gives_carry_no_mark_of_another_name() {
        let folder = tempfile::tempdir().unwrap();
        let (kept, image) = (folder.path().join("v.img.moved-m3"), folder.path().join("v.img"));
        std::fs::write(&kept, b"complete").unwrap();
        // The mark is made before the kept image is renamed.
        mark(&image, lasting(&kept).as_ref()).unwrap();
        assert_eq!(marked(&kept), Marked::No);
        unmark(&image).unwrap();
        assert!(!is_marked(&kept));
    }

    #[test]
    fn a_file_of_somebody_else_with_the_name_of_a_mark_stays() {
        let folder = tempfile::tempdir().unwrap();
        let theirs = folder.path().join(".v.img.partial");
        std::fs::write(&theirs, b"an upload").unwrap();
        let refused = mark(&folder.path().join("v.img"), None).unwrap_err();
        assert!(refused.to_string().contains("move it away"), "{refused}");
        assert_eq!(std::fs::read(&theirs).unwrap(), b"an upload");
    }

    #[test]
    fn an_image_is_marked_until_it_is_unmarked_or_gone() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("v.img");
        std::fs::write(&image, b"").unwrap();
        assert!(!is_marked(&image));
        for _ in 0..2 {
            mark(&image, lasting(&image).as_ref()).unwrap();
        }
        let path = folder.path().join(".v.img.partial");
        assert_eq!((is_marked(&image), image_of(&path)), (true, Some(image.clone())));
        // A journal that does not have it does not say that it is complete.
        settle(folder.path(), |_| false).unwrap();
        assert!(is_marked(&image));
        std::fs::remove_file(&image).unwrap();
        settle(folder.path(), |_| false).unwrap();
        assert!(!path.exists());
        for _ in 0..2 {
            unmark(&image).unwrap();
        }
    }

    #[test]
    fn a_mark_goes_when_the_journal_says_that_nothing_is_missing_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("v.img");
        std::fs::write(&image, b"").unwrap();
        mark(&image, lasting(&image).as_ref()).unwrap();
        let (volume, location) =
            (VolumeId([1; 16]), ImageLocation::raw_file("a", image.display().to_string()));
        let record = VolumeRecord {
            volume,
            name: "v".into(),
            size_bytes: 4096,
            block_size_bytes: 4096,
            image: location.clone(),
            generation: Generation(3),
            export: ExportSettings::default(),
        };
        let (peer, peer_name, remote) = (HostId([9; 32]), "b".to_owned(), MigrationId(7));
        let (migration, attempt) = (MigrationId(0), Attempt(1));
        let moving = MigratingVolume { volume, source: ImageLocation::raw_file("b", ""), target: location };
        let side = Side::Incoming { peer, peer_name: peer_name.clone(), remote, volumes: vec![record] };
        let manifest = Manifest { units: 1, checksum: 2 };
        let hollow = Hollow { attempt, manifests: vec![(volume, manifest)] };
        let mut state = State::default();
        let steps = [
            (Record::MigrationStarted { migration, volumes: vec![moving], keep_source: false, side }, true),
            (Record::Hollow { migration, hollow }, true),
            (Record::TargetPrepared { migration, attempt }, true),
            (Record::Owned { migration, attempt, generations: vec![(volume, Generation(4))] }, true),
            // It is this host's, and lacks blocks.
            (
                Record::MigrationEnded {
                    migration,
                    outcome: Outcome::Moved { left_over: String::new() },
                    summary: Summary::default(),
                },
                true,
            ),
            (Record::Filled { volume }, false),
        ];
        for (record, stays) in steps {
            let entry = Entry { at_unix_ms: 0, records: vec![record.clone()] };
            state.apply(&entry).unwrap();
            settle(folder.path(), |image| is_complete(image, &state)).unwrap();
            assert_eq!(is_marked(&image), stays, "after {record:?}");
        }
    }

    #[test]
    fn what_somebody_else_has_put_there_marks_nothing_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (image, mark) = (folder.path().join("v.img"), folder.path().join(".v.img.partial"));
        std::fs::write(&image, b"").unwrap();
        let check = |what: &str| {
            assert!(!is_marked(&image) && image_of(&mark).is_none(), "{what}");
            unmark(&image).unwrap();
            settle(folder.path(), |_| false).unwrap();
            assert!(std::fs::symlink_metadata(&mark).is_ok(), "{what}");
        };
        std::fs::write(&mark, b"sterna: half").unwrap();
        check("a beginning");
        std::fs::remove_file(&mark).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &mark, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        check("a pipe");
        std::fs::remove_file(&mark).unwrap();
        std::fs::write(folder.path().join("elsewhere"), MAGIC).unwrap();
        std::os::unix::fs::symlink("elsewhere", &mark).unwrap();
        check("a link");
        std::fs::remove_file(&mark).unwrap();
        std::fs::create_dir(&mark).unwrap();
        check("a folder");
    }
}
