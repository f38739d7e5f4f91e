//! The steps that change an image or its name.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use lane::ControlFault;
use migration::MigrationId;
use migration::custody::{Book, Ending, Event, Found, Handling, Object, Owner, Step, Todo};
use migration::journal::{ImageLocation, Place};
use migration::recovery::Retirement;

use super::claims::add_users;
use super::freeing::Doomed;
use super::opened::{Lock, Opened, identity_of};
use super::{Custody, CustodyError, names};
use crate::fail_point::{self, Step as FailStep};
use crate::images::{fenced_path, half_made};

/// How long a lock without a visible holder is waited for: the last writes of a killed daemon can take seconds.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(6);
const LOCK_POLL: Duration = Duration::from_millis(20);

/// A completed step, with the file on which it was done.
struct Taken {
    ending: Ending,
    file: Option<OwnedFd>,
}

impl Custody {
    /// Deletes a half-made or abandoned image with the files beside it; succeeds if it is gone. A device and a server's export
    /// stay, because the journal has fenced them. After an error the image stays.
    pub(crate) fn discard(&self, image: &ImageLocation, owner: &Owner) -> Result<(), CustodyError> {
        fail_point::before(FailStep::Discard);
        if let Some(path) = image.place.file().map(Path::new) {
            // N.B. first: an image with a token counts as the offered one.
            lane::shared_storage::remove(path)
                .map_err(|error| CustodyError::io("delete what is beside", path, error))?;
            self.delete(path, owner)?;
            // N.B. last: an image that could not be deleted stays marked.
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
        let taken = self.handle(Step::Discard, owner, path, made, "delete", Opened::unlink)?;
        // The name is gone for good. Its space is freed slowly, because a guest may be writing beside it.
        if let Some(file) = taken.file {
            Doomed::of(file).free();
        }
        Ok(())
    }

    /// Deletes or keeps a source image whose volume has moved away in `migration`; succeeds if it is gone. A device
    /// and a server's export stay, because the journal has fenced them. After an error the image stays, or is kept
    /// because a program uses it.
    pub(crate) fn retire(
        &self,
        image: &ImageLocation,
        retirement: Retirement,
        migration: MigrationId,
    ) -> Result<(), ControlFault> {
        fail_point::before(FailStep::Retire);
        match (image.place.file().map(Path::new), retirement) {
            (Some(path), Retirement::Delete) => self.delete_or_fence(path, migration)?,
            (Some(path), Retirement::Keep) => self.fence(path, migration)?,
            (None, _) => {}
        }
        fail_point::after(FailStep::Retire);
        Ok(())
    }

    /// Deletes an image, or renames it if that is refused, so that nothing starts from it.
    fn delete_or_fence(&self, path: &Path, migration: MigrationId) -> Result<(), ControlFault> {
        match self.delete(path, &Owner::Migration(migration)) {
            Err(CustodyError::Refused { refused, .. }) => {
                self.fence(path, migration)?;
                let kept = fenced_path(path, migration);
                let detail = format!("{refused}; it is kept as {}", kept.display());
                Err(ControlFault { operation: "delete", path: path.display().to_string(), detail })
            }
            deleted => Ok(deleted?),
        }
    }

    /// Renames an image that its volume has left in `migration`, so that no autostart finds it.
    fn fence(&self, path: &Path, migration: MigrationId) -> Result<(), CustodyError> {
        let fenced = fenced_path(path, migration);
        let owner = Owner::Migration(migration);
        let rename = |opened: &Opened| opened.rename_to_free(name_of(&fenced)?);
        self.handle(Step::Fence, &owner, path, None, "rename", rename).map(drop)
    }

    /// Renames an image in its folder, durably, if the new name is free; returns whether there was an image.
    pub(crate) fn rename(&self, from: &Path, to: &Path, owner: &Owner) -> Result<Ending, CustodyError> {
        let rename = |opened: &Opened| opened.rename_to_free(name_of(to)?);
        Ok(self.handle(Step::Rename, owner, from, None, "rename", rename)?.ending)
    }

    /// Does the same as [`Custody::rename`], but only for the open file `image`.
    pub(crate) fn rename_this(
        &self,
        from: &Path,
        image: &File,
        to: &Path,
        owner: &Owner,
    ) -> Result<Ending, CustodyError> {
        let rename = |opened: &Opened| opened.rename_to_free(name_of(to)?);
        Ok(self.handle(Step::Rename, owner, from, Some(image), "rename", rename)?.ending)
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
            opened.rename_over(name)?;
            if let Found::There(identity) = opened.found() {
                names::note(path, identity.clone());
            }
            Ok(())
        };
        Ok(self.handle(Step::TakeBack, &owner, kept, None, "take", take)?.ending)
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
        let place = Place::File(path.to_str().map(str::to_owned).unwrap_or_default());
        let object = Object { place, found: opened.found().clone() };
        let mut book = self.book_about(&object);
        then(&mut book);
        add_users(&mut book, Step::Discard, owner, file, &object);
        match book.ask(Step::Discard, owner, &object) {
            Ok(_) => Ok(()),
            Err(refused) => Err(CustodyError::Refused { path: path.to_owned(), refused }),
        }
    }

    /// Takes one step on one file, in the order of [`Handling`]. With `only`, it must be this file.
    fn handle(
        &self,
        step: Step,
        owner: &Owner,
        path: &Path,
        only: Option<&File>,
        operation: &'static str,
        act: impl FnOnce(&Opened) -> io::Result<()>,
    ) -> Result<Taken, CustodyError> {
        let failed = |error| CustodyError::io(operation, path, error);
        let place = Place::File(path.to_str().map(str::to_owned).unwrap_or_default());
        let opened = Opened::at(path).map_err(failed)?;
        let mut handling = Handling::new(step, owner.clone(), place.clone());
        let (mut act, mut is_other) = (Some(act), false);
        if let (Some(only), Found::There(found)) = (only, opened.found()) {
            is_other = identity_of(only).map_err(failed)? != *found;
        }
        // N.B. another file may have got the name since the volume was opened by it.
        if let (Owner::Volume(_) | Owner::Migration(_), Found::There(found)) = (owner, opened.found()) {
            is_other |= names::is_other(path, found);
        }
        loop {
            let event = match handling.next() {
                Ok(Todo::Open) => Event::Opened(opened.found().clone()),
                Ok(Todo::Lock) => lock(&opened, owner).map_err(failed)?,
                Ok(Todo::Claims) => {
                    let object = Object { place: place.clone(), found: opened.found().clone() };
                    let mut book = self.book_about(&object);
                    if let Some(file) = opened.file() {
                        add_users(&mut book, step, owner, file, &object);
                        self.add_open_chains(&mut book, step, file, &object);
                    }
                    Event::Gathered(book)
                }
                // N.B. if the file was made here, another file with its name does not count.
                Ok(Todo::Compare) if is_other => Event::Compared(Found::Gone),
                Ok(Todo::Compare) => Event::Compared(opened.look()),
                Ok(Todo::Act) => {
                    if let Some(act) = act.take() {
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
                    if matches!(step, Step::Discard | Step::Fence | Step::Rename) {
                        names::forget(path);
                    }
                    return Ok(Taken { ending, file: opened.into_file() });
                }
                Err(Err(refused)) => return Err(CustodyError::Refused { path: path.to_owned(), refused }),
            };
            handling.handle_event(event);
        }
    }
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
