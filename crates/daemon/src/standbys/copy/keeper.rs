//! Carries out the actions of one standby's machine on its files.

use std::any::Any;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use chronicle::BlockCount;
use lane::capture::BLOCK_BYTES;
use standby::receiver::{Action, Event, Grown, Image, Journal, PromoteOrder, Refusal, Settings};
use standby::record::{ImageState, StandbyRecord, Standing};
use standby::retention;
use standby::wire::{Content, StreamId, ToStandby};
use standby::{Standby, StandbyId, Watermark};
use tokio::sync::oneshot;

use super::files::{Files, Room};
use super::folder::Folder;
use crate::standbys::book::{Book, CopyConfig, Side, parse};
use crate::standbys::frames::{Frame, Line};

/// The number of blocks that spools may occupy: 4 GiB. Larger epochs are written in place, beside a recovery point.
const SPOOL_BLOCKS: u64 = 1 << 20;
/// The largest number of blocks of a volume: 4 PiB.
const VOLUME_BLOCKS_MAX: u64 = 1 << 40;
/// Time between two looks at a source that says nothing.
const IDLE: Duration = Duration::from_secs(1);

/// An input of a keeper.
pub(crate) enum Input {
    /// A message of the source. `credit` goes back to it when the message is done.
    Frame { line: Line, stream: StreamId, message: ToStandby, payload: Bytes, credit: Box<dyn Any + Send> },
    /// The source's host is not connected.
    Lost,
    /// An administrator orders to promote the standby.
    Promote { order: PromoteOrder, answer: oneshot::Sender<Result<Promoted, String>> },
    /// A migration to this host, of this number, begins with the images: they get these names as well.
    Lend { migration: u64, to: Vec<PathBuf>, answer: oneshot::Sender<Result<(), String>> },
    /// That migration has ended. An error is tried again.
    EndLending { to: Vec<PathBuf>, end: LendingEnd, answer: oneshot::Sender<io::Result<()>> },
    /// Moves the images to these paths and closes them: they belong to volumes.
    Release { to: Vec<PathBuf>, answer: oneshot::Sender<io::Result<()>> },
    /// Asks for the present state.
    Look { answer: oneshot::Sender<CopyView> },
    /// Ends the keeper.
    End,
}

/// A standby that was promoted, and whose volumes this host owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promoted {
    pub(crate) at: Watermark,
}

/// How a migration has ended that began with the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LendingEnd {
    /// The images are those of volumes of this host.
    UsedUp,
    /// It has failed. The images have lost their other names.
    GivenBack,
}

/// What an administrator sees of a standby.
#[derive(Clone, Debug, Default)]
pub(crate) struct CopyView {
    /// When the source's state was as the images are, in milliseconds since 1970; `None`: there is no recovery point.
    pub(crate) as_of_unix_ms: Option<u64>,
    pub(crate) is_promoted: bool,
    pub(crate) is_consumed: bool,
    /// The migration that may still give the images back.
    pub(crate) lent_to: Option<u64>,
    /// Recovery points, the oldest first: name, time in milliseconds since 1970.
    pub(crate) points: Vec<(Watermark, u64)>,
    /// Why it cannot go on.
    pub(crate) fault: Option<String>,
}

/// A keeper's thread, from outside.
#[derive(Clone)]
pub(crate) struct Copy {
    inputs: mpsc::Sender<Input>,
}

impl Copy {
    /// Starts the keeper of a standby in the store at `store`.
    pub(crate) fn start(config: CopyConfig, store: PathBuf, book: Book) -> io::Result<Self> {
        let (inputs, received) = mpsc::channel();
        let name = format!("standby {}", config.name);
        std::thread::Builder::new()
            .name(name)
            .spawn(move || Keeper::new(config, store, book).run(&received))?;
        Ok(Self { inputs })
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
    pub(super) store: PathBuf,
    pub(super) book: Book,
    /// `None`: a fault.
    pub(super) open: Option<Open>,
    pub(super) fault: Option<String>,
    pub(super) line: Option<Line>,
    /// When the source last said that the images are current.
    current_unix_ms: Option<u64>,
    promotion: Option<oneshot::Sender<Result<Promoted, String>>>,
    /// The migration that has begun with the images, and has not ended.
    pub(super) lent_to: Option<u64>,
}

/// The machine with its files.
pub(super) struct Open {
    pub(super) machine: Standby,
    pub(super) files: Files,
    /// The sizes of the epoch that is received.
    sizes: Vec<BlockCount>,
    owned: Option<Watermark>,
    pub(super) is_consumed: bool,
}

impl Keeper {
    pub(super) fn new(config: CopyConfig, store: PathBuf, book: Book) -> Self {
        Self {
            config,
            store,
            book,
            open: None,
            fault: None,
            line: None,
            current_unix_ms: None,
            promotion: None,
            lent_to: None,
        }
    }

    fn run(mut self, inputs: &mpsc::Receiver<Input>) {
        self.reopen();
        // One that cannot be read is reported by those that resume lending.
        self.lent_to = self.book.lent(&self.config.id).ok().flatten().map(|lent| lent.migration);
        loop {
            match inputs.recv_timeout(IDLE) {
                Ok(Input::End) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
                Ok(input) => self.take(input),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if let Some(open) = &mut self.open {
                        open.machine.handle_timeout(now());
                        self.carry_out(&Bytes::new());
                    }
                }
            }
        }
    }

    /// Opens the files and goes on from the durable record.
    pub(super) fn reopen(&mut self) {
        match self.try_to_open() {
            Ok(open) => {
                self.open = Some(open);
                self.fault = None;
                self.carry_out(&Bytes::new());
            }
            Err(error) => self.fail(&error),
        }
    }

    /// Returns the sizes of the volumes when the standby was made.
    pub(super) fn sizes(&self) -> Vec<BlockCount> {
        self.config.volumes.iter().map(|volume| BlockCount(volume.size_bytes / BLOCK_BYTES)).collect()
    }

    fn try_to_open(&self) -> io::Result<Open> {
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
        let files = Files::open(&self.store, &self.config.id, images, is_new, points, sealed)?;
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
            Some(record) => Standby::restart(settings, record, Journal::Own, Image::AsLeft),
            None => Standby::begin(settings, id),
        };
        Ok(Open { machine, files, sizes, owned: None, is_consumed: false })
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::End => {}
            Input::Frame { line, stream, message, payload, credit } => {
                self.take_frame(&line, stream, message, &payload);
                drop(credit);
            }
            Input::Lost => self.handle(Event::OwnerLost, &Bytes::new()),
            Input::Promote { order, answer } => {
                if self.open.is_none() {
                    self.reopen();
                }
                if let Some(at) = self.open.as_ref().and_then(|open| open.owned) {
                    // It was promoted before, and a volume of it was not made. The asker may have gone.
                    let _ = answer.send(match order.point {
                        Some(point) if point != at => Err(format!(
                            "it was promoted before, as of the recovery point {}",
                            super::text(at)
                        )),
                        _ => Ok(Promoted { at }),
                    });
                    return;
                }
                self.promotion = Some(answer);
                self.handle(Event::Promote(order), &Bytes::new());
                if let (Some(answer), Some(fault)) =
                    (self.promotion.take_if(|_| self.open.is_none()), &self.fault)
                {
                    let _ = answer.send(Err(fault.clone()));
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
        if let Err(problem) = check(&message, payload, open) {
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
        self.handle(Event::Received(stream, message), payload);
        if let Some(blocks) = blocks {
            line.send(&Frame::Taken(stream, blocks), Bytes::new());
        }
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
        tracing::warn!(standby = %self.config.name, %error, "a standby cannot go on; it is tried again");
        self.open = None;
        self.fault = Some(error.to_string());
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
            Action::WriteInPlace(volume, blocks, content) => {
                files.write(volume, blocks, bytes_of(content, payload))?;
            }
            // One file has the extents of all volumes; it is made durable when it is named.
            Action::FlushSpool(volume) => machine.handle_event(now(), Event::SpoolFlushed(volume)),
            Action::NameSpools(watermark) => files.seal_spool(watermark)?,
            Action::DropUnsealed => files.drop_unsealed()?,
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
                    let _ = answer.send(Err(words_of(refusal)));
                }
            }
            // No order for a test reaches the machine yet.
            Action::Clone(_) | Action::EndTest => {}
        }
        Ok(())
    }

    fn view(&self) -> CopyView {
        // N.B. What is recorded can be promoted once the fault is mended, so it is shown.
        let recorded = || self.book.record(Side::Copy, &self.config.id).ok().flatten();
        let Some(record) =
            self.open.as_ref().map_or_else(recorded, |open| Some(open.machine.record().clone()))
        else {
            return CopyView { fault: self.fault.clone(), ..CopyView::default() };
        };
        let is_promoted = matches!(record.standing, Standing::Promoted { .. });
        let is_point = record.image == ImageState::AsOfWatermark && record.watermark.is_some();
        let newest = record.points.last().map(|point| point.as_of_ms);
        let arrived = if is_point { Some(record.as_of_ms) } else { newest };
        let image = record.watermark.filter(|_| is_point).map(|at| (at, record.as_of_ms));
        CopyView {
            as_of_unix_ms: arrived
                .map(|arrived| self.current_unix_ms.filter(|_| is_point).unwrap_or(0).max(arrived)),
            is_promoted,
            is_consumed: record.standing == Standing::Consumed,
            lent_to: self.lent_to,
            points: record
                .points
                .iter()
                .map(|point| (point.watermark, point.as_of_ms))
                .chain(image)
                // The images are volumes now, which do not go back to a point.
                .filter(|_| !is_promoted)
                .collect(),
            fault: self.fault.clone(),
        }
    }
}

/// Checks a message of another host before the machine gets it.
fn check(message: &ToStandby, payload: &Bytes, open: &Open) -> Result<(), &'static str> {
    match message {
        ToStandby::Extent { volume, blocks, content } => {
            let Some(size) = open.sizes.get(volume.index()) else {
                return Err("it names a volume that is not there");
            };
            if blocks.start >= blocks.end || blocks.end.0 > size.0 {
                return Err("its blocks are not in the volume");
            }
            let bytes = match content {
                Content::Payload => blocks.len() * BLOCK_BYTES,
                Content::Zeroes => 0,
            };
            if payload.len() as u64 == bytes { Ok(()) } else { Err("its payload has another length") }
        }
        ToStandby::Begin { sizes, .. } => {
            let is_valid = sizes.len() == open.sizes.len()
                && sizes.iter().zip(&open.sizes).all(|(new, old)| new >= old && new.0 <= VOLUME_BLOCKS_MAX);
            if is_valid { Ok(()) } else { Err("its sizes are not those of the volumes") }
        }
        ToStandby::Offer { .. } | ToStandby::Seal { .. } | ToStandby::StillCurrent => {
            if payload.is_empty() {
                Ok(())
            } else {
                Err("it has a payload")
            }
        }
    }
}

fn bytes_of(content: Content, payload: &Bytes) -> Option<&[u8]> {
    match content {
        Content::Payload => Some(payload),
        Content::Zeroes => None,
    }
}

fn grown(room: Room) -> Grown {
    match room {
        Room::Enough => Grown::Yes,
        Room::TooLittle => Grown::No,
    }
}

fn words_of(refusal: Refusal) -> String {
    match refusal {
        Refusal::OwnerReachable => {
            "the host that has the volumes can be reached: move them here with sterna migrate there, or disconnect that host".to_owned()
        }
        Refusal::ForceNeeded => {
            "the host that has the volumes is silent, but it may still serve them: make sure that it is off, then add --force".to_owned()
        }
        Refusal::TooOld(age) => {
            let seconds = age.as_secs();
            format!("the standby is {seconds} s old: what was written since would be lost; to accept that: --older-than-ok {seconds}s")
        }
        Refusal::NoRecoveryPoint => "the standby has no recovery point: it never had everything, or has lost it".to_owned(),
        Refusal::NoSuchPoint => "the standby has no such recovery point; list them with: sterna standby show".to_owned(),
        Refusal::Unsure => "this host's journal was restored, and the source has not confirmed the standby yet; if the source is lost: --force".to_owned(),
        Refusal::Ended => "the standby was promoted already, or a migration uses it".to_owned(),
    }
}

fn unix_ms() -> u64 {
    now().as_millis() as u64
}

/// Returns the time since 1970: the origin of the records, which outlive the daemon.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
