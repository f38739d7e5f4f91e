//! Makes a copy of a volume in use, and cuts it off: a mirror that ends with a detachment instead of a handover.
//!
//! ```text
//!   both plain files, few extents ──► one clone of the whole file ───────────────────────────────────┐
//!   otherwise, or refused ──► mirror, chunks ──► equal ──► gate closed ──► mirror removed ──► opened ──┴─► flushed
//! ```
//! A clone of the whole file is a cut by itself. The file system waits for direct I/O in flight, holds other writes to the file, and
//! copies the references to its blocks. So each write that was acknowledged before is in the clone, and of two writes one after
//! the other never only the second. It is no cut of several volumes.

use std::cell::Cell;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use block::engine::run_blocking;
use block::filter::FlushDebt;
use block::{BlockDevice, ByteRange, ZeroMode};
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::duplication::{Duplication, DuplicationAction, DuplicationEvent, WhyGivenUp};
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
    /// What the lane and the one who has ordered tell each other.
    pub shared: Arc<Duplicated>,
}

/// The progress of a copy, and its cancellation.
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
    Untried,
    /// Refused, perhaps half-way.
    Refused,
}

impl LaneHandle {
    /// Makes a copy of the volume while it is used, and cuts it off: when this returns, the copy is durable, and is the volume at one
    /// instant since the call.
    ///
    /// # Errors
    /// [`Refused`]; the copy is of no use then.
    pub async fn duplicate(&self, order: DuplicateOrder, target: MigrationTarget) -> Result<(), Refused> {
        self.ask(|answer| Command::Duplicate(order, target, answer)).await?
    }
}

impl Lane {
    /// Carries out [`crate::LaneHandle::duplicate`].
    pub(crate) async fn duplicate(
        self: &Rc<Self>,
        order: DuplicateOrder,
        target: MigrationTarget,
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
        let content = match self.clone_whole_file(&store, chunks).await {
            WholeFile::Cloned => return store.flush().await.map_err(Refused::Target),
            WholeFile::Untried => content,
            WholeFile::Refused => TargetContent::Unknown,
        };
        let store = FlushDebt::new(store);
        let in_use = Rc::downgrade(&store);
        let result = self.copy_to(&order, store, content, zeroes, chunks).await;
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
        content: TargetContent,
        zeroes: ZeroMode,
        chunks: Chunks,
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
        self.mirror_and_cut(order, replica).await?;
        store.flush().await.map_err(Refused::Target)
    }

    async fn clone_whole_file(&self, to: &Rc<dyn BlockDevice>, chunks: Chunks) -> WholeFile {
        let files = self.volume().store().plain_file().zip(to.plain_file());
        let Some((from, _)) = files.filter(|_| chunks == Chunks::Cloned) else { return WholeFile::Untried };
        let counted = from.clone();
        match run_blocking(self.engine(), move || counted.extents()).await {
            Ok(Ok(extents)) if extents <= EXTENTS_MAX => {}
            extents => {
                debug!(?extents, "the image is not cloned at once");
                return WholeFile::Untried;
            }
        }
        match to.clone_range(&from, ByteRange::new(0, self.volume().size())).await {
            Ok(()) => WholeFile::Cloned,
            Err(error) => {
                info!(%error, "the file system does not clone the image at once");
                WholeFile::Refused
            }
        }
    }

    async fn mirror_and_cut(
        self: &Rc<Self>,
        order: &DuplicateOrder,
        replica: Replica,
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
        let held_max = settings.limits.switch_over_max.min(settings.limits.mirror_wait_max);
        let cutting = Cutting {
            lane: Rc::clone(self),
            copy,
            machine: Duplication::new(held_max),
            notices,
            events,
            fault: String::new(),
        };
        self.measured_also_for(&order.target_disk, cutting.run(&order.shared)).await
    }
}

/// A copy until its cut.
struct Cutting {
    lane: Rc<Lane>,
    copy: Rc<VolumeCopy>,
    machine: Duplication,
    notices: mpsc::UnboundedSender<Event>,
    events: mpsc::UnboundedReceiver<Event>,
    /// Why the copying has failed.
    fault: String,
}

impl Cutting {
    async fn run(mut self, shared: &Duplicated) -> Result<(), Refused> {
        loop {
            while let Some(action) = self.machine.poll_action() {
                if let Some(result) = self.carry_out(action) {
                    return result;
                }
            }
            let handle = self.lane.handle().clone();
            let looks_at = handle.now() + REPORT_INTERVAL;
            let at = self.machine.poll_timeout().map_or(looks_at, |(at, _)| at.min(looks_at));
            let event = match select(self.events.next(), handle.sleep_until(at)).await {
                Either::Left((event, _)) => event.and_then(|event| self.event_of(event)),
                Either::Right(_) => None,
            };
            let now = handle.now();
            match event {
                Some(event) => self.machine.handle_event(now, event),
                None => self.machine.handle_timeout(now),
            }
            shared.note(self.copy.progress().fraction);
            if shared.is_cancelled.load(Ordering::SeqCst) {
                self.machine.handle_event(now, DuplicationEvent::Cancelled);
            }
        }
    }

    /// Returns what the copying has reported.
    fn event_of(&mut self, event: Event) -> Option<DuplicationEvent> {
        match event {
            Event::Source(SourceEvent::GateClosed { attempt, .. }) => {
                Some(DuplicationEvent::GateClosed(attempt.0))
            }
            Event::Noticed(_, VolumeAction::Synchronised) => Some(DuplicationEvent::Synchronised),
            Event::Noticed(_, VolumeAction::Behind | VolumeAction::Converged) => {
                Some(DuplicationEvent::Behind)
            }
            Event::Noticed(_, VolumeAction::Failed { detail, .. }) => {
                self.fault = detail;
                Some(DuplicationEvent::Failed)
            }
            _ => None,
        }
    }

    /// Carries out an action; returns the result of the copy with the last one.
    fn carry_out(&mut self, action: DuplicationAction) -> Option<Result<(), Refused>> {
        let volume = self.lane.volume();
        match action {
            DuplicationAction::CloseGate(number) => {
                self.copy.event(VolumeEvent::GateCloses);
                let (closed, notices) = (volume.close(), self.notices.clone());
                self.lane.handle().spawn(async move {
                    closed.await;
                    let attempt = Attempt(number);
                    let event = Event::Source(SourceEvent::GateClosed { volume: INDEX, attempt });
                    // The copy may be over.
                    let _ = notices.unbounded_send(event);
                });
            }
            DuplicationAction::OpenGate => {
                self.copy.event(VolumeEvent::GateOpens);
                volume.open();
            }
            DuplicationAction::Detach => {
                self.copy.stop();
                volume.remove_mirror();
            }
            DuplicationAction::Complete => return Some(Ok(())),
            DuplicationAction::GiveUp(why) => return Some(Err(Refused::NotDuplicated(self.words(why)))),
        }
        None
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
