//! The thread that writes the audit log, and keeps it from growing without end.
//!
//! ```text
//!   audit.log ── FILE_BYTES_MAX ──► audit.log.1 ──► … ──► audit.log.7 ──► deleted
//! ```

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender};

use super::{Message, State};

/// Bytes of a file after which another one is begun: some ten thousand orders.
pub(super) const FILE_BYTES_MAX: u64 = 8 << 20;
/// Files that are full and kept.
pub(super) const KEPT_FILES: u32 = 7;
/// Lines that are made durable together.
const BATCH_MAX: usize = 256;
/// Nobody but the daemon's user reads who ordered what.
const MODE: u32 = 0o600;

/// Writes what comes, until nobody can send any more.
pub(super) fn run(path: &Path, messages: &Receiver<Message>, state: &State) {
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
            // Whoever has asked may have gone.
            let _ = done.try_send(());
        }
    }
}

/// Appends lines durably: all of them, or none if that can be had.
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
        // Half a line would spoil the next one. What cannot be cut off, no reader takes for a line.
        let _ = file.set_len(length);
    }
    written
}

/// Opens the file for each batch: it may have been deleted or moved by hand, and orders are rare.
fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().create(true).append(true).mode(MODE).open(path)?;
    if file.metadata()?.permissions().mode() & 0o777 != MODE && file.metadata()?.is_file() {
        file.set_permissions(Permissions::from_mode(MODE))?;
    }
    Ok(file)
}

/// Gives each file the name of the next older one; the oldest is replaced.
fn rotate(path: &Path) -> io::Result<()> {
    for number in (1..KEPT_FILES).rev() {
        match std::fs::rename(numbered(path, number), numbered(path, number + 1)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    std::fs::rename(path, numbered(path, 1))
}

/// The name of a file that is full.
pub(super) fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}
