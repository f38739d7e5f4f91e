//! The durable state of volumes' residencies: three kinds of files in a folder of their own, written by two threads.
//!
//! ```text
//!   lane ── mark(regions, epoch) ──► marks thread: queued marks become one durable write for each file
//!        ── keep(chronicle) ───────► keeping thread: written anew, synced, renamed; older marks go
//!
//!   chronicles/VOLUME.STAY.kept          a chronicle and its replicas, complete (`chronicle::kept`)
//!   chronicles/VOLUME.STAY.EPOCH.marks   one bit a block: may be written in that epoch (`marks`)
//!   chronicles/VOLUME.STAY.image         the attributes of the image (`migration::stay::image`)
//!   alive                                until when each run of the daemon was alive (`life`)
//!   chronicles/VOLUME.STAY.presence      the missing units (`presence`) of a volume that is being filled
//! ```
//! They are not in the journal: marks would fill it, a set of blocks may have megabytes, and a handover must wait for neither.
//! A missing or damaged file costs a whole copy and nothing else. A file with too few marks would cost data. `migration::stay`
//! decides which files can be trusted. A file of an unknown residency is deleted.

mod files;
mod life;
mod look;
mod marks;
mod presence;

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc;

use chronicle::{BlockRange, Epoch, Generation, Kept, LayeredBitmap, ReplicaOf, StayId};
use lane::{Keeper, LaneFuture, NotDurable};
use migration::filling::{LogEntry, UnitMap};
use migration::journal::{ImageLocation, Place, Side, State};
use migration::stay::opening::{self, Distrust, Found, OpeningStep};
use migration::stay::{Beginning, ImageRecord, Lives, OpenMarks, Run, Stay, vouches};
use migration::{StayKey, VolumeId};
use tokio::sync::oneshot;

use self::files::Files;
use self::life::SignsOfLife;
use self::marks::MarksFile;
use self::presence::{PresenceWork, PresenceWriter};
use crate::files::folder_entries::sync_folder_of;

pub(crate) use self::look::look;
pub(crate) use self::presence::PresenceError;

const FOLDER: &str = "chronicles";
/// The largest number of marks in one write.
const GROUP_MAX: usize = 1024;

type Reply = oneshot::Sender<Result<(), NotDurable>>;

/// The folder, and the threads that write to it; a clone is another handle to them.
#[derive(Clone, Debug)]
pub(crate) struct Chronicles {
    files: Files,
    marks: mpsc::Sender<Mark>,
    work: mpsc::Sender<Work>,
    presence: mpsc::Sender<PresenceWork>,
    life: SignsOfLife,
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
    /// Opens the folder, made if it does not exist, and starts the threads, which end with the last handle.
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
        let life = SignsOfLife::begin(data_dir)?;
        Ok(Self { files, marks, work, presence, life })
    }

    /// Returns the recorded chronicle with which a lane begins to use a volume's image, which must be locked. Deletes the files
    /// of the volume's other residencies. Blocks. After an error there may be files that must not be trusted later.
    pub(crate) fn open_stay(&self, key: StayKey, image: &ImageLocation) -> io::Result<Option<Kept>> {
        self.files.delete_other_stays(key)?;
        let kept = match self.files.kept(key) {
            Ok(kept) => kept,
            Err(error) => {
                let volume = key.volume;
                tracing::warn!(%volume, %error, "a kept chronicle cannot be used; copies begin from the start");
                None
            }
        };
        if kept.is_none() {
            // Unneeded marks are deleted too, and unreadable files.
            self.files.forget(key, Epoch(u64::MAX))?;
        }
        let look = look(image);
        self.run();
        let opening =
            opening::open(Found { kept, record: self.files.image_record(key), look, lives: self.lives() });
        if let Some(reason) = opening.distrust {
            let volume = key.volume;
            tracing::warn!(%volume, %reason, "every copy of the volume at another host counts as empty");
        }
        for step in opening.steps {
            match step {
                OpeningStep::Forget => self.files.forget(key, Epoch(u64::MAX))?,
                OpeningStep::Record(record) => self.change_image(key, |_| record),
            }
        }
        Ok(opening.believed)
    }

    /// Begins the residency of a volume whose image a copy has, too: from its first write on the chronicle knows what the copy lacks.
    /// The volume is not served yet. Blocks.
    pub(crate) fn begin_with_copy(
        &self,
        key: StayKey,
        image: &ImageLocation,
        beginning: Beginning,
        of: ReplicaOf,
    ) -> io::Result<()> {
        let mut stay = Stay::begin(beginning);
        let nothing = LayeredBitmap::new(beginning.block_size.blocks_of(beginning.size_bytes));
        let referral = stay.take_down(&stay.premarks(), of, Generation(0), nothing);
        let Some(kept) = referral.and_then(|referral| stay.refer(referral)) else { return Ok(()) };
        self.files.keep(key, &kept)?;
        self.files.change_image(key, |_| look(image).map(ImageRecord::Closed))
    }

    /// Returns the missing set of a volume of this size in bytes in a residency. Blocks. Errors:
    /// [`PresenceError`]: it is unknown. **N.B.** the volume must not be served then if it is this host's: fetched
    /// blocks would overwrite newer guest writes.
    pub(crate) fn missing(
        &self,
        key: StayKey,
        size_bytes: u64,
        place: &Place,
    ) -> Result<UnitMap, PresenceError> {
        presence::read(&self.files, key, size_bytes, place)
    }

    /// Reserves the space that the records of a volume's missing units may need in a residency. Fails if the data folder has
    /// no room for them. Blocks.
    pub(crate) fn reserve_presence(&self, key: StayKey, size_bytes: u64) -> io::Result<()> {
        presence::reserve(&self.files, key, size_bytes)
    }

    /// Records that a volume may also be in this image from now on. Blocks.
    pub(crate) fn note_image(&self, key: StayKey, image: &ImageLocation) {
        let (look, run) = (look(image), self.run());
        self.change_image(key, |record| opening::also_in_use(record, look, run));
    }

    /// Records the attributes of an image that was closed in order. If that fails, deletes the record. Blocks.
    pub(crate) fn close_image(&self, key: StayKey, image: &ImageLocation) {
        let look = look(image);
        let Err(error) = self.files.change_image(key, |record| opening::closed(record, look)) else { return };
        tracing::warn!(volume = %key.volume, %error, "cannot record the state of the image; copies at other hosts will count as \
            empty");
        if let Err(error) = self.files.forget_image(key) {
            tracing::warn!(volume = %key.volume, %error, "a change of the image while the daemon is stopped may go unnoticed");
        }
    }

    /// Checks that an image that a volume has left, and that another host reads, is unchanged. Blocks.
    pub(crate) fn check_left(&self, key: StayKey, image: &ImageLocation) -> Result<(), Distrust> {
        opening::check_left(self.files.image_record(key).as_ref(), look(image).as_ref())
    }

    /// Records that another image is the one that a volume has left, by order; returns whether it was not recorded. Blocks.
    ///
    /// An image that was changed in place stays rejected.
    pub(crate) fn accept_left(&self, key: StayKey, image: &ImageLocation) -> bool {
        let found = look(image);
        let record = self.files.image_record(key);
        let Some(accepted) = opening::accept_left(record.as_ref(), found) else { return false };
        self.change_image(key, |_| accepted);
        true
    }

    /// Returns whether the image that a volume leaves is a true copy of the volume. Blocks.
    pub(crate) fn vouches(&self, key: StayKey) -> bool {
        vouches(self.files.image_record(key).as_ref())
    }

    /// Deletes the files of residencies that the journal does not know. Blocks.
    pub(crate) fn sweep(&self, state: &State) {
        if let Err(error) = self.files.delete_all_but(|key| is_known(state, key)) {
            tracing::warn!(%error, "cannot delete all files of former residencies in the data folder");
        }
    }

    /// Deletes the files of a volume durably. Blocks.
    pub(crate) fn forget_volume(&self, volume: VolumeId) -> io::Result<()> {
        self.files.delete_volume(volume)
    }

    /// Returns the run of this daemon, which has an image in use from now on.
    pub(crate) fn run(&self) -> Run {
        self.life.run()
    }

    /// Returns the signs of life of this daemon and of earlier ones.
    pub(crate) fn lives(&self) -> Lives {
        self.life.lives()
    }

    pub(crate) fn keeper(&self) -> Rc<dyn Keeper> {
        Rc::new(self.clone())
    }

    /// **N.B.** If this fails, the earlier record remains. It claims no more than this one would.
    fn change_image(&self, key: StayKey, change: impl FnOnce(Option<ImageRecord>) -> ImageRecord) {
        if let Err(error) = self.files.change_image(key, |record| Some(change(record))) {
            tracing::warn!(volume = %key.volume, %error, "cannot record the state of the image");
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

/// Returns whether a residency exists, may begin, or may be resumed.
fn is_known(state: &State, key: StayKey) -> bool {
    let here = state.volumes.get(&key.volume).is_some_and(|volume| volume.stay == key.stay);
    // Until its migration ends, a released volume may be handed back.
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
                    // The content of the file is unknown now, so it is read again.
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

/// Runs the thread that writes and deletes chronicles.
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
