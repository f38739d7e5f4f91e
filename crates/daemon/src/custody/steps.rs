//! The steps that change an image or its name.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use lane::ControlFault;
use migration::MigrationId;
use migration::custody::{
    Book, Ending, Event, Found, Handling, Kind, KnownImage, Object, Owner, Purpose, Refused, Step, Todo,
};
use migration::journal::{ImageLocation, Place, Side};
use migration::recovery::Retirement;

use super::claims::{add_ourselves, add_users};
use super::freeing::Doomed;
use super::lasting::{exchanged, place_of};
use super::opened::{Lock, Opened, identity_of};
use super::{Custody, CustodyError};
use crate::fail_point::{self, Step as FailStep};
use crate::images::{fenced_paths, half_made, kept_path};

/// How long a lock without a visible holder is waited for: the last writes of a killed daemon can take seconds.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(6);
const LOCK_POLL: Duration = Duration::from_millis(20);

/// A completed step, with the file on which it was done.
struct Taken {
    ending: Ending,
    file: Option<OwnedFd>,
}

#[derive(Clone, Copy)]
struct Order<'a> {
    step: Step,
    owner: &'a Owner,
    path: &'a Path,
    /// The only file to which the step may apply.
    only: Option<&'a File>,
    /// The attempted operation, as a verb.
    operation: &'static str,
    /// The name after the step, and its purpose; `None`: no name.
    to: Option<(&'a Path, Purpose)>,
}

impl Custody {
    /// Deletes a half-made or abandoned image with the files beside it; succeeds if it is gone. A device and a server's export
    /// stay, because the journal has fenced them. After an error the image stays.
    pub(crate) fn discard(&self, image: &ImageLocation, owner: &Owner) -> Result<(), CustodyError> {
        fail_point::before(FailStep::Discard);
        if let Some(path) = image.place.file().map(Path::new) {
            // N.B. The token goes first: an image with a token counts as the offered one.
            lane::shared_storage::remove(path)
                .map_err(|error| CustodyError::io("delete what is beside", path, error))?;
            self.delete(path, owner)?;
            // N.B. The mark goes last: an image that could not be deleted stays marked.
            half_made::unmark(path).map_err(|error| CustodyError::io("delete the mark of", path, error))?;
        }
        fail_point::after(FailStep::Discard);
        Ok(())
    }

    /// Deletes one file; succeeds if it is gone. After an error it stays.
    pub(crate) fn delete(&self, path: &Path, owner: &Owner) -> Result<(), CustodyError> {
        self.delete_this(path, None, owner)
    }

    /// Does the same as [`Custody::delete`], but only for the open file `made`.
    pub(crate) fn delete_this(
        &self,
        path: &Path,
        made: Option<&File>,
        owner: &Owner,
    ) -> Result<(), CustodyError> {
        let order = Order { step: Step::Discard, owner, path, only: made, operation: "delete", to: None };
        let taken = self.handle(order, Opened::unlink)?;
        // The name is gone for good. Its space is freed slowly, because a guest may be writing beside it.
        if let Some(file) = taken.file {
            Doomed::of(file).free();
        }
        Ok(())
    }

    /// Deletes or keeps a source image whose volume has moved away in `migration`; succeeds if it is gone. A device
    /// and a server's export stay, because the journal has fenced them. Returns the name under which the image is kept.
    /// After an error the image stays, or is kept because a program uses it.
    pub(crate) fn retire(
        &self,
        image: &ImageLocation,
        retirement: Retirement,
        migration: MigrationId,
    ) -> Result<Option<PathBuf>, ControlFault> {
        fail_point::before(FailStep::Retire);
        let Some(path) = image.place.file().map(Path::new) else { return Ok(None) };
        let retired = self.see(path).map_err(ControlFault::from).and_then(|()| match retirement {
            Retirement::Delete => self.delete_or_fence(path, migration).map(|()| None),
            Retirement::Keep => Ok(Some(self.fence(path, migration)?)),
        });
        if retired.is_err() {
            // An image that keeps its name, because its file system takes no changes, is still an old one.
            self.note_hidden(path, migration)?;
        }
        fail_point::after(FailStep::Retire);
        retired
    }

    /// Checks that a source is not out of sight.
    fn see(&self, path: &Path) -> Result<(), CustodyError> {
        let failed = |error| CustodyError::io("find", path, error);
        let opened = Opened::at(path).map_err(failed)?;
        let Some(why) = self.doubt_absence(path, &opened).map_err(failed)? else { return Ok(()) };
        let refused = Refused { step: Step::Discard, claims: vec![Kind::Unknown { why }] };
        Err(CustodyError::Refused { path: path.to_owned(), refused })
    }

    /// Returns why an image that `migration` has left is kept by a name.
    fn purpose_of_kept(&self, path: &Path, migration: MigrationId) -> Purpose {
        let is_adopted = self.read(|state| {
            let moving = state.migrations.get(&migration).into_iter().flat_map(|known| &known.volumes);
            let mut sources = moving.map(|moving| &moving.source);
            sources.any(|source| source.is_adopted() && source.place.file().map(Path::new) == Some(path))
        });
        if is_adopted { Purpose::Given(migration) } else { Purpose::Kept(migration) }
    }

    /// Checks that the names of what a migration has filled here lead to it: until then its source is the only copy with a name.
    fn confirm_targets(&self, migration: MigrationId) -> Result<(), CustodyError> {
        // A target of an earlier program is not recorded.
        let targets: Vec<Place> = self.read(|state| {
            let known = state.migrations.get(&migration).filter(|known| known.side == Side::OneHost);
            let places =
                known.into_iter().flat_map(|known| &known.volumes).map(|moving| &moving.target.place);
            places.filter(|place| state.images.contains_key(place)).cloned().collect()
        });
        targets.iter().try_for_each(|target| match self.confirm_filled(target) {
            Err(CustodyError::Io { .. }) => Err(exchanged(target, Step::ServeReadWrite)),
            confirmed => confirmed,
        })
    }

    /// Deletes an image, or renames it if that is refused, so that nothing starts from it.
    fn delete_or_fence(&self, path: &Path, migration: MigrationId) -> Result<(), ControlFault> {
        let confirmed = self.confirm_targets(migration);
        match confirmed.and_then(|()| self.delete(path, &Owner::Migration(migration))) {
            Err(why @ CustodyError::Refused { .. }) => {
                let kept = self.fence(path, migration)?;
                let detail = format!("{why}; it is kept as {}", kept.display());
                Err(ControlFault { operation: "delete", path: path.display().to_string(), detail })
            }
            deleted => Ok(deleted?),
        }
    }

    /// Renames an image that its volume has left in `migration`: no autostart finds it. Returns its name.
    fn fence(&self, path: &Path, migration: MigrationId) -> Result<PathBuf, CustodyError> {
        let owner = Owner::Migration(migration);
        let is_free = |fenced: &PathBuf| {
            fenced.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        for fenced in fenced_paths(path, migration).filter(is_free) {
            let rename = |opened: &Opened| opened.rename_to_free(name_of(&fenced)?);
            let to = Some((fenced.as_path(), self.purpose_of_kept(path, migration)));
            let order = Order { step: Step::Fence, owner: &owner, path, only: None, operation: "rename", to };
            match self.handle(order, rename) {
                Ok(Taken { ending: Ending::Taken, .. }) => return Ok(fenced),
                // An earlier run has renamed the image already.
                Ok(Taken { ending: Ending::Gone, .. }) => {
                    return Ok(self.read(|state| kept_path(state, path, migration)));
                }
                // A file has come to the name meanwhile.
                Err(error) if error.is_taken() => {}
                Err(error) => return Err(error),
            }
        }
        Err(CustodyError::io("rename", path, io::ErrorKind::AlreadyExists.into()))
    }

    /// Renames an image in its folder, durably, if the new name is free; returns whether there was an image.
    pub(crate) fn rename(&self, from: &Path, to: &Path, owner: &Owner) -> Result<Ending, CustodyError> {
        self.rename_only(from, None, to, owner)
    }

    /// Does the same as [`Custody::rename`], but only for the open file `image`.
    pub(crate) fn rename_this(
        &self,
        from: &Path,
        image: &File,
        to: &Path,
        owner: &Owner,
    ) -> Result<Ending, CustodyError> {
        self.rename_only(from, Some(image), to, owner)
    }

    fn rename_only(
        &self,
        path: &Path,
        only: Option<&File>,
        to: &Path,
        owner: &Owner,
    ) -> Result<Ending, CustodyError> {
        let rename = |opened: &Opened| opened.rename_to_free(name_of(to)?);
        let purpose = self.read(|state| state.purpose_of(&place_of(to)));
        let order =
            Order { step: Step::Rename, owner, path, only, operation: "rename", to: Some((to, purpose)) };
        Ok(self.handle(order, rename)?.ending)
    }

    /// Makes a kept image the target at `path`, in place of the empty file `reserved`. After an error both are unchanged.
    pub(crate) fn take_back(
        &self,
        kept: &Path,
        path: &Path,
        reserved: &File,
        migration: MigrationId,
    ) -> Result<Ending, CustodyError> {
        let owner = Owner::Migration(migration);
        let take = |opened: &Opened| {
            let name = name_of(path)?;
            let is_reserved = opened.look_at(name) == Found::There(identity_of(reserved)?);
            if !is_reserved || reserved.metadata()?.len() != 0 {
                return Err(io::Error::other("another file has taken its target's place"));
            }
            half_made::mark(path, opened.lasting())?;
            opened.rename_over(name)
        };
        let to = Some((path, Purpose::Use));
        let order =
            Order { step: Step::TakeBack, owner: &owner, path: kept, only: None, operation: "take", to };
        Ok(self.handle(order, take)?.ending)
    }

    /// Checks whether a file could be deleted if the book were as `then` makes it. Changes nothing.
    pub(super) fn check_deletion(
        &self,
        path: &Path,
        owner: &Owner,
        then: impl FnOnce(&mut Book),
    ) -> Result<(), CustodyError> {
        let opened = Opened::at(path).map_err(|error| CustodyError::io("open", path, error))?;
        let Some(file) = opened.file() else { return Ok(()) };
        let object = object_of(path, &opened);
        let mut book = self.book_about(&object);
        then(&mut book);
        add_users(&mut book, Step::Discard, owner, file, &object);
        match book.ask(Step::Discard, owner, &object) {
            Ok(_) => Ok(()),
            Err(refused) => Err(CustodyError::Refused { path: path.to_owned(), refused }),
        }
    }

    /// Takes one step on one file, in the order of [`Handling`].
    fn handle(
        &self,
        order: Order<'_>,
        act: impl FnOnce(&Opened) -> io::Result<()>,
    ) -> Result<Taken, CustodyError> {
        let Order { step, owner, path, only, operation, .. } = order;
        let failed = |error| CustodyError::io(operation, path, error);
        let opened = Opened::at(path).map_err(failed)?;
        let hidden = self.doubt_absence(path, &opened).map_err(failed)?.map(Found::Unknown);
        let mut handling = Handling::new(step, owner.clone(), place_of(path));
        let (mut act, mut is_other) = (Some(act), false);
        if let (Some(only), Found::There(found)) = (only, opened.found()) {
            is_other = identity_of(only).map_err(failed)? != *found;
        }
        loop {
            let event = match handling.next() {
                Ok(Todo::Open) => {
                    let found = hidden.as_ref().unwrap_or(opened.found());
                    Event::Opened(found.clone(), opened.lasting().cloned())
                }
                Ok(Todo::Lock) => lock(&opened, owner).map_err(failed)?,
                Ok(Todo::Claims) => Event::Gathered(self.book_of_step(&order, &opened)),
                // N.B. if the file was made here, another file with its name does not count.
                Ok(Todo::Compare) if is_other => Event::Compared(Found::Gone),
                Ok(Todo::Compare) => Event::Compared(opened.look()),
                Ok(Todo::Act) => {
                    if let Some(act) = act.take() {
                        self.note_name(&order, &opened)?;
                        act(&opened).map_err(failed)?;
                    }
                    Event::Acted
                }
                // A missing file is gone only if its folder exists: a store that is not mounted still has it.
                Ok(Todo::Sync) => {
                    opened.sync_folder().map_err(failed)?;
                    Event::Synced
                }
                Err(Ok(ending)) => {
                    // A name that is remembered for too long only refuses new files under it.
                    if let Err(error) = self.forget(path) {
                        tracing::warn!(%error, "cannot forget the name of a deleted image; new files with this name are refused");
                    }
                    return Ok(Taken { ending, file: opened.into_file() });
                }
                Err(Err(refused)) => return Err(CustodyError::Refused { path: path.to_owned(), refused }),
            };
            handling.handle_event(event);
        }
    }

    fn book_of_step(&self, order: &Order<'_>, opened: &Opened) -> Book {
        let object = object_of(order.path, opened);
        let mut book = self.book_about(&object);
        if let Some(file) = opened.file() {
            add_users(&mut book, order.step, order.owner, file, &object);
            if order.only.is_none() {
                add_ourselves(&mut book, order.step, order.owner, file, &object);
            }
            self.add_open_chains(&mut book, order.step, file, &object);
        }
        // Whether it is that file is compared by itself.
        if let (Some(_), Some(lasting)) = (order.only, object.lasting) {
            book.mean(&object.place, lasting);
        }
        book
    }

    /// Records the name that a file is about to have. **N.B.** The record is durable before the rename: a restart finds
    /// the file under either name.
    fn note_name(&self, order: &Order<'_>, opened: &Opened) -> Result<(), CustodyError> {
        let (Some((to, purpose)), Some(lasting)) = (order.to, opened.lasting().cloned()) else {
            return Ok(());
        };
        self.note(&place_of(to), KnownImage { lasting, purpose })
    }
}

fn object_of(path: &Path, opened: &Opened) -> Object {
    Object { place: place_of(path), found: opened.found().clone(), lasting: opened.lasting().cloned() }
}

/// Locks the open file. Waits for a lock without a visible holder.
fn lock(opened: &Opened, owner: &Owner) -> io::Result<Event> {
    let deadline = Instant::now() + LOCK_WAIT_MAX;
    loop {
        match opened.try_lock()? {
            Lock::Got => return Ok(Event::Locked),
            // Its maker has it open and locked.
            _ if *owner == Owner::Maker => return Ok(Event::Locked),
            Lock::Held(holder) => return Ok(Event::Held(holder)),
            Lock::Fading(holder) if Instant::now() >= deadline => return Ok(Event::Held(holder)),
            Lock::Fading(_) => std::thread::sleep(LOCK_POLL),
        }
    }
}

fn name_of(path: &Path) -> io::Result<&OsStr> {
    path.file_name().ok_or_else(|| io::ErrorKind::InvalidInput.into())
}
