//! What has to outlast the daemon of volumes' chronicles: two kinds of files in a folder of their own, two threads.
//!
//! ```text
//!   lane ── mark(regions, epoch) ──► marks thread: what waits becomes one durable write a file
//!        ── keep(chronicle) ───────► keeping thread: written anew, synced, renamed; older marks go
//!
//!   chronicles/VOLUME.kept          a chronicle and its replicas, whole (`chronicle::kept`)
//!   chronicles/VOLUME.EPOCH.marks   one bit a block: may be written in that epoch (`marks`)
//! ```
//! They are no part of the journal: marks would fill it, a set of blocks may have megabytes, and a handover must wait for
//! neither. A file that is missing or damaged costs a whole copy and nothing else; one that says too little would cost
//! data, so what is out of date is deleted before the first write that it does not know.

mod marks;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::mpsc;

use chronicle::{BlockRange, Epoch, Kept};
use lane::{Keeper, LaneFuture, NotDurable};
use migration::VolumeId;
use tokio::sync::oneshot;

use crate::images::sync_folder_of;
use marks::MarksFile;

/// Name of the folder in the data folder.
const FOLDER: &str = "chronicles";
/// Longest file that is read: more than the largest sets take.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// Marks that become one write at most.
const GROUP_MAX: usize = 1024;
/// Files of marks that are kept open.
const OPEN_MAX: usize = 64;

type Reply = oneshot::Sender<Result<(), NotDurable>>;

/// The folder, and the threads that write to it; a clone is another handle to them.
#[derive(Clone, Debug)]
pub(crate) struct Chronicles {
    folder: PathBuf,
    marks: mpsc::Sender<Mark>,
    work: mpsc::Sender<Work>,
}

#[derive(Debug)]
struct Mark {
    volume: VolumeId,
    epoch: Epoch,
    blocks: Vec<BlockRange>,
    reply: Reply,
}

#[derive(Debug)]
enum Work {
    Keep { volume: VolumeId, kept: Box<Kept>, reply: Reply },
    Forget { volume: VolumeId, through: Epoch, reply: Reply },
}

impl Chronicles {
    /// Opens the folder, made if it is not there, and starts the threads; they end with the last handle.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn open(data_dir: &Path) -> io::Result<Self> {
        let folder = data_dir.join(FOLDER);
        match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => sync_folder_of(&folder)?,
        }
        let (marks, marks_queue) = mpsc::channel();
        let (work, work_queue) = mpsc::channel();
        let marker = Marker { folder: folder.clone(), open: BTreeMap::new() };
        std::thread::Builder::new().name("marks".into()).spawn(move || marker.run(&marks_queue))?;
        let kept_in = folder.clone();
        let keep = move || keep_all(&kept_in, &work_queue);
        std::thread::Builder::new().name("chronicles".into()).spawn(keep)?;
        Ok(Self { folder, marks, work })
    }

    /// What was kept of a volume, with later marks; sleeps. Whatever cannot be read is deleted and counts as nothing.
    ///
    /// # Errors
    /// The system's: something may be there that must not be trusted later.
    pub(crate) fn load(&self, volume: VolumeId) -> io::Result<Option<Kept>> {
        let path = kept_path(&self.folder, volume);
        let read = match read_bounded(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.and_then(|bytes| Kept::decode(&bytes).map_err(io::Error::other)),
        };
        match read.and_then(|kept| self.with_marks(volume, kept)) {
            Ok(kept) => Ok(Some(kept)),
            Err(error) => {
                tracing::warn!(%volume, %error, "what was kept of a chronicle is of no use; copies begin anew");
                self.forget_now(volume)?;
                Ok(None)
            }
        }
    }

    /// Forgets durably what was kept of a volume; sleeps.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn forget_now(&self, volume: VolumeId) -> io::Result<()> {
        forget(&self.folder, volume, Epoch(u64::MAX))
    }

    /// As a lane takes it.
    pub(crate) fn keeper(&self) -> Rc<dyn Keeper> {
        Rc::new(self.clone())
    }

    fn with_marks(&self, volume: VolumeId, kept: Kept) -> io::Result<Kept> {
        let marks = marks_of(&self.folder, volume)?.into_iter();
        let read = marks.map(|(epoch, path)| Ok((epoch, marks::read(&path)?)));
        Ok(kept.with_marks(read.collect::<io::Result<Vec<_>>>()?))
    }

    fn ask<T>(
        queue: &mpsc::Sender<T>,
        request: impl FnOnce(Reply) -> T,
    ) -> LaneFuture<Result<(), NotDurable>> {
        let (reply, answer) = oneshot::channel();
        let stopped = || NotDurable { detail: "the daemon is stopping".to_owned() };
        let queued = queue.send(request(reply)).map_err(|_| stopped());
        Box::pin(async move {
            queued?;
            answer.await.unwrap_or_else(|_| Err(stopped()))
        })
    }
}

impl Keeper for Chronicles {
    fn mark(
        &self,
        volume: VolumeId,
        epoch: Epoch,
        blocks: Vec<BlockRange>,
    ) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.marks, |reply| Mark { volume, epoch, blocks, reply })
    }

    fn keep(&self, volume: VolumeId, kept: Kept) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.work, |reply| Work::Keep { volume, kept: Box::new(kept), reply })
    }

    fn forget(&self, volume: VolumeId, through: Epoch) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.work, |reply| Work::Forget { volume, through, reply })
    }
}

/// The thread that marks.
struct Marker {
    folder: PathBuf,
    open: BTreeMap<(VolumeId, Epoch), MarksFile>,
}

impl Marker {
    fn run(mut self, queue: &mpsc::Receiver<Mark>) {
        while let Ok(first) = queue.recv() {
            let mut groups = BTreeMap::<_, (Vec<BlockRange>, Vec<Reply>)>::new();
            for mark in std::iter::once(first).chain(queue.try_iter().take(GROUP_MAX - 1)) {
                let (blocks, replies) = groups.entry((mark.volume, mark.epoch)).or_default();
                blocks.extend(mark.blocks);
                replies.push(mark.reply);
            }
            for (key, (blocks, replies)) in groups {
                let result = self.mark(key, &blocks).map_err(|error| not_durable(&error));
                if result.is_err() {
                    // What the file holds is not known any more; it is read again.
                    self.open.remove(&key);
                }
                replies.into_iter().for_each(|reply| answer(reply, result.clone()));
            }
        }
    }

    fn mark(&mut self, key: (VolumeId, Epoch), blocks: &[BlockRange]) -> io::Result<()> {
        if !self.open.contains_key(&key) {
            if self.open.len() >= OPEN_MAX {
                self.open.pop_first();
            }
            // Epochs are marked in order, one ahead at most: the ones before are over.
            self.open.retain(|(volume, epoch), _| *volume != key.0 || epoch.next() >= key.1);
            let file = MarksFile::open(&marks_path(&self.folder, key.0, key.1))?;
            self.open.insert(key, file);
        }
        match self.open.get_mut(&key) {
            Some(file) => file.mark(blocks),
            // Unreachable: it has just been inserted.
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

/// The thread that keeps and forgets.
fn keep_all(folder: &Path, queue: &mpsc::Receiver<Work>) {
    while let Ok(work) = queue.recv() {
        let (result, reply) = match work {
            Work::Keep { volume, kept, reply } => (keep(folder, volume, &kept), reply),
            Work::Forget { volume, through, reply } => (forget(folder, volume, through), reply),
        };
        answer(reply, result.map_err(|error| not_durable(&error)));
    }
}

fn keep(folder: &Path, volume: VolumeId, kept: &Kept) -> io::Result<()> {
    let path = kept_path(folder, volume);
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(&kept.encode())?;
    file.sync_all()?;
    std::fs::rename(&new, &path)?;
    sync_folder_of(&path)?;
    // N.B. only now: before, a restart would have found an older chronicle, which needs them.
    for (_, marks) in marks_of(folder, volume)?.into_iter().filter(|(epoch, _)| *epoch <= kept.through) {
        remove(&marks)?;
    }
    Ok(())
}

fn forget(folder: &Path, volume: VolumeId, through: Epoch) -> io::Result<()> {
    let path = kept_path(folder, volume);
    remove(&path)?;
    // N.B. durably: marks end from here on.
    sync_folder_of(&path)?;
    for (_, marks) in marks_of(folder, volume)?.into_iter().filter(|(epoch, _)| *epoch <= through) {
        remove(&marks)?;
    }
    Ok(())
}

/// The files of marks of a volume, with their epochs.
fn marks_of(folder: &Path, volume: VolumeId) -> io::Result<Vec<(Epoch, PathBuf)>> {
    let prefix = format!("{volume}.");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let epoch = name.to_str().and_then(|name| name.strip_prefix(&prefix)?.strip_suffix(".marks"));
        if let Some(epoch) = epoch.and_then(|epoch| epoch.parse().ok()) {
            found.push((Epoch(epoch), entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

fn kept_path(folder: &Path, volume: VolumeId) -> PathBuf {
    folder.join(format!("{volume}.kept"))
}

fn marks_path(folder: &Path, volume: VolumeId, epoch: Epoch) -> PathBuf {
    folder.join(format!("{volume}.{}.marks", epoch.0))
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let length = File::open(path)?.metadata()?.len();
    if length > FILE_BYTES_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    std::fs::read(path)
}

/// Removes a file; one that is gone is a success.
fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn not_durable(error: &io::Error) -> NotDurable {
    NotDurable { detail: error.to_string() }
}

fn answer(reply: Reply, result: Result<(), NotDurable>) {
    // The lane may have ended.
    let _ = reply.send(result);
}

#[cfg(test)]
mod tests;
