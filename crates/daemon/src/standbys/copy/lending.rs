//! Lends the images to a migration to this host, and takes them back if it fails.
//!
//! ```text
//!   noted as lent ─► *consumed* durable ─► second names ─► the migration writes ─┬─► the volumes are here: the names here go
//!                                                                                └─► it has failed: *receiving* durable
//! ```
//! The files stay in the folder under their names: whatever happens to the migration's names, nothing of the images is lost.

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use standby::receiver::{Event, Image};
use standby::record::Standing;
use standby::reprotection::BASE;

use super::files::Files;
use super::input::LendingEnd;
use super::keeper::Keeper;
use crate::files::folder_entries::sync_folder_of;
use crate::standbys::book::Lent;
use crate::standbys::frames::Frame;

impl Keeper {
    /// Gives the images second names for a migration. After an error they are the standby's as before.
    pub(super) fn lend(&mut self, migration: u64, to: &[PathBuf]) -> Result<(), String> {
        let open = self.open.as_ref();
        let watermark = open.and_then(|open| open.machine.record().watermark);
        let has_all = watermark.is_some_and(|at| at.epoch > BASE);
        if !has_all {
            return Err("it has never had everything".to_owned());
        }
        // N.B. Before anything is noted: what the other one has written is compared with its note.
        if open.is_some_and(|open| open.machine.record().standing == Standing::Consumed) {
            return Err("another migration has begun with it, and has not given it back yet".to_owned());
        }
        let text = |error: io::Error| error.to_string();
        // N.B. Before *consumed*: a start with that alone would take the images for used up.
        let lent = Lent { migration, written_at: None };
        self.book.write_lent(&self.config.id, &lent).map_err(text)?;
        self.handle(Event::Consume, &Bytes::new());
        if !self.open.as_ref().is_some_and(|open| open.is_consumed) {
            let reason = self.fault.clone().unwrap_or_else(|| "it has ended, or was restored".to_owned());
            self.book.end_lending(&self.config.id).map_err(text)?;
            return Err(reason);
        }
        self.lent_to = Some(migration);
        let linked = self.link(migration, to);
        if let Err(error) = linked {
            self.give_back(to).map_err(text)?;
            return Err(format!("the store cannot give a file two names: {error}"));
        }
        Ok(())
    }

    fn link(&mut self, migration: u64, to: &[PathBuf]) -> io::Result<()> {
        let Some(open) = &mut self.open else { return Err(io::ErrorKind::NotFound.into()) };
        let lent = Lent { migration, written_at: Some(open.files.age()?) };
        self.book.write_lent(&self.config.id, &lent)?;
        for (index, to) in to.iter().enumerate() {
            open.files.lend_image(index, to)?;
        }
        open.files.close();
        Ok(())
    }

    /// Goes on after the migration has ended.
    pub(super) fn end_lending(&mut self, to: &[PathBuf], end: LendingEnd) -> io::Result<()> {
        if self.open.is_none() {
            self.reopen();
        }
        match end {
            LendingEnd::GivenBack => self.give_back(to),
            LendingEnd::UsedUp => {
                let open = self.open.as_ref().ok_or(io::ErrorKind::NotFound)?;
                if open.machine.record().standing != Standing::Receiving {
                    open.files.forget_images(to.len())?;
                }
                self.note_end()
            }
        }
    }

    fn give_back(&mut self, to: &[PathBuf]) -> io::Result<()> {
        to.iter().try_for_each(|path| unlink(path))?;
        let lent = self.book.lent(&self.config.id)?;
        let (sizes, folder) = (self.sizes(), self.folder()?);
        let Some(open) = &mut self.open else { return Err(io::ErrorKind::NotFound.into()) };
        let record = open.machine.record();
        if record.standing != Standing::Consumed {
            // A start has found it lent, and not consumed.
            return self.note_end();
        }
        open.files.close();
        // Fails while the migration has them open.
        open.files = Files::open(&folder, &self.config.id, &sizes, false, &record.points, &[])?;
        let is_same = lent.and_then(|lent| lent.written_at) == Some(open.files.written_at()?);
        let image = if is_same { Image::AsLeft } else { Image::Touched };
        open.is_consumed = false;
        self.handle(Event::Returned(image), &Bytes::new());
        if self.open.is_none() {
            return Err(io::Error::other(self.words()));
        }
        tracing::info!(standby = %self.config.name, ?image, "the images of a standby are back from a migration that has failed");
        if let Some(line) = &self.line {
            // The source offers again, and learns what is missing.
            let text = "the migration that used the standby has failed; it goes on with what it lacks";
            line.send(&Frame::Fault(text.to_owned()), Bytes::new());
        }
        self.note_end()
    }

    fn note_end(&mut self) -> io::Result<()> {
        self.book.end_lending(&self.config.id)?;
        self.lent_to = None;
        Ok(())
    }
}

/// Deletes a name of an image durably. One that is not there is a success.
fn unlink(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Ok(()) => sync_folder_of(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}
