//! Carries out the actions of one standby's machine on its files.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use chronicle::BlockCount;
use lane::capture::BLOCK_BYTES;
use standby::asking::{Question, Word};
use standby::receiver::{Action, Event, Image, Journal, Settings};
use standby::record::{ImageState, StandbyRecord, Standing};
use standby::retention;
use standby::wire::{Content, StreamId, ToStandby};
use standby::{Standby, StandbyId, Watermark};
use tokio::sync::oneshot;

use super::cloning::{CloneAnswer, CloneOrder, Cloning, Progress};
use super::files::Files;
use super::folder::Folder;
use super::input::{Ending, Input, NotPromoted, Promoted};
use super::messages::{bytes_of, check, grown, words_of};
use super::room::room;
use crate::standbys::book::{Book, CopyConfig, Side, parse};
use crate::standbys::frames::{Frame, Line, Terms};
use crate::standbys::lock;

/// The number of blocks that spools may occupy: 4 GiB. Larger epochs are written in place, beside a recovery point.
const SPOOL_BLOCKS: u64 = 1 << 20;
/// Time between two looks at a source that says nothing.
const IDLE: Duration = Duration::from_secs(1);
/// The time before files that could not be used are opened again.
const AGAIN: Duration = Duration::from_secs(5);

/// Returns the folder of the store, or why there is none.
pub(crate) type Locate = Box<dyn Fn() -> Result<PathBuf, String> + Send>;

/// A keeper's thread, from outside.
#[derive(Clone)]
pub(crate) struct Copy {
    inputs: mpsc::Sender<Input>,
    seen: Arc<Mutex<Seen>>,
}

/// What of a keeper is known without asking it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// Why it cannot go on.
    pub(crate) fault: Option<String>,
    /// Whether the source still serves what was promoted here.
    pub(crate) is_contested: bool,
    /// How old the source lets it become; `None`: not known since this daemon began.
    pub(crate) terms: Option<Terms>,
}

impl Copy {
    /// Starts the keeper of a standby.
    pub(crate) fn start(config: CopyConfig, store: Locate, book: Book) -> io::Result<Self> {
        let (inputs, received) = mpsc::channel();
        let name = format!("standby {}", config.name);
        let keeper = Keeper::new(config, store, book);
        let seen = Arc::clone(&keeper.seen);
        std::thread::Builder::new().name(name).spawn(move || keeper.run(&received))?;
        Ok(Self { inputs, seen })
    }

    /// Returns what is known of the keeper without asking it.
    pub(crate) fn seen(&self) -> Seen {
        lock(&self.seen).clone()
    }

    /// Notes what the source orders.
    pub(crate) fn note(&self, terms: Terms) {
        lock(&self.seen).terms = Some(terms);
    }

    /// Ends the keeper. Returns once its files are closed.
    pub(crate) async fn end(&self, why: Ending) {
        let (ended, closed) = oneshot::channel();
        self.give(Input::End(why, ended));
        // A keeper that has ended drops the sender.
        let _ = closed.await;
    }

    /// Has a clone of a recovery point made.
    pub(crate) fn clone_point(&self, point: Option<Watermark>, progress: Arc<Progress>) -> CloneAnswer {
        let (answer, answered) = oneshot::channel();
        let back = self.inputs.clone();
        self.give(Input::Clone(CloneOrder { point, progress, answer, back }));
        answered
    }

    /// Hands an input to the keeper. One that has ended drops it, and its answer.
    pub(crate) fn give(&self, input: Input) {
        let _ = self.inputs.send(input);
    }
}

/// Deletes all files of a standby whose keeper has ended.
pub(crate) fn delete_files(store: &std::path::Path, id: &str) -> io::Result<()> {
    Folder::delete(store, id)
}

pub(super) struct Keeper {
    pub(super) config: CopyConfig,
    store: Locate,
    pub(super) book: Book,
    /// `None`: a fault.
    pub(super) open: Option<Open>,
    pub(super) fault: Option<String>,
    /// When that was found.
    pub(super) failed: Option<Instant>,
    pub(super) line: Option<Line>,
    /// When the source last said that the images are current.
    pub(super) current_unix_ms: Option<u64>,
    promotion: Option<oneshot::Sender<Result<Promoted, NotPromoted>>>,
    /// The migration that has begun with the images, and has not ended.
    pub(super) lent_to: Option<u64>,
    /// What happened to the images, until they have everything again.
    pub(super) note: Option<String>,
    /// The clone that is being made.
    pub(super) cloning: Option<Cloning>,
    /// The number of clones that were begun.
    pub(super) clones: u64,
    seen: Arc<Mutex<Seen>>,
    /// Returns the free bytes of a store, and all.
    pub(super) space: fn(&Files) -> io::Result<(u64, u64)>,
}

/// The machine with its files.
pub(super) struct Open {
    pub(super) machine: Standby,
    pub(super) files: Files,
    /// The sizes of the epoch that is received.
    pub(super) sizes: Vec<BlockCount>,
    owned: Option<Watermark>,
    pub(super) is_consumed: bool,
    /// Whether the extent that the machine gets was found in the image.
    pub(super) is_found: bool,
}

impl Keeper {
    /// Returns whether the standby was promoted. One without files is known by its record.
    fn word(&self, question: Question) -> Word {
        if let Some(open) = &self.open {
            return open.machine.word(question);
        }
        let record: Option<StandbyRecord> = self.book.record(Side::Copy, &self.config.id).ok().flatten();
        match record.map(|record| record.standing) {
            Some(Standing::Promoted { .. }) => Word::Promoted,
            _ => Word::Unsure,
        }
    }

    pub(super) fn new(config: CopyConfig, store: Locate, book: Book) -> Self {
        Self {
            config,
            store,
            book,
            open: None,
            fault: None,
            failed: None,
            line: None,
            current_unix_ms: None,
            promotion: None,
            lent_to: None,
            note: None,
            cloning: None,
            clones: 0,
            seen: Arc::default(),
            space: Files::space,
        }
    }

    fn run(mut self, inputs: &mpsc::Receiver<Input>) {
        self.reopen();
        // `resume_lending` reports a file that cannot be read.
        self.lent_to = self.book.lent(&self.config.id).ok().flatten().map(|lent| lent.migration);
        loop {
            match inputs.recv_timeout(IDLE) {
                Ok(Input::End(why, ended)) => {
                    self.close(why);
                    // The asker may have gone.
                    let _ = ended.send(());
                    return;
                }
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
                Ok(input) => {
                    self.try_again();
                    self.take(input);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    self.try_again();
                    if let Some(open) = &mut self.open {
                        open.machine.handle_timeout(now());
                        self.carry_out(&Bytes::new());
                    }
                }
            }
        }
    }

    /// Closes the files. If the daemon ends, notes how they are left.
    pub(super) fn close(&mut self, why: Ending) {
        self.end_clone("the daemon ends, or the standby is removed");
        let Some(mut open) = self.open.take() else { return };
        if why == Ending::Removed || open.machine.record().standing != Standing::Receiving {
            return;
        }
        let looks = open.files.flush().and_then(|()| open.files.looks());
        if let Err(error) = looks.and_then(|looks| self.book.write_looks(&self.config.id, &looks)) {
            tracing::warn!(standby = %self.config.name, %error, "it is not noted how a standby is left");
        }
    }

    /// Returns the folder of the store.
    pub(super) fn folder(&self) -> io::Result<PathBuf> {
        (self.store)().map_err(|reason| io::Error::new(io::ErrorKind::NotFound, reason))
    }

    /// Opens files again that could not be used some time ago: a disk may be back, also while the source cannot be reached, and a
    /// source that comes back asks.
    fn try_again(&mut self) {
        if self.open.is_none() && self.failed.is_some_and(|failed| failed.elapsed() >= AGAIN) {
            self.reopen();
        }
    }

    /// Opens the files and goes on from the durable record.
    pub(super) fn reopen(&mut self) {
        match self.try_to_open() {
            Ok(open) => {
                self.open = Some(open);
                self.fault = None;
                self.failed = None;
                lock(&self.seen).fault = None;
                self.carry_out(&Bytes::new());
                // N.B. That an image was touched is forgotten once the record says so.
                if self.note.is_some()
                    && self.open.is_some()
                    && let Err(error) = self.book.end_looks(&self.config.id)
                {
                    self.fail(&error);
                }
            }
            Err(error) => self.fail(&error),
        }
    }

    /// Returns the sizes of the volumes when the standby was made.
    pub(super) fn sizes(&self) -> Vec<BlockCount> {
        self.config.volumes.iter().map(|volume| BlockCount(volume.size_bytes / BLOCK_BYTES)).collect()
    }

    fn try_to_open(&mut self) -> io::Result<Open> {
        let id = parse(&self.config.id).unwrap_or(StandbyId(0));
        let record: Option<StandbyRecord> = self.book.record(Side::Copy, &self.config.id)?;
        let is_new = record.as_ref().is_none_or(|record| {
            record.watermark.is_none() && record.sealed.is_empty() && record.points.is_empty()
        });
        let sizes = self.sizes();
        let (points, sealed) = match &record {
            Some(record) => (record.points.as_slice(), record.sealed.as_slice()),
            None => (&[][..], &[][..]),
        };
        // N.B. Images that belong to volumes, or to a migration, are not made anew.
        let is_receiving = record.as_ref().is_none_or(|record| record.standing == Standing::Receiving);
        let images: &[BlockCount] = if is_receiving { &sizes } else { &[] };
        let files = Files::open(&self.folder()?, &self.config.id, images, is_new, points, sealed)?;
        let image = self.compare(&files)?;
        let settings = Settings {
            spool_blocks: SPOOL_BLOCKS,
            points_blocks: None,
            kept_by: files.keeps_points_by(),
            keep: retention::Keep {
                last: self.config.keep.last as usize,
                hourly: self.config.keep.hourly as usize,
                daily: self.config.keep.daily as usize,
            },
        };
        let machine = match record {
            Some(record) => Standby::restart(settings, record, Journal::Own, image),
            None => Standby::begin(settings, id),
        };
        Ok(Open { machine, files, sizes, owned: None, is_consumed: false, is_found: false })
    }

    /// Returns whether the images are as the last daemon left them. One that did not end in order has left no word about that.
    fn compare(&mut self, files: &Files) -> io::Result<Image> {
        let Some(left) = self.book.looks(&self.config.id)? else { return Ok(Image::AsLeft) };
        if left == files.looks()? {
            // N.B. Before anything is written.
            self.book.end_looks(&self.config.id)?;
            return Ok(Image::AsLeft);
        }
        let note = "another program has changed its image while the daemon did not run: it is copied again, and recovery points \
            that depend on that image are gone";
        tracing::warn!(standby = %self.config.name, "{note}");
        self.note = Some(note.to_owned());
        Ok(Image::Touched)
    }

    /// Returns why a recovery point cannot be restored; `None`: it can, or is unknown.
    fn damage_of(&self, point: Watermark) -> Option<String> {
        let error = self.open.as_ref()?.files.undo_since(point).err()?;
        Some(format!(
            "the recovery point {} cannot be restored: {error}; choose another one: sterna standby show",
            super::text(point)
        ))
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::End(..) => {}
            Input::Frame { line, stream, message, payload, credit } => {
                self.take_frame(&line, stream, message, &payload);
                drop(credit);
            }
            Input::Named(named) => self.take_named(*named),
            Input::Seed { files, exported, answer } => {
                // The asker may have gone.
                let _ = answer.send(self.seed(&files, exported));
            }
            Input::Question { question, answer } => {
                // It offers what it serves, and may say so again.
                lock(&self.seen).is_contested = false;
                // The asker may have gone.
                let _ = answer.send(self.word(question));
            }
            Input::Lost => self.handle(Event::OwnerLost, &Bytes::new()),
            Input::Promote { order, answer } => {
                if self.open.is_none() {
                    self.reopen();
                }
                if let Some(at) = self.open.as_ref().and_then(|open| open.owned) {
                    // It was promoted before, and a volume of it was not made. The asker may have gone.
                    let _ = answer.send(match order.point {
                        Some(point) if point != at => Err(NotPromoted::Failed(format!(
                            "it was promoted before, as of the recovery point {}",
                            super::text(at)
                        ))),
                        _ => Ok(Promoted { at }),
                    });
                    return;
                }
                // N.B. Before anything is promoted: once it is, there is no other point.
                if let Some(damage) = order.point.and_then(|point| self.damage_of(point)) {
                    let _ = answer.send(Err(NotPromoted::Failed(damage)));
                    return;
                }
                self.promotion = Some(answer);
                self.handle(Event::Promote(order), &Bytes::new());
                if let (Some(answer), Some(fault)) =
                    (self.promotion.take_if(|_| self.open.is_none()), &self.fault)
                {
                    let _ = answer.send(Err(NotPromoted::Failed(fault.clone())));
                }
            }
            Input::Lend { migration, to, answer } => {
                // The asker may have gone.
                let _ = answer.send(self.lend(migration, &to));
            }
            Input::EndLending { to, end, answer } => {
                let _ = answer.send(self.end_lending(&to, end));
            }
            Input::Release { to, answer } => {
                let _ = answer.send(self.release(&to));
            }
            Input::Compare { volume, first, hashes, answer } => {
                let _ = answer.send(self.same(volume, first, &hashes));
            }
            Input::Clone(order) => self.begin_clone(order),
            Input::Copied { number, answer } => self.answer_copied(number, &answer),
            Input::Cloned { number, result } => self.take_clone(number, result),
            Input::EndClone => {
                self.end_clone("it was ended");
                self.handle(Event::TestEnded, &Bytes::new());
            }
            Input::Look { answer } => {
                let _ = answer.send(self.view());
            }
        }
    }

    /// Gives the images away. The machine goes on, because it answers the source.
    fn release(&mut self, to: &[PathBuf]) -> io::Result<()> {
        let open = self
            .open
            .as_mut()
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the images are not open"))?;
        for (index, to) in to.iter().enumerate() {
            open.files.move_image(index, to)?;
        }
        open.files.close();
        Ok(())
    }

    fn take_frame(&mut self, line: &Line, stream: StreamId, message: ToStandby, payload: &Bytes) {
        self.line = Some(line.clone());
        let promoted = |open: &Open| matches!(open.machine.record().standing, Standing::Promoted { .. });
        let is_promoted = self.open.as_ref().is_some_and(promoted);
        if is_promoted && !std::mem::replace(&mut lock(&self.seen).is_contested, true) {
            tracing::error!(standby = %self.config.name, "the host that had the volumes serves them, too");
        }
        let is_offer = matches!(message, ToStandby::Offer { .. });
        if self.open.is_none() && is_offer {
            // The disk may be mounted, or may have room again.
            self.reopen();
        }
        let Some(open) = &mut self.open else {
            if is_offer {
                line.send(&Frame::Fault(self.words()), Bytes::new());
            }
            return;
        };
        if let Err(problem) = check(&message, payload, &open.sizes) {
            tracing::warn!(standby = %self.config.name, problem, "a host sent an invalid message about a standby");
            // N.B. Nothing more of this stream counts: its epoch lacks this message.
            self.open = None;
            line.send(
                &Frame::Fault(format!("the standby's host refuses a message: {problem}")),
                Bytes::new(),
            );
            return;
        }
        if let ToStandby::Begin { sizes, .. } = &message {
            open.sizes.clone_from(sizes);
        }
        if matches!(message, ToStandby::StillCurrent) {
            self.current_unix_ms = Some(unix_ms());
        }
        let blocks = match &message {
            ToStandby::Extent { blocks, content: Content::Payload, .. } => Some(blocks.len()),
            ToStandby::Extent { content: Content::Zeroes, .. } => Some(1),
            _ => None,
        };
        if is_offer && open.files.has_content() {
            line.send(&Frame::HasContent(stream), Bytes::new());
        }
        if let Err(error) = self.look_for_room(&message) {
            self.fail(&error);
        }
        self.handle(Event::Received(stream, message), payload);
        if let Some(blocks) = blocks {
            line.send(&Frame::Taken(stream, blocks), Bytes::new());
        }
    }

    /// Lets the machine know how much room the store has, if a message may need some.
    pub(super) fn look_for_room(&mut self, message: &ToStandby) -> io::Result<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let bytes = match message {
            ToStandby::Offer { .. } | ToStandby::Seal { .. } => return Ok(()),
            ToStandby::Begin { .. } | ToStandby::StillCurrent => 0,
            ToStandby::Extent { volume, blocks, content } => {
                let sent = if *content == Content::Payload { blocks.len() * BLOCK_BYTES } else { 0 };
                let is_in_place = open.machine.record().image == ImageState::Torn;
                sent + if is_in_place { open.files.undo_bytes(*volume, *blocks)? } else { 0 }
            }
        };
        let (free, total) = (self.space)(&open.files)?;
        let (room, needs) = (room(free, total), bytes.div_ceil(BLOCK_BYTES));
        if needs == 0 {
            self.handle(Event::Room(room), &Bytes::new());
        } else if room < needs as i64 {
            self.handle(Event::Room(room), &Bytes::new());
            self.handle(Event::StoreFull(needs), &Bytes::new());
        }
        Ok(())
    }

    pub(super) fn handle(&mut self, event: Event, payload: &Bytes) {
        if let Some(open) = &mut self.open {
            open.machine.handle_event(now(), event);
            self.carry_out(payload);
        }
    }

    /// Carries out all actions. A fault of a file ends the machine: the next stream begins from what is durable.
    pub(super) fn carry_out(&mut self, payload: &Bytes) {
        loop {
            let Some(open) = &mut self.open else { return };
            let Some(action) = open.machine.poll_action() else { return };
            if let Err(error) = self.act(action, payload) {
                self.fail(&error);
            }
        }
    }

    pub(super) fn fail(&mut self, error: &io::Error) {
        if self.fault.as_ref().is_none_or(|fault| *fault != error.to_string()) {
            tracing::warn!(standby = %self.config.name, %error, "a standby cannot go on; it is tried again");
        }
        self.failed = Some(Instant::now());
        self.open = None;
        self.end_clone(&error.to_string());
        self.fault = Some(error.to_string());
        lock(&self.seen).fault.clone_from(&self.fault);
        if let Some(line) = &self.line {
            line.send(&Frame::Fault(self.words()), Bytes::new());
        }
    }

    pub(super) fn words(&self) -> String {
        format!(
            "the standby's host cannot write it: {}",
            self.fault.as_deref().unwrap_or("its files are closed")
        )
    }

    fn act(&mut self, action: Action, payload: &Bytes) -> io::Result<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let Open { machine, files, .. } = open;
        match action {
            Action::Send(stream, message) => {
                if let Some(line) = &self.line {
                    line.send(&Frame::ToOwner(stream, message), Bytes::new());
                }
            }
            Action::Spool(volume, blocks, content) => {
                files.spool(volume, blocks, bytes_of(content, payload))?;
            }
            // It is what the image has.
            Action::WriteInPlace(..) if open.is_found => {}
            Action::WriteInPlace(volume, blocks, content) => {
                files.write(volume, blocks, bytes_of(content, payload))?;
            }
            // One file has the extents of all volumes; it is made durable when it is named.
            Action::FlushSpool(volume) => machine.handle_event(now(), Event::SpoolFlushed(volume)),
            Action::NameSpools(watermark) => files.seal_spool(watermark)?,
            Action::DropUnsealed => files.drop_unsealed()?,
            Action::Measure(sealed) => {
                let blocks = files.measure(&sealed)?.div_ceil(BLOCK_BYTES);
                let (free, total) = (self.space)(files)?;
                machine.handle_event(now(), Event::Room(room(free, total)));
                machine.handle_event(now(), Event::Measured(blocks));
            }
            Action::KeepPoint(at, kept_by) => {
                files.keep_point(at, kept_by)?;
                machine.handle_event(now(), Event::PointKept);
            }
            Action::DropPoint(at) => files.drop_point(at)?,
            Action::RestorePoint(at) => {
                files.restore_point(at)?;
                machine.handle_event(now(), Event::PointRestored);
            }
            Action::OpenInPlace(sizes) => {
                let grown = grown(files.grow(&sizes)?);
                machine.handle_event(now(), Event::Opened(grown));
            }
            Action::Apply(sealed) => {
                let grown = grown(files.apply(&sealed)?);
                machine.handle_event(now(), Event::Applied(grown));
            }
            Action::FlushImage => {
                files.flush()?;
                machine.handle_event(now(), Event::ImageFlushed);
            }
            Action::UnlinkSpool(watermark) => files.unlink_spool(watermark)?,
            Action::MakeDurable(number, record) => {
                files.prepare_to_drop(&record.points)?;
                self.book.write_record(Side::Copy, &self.config.id, &record)?;
                machine.handle_event(now(), Event::Durable(number));
            }
            Action::Own(at) => {
                open.owned = Some(at);
                if let Some(answer) = self.promotion.take() {
                    let _ = answer.send(Ok(Promoted { at }));
                }
            }
            Action::Consumed(_) => open.is_consumed = true,
            Action::Refuse(refusal) => {
                if let Some(answer) = self.promotion.take() {
                    let _ = answer.send(Err(NotPromoted::Refused(refusal)));
                }
            }
            Action::Clone(at) => self.clone_point(at),
            Action::RefuseTest(refusal) => self.end_clone(&words_of(refusal)),
            Action::EndTest => self.end_clone("the standby was promoted, or used, or its image has changed"),
        }
        Ok(())
    }
}

fn unix_ms() -> u64 {
    now().as_millis() as u64
}

/// Returns the time since 1970: the origin of the records, which outlive the daemon.
pub(super) fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
