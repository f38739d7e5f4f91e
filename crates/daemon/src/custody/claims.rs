//! Collects the claims on images, from the journal, the folders and the system.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use block::held::ToLookAt;
use block::store::qcow2::{Format, TopLayer};
use block::store::{ImageError, Qcow2Error};
use migration::custody::{Book, Claim, Found, Identity, Kind, Object, Owner, Step};
use migration::journal::{ImageFormat, ImageLocation, Place, State};
use rustix::io::Errno;

use super::Custody;
use super::opened::identity;
use crate::images::{half_made, inventory};

/// The number of images whose chains are followed.
const CHAINED_MAX: usize = 40_000;
/// The largest number of images in one chain.
const DEPTH_MAX: usize = 256;

/// The image whose chain is known.
enum Top {
    Volume(migration::VolumeId, String),
    /// A file in the folder that belongs to no volume.
    Image(String),
}

impl Custody {
    /// Returns the book, and the object at `place`.
    pub(super) fn book_for(&self, place: &Place) -> (Book, Object) {
        let object = Object { place: place.clone(), found: look(place) };
        (self.book_about(&object), object)
    }

    /// Returns the book with all claims about `object`.
    pub(super) fn book_about(&self, object: &Object) -> Book {
        let state = self.state();
        let mut book = Book::of_journal(&state);
        book.identify(look);
        if let Some(path) = object.place.file().map(Path::new) {
            add_kept(&mut book, path, object);
            add_chains(&mut book, &state, path);
        }
        book
    }
}

/// Adds the programs that have an image open, for a `step` that destroys its content. Locks are checked later.
pub(super) fn add_users(book: &mut Book, step: Step, owner: &Owner, file: &OwnedFd, object: &Object) {
    if !matches!(step, Step::Discard | Step::TakeBack) || *owner == Owner::Maker {
        return;
    }
    let kinds = match block::store::users_of(file) {
        Ok(users) => users.into_iter().map(|holder| Kind::Foreign { holder }).collect(),
        Err(error) => {
            vec![Kind::Unknown { why: format!("the open files of other programs cannot be listed: {error}") }]
        }
    };
    for kind in kinds {
        book.add(Claim { kind, place: object.place.clone(), found: object.found.clone() });
    }
}

fn look(place: &Place) -> Found {
    let path = match place {
        Place::File(path) | Place::Device(path) => Path::new(path),
        // This daemon wrote the address, so its spelling is unique.
        Place::Nbd(uri) => return Found::There(Identity::Export(uri.clone())),
    };
    match rustix::fs::stat(path) {
        Ok(stat) => Found::There(identity(&stat)),
        Err(Errno::NOENT | Errno::NOTDIR) => Found::Gone,
        Err(errno) => Found::Unknown(io::Error::from(errno).to_string()),
    }
}

/// Adds claims by the name of a file and by the mark beside it.
fn add_kept(book: &mut Book, path: &Path, object: &Object) {
    let mut add = |kind| book.add(Claim { kind, place: object.place.clone(), found: object.found.clone() });
    let named = path.file_name().and_then(|name| name.to_str()).and_then(inventory::parse);
    if let Some((volume, _, migration)) = named {
        add(Kind::Kept { volume: volume.to_owned(), migration });
    }
    if half_made::is_marked(path) {
        add(Kind::HalfMade);
    }
}

/// Adds claims by chains: those of volumes, and those of images beside the object.
fn add_chains(book: &mut Book, state: &State, path: &Path) {
    let mut tops: Vec<(Top, PathBuf)> = Vec::new();
    let is_qcow2 = |image: &ImageLocation| image.format == ImageFormat::Qcow2;
    for record in state.claimed_records().filter(|record| is_qcow2(&record.image)) {
        let top = Top::Volume(record.volume, record.name.clone());
        tops.push((top, record.image.place.name().into()));
    }
    let known: BTreeSet<PathBuf> = tops.iter().map(|(_, path)| path.clone()).collect();
    match overlays_beside(path) {
        Ok(found) => {
            let found = found.into_iter().filter(|found| !known.contains(found) && found != path);
            tops.extend(found.map(|found| (Top::Image(found.display().to_string()), found)));
        }
        Err(error) => {
            let why = format!("the folder of {} cannot be read: {error}", path.display());
            book.add(unknown(path, why));
        }
    }
    for (top, image) in tops.into_iter().take(CHAINED_MAX) {
        add_chain(book, &top, image);
    }
}

fn add_chain(book: &mut Book, top: &Top, mut image: PathBuf) {
    for _ in 0..DEPTH_MAX {
        let below = match TopLayer::of(&image, &ToLookAt) {
            Ok(layer) => layer.backing,
            Err(error) => {
                if is_unknown(top, &error) {
                    let why = format!("the backing file of {} cannot be read: {error}", image.display());
                    book.add(unknown(&image, why));
                }
                return;
            }
        };
        let Some(below) = below else { return };
        let place = Place::File(below.path.clone());
        let kind = match top {
            Top::Volume(volume, name) => Kind::BelowServed { volume: *volume, name: name.clone() },
            Top::Image(top) => Kind::BelowImage { top: top.clone() },
        };
        book.add(Claim { kind, found: look(&place), place });
        if below.format != Format::Qcow2 {
            return;
        }
        image = below.path.into();
    }
}

/// Returns whether an unreadable image may have a backing file. For a volume's image: yes. For another file: only if its disk
/// does not answer, because no program can use an unreadable image.
fn is_unknown(top: &Top, error: &Qcow2Error) -> bool {
    match (top, error) {
        // A missing image has no backing file, and its former ones are free.
        (_, Qcow2Error::Image(ImageError::NotFound { path })) => {
            path.parent().is_none_or(|folder| !folder.is_dir())
        }
        (Top::Volume(..), _) => true,
        (Top::Image(_), error) => matches!(error, Qcow2Error::Image(_)),
    }
}

/// Returns the files in an image's folder that have a qcow2 name, also kept ones. A guest may have written a mere qcow2 header.
fn overlays_beside(path: &Path) -> io::Result<Vec<PathBuf>> {
    let Some(folder) = path.parent() else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_named = name.ends_with(".qcow2") || name.ends_with(".qcow") || name.contains(".qcow2.");
        // Opening a pipe would block.
        if is_named && std::fs::metadata(entry.path()).is_ok_and(|found| found.is_file()) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn unknown(path: &Path, why: String) -> Claim {
    Claim {
        kind: Kind::Unknown { why },
        place: Place::File(path.display().to_string()),
        found: Found::Unknown("it cannot be read".to_owned()),
    }
}
