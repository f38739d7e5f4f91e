//! The identities of images across restarts: read from the system, and recorded in the journal.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use block::held::Held;
use migration::MigrationId;
use migration::custody::{
    Book, DeviceName, Found, Kind, KnownImage, Lasting, Object, Opening, Owner, Purpose, Refused, Step,
    Verdict, is_gone, judge, may_promise, opening,
};
use migration::journal::{ImageLocation, Place, Record};
use rustix::fs::{AtFlags, FileType, Statx, StatxFlags};

use super::claims::{Loops, add_loops, look};
use super::opened::Opened;
use super::{Custody, CustodyError};

const SYS: &str = "/sys";
/// The random number of the machine's present start.
const START: &str = "/proc/sys/kernel/random/boot_id";

impl Custody {
    /// Checks that the image opened by a name is the one that the journal means, and durably records a name that
    /// the journal does not know.
    ///
    /// # Errors
    /// [`CustodyError`]: the image is another one, or cannot be recorded. It must not be served or filled.
    pub(crate) fn confirm(&self, place: &Place, image: &Held) -> Result<(), CustodyError> {
        let failed = |error| CustodyError::io("look at", Path::new(place.name()), error);
        let found = lasting_of(image).map_err(failed)?;
        match opening(self.read(|state| state.images.get(place).cloned()).as_ref(), found) {
            Opening::Use => self.note_folder(place, image),
            Opening::Note(known) => self.note(place, known).and_then(|()| self.note_folder(place, image)),
            Opening::Refuse => Err(exchanged(place, Step::ServeReadWrite)),
        }
    }

    /// Checks that nobody has mounted the image of a volume, or one that it stands on, by a loop device, while this
    /// daemon did not serve it.
    ///
    /// # Errors
    /// [`CustodyError`]: one is mounted, or may be.
    pub(crate) fn check_mounts(&self, image: &ImageLocation) -> Result<(), CustodyError> {
        let place = &image.place;
        let object = Object { place: place.clone(), found: look(place), lasting: None };
        let mut book = Book::default();
        let below = self.add_loops_below(&mut book, Step::ServeReadWrite, image, Loops::Held);
        add_loops(&mut book, Step::ServeReadWrite, &object, Loops::Held);
        match book.ask(Step::ServeReadWrite, &Owner::Maker, &object) {
            Ok(_) => Ok(()),
            Err(refused) => {
                Err(CustodyError::Refused { path: below.unwrap_or_else(|| place.name().into()), refused })
            }
        }
    }

    /// Durably records the folder of an image that was opened, unless the journal has the record.
    fn note_folder(&self, place: &Place, image: &Held) -> Result<(), CustodyError> {
        let Some(folder) = place.file().and_then(|path| Path::new(path).parent()) else { return Ok(()) };
        let failed = |error| CustodyError::io("look at the folder of", Path::new(place.name()), error);
        let opened = Opened::at(Path::new(place.name())).map_err(failed)?;
        let is_in_it =
            opened.lasting().is_some_and(|found| lasting_of(image).ok().flatten().as_ref() == Some(found));
        match opened.folder_lasting().map_err(failed)? {
            // A link, or something has been mounted over the folder meanwhile.
            Some(lasting) if is_in_it => {
                self.note(&place_of(folder), KnownImage { lasting, purpose: Purpose::Folder })
            }
            _ => Ok(()),
        }
    }

    /// Returns why a name that is missing in an open folder is not gone; `None`: it is gone.
    pub(super) fn doubt_absence(&self, path: &Path, opened: &Opened) -> io::Result<Option<String>> {
        if *opened.found() != Found::Gone {
            return Ok(None);
        }
        let folder = opened.folder_lasting()?;
        let is_gone = self.read(|state| is_gone(state.folder_of(&place_of(path)), folder.as_ref()));
        let text = "its folder is not the one in which it was: another file system is mounted there, or none";
        Ok((!is_gone).then(|| text.to_owned()))
    }

    /// Durably remembers an image that its volume has left in `migration`, and that could not be retired.
    pub(super) fn note_hidden(&self, path: &Path, migration: MigrationId) -> Result<(), CustodyError> {
        let place = place_of(path);
        let known = self.read(|state| state.images.get(&place).cloned());
        let Some(KnownImage { lasting, .. }) = known else { return Ok(()) };
        match lasting_at(&place) {
            // Another file has come to the name.
            Ok(Some(found)) if found != lasting => Ok(()),
            _ => self.note(&place, KnownImage { lasting, purpose: Purpose::Hidden(migration) }),
        }
    }

    /// Checks that a name leads to the image that was filled under it, so that the image may be promised.
    ///
    /// # Errors
    /// [`CustodyError`]: the written data may be in a file without a name.
    pub(crate) fn confirm_filled(&self, place: &Place) -> Result<(), CustodyError> {
        let found =
            lasting_at(place).map_err(|error| CustodyError::io("find", Path::new(place.name()), error))?;
        let known = self.read(|state| state.images.get(place).cloned());
        if may_promise(place, known.as_ref(), found.as_ref()) {
            Ok(())
        } else {
            Err(exchanged(place, Step::ServeReadWrite))
        }
    }

    /// Returns whether a name leads to the image that this migration, of this journal, left and kept.
    pub(crate) fn is_kept(&self, place: &Place, migration: MigrationId) -> bool {
        let Ok(found) = lasting_at(place) else { return false };
        let known = self.read(|state| state.images.get(place).cloned());
        let known = known.filter(|known| known.purpose.kept_by() == Some(migration));
        judge(known.as_ref(), found.as_ref()) == Verdict::Confirmed
    }

    /// Durably makes the file under the name of a volume's image the volume's image, on the administrator's
    /// word. A link is followed. `Ok(false)`: it already is.
    ///
    /// # Errors
    /// [`CustodyError`]: the file is in use, or cannot be recorded.
    pub(crate) fn accept(&self, owner: &Owner, place: &Place) -> Result<bool, CustodyError> {
        let failed = |error| CustodyError::io("find", Path::new(place.name()), error);
        let held = block::held::find(Path::new(place.name())).map_err(failed)?;
        let Some(lasting) = lasting_of(&held).map_err(failed)? else {
            return Err(failed(io::Error::other("it is neither a file nor a device")));
        };
        let known = KnownImage { lasting: lasting.clone(), purpose: Purpose::Use };
        if self.read(|state| judge(state.images.get(place), Some(&lasting)) == Verdict::Confirmed) {
            return Ok(false);
        }
        let (mut book, mut object) = self.book_for(place);
        object.lasting = Some(lasting.clone());
        book.mean(place, lasting);
        add_loops(&mut book, Step::ServeReadWrite, &object, Loops::Any);
        match book.ask(Step::ServeReadWrite, owner, &object) {
            Ok(_) => self.note(place, known).map(|()| true),
            Err(refused) => Err(CustodyError::Refused { path: place.name().into(), refused }),
        }
    }

    /// Returns the record of the image under a name, to be committed with its use; `None`: its identity is unknown.
    pub(crate) fn record_of(&self, place: &Place, image: impl AsFd) -> io::Result<Option<Record>> {
        let known = lasting_of(image)?.map(|lasting| KnownImage { lasting, purpose: Purpose::Use });
        Ok(known.map(|known| Record::ImageKnown { place: place.clone(), known }))
    }

    /// Durably records the image under a name, unless the journal has the record.
    pub(super) fn note(&self, place: &Place, known: KnownImage) -> Result<(), CustodyError> {
        if self.read(|state| state.images.get(place) == Some(&known)) {
            return Ok(());
        }
        self.commit(place, Record::ImageKnown { place: place.clone(), known })
    }

    /// Durably records the name of a new file, which is unused so far.
    pub(super) fn note_new(&self, path: &Path, file: impl AsFd) -> Result<(), CustodyError> {
        let found = lasting_of(file).map_err(|error| CustodyError::io("look at", path, error))?;
        let place = place_of(path);
        match found {
            Some(lasting) => self.note(&place, KnownImage { lasting, purpose: Purpose::Passing }),
            None => Ok(()),
        }
    }

    /// Forgets a temporary name, or the name of a kept image. The journal itself tracks the names that a
    /// volume or a migration uses.
    pub(crate) fn forget(&self, path: &Path) -> Result<(), CustodyError> {
        let place = place_of(path);
        let is_known =
            self.read(|state| state.images.get(&place).is_some_and(|known| known.purpose != Purpose::Use));
        if is_known { self.commit(&place, Record::ImageForgotten { place: place.clone() }) } else { Ok(()) }
    }

    fn commit(&self, place: &Place, record: Record) -> Result<(), CustodyError> {
        let committed = self.commit_now(vec![record]);
        let failed =
            |fault| CustodyError::io("note what image is", Path::new(place.name()), io::Error::other(fault));
        committed.map_err(failed)
    }
}

/// Returns the error for another image under the name.
pub(super) fn exchanged(place: &Place, step: Step) -> CustodyError {
    CustodyError::Refused {
        path: place.name().into(),
        refused: Refused { step, claims: vec![Kind::Exchanged] },
    }
}

pub(super) fn place_of(path: &Path) -> Place {
    Place::File(path.to_str().map(str::to_owned).unwrap_or_default())
}

/// Returns the identity of the image at a place; `None`: there is none, or it is unknown. A link at the end of a file's path is
/// not followed: the name is the link's.
pub(crate) fn lasting_at(place: &Place) -> io::Result<Option<Lasting>> {
    let (path, flags) = match place {
        Place::File(path) => (path, AtFlags::SYMLINK_NOFOLLOW),
        Place::Device(path) => (path, AtFlags::empty()),
        Place::Nbd(_) => return Ok(None),
    };
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    Ok(lasting(&rustix::fs::statx(rustix::fs::CWD, path.as_str(), flags, wanted)?))
}

/// Returns the identity of an open folder; `None`: it is unknown.
pub(super) fn lasting_of_folder(folder: impl AsFd) -> io::Result<Option<Lasting>> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let found = rustix::fs::statx(folder, "", AtFlags::EMPTY_PATH, wanted)?;
    let is_folder = FileType::from_raw_mode(found.stx_mode.into()) == FileType::Directory;
    Ok(is_folder.then(|| file(&found)))
}

/// Returns the identity of an open image; `None`: it is unknown.
pub(super) fn lasting_of(image: impl AsFd) -> io::Result<Option<Lasting>> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    Ok(lasting(&rustix::fs::statx(image, "", AtFlags::EMPTY_PATH, wanted)?))
}

fn lasting(found: &Statx) -> Option<Lasting> {
    match FileType::from_raw_mode(found.stx_mode.into()) {
        FileType::RegularFile | FileType::Symlink => Some(file(found)),
        FileType::BlockDevice => device(Path::new(SYS), (found.stx_rdev_major, found.stx_rdev_minor)),
        _ => None,
    }
}

fn file(found: &Statx) -> Lasting {
    let is_said = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
    let born = is_said.then_some((found.stx_btime.tv_sec, found.stx_btime.tv_nsec));
    Lasting::File { inode: found.stx_ino, born }
}

/// Returns the identity of a device, as described below `sys`.
fn device(sys: &Path, (major, minor): (u32, u32)) -> Option<Lasting> {
    let folder = sys.join(format!("dev/block/{major}:{minor}")).canonicalize().ok()?;
    let is_part = folder.join("partition").exists();
    let whole = if is_part { folder.parent()?.to_owned() } else { folder.clone() };
    let name = match (name_of(sys, &whole), read(&folder.join("partition"))) {
        (name, None) => name,
        (DeviceName::Own(name), Some(part)) => DeviceName::Own(format!("{name}, partition {part}")),
        (DeviceName::Position(name), Some(part)) => DeviceName::Position(format!("{name}, partition {part}")),
    };
    let number = read(&whole.join("diskseq")).and_then(|number| number.parse().ok());
    Some(Lasting::Device { name, seen: read(Path::new(START)).zip(number) })
}

/// Returns the name of the whole device with this folder.
fn name_of(sys: &Path, folder: &Path) -> DeviceName {
    // A name may end in spaces.
    if let Ok(file) = std::fs::read_to_string(folder.join("loop/backing_file")) {
        let file = file.trim_end_matches('\n');
        return loop_over(file, &read(&folder.join("loop/offset")).unwrap_or_default());
    }
    let numbers = ["dm/uuid", "md/uuid", "wwid", "device/wwid", "serial", "device/serial"];
    if let Some((kind, number)) = numbers.iter().find_map(|name| Some((name, read(&folder.join(name))?))) {
        return DeviceName::Own(format!("{kind} {number}"));
    }
    // The kernel's own name depends on the order of discovery; the position of the connection does not.
    let position = folder.strip_prefix(sys.join("devices")).unwrap_or(folder);
    let is_virtual = position.starts_with("virtual");
    let connected = position.ancestors().find(|above| above.ends_with("block")).and_then(Path::parent);
    let position = if is_virtual { Some(position) } else { connected };
    DeviceName::Position(position.unwrap_or(folder).display().to_string())
}

/// A loop device is named after its file.
fn loop_over(file: &str, offset: &str) -> DeviceName {
    match lasting_at(&Place::File(file.to_owned())) {
        Ok(Some(Lasting::File { inode, born })) => {
            DeviceName::Own(format!("loop over file {inode} of {born:?}, from {offset}"))
        }
        _ => DeviceName::Position(format!("loop over {file}, from {offset}")),
    }
}

/// Reads one line of a file in `/sys`; `None`: there is no text.
fn read(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let text = text.trim_end_matches(['\n', '\0', ' ']);
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a folder like `/sys`: devices at their places, with files in them.
    fn sys(devices: &[(&str, &str, &[(&str, &str)])]) -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(sys.path().join("dev/block")).unwrap();
        for (number, path, files) in devices {
            let folder = sys.path().join("devices").join(path);
            for (name, content) in *files {
                std::fs::create_dir_all(folder.join(name).parent().unwrap()).unwrap();
                std::fs::write(folder.join(name), format!("{content}\n")).unwrap();
            }
            std::os::unix::fs::symlink(&folder, sys.path().join("dev/block").join(number)).unwrap();
        }
        sys
    }

    fn named(sys: &tempfile::TempDir, minor: u32) -> DeviceName {
        let sys = sys.path().canonicalize().unwrap();
        match device(&sys, (8, minor)) {
            Some(Lasting::Device { name, .. }) => name,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_device_is_known_by_its_own_number_or_by_where_it_is_connected() {
        let sys = sys(&[
            ("8:0", "pci0/host0/0:0:0:0/block/sda", &[("device/wwid", "naa.5"), ("diskseq", "9")]),
            ("8:1", "pci0/host0/0:0:0:0/block/sda/sda1", &[("partition", "1")]),
            ("8:2", "virtual/block/dm-0", &[("dm/uuid", "LVM-abc")]),
            ("8:3", "pci0/0000:00:05.0/virtio2/block/vdb", &[("diskseq", "10"), ("serial", "")]),
            ("8:4", "virtual/block/ram0", &[("diskseq", "11")]),
        ]);
        assert_eq!(named(&sys, 0), DeviceName::Own("device/wwid naa.5".into()));
        assert_eq!(named(&sys, 1), DeviceName::Own("device/wwid naa.5, partition 1".into()));
        assert_eq!(named(&sys, 2), DeviceName::Own("dm/uuid LVM-abc".into()));
        assert_eq!(named(&sys, 3), DeviceName::Position("pci0/0000:00:05.0/virtio2".into()));
        assert_eq!(named(&sys, 4), DeviceName::Position("virtual/block/ram0".into()));
        assert_eq!(device(sys.path(), (8, 5)), None);
    }

    #[test]
    fn a_loop_device_is_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        std::fs::write(&file, b"a").unwrap();
        let text = file.display().to_string();
        let loops = |minor: u32, path: &'static str| {
            let sys = sys(&[("8:0", path, &[("loop/backing_file", &text), ("loop/offset", "0")])]);
            named(&sys, minor)
        };
        let before = loops(0, "virtual/block/loop3");
        assert_eq!(before, loops(0, "virtual/block/loop4"));
        std::fs::rename(&file, folder.path().join("away")).unwrap();
        std::fs::write(&file, b"a").unwrap();
        assert_ne!(before, loops(0, "virtual/block/loop3"));
    }

    #[test]
    fn a_file_is_another_one_when_its_name_was_given_to_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.img");
        std::fs::write(&path, b"a").unwrap();
        let place = place_of(&path);
        let open = std::fs::File::open(&path).unwrap();
        let known = lasting_of(&open).unwrap().unwrap();
        assert_eq!(lasting_at(&place).unwrap().as_ref(), Some(&known));
        std::fs::rename(&path, folder.path().join("away")).unwrap();
        lasting_at(&place).unwrap_err();
        std::fs::write(&path, b"a").unwrap();
        assert_ne!(lasting_at(&place).unwrap(), Some(known));
    }
}
