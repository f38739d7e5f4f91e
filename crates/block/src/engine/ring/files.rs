//! The ring's table of registered files, which saves a reference count per operation.
//!
//! A file gets a slot at its first operation. The kernel's table keeps the file open, and with it the lock on an image. So a slot
//! must not outlive the last handle: the driver calls [`FileTable::sweep`] before each wait, and a store that has finished
//! releases its files itself.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Weak};

use io_uring::Submitter;

use super::request::FileReference;

/// Slots of the table. Further files are used by their descriptors.
const SLOTS: u32 = 64;

pub(super) struct FileTable {
    /// A weak handle prevents reuse of the address, so it identifies the file. Empty: the kernel refused to make a table.
    slots: Vec<Option<Weak<OwnedFd>>>,
    used: usize,
    /// Cleared when the kernel refuses a file, so that it is not asked again at every operation.
    accepts: bool,
}

impl FileTable {
    /// Asks the kernel for a table; without one every file is used by its descriptor.
    pub(super) fn new(submitter: &Submitter<'_>) -> Self {
        let slots = match submitter.register_files_sparse(SLOTS) {
            Ok(()) => vec![None; SLOTS as usize],
            Err(error) => {
                tracing::debug!(%error, "no table of registered files");
                Vec::new()
            }
        };
        Self { slots, used: 0, accepts: true }
    }

    pub(super) fn reference(&mut self, file: &Arc<OwnedFd>, submitter: &Submitter<'_>) -> FileReference {
        if let Some(slot) = self.slot_of(file) {
            return FileReference::Slot(slot as u32);
        }
        if !self.accepts || self.used == self.slots.len() {
            return FileReference::Descriptor;
        }
        let Some(slot) = self.slots.iter().position(Option::is_none) else {
            return FileReference::Descriptor;
        };
        if let Err(error) = submitter.register_files_update(slot as u32, &[file.as_raw_fd()]) {
            tracing::debug!(%error, "no further registered files");
            self.accepts = false;
            return FileReference::Descriptor;
        }
        self.slots[slot] = Some(Arc::downgrade(file));
        self.used += 1;
        FileReference::Slot(slot as u32)
    }

    /// Frees the slots of files without handles. Operations own handles until they have ended, so none refers to such a slot.
    pub(super) fn sweep(&mut self, submitter: &Submitter<'_>) {
        if self.used == 0 {
            return;
        }
        for slot in 0..self.slots.len() {
            if self.slots[slot].as_ref().is_some_and(|file| file.strong_count() == 0) {
                self.free(slot, submitter);
            }
        }
    }

    /// Frees the slot of `file`, if it has one.
    ///
    /// **N.B.** Every operation that names the slot must have ended: its submission is not enough.
    pub(super) fn release(&mut self, file: &Arc<OwnedFd>, submitter: &Submitter<'_>) {
        if let Some(slot) = self.slot_of(file) {
            self.free(slot, submitter);
        }
    }

    pub(super) fn contains(&self, file: &Arc<OwnedFd>) -> bool {
        self.slot_of(file).is_some()
    }

    pub(super) fn unregister(&mut self, submitter: &Submitter<'_>) {
        if !std::mem::take(&mut self.slots).is_empty() {
            // Closing the ring does the same, but later and in the background.
            let _ = submitter.unregister_files();
        }
        self.used = 0;
    }

    fn slot_of(&self, file: &Arc<OwnedFd>) -> Option<usize> {
        let address = Arc::as_ptr(file);
        if self.used == 0 {
            return None;
        }
        self.slots.iter().position(|slot| slot.as_ref().is_some_and(|known| known.as_ptr() == address))
    }

    fn free(&mut self, slot: usize, submitter: &Submitter<'_>) {
        // -1 empties the slot. If the kernel refuses, the slot stays taken until the next sweep.
        if submitter.register_files_update(slot as u32, &[-1]).is_ok() {
            self.slots[slot] = None;
            self.used -= 1;
        }
    }
}
