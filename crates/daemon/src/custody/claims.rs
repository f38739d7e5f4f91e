//! Collects the claims on images, from the journal, the folders and the system.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use migration::custody::{Book, Claim, Found, Identity, Kind, Object, Owner, Step};
use migration::journal::{ImageFormat, ImageLocation, Place};
use rustix::io::Errno;

use super::chains::{Chains, Top};
use super::lasting::lasting_at;
use super::opened::identity;
use super::stacks::Stacks;
use super::{Custody, GivenUp};
use crate::images::{half_made, inventory};

impl Custody {
    pub(super) fn book_for(&self, place: &Place) -> (Book, Object) {
        let (found, lasting) = (look(place), lasting_at(place).ok().flatten());
        let object = Object { place: place.clone(), found, lasting };
        (self.book_about(&object), object)
    }

    pub(super) fn book_about(&self, object: &Object) -> Book {
        let state = self.state();
        let mut book = Book::of_journal(&state);
        book.identify(look);
        if let Some(path) = object.place.file().map(Path::new) {
            add_kept(&mut book, path, object, self.given_up(path));
            add_link(&mut book, path, object);
        }
        let mut chains = Chains::new(&mut book, self.headers(), &state, object);
        chains.add_journal();
        chains.add_folders(&self.folders_for(object));
        add_stacks(&mut book, object);
        book
    }
}

/// Adds the images that share bytes with others: a device may hold a file system with images, and two addresses may lead to one
/// export. Files alone need no search.
fn add_stacks(book: &mut Book, object: &Object) {
    let Found::There(asked) = &object.found else { return };
    let is_export = |identity: &Identity| matches!(identity, Identity::Export(_));
    let is_device = |identity: &Identity| matches!(identity, Identity::Device(_));
    let mut all: BTreeSet<Identity> = book
        .claims()
        .iter()
        .filter_map(|claim| match &claim.found {
            Found::There(identity) if is_export(identity) == is_export(asked) => Some(identity.clone()),
            _ => None,
        })
        .collect();
    all.insert(asked.clone());
    if !all.iter().any(|identity| is_export(identity) || is_device(identity)) {
        return;
    }
    let mut stacks = Stacks::new();
    for identity in all {
        match stacks.of(&identity) {
            Ok(stack) => book.stand(identity, stack),
            Err(error) => {
                let why =
                    format!("what an image of this host has in common with others cannot be read: {error}");
                book.add(unknown(Path::new(object.place.name()), why));
            }
        }
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

/// Adds the loop devices over bytes of an image that is to be served for writing, or overwritten: the kernel writes through them,
/// and locks nothing. `which` of them count is for the caller to say. The devices that the image itself lies on do not.
pub(super) fn add_loops(book: &mut Book, step: Step, object: &Object, which: Loops) {
    let Found::There(identity) = &object.found else { return };
    if !matches!(step, Step::ServeReadWrite | Step::Zero) || matches!(identity, Identity::Export(_)) {
        return;
    }
    let kinds = match loops_beside(identity, which) {
        Ok(loops) => loops.into_iter().map(|holder| Kind::Foreign { holder }).collect(),
        Err(error) => vec![Kind::Unknown { why: format!("the loop devices cannot be asked: {error}") }],
    };
    for kind in kinds {
        book.add(Claim { kind, place: object.place.clone(), found: object.found.clone() });
    }
}

impl Custody {
    /// Adds the loop devices over the images that an image stands on, if it is to be served: the kernel writes through them into what
    /// the guest reads. Returns the path of the first such image.
    pub(super) fn add_loops_below(
        &self,
        book: &mut Book,
        step: Step,
        image: &ImageLocation,
        which: Loops,
    ) -> Option<PathBuf> {
        if step != Step::ServeReadWrite || image.format != ImageFormat::Qcow2 {
            return None;
        }
        let top = Object { place: image.place.clone(), found: Found::Gone, lasting: None };
        let (mut chain, state) = (Book::default(), self.state());
        let label = Top::Image(image.place.name().to_owned());
        Chains::new(&mut chain, self.headers(), &state, &top).add(&label, image.place.name().into());
        let mut first = None;
        for claim in chain.claims() {
            let Found::There(identity @ (Identity::File { .. } | Identity::Device(_))) = &claim.found else {
                continue;
            };
            let kinds: Vec<Kind> = match loops_beside(identity, which) {
                Ok(loops) => loops.into_iter().map(|holder| Kind::Foreign { holder }).collect(),
                Err(error) => {
                    vec![Kind::Unknown { why: format!("the loop devices cannot be asked: {error}") }]
                }
            };
            for kind in kinds {
                first = first.or_else(|| claim.place.file().map(PathBuf::from));
                book.add(Claim { kind, place: image.place.clone(), found: look(&image.place) });
            }
        }
        first
    }
}

/// Which loop devices keep an image from being written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loops {
    /// Each writable one: somebody may mount it at any time.
    Any,
    /// A writable one that is mounted, or that another device stands on.
    Held,
}

fn loops_beside(identity: &Identity, which: Loops) -> io::Result<Vec<String>> {
    let mut stacks = Stacks::new();
    let own = stacks.of(identity)?;
    let mut beside = Vec::new();
    for device in block::store::loop_devices()? {
        let number = Identity::Device(device.number);
        if device.is_read_only || own.whole.contains(&number) || own.below.contains(&number) {
            continue;
        }
        if stacks.of(&number)?.overlaps(&own) && (which == Loops::Any || device.is_held()?) {
            beside.push(device.to_string());
        }
    }
    Ok(beside)
}

/// How long to wait until this daemon closes its descriptors of an image. A lane that has just ended, or another order that
/// examines the image, closes its own soon.
const OURS_MAX: Duration = Duration::from_secs(1);
const OURS_POLL: Duration = Duration::from_millis(20);

/// Adds a claim of this daemon if it has the file open and the order knows the image by its name only. A user may have renamed
/// the image of a volume that is served: then no other claim has its new name. Sleeps.
pub(super) fn add_ourselves(book: &mut Book, step: Step, owner: &Owner, file: &OwnedFd, object: &Object) {
    let is_about_a_name = matches!(owner, Owner::Administrator(_) | Owner::Housekeeping);
    if matches!(step, Step::Discard | Step::TakeBack) && is_about_a_name && stays_ours(file) {
        let holder = "a volume that this daemon serves, whose image has another name,".to_owned();
        let kind = Kind::Foreign { holder };
        book.add(Claim { kind, place: object.place.clone(), found: object.found.clone() });
    }
}

/// Returns whether this daemon keeps an image open, or may.
fn stays_ours(file: &OwnedFd) -> bool {
    let deadline = Instant::now() + OURS_MAX;
    while block::store::is_ours(file).unwrap_or(true) {
        if Instant::now() >= deadline {
            return true;
        }
        std::thread::sleep(OURS_POLL);
    }
    false
}

impl Custody {
    /// Adds the backing chains that other programs have open: their upper images may be unknown.
    ///
    /// `step` takes the name away. A step that takes the bytes away is refused because of the program itself.
    pub(super) fn add_open_chains(&self, book: &mut Book, step: Step, file: &OwnedFd, object: &Object) {
        if !matches!(step, Step::Fence | Step::Rename) {
            return;
        }
        let beside = match block::store::open_beside(file) {
            Ok(beside) => beside,
            Err(error) => {
                let why = format!("the open files of other programs cannot be listed: {error}");
                return book.add(Claim {
                    kind: Kind::Unknown { why },
                    place: object.place.clone(),
                    found: object.found.clone(),
                });
            }
        };
        let state = self.state();
        let mut chains = Chains::new(book, self.headers(), &state, object);
        for (holder, path) in beside {
            // The descriptor may have been closed since it was listed.
            let Ok(name) = std::fs::read_link(&path) else { continue };
            chains.add(&Top::Image(format!("{}, which {holder} has open,", name.display())), path);
        }
    }
}

pub(super) fn look(place: &Place) -> Found {
    let path = match place {
        Place::File(path) | Place::Device(path) => Path::new(path),
        // This daemon wrote the address, so its spelling is unique.
        Place::Nbd(uri) => return Found::There(Identity::Export(uri.clone())),
    };
    look_at(path)
}

/// Returns what a path leads to. A path need not be text.
pub(crate) fn look_at(path: &Path) -> Found {
    match rustix::fs::stat(path) {
        Ok(stat) => Found::There(identity(&stat)),
        Err(Errno::NOENT | Errno::NOTDIR) => Found::Gone,
        Err(errno) => Found::Unknown(io::Error::from(errno).to_string()),
    }
}

/// Returns whether two places are the same file, device or export under any name.
pub(crate) fn is_same(one: &Place, other: &Place) -> bool {
    one == other
        || matches!((look(one), look(other)), (Found::There(one), Found::There(other)) if one == other)
}

/// Adds claims by the name of a file and by the mark beside it.
fn add_kept(book: &mut Book, path: &Path, object: &Object, given_up: Option<GivenUp>) {
    let mut add = |kind| book.add(Claim { kind, place: object.place.clone(), found: object.found.clone() });
    let named = path.file_name().and_then(|name| name.to_str()).and_then(inventory::parse);
    if let Some((volume, _, migration)) = named {
        add(Kind::Kept { volume: volume.to_owned(), migration });
    }
    if let Some(GivenUp { volume, host }) = given_up {
        add(Kind::GivenUp { volume, host });
    }
    if half_made::is_marked(path) {
        add(Kind::HalfMade);
    }
}

/// Adds where the name of a file leads, if it is a link.
fn add_link(book: &mut Book, path: &Path, object: &Object) {
    if !path.symlink_metadata().is_ok_and(|found| found.is_symlink()) {
        return;
    }
    let Ok(to) = path.canonicalize() else { return };
    if let Ok(Some(lasting)) = lasting_at(&Place::File(to.display().to_string())) {
        book.link(&object.place, to.display().to_string(), lasting);
    }
}

pub(super) fn unknown(path: &Path, why: String) -> Claim {
    Claim {
        kind: Kind::Unknown { why },
        place: Place::File(path.display().to_string()),
        found: Found::Unknown("it cannot be read".to_owned()),
    }
}
