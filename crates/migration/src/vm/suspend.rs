//! A VM that is suspended to disk: its memory is written to a file, and a later start restores it from there, once.
//!
//! ```text
//!   SAVE     note ─► paused ─► memory written ─► disks flushed ─► file kept ─► recorded: Saved ─► QEMU ended ─► recorded: Suspended
//!   RESTORE  recorded: Restoring ─► QEMU loads the file ─► note ─► recorded: nothing ─► the guest runs ─► file deleted
//!
//!   Nothing ──► Saved ──► Suspended ──► Restoring ──► Nothing
//!     ▲           │ the guest may have run   │ the same
//!     └───────────┴──────────────────────────┘
//! ```
//! **N.B.** A guest that has run since it was saved has changed its disks, and its old memory would destroy them. So the file is valid
//! only while the record says so, the record says so only once the guest does not run, and it is removed, durably, before the
//! guest's next step. Until that step the file may be used again, whatever has failed.

/// What is durably recorded of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// Nothing about a file: a file that exists is a leftover.
    Nothing,
    /// The file has the whole VM, and its QEMU is about to end.
    Saved,
    /// The file has the whole VM, and QEMU has ended.
    Suspended,
    /// The same, and a new QEMU may be loading the file.
    Restoring,
}

/// What is found of a VM's QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// There is no QEMU.
    Ended,
    /// The guest has not run since the file was written.
    Held,
    /// The guest runs, or may have run.
    Free,
}

/// What is found of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum File {
    /// It has the recorded size.
    Whole,
    /// It does not exist, or is not whole.
    Missing,
}

/// What a VM is, by its record, its QEMU and its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// A VM like any other. A file is deleted.
    Ordinary,
    /// It is suspended, and its next start uses the file.
    Suspended,
    /// Its QEMU has to end; then it is suspended.
    End,
    /// Its guest goes on. The file is invalid: first the file is deleted, then the record.
    GoesOn,
    /// There is no QEMU, and no file to restore it from.
    Lost,
}

/// Returns what a QEMU's state, by QEMU's name, means for a VM with this record.
pub fn guest(record: Record, state: &str) -> Guest {
    let is_held = match record {
        // It has sent its memory away. It leaves this state only when it is ordered to run.
        Record::Saved => state == "postmigrate",
        // It waits for its memory, or has loaded it.
        Record::Restoring => matches!(state, "inmigrate" | "prelaunch" | "paused"),
        Record::Nothing | Record::Suspended => false,
    };
    if is_held { Guest::Held } else { Guest::Free }
}

/// Decides what a VM is that a restarted daemon finds, or whose QEMU has just ended.
pub fn resolve(record: Record, guest: Guest, file: File) -> Resolution {
    match (record, guest, file) {
        (Record::Nothing, _, _) => Resolution::Ordinary,
        (_, Guest::Free, _) => Resolution::GoesOn,
        // The QEMU still has the memory, and nothing else has it.
        (Record::Saved, Guest::Held, File::Missing) => Resolution::GoesOn,
        (_, Guest::Held, _) => Resolution::End,
        (_, Guest::Ended, File::Whole) => Resolution::Suspended,
        (_, Guest::Ended, File::Missing) => Resolution::Lost,
    }
}

/// A step that suspends a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveStep {
    /// Note that the guest may be paused, and has to run again ([`hold`](super::hold)).
    Note,
    /// Pause the guest.
    Pause,
    /// Write its memory and its devices to a file of another name.
    Write,
    /// Make its disks durable.
    Flush,
    /// Make the file durable, under its own name.
    Keep,
    /// Record [`Record::Saved`].
    RecordSaved,
    /// End QEMU.
    End,
    /// Record [`Record::Suspended`].
    RecordSuspended,
}

/// The steps that suspend a VM, in order. If one before [`SaveStep::End`] fails, the file is deleted, then the record, and then
/// the guest runs on.
pub const SAVE: [SaveStep; 8] = [
    SaveStep::Note,
    SaveStep::Pause,
    SaveStep::Write,
    SaveStep::Flush,
    SaveStep::Keep,
    SaveStep::RecordSaved,
    SaveStep::End,
    SaveStep::RecordSuspended,
];

/// A step that restores a suspended VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreStep {
    /// Record [`Record::Restoring`], then start a QEMU that waits for its memory.
    Launch,
    /// Load the file, and compare it with what was recorded of it.
    Load,
    /// Note that the guest is paused, and has to run.
    Note,
    /// Record [`Record::Nothing`].
    RecordNothing,
    /// Let the guest run.
    Run,
    /// Delete the file.
    Delete,
}

/// The steps that restore a suspended VM, in order. If one before [`RestoreStep::RecordNothing`] fails, QEMU ends, and the VM is
/// suspended as before.
pub const RESTORE: [RestoreStep; 6] = [
    RestoreStep::Launch,
    RestoreStep::Load,
    RestoreStep::Note,
    RestoreStep::RecordNothing,
    RestoreStep::Run,
    RestoreStep::Delete,
];

#[cfg(test)]
mod tests;
