//! What has to outlast the daemon of volumes' stays: three kinds of files in a folder of their own, two threads.
//!
//! ```text
//!   lane ── mark(regions, epoch) ──► marks thread: what waits becomes one durable write a file
//!        ── keep(chronicle) ───────► keeping thread: written anew, synced, renamed; older marks go
//!
//!   chronicles/VOLUME.STAY.kept          a chronicle and its replicas, whole (`chronicle::kept`)
//!   chronicles/VOLUME.STAY.EPOCH.marks   one bit a block: may be written in that epoch (`marks`)
//!   chronicles/VOLUME.STAY.image         how the image looked (`migration::stay::image`)
//!   chronicles/VOLUME.STAY.presence      which units are missing (`presence`), of a volume that is being filled
//! ```
//! They are no part of the journal: marks would fill it, a set of blocks may have megabytes, and a handover must wait for
//! neither. A file that is missing or damaged costs a whole copy and nothing else; one that says too little would cost
//! data. What is believed of them is decided by `migration::stay`; what bears no stay that the journal knows is deleted
//! when it is seen.

mod files;
mod look;
mod marks;
mod presence;

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc;

use chronicle::{BlockRange, Epoch, Kept, StayId};
use lane::{Keeper, LaneFuture, NotDurable};
use migration::filling::{LogEntry, UnitMap};
use migration::journal::{ImageLocation, Place, Side, State};
use migration::stay::opening::{self, Distrust, Found, OpeningStep};
use migration::stay::{ImageRecord, OpenMarks, vouches};
use migration::{StayKey, VolumeId};
use tokio::sync::oneshot;

use self::files::Files;
use self::marks::MarksFile;
use self::presence::{PresenceWork, PresenceWriter};
use crate::files::folder_entries::sync_folder_of;

pub(crate) use self::look::look;
pub(crate) use self::presence::PresenceError;

/// Name of the folder in the data folder.
const FOLDER: &str = "chronicles";
/// Marks that become one write at most.
const GROUP_MAX: usize = 1024;

type Reply = oneshot::Sender<Result<(), NotDurable>>;

/// The folder, and the threads that write to it; a clone is another handle to them.
#[derive(Clone, Debug)]
pub(crate) struct Chronicles {
    files: Files,
    marks: mpsc::Sender<Mark>,
    work: mpsc::Sender<Work>,
    presence: mpsc::Sender<PresenceWork>,
}

#[derive(Debug)]
struct Mark {
    key: StayKey,
    epoch: Epoch,
    blocks: Vec<BlockRange>,
    reply: Reply,
}

#[derive(Debug)]
enum Work {
    Keep { key: StayKey, kept: Box<Kept>, reply: Reply },
    Forget { key: StayKey, through: Epoch, reply: Reply },
    Doubt { key: StayKey, reply: Reply },
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
        let files = Files::new(folder);
        let (marks, marks_queue) = mpsc::channel();
        let (work, work_queue) = mpsc::channel();
        let marker = Marker { files: files.clone(), open: OpenMarks::default() };
        std::thread::Builder::new().name("marks".into()).spawn(move || marker.run(&marks_queue))?;
        let kept_in = files.clone();
        let keep = move || keep_all(&kept_in, &work_queue);
        std::thread::Builder::new().name("chronicles".into()).spawn(keep)?;
        let (presence, presence_queue) = mpsc::channel();
        let writer = PresenceWriter::new(files.clone());
        std::thread::Builder::new().name("presence".into()).spawn(move || writer.run(&presence_queue))?;
        Ok(Self { files, marks, work, presence })
    }

    /// What a lane goes on with that begins to use the image of a volume, which nobody else holds; sleeps. The files of
    /// the volume's other stays are deleted.
    ///
    /// # Errors
    /// The system's: something may be there that must not be trusted later.
    pub(crate) fn open_stay(&self, key: StayKey, image: &ImageLocation) -> io::Result<Option<Kept>> {
        self.files.delete_other_stays(key)?;
        let kept = match self.files.kept(key) {
            Ok(kept) => kept,
            Err(error) => {
                let volume = key.volume;
                tracing::warn!(%volume, %error, "what was kept of a chronicle is of no use; copies begin anew");
                None
            }
        };
        if kept.is_none() {
            // Also marks that nobody needs, and what could not be read.
            self.files.forget(key, Epoch(u64::MAX))?;
        }
        let look = look(image);
        let opening = opening::open(Found { kept, record: self.files.image_record(key), look });
        if let Some(reason) = opening.distrust {
            let volume = key.volume;
            tracing::warn!(%volume, %reason, "every copy of the volume elsewhere counts as one that lacks everything");
        }
        for step in opening.steps {
            match step {
                OpeningStep::Forget => self.files.forget(key, Epoch(u64::MAX))?,
                OpeningStep::Record(record) => self.record_image(key, &record),
            }
        }
        Ok(opening.believed)
    }

    /// What a volume of this size in bytes lacks in a stay; sleeps.
    ///
    /// # Errors
    /// [`PresenceError`]: it is not known. **N.B.** A volume that is this host's must not be served then: what is fetched again
    /// would come over what was written since.
    pub(crate) fn missing(
        &self,
        key: StayKey,
        size_bytes: u64,
        place: &Place,
    ) -> Result<UnitMap, PresenceError> {
        presence::read(&self.files, key, size_bytes, place)
    }

    /// Remembers that a volume may be in this image, too, from now on; sleeps.
    pub(crate) fn note_image(&self, key: StayKey, image: &ImageLocation) {
        let record = opening::also_in_use(self.files.image_record(key), look(image));
        self.record_image(key, &record);
    }

    /// Remembers how the image of a volume looks that has been closed in order; sleeps. If that cannot be remembered, then
    /// nothing of it is.
    pub(crate) fn close_image(&self, key: StayKey, image: &ImageLocation) {
        let Some(record) = opening::closed(self.files.image_record(key), look(image)) else { return };
        let Err(error) = self.files.record_image(key, &record) else { return };
        tracing::warn!(volume = %key.volume, %error, "how the image looks cannot be recorded; copies elsewhere will count as ones that lack everything");
        if let Err(error) = self.files.forget_image(key) {
            tracing::warn!(volume = %key.volume, %error, "a change of the image while the daemon is stopped may go unnoticed");
        }
    }

    /// Tells whether the image that a volume has left, and that another host reads, is as it was left; sleeps.
    ///
    /// # Errors
    /// [`Distrust`]: somebody has changed it.
    pub(crate) fn check_left(&self, key: StayKey, image: &ImageLocation) -> Result<(), Distrust> {
        opening::check_left(self.files.image_record(key).as_ref(), look(image).as_ref())
    }

    /// Tells whether the image that a volume leaves is what the volume was; sleeps.
    pub(crate) fn vouches(&self, key: StayKey) -> bool {
        vouches(self.files.image_record(key).as_ref())
    }

    /// Deletes what belongs to no stay that the journal knows; sleeps.
    pub(crate) fn sweep(&self, state: &State) {
        if let Err(error) = self.files.delete_all_but(|key| is_known(state, key)) {
            tracing::warn!(%error, "what former stays of volumes have left in the data folder is not all deleted");
        }
    }

    /// Forgets durably what was kept of a volume; sleeps.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn forget_volume(&self, volume: VolumeId) -> io::Result<()> {
        self.files.delete_volume(volume)
    }

    /// As a lane takes it.
    pub(crate) fn keeper(&self) -> Rc<dyn Keeper> {
        Rc::new(self.clone())
    }

    /// N.B. What was remembered before stays if this fails. It vouches for no more than this would.
    fn record_image(&self, key: StayKey, record: &ImageRecord) {
        if let Err(error) = self.files.record_image(key, record) {
            tracing::warn!(volume = %key.volume, %error, "how the image looks cannot be recorded");
        }
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
        key: StayKey,
        epoch: Epoch,
        blocks: Vec<BlockRange>,
    ) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.marks, |reply| Mark { key, epoch, blocks, reply })
    }

    fn keep(&self, key: StayKey, kept: Kept) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.work, |reply| Work::Keep { key, kept: Box::new(kept), reply })
    }

    fn forget(&self, key: StayKey, through: Epoch) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.work, |reply| Work::Forget { key, through, reply })
    }

    fn doubt(&self, key: StayKey) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.work, |reply| Work::Doubt { key, reply })
    }

    fn begin_presence(
        &self,
        key: StayKey,
        size_bytes: u64,
        entry: LogEntry,
    ) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.presence, |reply| PresenceWork::Begin { key, size_bytes, entry, reply })
    }

    fn add_presence(
        &self,
        key: StayKey,
        size_bytes: u64,
        entry: LogEntry,
    ) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.presence, |reply| PresenceWork::Add { key, size_bytes, entry, reply })
    }

    fn note_presence(
        &self,
        key: StayKey,
        size_bytes: u64,
        units: Vec<BlockRange>,
    ) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.presence, |reply| PresenceWork::Note { key, size_bytes, units, reply })
    }

    fn forget_presence(&self, key: StayKey) -> LaneFuture<Result<(), NotDurable>> {
        Self::ask(&self.presence, |reply| PresenceWork::Forget { key, reply })
    }
}

/// Whether a stay goes on, may begin, or may be gone on with.
fn is_known(state: &State, key: StayKey) -> bool {
    let here = state.volumes.get(&key.volume).is_some_and(|volume| volume.stay == key.stay);
    // It may be handed back.
    let released = state.moved.get(&key.volume).is_some_and(|moved| {
        moved.volume.stay == key.stay && state.unfinished().any(|(id, _)| id == moved.migration)
    });
    let comes = state.unfinished().any(|(id, migration)| {
        key.stay == StayId::Arrived(id.0)
            && matches!(migration.side, Side::Incoming { .. })
            && migration.volumes.iter().any(|moving| moving.volume == key.volume)
    });
    here || released || comes
}

/// The thread that marks.
struct Marker {
    files: Files,
    open: OpenMarks<MarksFile>,
}

impl Marker {
    fn run(mut self, queue: &mpsc::Receiver<Mark>) {
        while let Ok(first) = queue.recv() {
            let mut groups = std::collections::BTreeMap::<_, (Vec<BlockRange>, Vec<Reply>)>::new();
            for mark in std::iter::once(first).chain(queue.try_iter().take(GROUP_MAX - 1)) {
                let (blocks, replies) = groups.entry((mark.key, mark.epoch)).or_default();
                blocks.extend(mark.blocks);
                replies.push(mark.reply);
            }
            for ((key, epoch), (blocks, replies)) in groups {
                let result = self.mark(key, epoch, &blocks).map_err(|error| not_durable(&error));
                if result.is_err() {
                    // What the file holds is not known any more; it is read again.
                    self.open.close(key, epoch);
                }
                replies.into_iter().for_each(|reply| answer(reply, result.clone()));
            }
        }
    }

    fn mark(&mut self, key: StayKey, epoch: Epoch, blocks: &[BlockRange]) -> io::Result<()> {
        let path = self.files.marks_path(key, epoch);
        self.open.of(key, epoch, || MarksFile::open(&path))?.mark(blocks)
    }
}

/// The thread that keeps and forgets.
fn keep_all(files: &Files, queue: &mpsc::Receiver<Work>) {
    while let Ok(work) = queue.recv() {
        let (result, reply) = match work {
            Work::Keep { key, kept, reply } => (files.keep(key, &kept), reply),
            Work::Forget { key, through, reply } => (files.forget(key, through), reply),
            Work::Doubt { key, reply } => (files.doubt_image(key), reply),
        };
        answer(reply, result.map_err(|error| not_durable(&error)));
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
