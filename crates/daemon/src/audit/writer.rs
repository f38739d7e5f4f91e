//! The thread that writes the audit log, and limits its size.
//!
//! ```text
//!   audit.log ── FILE_BYTES_MAX ──► audit.log.1 ──► … ──► audit.log.7 ──► deleted
//! ```

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender};

use super::{LogCounters, Message};

/// The size at which a new file is begun: some ten thousand orders.
pub(super) const FILE_BYTES_MAX: u64 = 8 << 20;
pub(super) const KEPT_FILES: u32 = 7;
/// How many lines are made durable together.
const BATCH_MAX: usize = 256;
/// The mode that lets only the daemon's user read who ordered what.
const MODE: u32 = 0o600;

/// Writes messages until all senders are gone.
pub(super) fn run(path: &Path, messages: &Receiver<Message>, state: &LogCounters) {
    while let Ok(first) = messages.recv() {
        let (mut lines, mut bytes, mut flushed) = (0, Vec::new(), Vec::<SyncSender<()>>::new());
        for message in std::iter::once(first).chain(messages.try_iter().take(BATCH_MAX)) {
            match message {
                Message::Line(line) => {
                    bytes.extend_from_slice(&line);
                    lines += 1;
                }
                Message::Flush(done) => flushed.push(done),
            }
        }
        if lines > 0 {
            match append(path, &bytes) {
                Ok(()) => state.write(lines),
                Err(error) => state.lose(lines, &error.to_string()),
            }
        }
        for done in flushed {
            // The caller may have given up.
            let _ = done.try_send(());
        }
    }
}

/// Appends lines durably: all of them, or none if possible.
fn append(path: &Path, lines: &[u8]) -> io::Result<()> {
    let mut file = open(path)?;
    let mut length = file.metadata()?.len();
    if length > 0 && length + lines.len() as u64 > FILE_BYTES_MAX {
        rotate(path)?;
        file = open(path)?;
        length = file.metadata()?.len();
    }
    let written = file.write_all(lines).and_then(|()| file.sync_data());
    if written.is_err() {
        // Half a line would spoil the next one. If it cannot be cut off, readers skip the broken line.
        let _ = file.set_len(length);
    }
    written
}

/// Opens the file for each batch: orders are rare, and the file may have been deleted or moved by hand.
fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().create(true).append(true).mode(MODE).open(path)?;
    if file.metadata()?.permissions().mode() & 0o777 != MODE && file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(MODE))?;
    }
    Ok(file)
}

/// Renames each file to the next older name; the oldest is replaced.
fn rotate(path: &Path) -> io::Result<()> {
    for number in (1..KEPT_FILES).rev() {
        match std::fs::rename(numbered(path, number), numbered(path, number + 1)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    std::fs::rename(path, numbered(path, 1))
}

/// Returns the name of a full file.
pub(super) fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}
