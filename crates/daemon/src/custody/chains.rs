//! The backing chains of images: those of the journal, those of every store, those beside the image in question, and those that a
//! program has open together with it.
//!
//! A known format is trusted: a guest can write anything into a raw disk, even the header of an overlay.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::path::{Path, PathBuf};

use migration::custody::{Book, Claim, Found, Identity, Kind, Object};
use migration::journal::{ImageFormat, ImageLocation, Place, State, VolumeRecord};
use nbd_protocol::{NbdUri, Server};
use rustix::fs::{AtFlags, CWD, FileType};

use super::claims::{look, look_at, unknown};
use super::headers::{Headers, Looked, Says};
use super::leads::{Lead, leads, of_socket};
use super::opened::identity;
use super::stacks::is_here;
use crate::images::inventory;

/// Files that are examined for one order, in all folders.
const FILES_MAX: usize = 100_000;
/// Length of a backing chain that is followed.
const DEPTH_MAX: usize = 256;
/// Links that one name may lead through, as in the kernel.
const LINKS_MAX: usize = 40;

/// The top of a backing chain, by the journal or as a file.
#[derive(Clone)]
pub(super) enum Top {
    Volume(migration::VolumeId, String),
    /// A file that belongs to no volume.
    Image(String),
}

/// Follows backing chains for one book.
pub(super) struct Chains<'a> {
    book: &'a mut Book,
    headers: &'a Headers,
    state: &'a State,
    /// The image in question. It is not in its own backing chain.
    object: &'a Object,
    /// Images in the chains of tops without a volume.
    walked: BTreeSet<PathBuf>,
}

impl<'a> Chains<'a> {
    pub(super) fn new(
        book: &'a mut Book,
        headers: &'a Headers,
        state: &'a State,
        object: &'a Object,
    ) -> Self {
        Self { book, headers, state, object, walked: BTreeSet::new() }
    }

    pub(super) fn add_journal(&mut self) {
        let is_qcow2 =
            |image: &ImageLocation| image.format == ImageFormat::Qcow2 && !image.place.name().is_empty();
        for record in self.state.claimed_records().filter(|record| is_qcow2(&record.image)) {
            let top = Top::Volume(record.volume, record.name.clone());
            self.add(&top, record.image.place.name().into());
        }
        for (_, migration) in self.state.unfinished() {
            let images = migration.volumes.iter().flat_map(|moving| [&moving.source, &moving.target]);
            for image in images.filter(|image| is_qcow2(image)) {
                self.add(&Top::Image(image.place.name().to_owned()), image.place.name().into());
            }
        }
    }

    /// Adds the backing chains of the files in these folders.
    pub(super) fn add_folders(&mut self, folders: &BTreeSet<PathBuf>) {
        let raw = self.known_as_raw();
        let mut count = 0;
        for folder in folders {
            let entries = match std::fs::read_dir(folder) {
                Ok(entries) => entries,
                Err(error) => {
                    self.unknown_above(
                        folder,
                        format!("the folder {} cannot be read: {error}", folder.display()),
                    );
                    continue;
                }
            };
            for entry in entries {
                count += 1;
                if count > FILES_MAX {
                    return self
                        .unknown_above(folder, format!("the stores have more than {FILES_MAX} files"));
                }
                match entry {
                    Ok(entry) => self.add_file(entry.path(), &raw),
                    Err(error) => {
                        let why = format!("the folder {} cannot be read: {error}", folder.display());
                        self.unknown_above(folder, why);
                    }
                }
            }
        }
    }

    fn add_file(&mut self, path: PathBuf, raw: &BTreeSet<Identity>) {
        let named = path.file_name().and_then(|name| name.to_str());
        let kept = named.and_then(|name| inventory::known(name, self.state));
        if kept.is_some_and(|(_, format, _)| format == ImageFormat::Raw) {
            return;
        }
        // N.B. A folder may be full of devices, as /dev is, and to open one can do something. A device is read only if an image
        // names it.
        if std::fs::metadata(&path).is_ok_and(|there| !there.is_file()) {
            return;
        }
        if matches!(look_at(&path), Found::There(identity) if raw.contains(&identity)) {
            return;
        }
        self.add(&Top::Image(path.display().to_string()), path);
    }

    /// Returns the images that are raw according to the journal.
    fn known_as_raw(&self) -> BTreeSet<Identity> {
        let records = self.state.claimed_records().map(|record| &record.image);
        let moving = self.state.unfinished().flat_map(|(_, migration)| &migration.volumes);
        let images = records.chain(moving.flat_map(|moving| [&moving.source, &moving.target]));
        let raw = images.filter(|image| image.format == ImageFormat::Raw);
        let found = raw.filter_map(|image| match look(&image.place) {
            Found::There(identity @ Identity::File { .. }) => Some(identity),
            _ => None,
        });
        found.collect()
    }

    pub(super) fn add(&mut self, top: &Top, image: PathBuf) {
        let mut seen = BTreeSet::new();
        let mut images = VecDeque::from([image]);
        while let Some(image) = images.pop_front() {
            // A loop ends here, and so does the shared end of two chains.
            if !seen.insert(image.clone())
                || matches!(top, Top::Image(_)) && !self.walked.insert(image.clone())
            {
                continue;
            }
            if seen.len() > DEPTH_MAX {
                return self.unknown(
                    top,
                    &image,
                    format!("{} stands on more than {DEPTH_MAX} images", image.display()),
                );
            }
            match self.headers.look(&image) {
                Ok(None) => {}
                Ok(Some(looked)) if self.is_object(&looked) && matches!(top, Top::Image(_)) => {}
                Ok(Some(looked)) => self.add_below(top, &image, &looked, &mut images),
                // N.B. an image below may lie on a disk that is not mounted now.
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound
                        && seen.len() > 1
                        && may_be_unmounted(&image) =>
                {
                    let path = image.display();
                    let why = format!(
                        "what {path} stands on is not known, because it is not there: mount its disk"
                    );
                    self.unknown(top, &image, why);
                }
                // Any other missing image has no backing chain, and claims nothing.
                Err(error) if error.kind() == io::ErrorKind::NotFound && !is_in_lost_folder(top, &image) => {}
                Err(error) => {
                    self.unknown(
                        top,
                        &image,
                        format!("what {} stands on cannot be read: {error}", image.display()),
                    );
                }
            }
        }
    }

    fn add_below(&mut self, top: &Top, image: &Path, looked: &Looked, images: &mut VecDeque<PathBuf>) {
        let names = match &*looked.says {
            Says::Nothing => return,
            Says::Unknown(why) => {
                return self.unknown(
                    top,
                    image,
                    format!("what {} stands on is not known: {why}", image.display()),
                );
            }
            Says::Names(names) => names,
        };
        for named in names {
            let leads = leads(&named.name, &looked.folders);
            let is_there = |lead: &Lead| matches!(lead, Lead::File(path) if look_at(path) != Found::Gone);
            // A relative name has two readings. The one that leads nowhere is not meant.
            let is_read = leads.iter().any(is_there);
            for lead in leads {
                match lead {
                    Lead::File(path) => {
                        self.claim_file(top, &path);
                        if !named.is_raw && (!is_read || look_at(&path) != Found::Gone) {
                            images.push_back(path);
                        }
                    }
                    Lead::Export { uri, volumes } => self.claim_export(image, &uri, &volumes),
                    Lead::Away => {}
                    Lead::Unknown(name) => {
                        let why = format!("{} stands on {name}, which is not understood", image.display());
                        self.unknown(top, image, why);
                    }
                }
            }
        }
    }

    fn is_object(&self, looked: &Looked) -> bool {
        let (device, inode) = looked.identity;
        self.object.found == Found::There(Identity::File { device, inode })
    }

    fn claim_file(&mut self, top: &Top, path: &Path) {
        let kind = || match top {
            Top::Volume(volume, name) => Kind::BelowServed { volume: *volume, name: name.clone() },
            Top::Image(top) => Kind::BelowImage { top: top.clone() },
        };
        let mut path = path.to_owned();
        for _ in 0..LINKS_MAX {
            self.book.add(Claim { kind: kind(), found: look_at(&path), place: place_of(&path) });
            let Ok(stat) = rustix::fs::statat(CWD, &path, AtFlags::SYMLINK_NOFOLLOW) else { return };
            if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
                return;
            }
            let (place, found) = (place_of(&path), Found::There(identity(&stat)));
            self.book.add(Claim { kind: kind(), place, found });
            let Ok(target) = std::fs::read_link(&path) else { return };
            path = path.parent().unwrap_or(Path::new("/")).join(target);
        }
    }

    /// Claims the export, and the images of the volumes that it may belong to.
    fn claim_export(&mut self, image: &Path, uri: &str, volumes: &[String]) {
        let top = image.display().to_string();
        let led = led_to(uri);
        let is_it = |record: &VolumeRecord| volumes.contains(&record.name) || led.leads_to(record);
        for known in self.state.volumes.values().filter(|known| is_it(&known.record)) {
            let place = known.record.image.place.clone();
            let kind = Kind::BelowExport { top: top.clone() };
            self.book.add(Claim { kind, found: look(&place), place });
        }
        let place = Place::Nbd(uri.to_owned());
        self.book.add(Claim { kind: Kind::BelowImage { top }, found: look(&place), place });
    }

    /// Claims all images for a top whose chain is not known.
    fn unknown(&mut self, top: &Top, path: &Path, why: String) {
        match top {
            Top::Volume(..) => self.book.add(unknown(path, why)),
            Top::Image(_) => self.unknown_above(path, why),
        }
    }

    /// Claims all images for a file, or for files, of no volume.
    fn unknown_above(&mut self, path: &Path, why: String) {
        self.book.add(Claim { kind: Kind::UnknownAbove { why }, ..unknown(path, String::new()) });
    }
}

/// Where the address of an export leads, whatever the name of the export: a server's default may be any volume.
enum Led {
    /// It leads to the socket of a volume with this name.
    Socket(String),
    /// It leads to this port of this host.
    Port(u16),
    /// It leads to another host, or cannot be read.
    Nowhere,
}

impl Led {
    fn leads_to(&self, record: &VolumeRecord) -> bool {
        match self {
            Self::Socket(volume) => *volume == record.name,
            Self::Port(port) => record.export.listen.as_ref().is_some_and(|listens| {
                listens.rsplit(':').next().and_then(|listens| listens.parse().ok()) == Some(*port)
            }),
            Self::Nowhere => false,
        }
    }
}

fn led_to(uri: &str) -> Led {
    let Ok(NbdUri { server, .. }) = uri.parse() else { return Led::Nowhere };
    match server {
        // A link may have another name than the socket.
        Server::Unix(path) => {
            path.canonicalize().ok().and_then(|path| of_socket(&path)).map_or(Led::Nowhere, Led::Socket)
        }
        Server::Tcp { host, port } if is_here(&host, port) => Led::Port(port),
        Server::Tcp { .. } => Led::Nowhere,
    }
}

/// Returns whether the disk of a missing image may be unmounted: its folder is missing or empty.
fn may_be_unmounted(image: &Path) -> bool {
    let entries = image.parent().map(std::fs::read_dir);
    entries.is_none_or(|entries| entries.map_or(true, |mut entries| entries.next().is_none()))
}

fn place_of(path: &Path) -> Place {
    Place::File(path.display().to_string())
}

/// Returns whether a volume's image may be in a folder that is temporarily missing.
fn is_in_lost_folder(top: &Top, image: &Path) -> bool {
    matches!(top, Top::Volume(..)) && image.parent().is_some_and(|folder| !folder.is_dir())
}
