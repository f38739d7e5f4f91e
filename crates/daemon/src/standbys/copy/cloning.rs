//! Clones of a recovery point, for tests: files of their own, made while epochs go on being applied.
//!
//! ```text
//!   the machine has the point stay ─► reflink ──────────────────────────────────────────┐
//!                                 └─► a thread: copies the images ─► asks the keeper ─► puts back what was overwritten ─► complete
//!                                               (undo files collect what epochs overwrite meanwhile)
//! ```
//! The images may be written to while they are copied: what was there when the point was kept is in an undo file before that.

use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bytes::Bytes;
use lane::capture::BLOCK_BYTES;
use standby::Watermark;
use standby::receiver::Event;
use tokio::sync::oneshot;

use super::extents::Extents;
use super::files::{Cloned, clone_name, put_back};
use super::folder::Folder;
use super::input::Input;
use super::keeper::{Keeper, now};
use super::room::has_room;
use super::undo::next_data;

/// A clone that takes longer is given up: its point has to stay meanwhile.
const CLONE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// The most bytes that are copied at a time.
const PIECE_BLOCKS: u64 = (1 << 20) / BLOCK_BYTES;
/// So many pieces are copied between two looks at the room of the store.
const PIECES_BETWEEN_LOOKS: u64 = 64;

/// How far a clone is, in bytes.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    pub(crate) bytes_done: AtomicU64,
    /// 0: nothing has to be copied, or it is not known yet.
    pub(crate) bytes_total: AtomicU64,
}

/// The answer to an order for a clone: the point, or why there is none.
pub(crate) type CloneAnswer = oneshot::Receiver<Result<Watermark, String>>;

/// An order for a clone.
pub(crate) struct CloneOrder {
    /// `None`: of the newest state.
    pub(crate) point: Option<Watermark>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) answer: oneshot::Sender<Result<Watermark, String>>,
    /// The way back to the keeper.
    pub(crate) back: mpsc::Sender<Input>,
}

/// A clone that is being made.
pub(super) struct Cloning {
    order: CloneOrder,
    number: u64,
    /// Its point, once the machine has said so.
    at: Option<Watermark>,
    is_given_up: Arc<AtomicBool>,
}

impl Keeper {
    /// Asks the machine for the point of a clone.
    pub(super) fn begin_clone(&mut self, order: CloneOrder) {
        if self.open.is_none() {
            self.reopen();
        }
        if self.open.is_none() || self.cloning.is_some() {
            let fault = self.fault.clone().unwrap_or_else(|| "another clone is being made".to_owned());
            // The asker may have gone.
            let _ = order.answer.send(Err(fault));
            return;
        }
        self.clones += 1;
        let (point, number) = (order.point, self.clones);
        self.cloning = Some(Cloning { order, number, at: None, is_given_up: Arc::default() });
        self.handle(Event::TestBegins(point, now() + CLONE_MAX), &Bytes::new());
    }

    /// Makes the files of the clone, and has them filled. An error ends the clone, and nothing else.
    pub(super) fn clone_point(&mut self, at: Watermark) {
        let begun = self.try_to_clone(at);
        if let Err(error) = begun {
            self.end_clone(&error.to_string());
            // N.B. What else the machine has given out follows, with its payload.
            if let Some(open) = &mut self.open {
                open.machine.handle_event(now(), Event::TestEnded);
            }
        }
    }

    fn try_to_clone(&mut self, at: Watermark) -> io::Result<()> {
        let (Some(open), Some(cloning)) = (&mut self.open, &mut self.cloning) else { return Ok(()) };
        cloning.at = Some(at);
        let files = open.files.begin_clone(at)?;
        let mut bytes = 0;
        for file in files.iter().filter(|file| !file.is_shared) {
            bytes += file.from.metadata()?.blocks() * 512;
        }
        let (free, total) = (self.space)(&open.files)?;
        if !has_room(free, total, bytes) {
            return Err(too_little_room());
        }
        let Cloning { order, number, is_given_up, .. } = cloning;
        order.progress.bytes_total.store(bytes, Ordering::Relaxed);
        let task = Task {
            files,
            progress: Arc::clone(&order.progress),
            number: *number,
            is_given_up: Arc::clone(is_given_up),
            keeper: order.back.clone(),
        };
        std::thread::Builder::new().name("clone of a standby".to_owned()).spawn(move || task.run())?;
        Ok(())
    }

    /// Gives the thread of a clone what was overwritten since its point.
    pub(super) fn answer_copied(&mut self, number: u64, answer: &mpsc::Sender<io::Result<Vec<Extents>>>) {
        let at =
            self.cloning.as_ref().filter(|cloning| cloning.number == number).and_then(|cloning| cloning.at);
        if let (Some(at), Some(open)) = (at, &self.open) {
            // One that is not answered gives up.
            let _ = answer.send(open.files.undo_since(at));
        }
    }

    /// Takes the result of the thread.
    pub(super) fn take_clone(&mut self, number: u64, result: Result<(), String>) {
        let Some(Cloning { order, at: Some(at), .. }) =
            self.cloning.take_if(|cloning| cloning.number == number)
        else {
            return;
        };
        self.handle(Event::TestEnded, &Bytes::new());
        // The asker may have gone.
        let _ = order.answer.send(result.map(|()| at));
    }

    /// Gives a clone up that is being made.
    pub(super) fn end_clone(&mut self, why: &str) {
        if let Some(Cloning { order, is_given_up, .. }) = self.cloning.take() {
            is_given_up.store(true, Ordering::Relaxed);
            let _ = order.answer.send(Err(why.to_owned()));
        }
    }
}

/// What the thread of a clone does.
struct Task {
    files: Vec<Cloned>,
    progress: Arc<Progress>,
    number: u64,
    is_given_up: Arc<AtomicBool>,
    keeper: mpsc::Sender<Input>,
}

impl Task {
    fn run(self) {
        let result = self.fill().map_err(|error| error.to_string());
        // A keeper that has ended needs no result.
        let _ = self.keeper.send(Input::Cloned { number: self.number, result });
    }

    fn fill(&self) -> io::Result<()> {
        for file in self.files.iter().filter(|file| !file.is_shared) {
            self.copy(file)?;
        }
        let (answer, answered) = mpsc::channel();
        let given_up = || io::Error::other("it was given up");
        let keeper = &self.keeper;
        keeper.send(Input::Copied { number: self.number, answer }).map_err(|_| given_up())?;
        let undo: Vec<Extents> = answered.recv().map_err(|_| given_up())??;
        let mut images = Vec::new();
        for file in &self.files {
            images.push(file.to.try_clone()?);
        }
        for undo in &undo {
            self.look()?;
            put_back(&images, undo)?;
        }
        for (image, file) in images.iter().zip(&self.files) {
            // A later point may have been larger.
            image.set_len(file.bytes)?;
            image.sync_all()?;
        }
        Ok(())
    }

    /// Copies a file whose holes stay holes.
    fn copy(&self, file: &Cloned) -> io::Result<()> {
        let end = file.bytes / BLOCK_BYTES;
        let (mut from, mut pieces, mut bytes) = (0, 0, Vec::new());
        while from < end {
            let (start, until) = next_data(&file.from, from, end)?;
            from = start;
            while from < until {
                if pieces % PIECES_BETWEEN_LOOKS == 0 {
                    self.look()?;
                }
                pieces += 1;
                let blocks = (until - from).min(PIECE_BLOCKS);
                bytes.resize((blocks * BLOCK_BYTES) as usize, 0);
                file.from.read_exact_at(&mut bytes, from * BLOCK_BYTES)?;
                if !block::buffer::is_zero(&bytes) {
                    file.to.write_all_at(&bytes, from * BLOCK_BYTES)?;
                }
                self.progress.bytes_done.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                from += blocks;
            }
        }
        Ok(())
    }

    /// Fails if the clone is not wanted any more, or takes the room that is left for others.
    fn look(&self) -> io::Result<()> {
        if self.is_given_up.load(Ordering::Relaxed) {
            return Err(io::Error::other("it was given up"));
        }
        let Some(file) = self.files.first() else { return Ok(()) };
        let found = rustix::fs::fstatvfs(&file.to)?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        if has_room(bytes(found.f_bavail), bytes(found.f_blocks), 0) {
            Ok(())
        } else {
            Err(too_little_room())
        }
    }
}

fn too_little_room() -> io::Error {
    let text = "the store has no room for a copy that leaves the reserve of standbys and of others alone";
    io::Error::new(io::ErrorKind::StorageFull, text)
}

/// Gives a file of a clone a second name at a path of the store that no file has. May block.
pub(crate) fn name_clone(store: &Path, standby: &str, index: usize, to: &Path) -> io::Result<()> {
    Folder::open(store, standby)?.link_out(&clone_name(index), to)
}

/// Deletes the files of a clone, and their second names at these paths, durably. Another file at such a path stays. May block.
pub(crate) fn delete_clone(store: &Path, standby: &str, paths: &[&Path]) -> io::Result<()> {
    let folder = Folder::open(store, standby)?;
    for (index, path) in paths.iter().enumerate() {
        folder.remove_both(&clone_name(index), path)?;
    }
    folder.sync()
}

/// Returns whether the store has more free than standbys leave to others. One that cannot be asked has. May block.
pub(crate) fn has_room_in(store: &Path, standby: &str) -> bool {
    let space = Folder::open(store, standby).and_then(|folder| folder.space());
    space.map_or(true, |(free, total)| has_room(free, total, 0))
}
