//! Makes a copy of a volume in use, and cuts it off: a mirror that ends with a detachment instead of a handover.
//!
//! ```text
//!   both plain files, few extents ──► one clone of the whole file ───────────────────────────────────┐
//!   otherwise, or refused ──► mirror, chunks ──► equal ──► gate closed ──► mirror removed ──► opened ──┴─► flushed
//!   one of several volumes, plain files ──► gate closed ──► one clone of the whole file ──► opened ────┘
//! ```
//! A clone of the whole file is a cut by itself. The file system waits for direct I/O in flight, holds other writes to the file, and
//! copies the references to its blocks. So each write that was acknowledged before is in the clone, and of two writes one after
//! the other never only the second. It is no cut of several volumes: for that, the file is cloned while the gates of all are closed.
//!
//! The lane decides nothing. It reports to the conductor of the order, which has the machine ([`migration::duplication`]), and carries
//! out what that orders. If the conductor is gone, the lane opens its gate, and the copy is of no use.

use std::cell::Cell;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use block::clone::PlainFile;
use block::engine::run_blocking;
use block::filter::FlushDebt;
use block::{BlockDevice, ByteRange, ZeroMode};
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::duplication::{DuplicationAction, DuplicationEvent, WhyGivenUp};
use migration::journal::ImageLocation;
use migration::source::SourceEvent;
use migration::strategy::{Strategy, VolumeAction, VolumeEvent};
use migration::{Attempt, Carried, PacingSettings, VolumeIndex};
use tracing::{debug, info};

use crate::REPORT_INTERVAL;
use crate::copy::VolumeCopy;
use crate::driver::{
    Chunks, CopySettings, Event, GivesWay, OutgoingVolume, Replica, TargetContent, start_copy,
};
use crate::handle::{Command, LaneHandle, MigrationTarget};
use crate::refused::Refused;
use crate::thread::Lane;

/// The most pieces of a file that is cloned at once: guests are held meanwhile, for 8 µs a piece (XFS), which is less than half of
/// a second. A file with more is cloned in chunks.
const EXTENTS_MAX: u32 = 50_000;

/// How long the last requests to a copy may take after its end.
const CLOSED_WITHIN: Duration = Duration::from_secs(10);
const CLOSED_POLL: Duration = Duration::from_millis(5);

/// The volume of a copy that has no driver.
const INDEX: VolumeIndex = VolumeIndex(0);

/// How a volume is duplicated.
#[derive(Clone, Debug)]
pub struct DuplicateOrder {
    /// The volume's image.
    pub image: ImageLocation,
    /// The pacer of the disk that the copy is on.
    pub target_disk: Arc<pacer::Store>,
    /// The pace of the copying.
    pub pacing: PacingSettings,
    /// What guests of the disks may lose; `None`: the copy does not give way.
    pub impact: Option<pacer::Impact>,
    /// The progress, for the one who has ordered.
    pub shared: Arc<Duplicated>,
    /// Whether the volume is copied alone.
    pub company: Company,
}

/// With what a volume is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// Alone: its file may be cloned at any instant.
    Alone,
    /// With other volumes, which are cut off at the same instant.
    Group,
}

/// The way between a lane and the conductor of its order.
#[derive(Debug)]
pub struct CutLine {
    /// The position of the volume in the order.
    pub index: usize,
    /// What the lane reports. One channel for all lanes of the order: the conductor sees their reports in the order in which they
    /// were made.
    pub reports: mpsc::UnboundedSender<DuplicationEvent>,
    /// What the conductor orders.
    pub orders: mpsc::UnboundedReceiver<DuplicationAction>,
}

/// The progress of a copy, and its cancellation, which the conductor of the order looks at.
#[derive(Debug, Default)]
pub struct Duplicated {
    /// The part of the copy that is done, in millionths.
    pub done_ppm: AtomicU64,
    /// Whether it is to end without a result.
    pub is_cancelled: AtomicBool,
}

/// What became of the attempt to clone a whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WholeFile {
    Cloned,
    /// Refused, perhaps half-way.
    Refused,
}

impl LaneHandle {
    /// Makes a copy of the volume while it is used, and cuts it off when the conductor says so: when this returns, the copy is
    /// durable, and is the volume at one instant since the call.
    ///
    /// # Errors
    /// [`Refused`]; the copy is of no use then.
    pub async fn duplicate(
        &self,
        order: DuplicateOrder,
        target: MigrationTarget,
        line: CutLine,
    ) -> Result<(), Refused> {
        self.ask(|answer| Command::Duplicate(Box::new((order, target, line)), answer)).await?
    }
}

impl Lane {
    /// Carries out [`crate::LaneHandle::duplicate`].
    pub(crate) async fn duplicate(
        self: &Rc<Self>,
        order: DuplicateOrder,
        target: MigrationTarget,
        line: CutLine,
    ) -> Result<(), Refused> {
        self.check_idle()?;
        self.check_whole()?;
        let (source_bytes, target_bytes) = (self.volume().size(), target.store.size());
        if source_bytes != target_bytes {
            return Err(Refused::SizeDiffers { target_bytes, source_bytes });
        }
        let _duplicating = self.begins_to_duplicate();
        let MigrationTarget { store, content, zeroes, chunks } = target;
        let store = store.into_device(self.handle(), self.engine()).await.map_err(Refused::Target)?;
        let content = match (self.file_to_clone(&store, chunks).await, order.company) {
            (None, _) => content,
            (Some(file), Company::Group) => {
                let copying = Copying::Whole { from: file, to: Rc::clone(&store) };
                self.cut(copying, line).run(&order.shared).await?;
                return store.flush().await.map_err(Refused::Target);
            }
            (Some(file), Company::Alone) => match self.clone_whole_file(&file, &store).await {
                WholeFile::Cloned => return store.flush().await.map_err(Refused::Target),
                WholeFile::Refused => TargetContent::Unknown,
            },
        };
        let store = FlushDebt::new(store);
        let in_use = Rc::downgrade(&store);
        let result = self.copy_to(&order, store, (content, zeroes, chunks), line).await;
        self.until_closed(&in_use).await;
        result
    }

    /// Waits until no request uses the copy any more: then its image is closed, and not locked.
    async fn until_closed(&self, store: &Weak<FlushDebt>) {
        let give_up_at = self.handle().now() + CLOSED_WITHIN;
        while store.strong_count() > 0 && self.handle().now() < give_up_at {
            self.handle().sleep(CLOSED_POLL).await;
        }
    }

    async fn copy_to(
        self: &Rc<Self>,
        order: &DuplicateOrder,
        store: Rc<FlushDebt>,
        (content, zeroes, chunks): (TargetContent, ZeroMode, Chunks),
        line: CutLine,
    ) -> Result<(), Refused> {
        let replica = Replica {
            bulk: Rc::clone(&store) as Rc<dyn BlockDevice>,
            mirrored: Rc::clone(&store) as Rc<dyn BlockDevice>,
            content,
            known: None,
            carried: Carried::default(),
            zeroes,
            chunks,
            guests_there: None,
            manifest: None,
        };
        self.mirror_and_cut(order, replica, line).await?;
        store.flush().await.map_err(Refused::Target)
    }

    /// Returns the volume's file, if the copy can be one clone of it.
    async fn file_to_clone(&self, to: &Rc<dyn BlockDevice>, chunks: Chunks) -> Option<PlainFile> {
        let files = self.volume().store().plain_file().zip(to.plain_file());
        let (from, _) = files.filter(|_| chunks == Chunks::Cloned)?;
        let counted = from.clone();
        match run_blocking(self.engine(), move || counted.extents()).await {
            Ok(Ok(extents)) if extents <= EXTENTS_MAX => Some(from),
            extents => {
                debug!(?extents, "the image is not cloned at once");
                None
            }
        }
    }

    async fn clone_whole_file(&self, from: &PlainFile, to: &Rc<dyn BlockDevice>) -> WholeFile {
        match to.clone_range(from, ByteRange::new(0, self.volume().size())).await {
            Ok(()) => WholeFile::Cloned,
            Err(error) => {
                info!(%error, "the file system does not clone the image at once");
                WholeFile::Refused
            }
        }
    }

    fn cut(self: &Rc<Self>, copying: Copying, line: CutLine) -> Cutting {
        let (notices, events) = mpsc::unbounded();
        Cutting {
            lane: Rc::clone(self),
            copying,
            line,
            notices,
            events,
            is_closed: false,
            fault: "the copying of another volume of the order has failed".to_owned(),
        }
    }

    async fn mirror_and_cut(
        self: &Rc<Self>,
        order: &DuplicateOrder,
        replica: Replica,
        line: CutLine,
    ) -> Result<(), Refused> {
        let settings = CopySettings {
            pacing: order.pacing.clone(),
            gives_way: GivesWay {
                disks: self.disks().and(Arc::clone(&order.target_disk)),
                impact: order.impact,
                budget: None,
                ends_by: None,
            },
            limits: self.limits(),
            strategy: Strategy::Mirror,
        };
        let leaving = OutgoingVolume::on_this_host(Rc::clone(self.volume()), replica, order.image.clone());
        let (notices, events) = mpsc::unbounded();
        let (handle, buffers) = (self.handle(), self.engine().buffers());
        let copy = start_copy(handle, buffers, &settings, INDEX, &leaving, notices.clone());
        let cutting = Cutting { notices, events, ..self.cut(Copying::Mirror(copy), line) };
        self.measured_also_for(&order.target_disk, cutting.run(&order.shared)).await
    }
}

/// How a copy gets the volume's content.
enum Copying {
    /// It is a mirror, and is cut off by the end of the mirror.
    Mirror(Rc<VolumeCopy>),
    /// The volume's file is cloned at the cut.
    Whole { from: PlainFile, to: Rc<dyn BlockDevice> },
}

/// A copy until its cut.
struct Cutting {
    lane: Rc<Lane>,
    copying: Copying,
    line: CutLine,
    notices: mpsc::UnboundedSender<Event>,
    events: mpsc::UnboundedReceiver<Event>,
    /// Whether the gate was ordered to close, and not to open.
    is_closed: bool,
    /// Why the copying has failed.
    fault: String,
}

impl Cutting {
    async fn run(mut self, shared: &Duplicated) -> Result<(), Refused> {
        if let Copying::Whole { .. } = self.copying {
            self.report(DuplicationEvent::Synchronised(self.line.index));
        }
        loop {
            let handle = self.lane.handle().clone();
            let pause = handle.sleep(REPORT_INTERVAL);
            let told = select(self.line.orders.next(), self.events.next());
            match select(told, pin!(pause)).await {
                Either::Left((Either::Left((order, _)), _)) => {
                    // A conductor that is gone has given up.
                    let order = order.unwrap_or(DuplicationAction::GiveUp(WhyGivenUp::Cancelled));
                    if let Some(result) = self.carry_out(order).await {
                        return result;
                    }
                }
                Either::Left((Either::Right((event, _)), _)) => {
                    if let Some(event) = event.and_then(|event| self.event_of(event)) {
                        self.report(event);
                    }
                }
                Either::Right(_) => {}
            }
            if let Copying::Mirror(copy) = &self.copying {
                shared.note(copy.progress().fraction);
            }
        }
    }

    fn report(&self, event: DuplicationEvent) {
        // A conductor that is gone is noticed by its orders.
        let _ = self.line.reports.unbounded_send(event);
    }

    /// Returns what the copying has reported.
    fn event_of(&mut self, event: Event) -> Option<DuplicationEvent> {
        let index = self.line.index;
        match event {
            Event::Source(SourceEvent::GateClosed { attempt, .. }) => {
                Some(DuplicationEvent::GateClosed(index, attempt.0))
            }
            Event::Noticed(_, VolumeAction::Synchronised) => Some(DuplicationEvent::Synchronised(index)),
            Event::Noticed(_, VolumeAction::Behind | VolumeAction::Converged) => {
                Some(DuplicationEvent::Behind(index))
            }
            Event::Noticed(_, VolumeAction::Failed { detail, .. }) => {
                self.fault = detail;
                Some(DuplicationEvent::Failed)
            }
            _ => None,
        }
    }

    /// Carries out an order; returns the result of the copy with the last one.
    async fn carry_out(&mut self, action: DuplicationAction) -> Option<Result<(), Refused>> {
        match action {
            DuplicationAction::CloseGates(number) => self.close_gate(number),
            DuplicationAction::OpenGates => self.open_gate(),
            DuplicationAction::Cut => {
                let cut = self.cut_off().await;
                self.report(cut);
            }
            DuplicationAction::Detach => self.detach(),
            DuplicationAction::Complete => return Some(Ok(())),
            DuplicationAction::GiveUp(why) => {
                // N.B. Whatever was ordered before: no mirror and no closed gate is left.
                self.detach();
                self.open_gate();
                return Some(Err(Refused::NotDuplicated(self.words(why))));
            }
        }
        None
    }

    fn close_gate(&mut self, number: u32) {
        if let Copying::Mirror(copy) = &self.copying {
            copy.event(VolumeEvent::GateCloses);
        }
        self.is_closed = true;
        let (closed, notices) = (self.lane.volume().close(), self.notices.clone());
        self.lane.handle().spawn(async move {
            closed.await;
            let attempt = Attempt(number);
            let event = Event::Source(SourceEvent::GateClosed { volume: INDEX, attempt });
            // The copy may be over.
            let _ = notices.unbounded_send(event);
        });
    }

    fn open_gate(&mut self) {
        if !std::mem::take(&mut self.is_closed) {
            return;
        }
        if let Copying::Mirror(copy) = &self.copying {
            copy.event(VolumeEvent::GateOpens);
        }
        self.lane.volume().open();
    }

    /// Makes the copy complete while the gate is closed.
    async fn cut_off(&mut self) -> DuplicationEvent {
        let size_bytes = self.lane.volume().size();
        let cloned = match &self.copying {
            Copying::Mirror(_) => Ok(()),
            Copying::Whole { from, to } => to.clone_range(from, ByteRange::new(0, size_bytes)).await,
        };
        self.detach();
        match cloned {
            Ok(()) => DuplicationEvent::Cut(self.line.index),
            Err(error) => {
                self.fault = format!("the file system does not clone the image: {error}");
                DuplicationEvent::Failed
            }
        }
    }

    fn detach(&mut self) {
        if let Copying::Mirror(copy) = &self.copying {
            copy.stop();
            self.lane.volume().remove_mirror();
        }
    }

    fn words(&self, why: WhyGivenUp) -> String {
        match why {
            WhyGivenUp::Failed => self.fault.clone(),
            WhyGivenUp::Cancelled => "it was cancelled".to_owned(),
            WhyGivenUp::NeverStill => {
                "guests wrote so much that the copy was never equal to the volume while they were held; try again when they write \
                 less"
                    .to_owned()
            }
        }
    }
}

impl Duplicated {
    fn note(&self, fraction: f64) {
        // Between 0 and a million.
        self.done_ppm.store((fraction.clamp(0.0, 1.0) * 1e6) as u64, Ordering::Relaxed);
    }
}

/// A lane that duplicates its volume, until this is dropped.
pub(crate) struct Duplicating<'a>(pub(crate) &'a Cell<bool>);

impl Drop for Duplicating<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}
