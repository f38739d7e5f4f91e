//! VMs that are suspended to disk: the files with their memory, and what is recorded of them.
//!
//! ```text
//!   suspended/NAME.memory.new   what a QEMU is sending; a leftover, if a daemon is killed
//!   suspended/NAME.memory       whole and durable; valid only as long as vms.json names it
//! ```
//! [`migration::vm::suspend`] decides the order of the steps, and what a restarted daemon makes of what it finds. The orders are in
//! `orders/suspend.rs`. QEMU never has the file: it sends and receives over a socket, and so its user needs no access, a full disk is
//! noticed here, and a killed daemon leaves no QEMU that goes on writing.

mod carrying;

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use hypervisor::RunState;
use migration::vm::suspend::{self, Guest, Resolution};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::arrival::{WAITING, blocking};
use super::catalogue::Fate;
use super::{Alive, Life, VmError, Vms};
use crate::files::folder_entries::sync_folder_of;
use crate::files::sockets::SocketFolder;
use crate::files::whole_file::unfinished;

pub(crate) use self::carrying::Written;

/// The folder in the data folder, unless another one is configured.
pub(super) const FOLDER: &str = "suspended";
const FOLDER_MODE: u32 = 0o700;
/// Only the daemon's user may read the memory of a guest.
const FILE_MODE: u32 = 0o600;
const RECORD_INTERVAL: Duration = Duration::from_secs(1);

/// The memory of a suspended VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// The absolute path of its file.
    pub(crate) file: PathBuf,
    /// The size of the file.
    pub(crate) bytes: u64,
    /// The CRC-32C of the file.
    pub(super) checksum: u32,
    /// The QEMU that has written it.
    pub(crate) hypervisor: String,
    /// Whether its guest ran, and is to run again.
    pub(crate) was_running: bool,
    pub(crate) since_unix_ms: u64,
    /// Its disks as the guest left them.
    pub(crate) disks: Vec<DiskMark>,
}

/// A disk as a guest left it: whoever writes to its image changes the mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskMark {
    pub(crate) volume: String,
    bytes: u64,
    /// When the image was last written, in nanoseconds since 1970.
    modified_unix_ns: u64,
}

impl DiskMark {
    /// Returns the mark of a volume by its image, once all writes are in the image. May block.
    pub(crate) fn of(volume: &str, image: &Path) -> io::Result<Self> {
        let found = std::fs::metadata(image)?;
        let modified = found.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let modified_unix_ns = u64::try_from(modified).unwrap_or(u64::MAX);
        Ok(Self { volume: volume.to_owned(), bytes: found.len(), modified_unix_ns })
    }
}

impl Saved {
    /// Returns whether the file has the recorded size. May block.
    fn file_state(&self) -> suspend::File {
        match std::fs::symlink_metadata(&self.file) {
            Ok(found) if found.is_file() && found.len() == self.bytes => suspend::File::Whole,
            _ => suspend::File::Missing,
        }
    }

    /// Opens the file; fails if it is not the recorded one. May block.
    pub(super) fn open(&self) -> io::Result<File> {
        let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&self.file)?;
        let found = file.metadata()?;
        if !found.is_file() || found.len() != self.bytes {
            let text = format!("it has {} bytes, and not the {} that were written", found.len(), self.bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(file)
    }

    /// Deletes the file of a VM whose record does not name it any more. May block.
    pub(super) fn delete_with_warning(&self, vm: &str) {
        if let Err(error) = delete(&self.file) {
            tracing::warn!(%vm, path = %self.file.display(), %error, "the memory of a VM that was suspended is left over");
        }
    }
}

impl Vms {
    pub(crate) fn is_suspended(&self, name: &str) -> bool {
        self.entries().get(name).is_some_and(|entry| matches!(entry.life, Life::Suspended(_)))
    }

    /// Returns the VM with this disk whose memory is in a file, or is being restored from there.
    pub(crate) fn suspended_on(&self, volume: &str) -> Option<String> {
        let entries = self.entries();
        let is_it = |entry: &&super::Entry| {
            entry.record.fate.saved().is_some()
                && entry.definition.volumes().iter().any(|name| name == volume)
        };
        entries.values().find(is_it).map(|entry| entry.record.name.clone())
    }

    /// Returns the memory of a suspended VM.
    pub(super) fn saved(&self, name: &str) -> Result<Saved, VmError> {
        match self.life(name)? {
            Life::Suspended(saved) => Ok(*saved),
            _ => Err(VmError::RunsAlready(name.to_owned())),
        }
    }

    /// Returns the path for the memory of a VM.
    pub(super) fn memory_file(&self, name: &str) -> PathBuf {
        self.memories.join(format!("{name}.memory"))
    }

    pub(super) fn make_memories_folder(&self) -> Result<(), VmError> {
        let made = DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(&self.memories);
        made.map_err(|error| VmError::io("make", &self.memories, error))
    }

    /// Makes the file into which a VM's memory is written. May block.
    fn make_memory_file(&self, name: &str) -> Result<File, VmError> {
        self.make_memories_folder()?;
        let path = unfinished(&self.memory_file(name));
        let made = delete(&path)
            .and_then(|()| OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&path));
        made.map_err(|error| VmError::io("make", &path, error))
    }

    /// Gives the written and durable file its name. May block.
    pub(super) fn keep_memory_file(&self, name: &str) -> Result<PathBuf, VmError> {
        let path = self.memory_file(name);
        let kept = std::fs::rename(unfinished(&path), &path).and_then(|()| sync_folder_of(&path));
        kept.map_err(|error| VmError::io("keep", &path, error))?;
        Ok(path)
    }

    /// Deletes what there is of a VM's memory, so that no record can mean it. May block.
    fn delete_memory_files(&self, name: &str) -> io::Result<()> {
        let path = self.memory_file(name);
        delete(&unfinished(&path)).and_then(|()| delete(&path))
    }

    /// Deletes files of VMs that are not suspended, which a killed daemon has left. May block.
    pub(super) fn delete_left_memories(&self) {
        let is_left = |entry: &super::Entry| entry.record.fate.saved().is_none();
        let left: Vec<String> = {
            let entries = self.entries();
            entries.iter().filter(|(_, entry)| is_left(entry)).map(|(name, _)| name.clone()).collect()
        };
        for name in left {
            if let Err(error) = self.delete_memory_files(&name) {
                tracing::warn!(vm = %name, %error, "the memory of a VM that is not suspended is left over");
            }
        }
    }

    /// Invalidates the memory of a VM whose guest goes on, by its file or by its record. Returns once one of them is gone, durably:
    /// the guest must not run before.
    pub(super) async fn invalidate_memory(self: &Arc<Self>, name: &str) {
        loop {
            let (vms, of) = (Arc::clone(self), name.to_owned());
            let deleted = blocking(move || {
                vms.delete_memory_files(&of)
                    .map_err(|error| VmError::io("delete", &vms.memory_file(&of), error))
            });
            let deleted = deleted.await;
            let recorded = match self.suspended_of(name) {
                true => self.remember(name, Fate::Started).await,
                false => Ok(()),
            };
            match (deleted, recorded) {
                (Ok(()), _) | (_, Ok(())) => return,
                (Err(error), Err(_)) => {
                    tracing::error!(vm = %name, %error, "cannot delete the memory of a VM that is to go on; trying again");
                    sleep(RECORD_INTERVAL).await;
                }
            }
        }
    }

    /// Returns whether the memory of a VM is recorded to be in a file.
    pub(super) fn suspended_of(&self, name: &str) -> bool {
        self.entries().get(name).is_some_and(|entry| entry.record.fate.saved().is_some())
    }

    /// Starts the QEMU of a suspended VM, which waits for its memory. After an error the VM is suspended as before.
    pub(super) async fn launch_to_restore(
        self: &Arc<Self>,
        name: &str,
        sockets: &SocketFolder,
    ) -> Result<Alive, VmError> {
        self.launch(name, sockets, &WAITING).await
    }

    /// Kills a QEMU that loads, or has loaded, the memory of a suspended VM, and returns when the VM is suspended again.
    pub(super) async fn kill_loading(&self, name: &str, alive: &Alive) {
        alive.process.kill();
        alive.process.ended().await;
        self.until_noticed(name, alive).await;
    }

    /// Gives up the memory of a suspended VM: it is stopped. After an error it is suspended.
    pub(crate) async fn discard_memory(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        let saved = self.saved(name)?;
        self.remember(name, Fate::Stopped).await?;
        self.set(name, None, Life::Stopped);
        let of = name.to_owned();
        blocking(move || {
            saved.delete_with_warning(&of);
            Ok(())
        })
        .await
    }

    /// Returns what is recorded while a VM is launched, and afterwards if that fails.
    pub(super) fn fates_of_launch(&self, name: &str) -> (Fate, (Life, Fate)) {
        let entries = self.entries();
        match entries.get(name).map(|entry| &entry.record.fate) {
            Some(Fate::Suspended { memory }) => {
                let memory = memory.clone();
                let life = Life::Suspended(Box::new(memory.clone()));
                (Fate::Restoring { memory: memory.clone() }, (life, Fate::Suspended { memory }))
            }
            _ => (Fate::Started, (Life::Stopped, Fate::Stopped)),
        }
    }

    /// Returns what a VM is whose QEMU has ended, if its memory is recorded to be in a file.
    pub(super) fn suspended_after_end(&self, name: &str) -> Option<(Life, Fate)> {
        let fate = self.entries().get(name)?.record.fate.clone();
        let memory = fate.saved()?.clone();
        match suspend::resolve(fate.suspension(), Guest::Ended, memory.file_state()) {
            Resolution::Suspended | Resolution::End => {
                tracing::info!(vm = %name, file = %memory.file.display(), bytes = memory.bytes, "the VM is suspended");
                Some((Life::Suspended(Box::new(memory.clone())), Fate::Suspended { memory }))
            }
            Resolution::Ordinary | Resolution::GoesOn => None,
            Resolution::Lost => {
                let message = format!(
                    "it was suspended, and the file with its memory is gone, or is not whole: {}; it can be started without it",
                    memory.file.display()
                );
                tracing::error!(vm = %name, %message, "the memory of a suspended VM is lost");
                Some((Life::Crashed(message.clone()), Fate::Crashed { message }))
            }
        }
    }

    /// Returns whether a QEMU in this state has to end, because its VM is suspended. Otherwise its guest goes on, and no file has
    /// its memory.
    pub(super) async fn has_to_end(self: &Arc<Self>, name: &str, state: &RunState) -> bool {
        let Some(fate) = self.entries().get(name).map(|entry| entry.record.fate.clone()) else {
            return false;
        };
        let Some(memory) = fate.saved() else { return false };
        let record = fate.suspension();
        match suspend::resolve(record, suspend::guest(record, state.as_str()), memory.file_state()) {
            Resolution::End => true,
            Resolution::GoesOn => {
                tracing::warn!(vm = %name, %state, "the VM was not suspended after all");
                self.invalidate_memory(name).await;
                false
            }
            Resolution::Ordinary | Resolution::Suspended | Resolution::Lost => false,
        }
    }
}

/// Deletes a file, durably; a missing one is no error.
fn delete(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        deleted => deleted.and_then(|()| sync_folder_of(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_changes_with_the_image_and_a_file_is_opened_only_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, "one").unwrap();
        let mark = DiskMark::of("v", &path).unwrap();
        assert_eq!(DiskMark::of("v", &path).unwrap(), mark);
        let later = std::time::SystemTime::now() + Duration::from_secs(1);
        File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
        assert_ne!(DiskMark::of("v", &path).unwrap(), mark, "it was written");
        let saved = |bytes| Saved {
            file: path.clone(),
            bytes,
            checksum: 0,
            hypervisor: String::new(),
            was_running: true,
            since_unix_ms: 0,
            disks: Vec::new(),
        };
        assert_eq!(saved(3).file_state(), suspend::File::Whole);
        assert!(saved(3).open().is_ok() && saved(4).open().is_err());
        assert_eq!(saved(4).file_state(), suspend::File::Missing);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let linked = Saved { file: link, ..saved(3) };
        assert!(linked.open().is_err() && linked.file_state() == suspend::File::Missing);
        delete(&path).unwrap();
        delete(&path).unwrap();
        assert!(saved(3).open().is_err());
    }
}
