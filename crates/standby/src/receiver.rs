//! The side of the standby's host: it receives epochs, applies them, keeps recovery points, and is promoted.
//!
//! ```text
//!   Begin ─► room? ─► Ready ─► spool ─Seal─► flushed ─► sealed ─► point kept ─► applied ─► image flushed ─► watermark ─► unlinked
//!              │                              (all volumes)  (record)  (record)                              (record)
//!              └ too large for the spool: a point is kept (record: torn), written in place, image flushed, watermark (record)
//!
//!   receiving ──promoted: redo complete (record)──► owned          receiving ◄─returned (record)─► consumed (record)──► another migration's
//! ```
//! A restart applies each sealed spool again from its beginning, and drops what has no seal. So an interruption at any moment leaves
//! the image as of a cut, or on the way to one that its spools complete, or a point (decision 0099).
//!
//! The caller carries out actions on the image and on the spools in their order. If one fails, it ends the stream and continues from
//! the last durable record, as after a crash: nothing that a lost flush may have taken counts as done before.

mod applying;
mod points;
mod promotion;
mod receiving;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use chronicle::{BlockCount, BlockRange, Epoch, Generation};

pub use promotion::{PromoteOrder, Refusal};

use crate::identity::{LifeId, StandbyId, VolumeIndex, Watermark};
use crate::outbox::Outbox;
use crate::planted::{Bug, broken};
use crate::record::{ImageState, KeptBy, Point, Sealed, StandbyRecord, Standing};
use crate::retention::Keep;
use crate::wire::{Content, RefusedBecause, StreamId, ToOwner, ToStandby};

/// What the order and the host fix for one standby.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The number of blocks that its spools may occupy.
    pub spool_blocks: u64,
    /// The number of blocks that its points may occupy: its quota, less the host's reserve. `None`: as many as its volumes have,
    /// also after they have grown.
    pub points_blocks: Option<u64>,
    /// How its file system keeps points.
    pub kept_by: KeptBy,
    /// Which points are kept.
    pub keep: Keep,
}

/// Where the records of a starting daemon come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Journal {
    /// They are those of the daemon before.
    Own,
    /// They were restored from a backup. They give no right before both sides agree (case 21).
    Restored,
}

/// Whether an image is as it was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// Only daemons have written to it, and these records know of it.
    AsLeft,
    /// Others may have changed it (case 20).
    Touched,
}

/// What happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// A message of an owner. A payload lies beside it until the actions are polled.
    Received(StreamId, ToStandby),
    /// The owner's host cannot be reached.
    OwnerLost,
    /// The store can give so many blocks more to the standby, beyond the host's reserve; below zero: the reserve lacks so many.
    Room(i64),
    /// The extent that would be received next finds no room: it needs this many blocks.
    StoreFull(u64),
    /// Applying a sealed epoch overwrites so many blocks of content, which a point has to keep ([`Action::Measure`]).
    Measured(u64),
    /// The spool of a volume is durable ([`Action::FlushSpool`]).
    SpoolFlushed(VolumeIndex),
    /// The point is kept ([`Action::KeepPoint`]).
    PointKept,
    /// The images have the sizes of the epoch that is written in place, or cannot have them.
    Opened(Grown),
    /// A sealed spool is applied, as far as the image's cache. `Grown::No`: nothing was applied.
    Applied(Grown),
    /// The images of all volumes are flushed.
    ImageFlushed,
    /// A point was copied into the image.
    PointRestored,
    /// The record of this number is durable.
    Durable(u64),
    /// Others have changed the image. The caller looks before it passes an offer or an order on, and before it keeps a point.
    ImageTouched,
    /// An administrator orders to promote the standby.
    Promote(PromoteOrder),
    /// A migration to this host uses the image.
    Consume,
    /// The migration that used the image has failed, and does not own it. It has written to it, or has not.
    Returned(Image),
    /// An administrator says that this is a standby, after a journal was restored.
    Agreed,
    /// A clone of a point is made for a test; `None`: of the newest state. It is complete at a time at the latest.
    TestBegins(Option<Watermark>, Duration),
    /// The clone is complete, or given up.
    TestEnded,
}

/// Whether images have the sizes of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grown {
    /// They have.
    Yes,
    /// Their store has no room for it.
    No,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message to the owner.
    Send(StreamId, ToOwner),
    /// Append the extent that was just received to the volume's spool without a seal.
    Spool(VolumeIndex, BlockRange, Content),
    /// Write the extent that was just received into the volume's image.
    WriteInPlace(VolumeIndex, BlockRange, Content),
    /// Make a volume's spool without a seal durable, and report [`Event::SpoolFlushed`].
    FlushSpool(VolumeIndex),
    /// From now on the spools without a seal are those of this epoch.
    NameSpools(Watermark),
    /// Delete the spools without a seal. No flush of them is reported any more.
    DropUnsealed,
    /// Count the blocks with content that a sealed epoch overwrites, and report [`Event::Room`] and [`Event::Measured`].
    Measure(Sealed),
    /// Keep the images of all volumes as a point, and report [`Event::PointKept`]; or [`Event::ImageTouched`] before it.
    KeepPoint(Watermark, KeptBy),
    /// Delete a point.
    DropPoint(Watermark),
    /// Copy a point into the images, sizes included, and report [`Event::PointRestored`].
    RestorePoint(Watermark),
    /// Grow the images to these sizes, so that an epoch can be written in place, and report [`Event::Opened`].
    OpenInPlace(Vec<BlockCount>),
    /// Grow the images to the sizes of a sealed epoch, write its spools into them in order, and report [`Event::Applied`].
    Apply(Sealed),
    /// Flush the images of all volumes, and report [`Event::ImageFlushed`].
    FlushImage,
    /// Delete the spools of a sealed epoch.
    UnlinkSpool(Watermark),
    /// Make a record durable, and report [`Event::Durable`].
    MakeDurable(u64, StandbyRecord),
    /// The group is owned here, as of this cut.
    Own(Watermark),
    /// The image belongs to the migration. It holds at least what this cut holds; `None`: nothing is known of it.
    Consumed(Option<Watermark>),
    /// An order is refused.
    Refuse(Refusal),
    /// Make a clone of a point for a test. The point stays until [`Event::TestEnded`].
    Clone(Watermark),
    /// A clone for a test is refused.
    RefuseTest(Refusal),
    /// Give the clone up unless it is complete: its point may change from now on.
    EndTest,
}

/// What a restored journal permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rights {
    Full,
    /// Nothing, before both sides agree. The image is as it was at the backup, or it is not.
    None(Image),
}

/// An owner whose offer was answered.
#[derive(Clone, Copy, Debug)]
struct Owner {
    stream: StreamId,
    life: LifeId,
    /// When it last said that the watermark is current, or when the watermark's seal arrived.
    current_at: Duration,
}

/// What an owner says of an epoch before it sends it.
#[derive(Clone, Debug)]
struct Announcement {
    watermark: Watermark,
    base: Option<Epoch>,
    blocks: u64,
    sizes: Vec<BlockCount>,
}

/// An epoch that has no seal.
#[derive(Clone, Debug)]
struct Unsealed {
    watermark: Watermark,
    sizes: Vec<BlockCount>,
    /// The number of blocks that were received.
    blocks: u64,
    /// The number of blocks that were announced, with those that were received before.
    blocks_max: u64,
    stage: Stage,
}

/// How far an epoch without a seal is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    /// It waits for room in the spool, or will be written in place as soon as a point is kept.
    Announced,
    /// It is received into the spool.
    Spooled,
    /// It is written in place.
    InPlace,
    /// Its seal has arrived, at this time. The spools of these volumes are not durable.
    Sealing(BTreeSet<VolumeIndex>, Duration),
}

/// What is being done to the image. One thing at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Work {
    Idle,
    /// It is being counted what a point before the oldest sealed epoch has to keep.
    Measuring,
    /// A point is being kept: before the oldest sealed epoch is applied, one is written in place, or a migration gets the image; or
    /// for a test.
    KeepingPoint(Next),
    /// The record with that point, or with the torn image, becomes durable.
    RecordingPoint(Next, u64),
    /// The images get these sizes, those of an epoch that is written in place.
    Opening(Vec<BlockCount>),
    /// An epoch is written in place.
    InPlace,
    /// A sealed epoch is being applied.
    Applying,
    /// The images are being flushed as of an epoch.
    Flushing(Sealed),
    /// The watermark of an epoch becomes durable.
    Recording(Sealed, u64),
    /// A point is being copied into the image.
    Restoring(Watermark),
    /// What was copied is being flushed.
    FlushingRestored(Watermark),
    /// What was being done to the image no longer counts, because others have changed it. A point that is being kept is dropped.
    Abandoned(Option<Watermark>),
    /// *Promoted*, or *consumed*, becomes durable.
    Ending,
    /// Nothing is done to the image any more.
    Ended,
}

/// What follows once a point is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Apply,
    WriteInPlace,
    /// The point is for a test.
    Test,
    /// A migration gets the image.
    Consume,
}

/// An order that waits until the image is at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// A point, or the newest; and the time from which on the order accepts what the owner had.
    Promote(Option<Watermark>, Duration),
    Consume,
}

/// The time after which a growth that found no room is tried again.
const GROW_AGAIN: Duration = Duration::from_secs(10);

/// The standby of a group of volumes.
#[derive(Debug)]
pub struct Standby {
    settings: Settings,
    record: StandbyRecord,
    rights: Rights,
    owner: Option<Owner>,
    /// An epoch that was announced while the one before is sealed.
    announced: Option<Announcement>,
    /// Whether the owner's host can be reached.
    is_reachable: bool,
    unsealed: Option<Unsealed>,
    /// The record that has each seal of `record.sealed`.
    seals: VecDeque<u64>,
    work: Work,
    /// Whether the image may hold a part of the oldest sealed epoch: no point of its watermark can be kept.
    is_partly_applied: bool,
    /// When the oldest sealed epoch, which waits for room to grow, is tried again.
    grows_at: Option<Duration>,
    order: Option<Order>,
    /// The stream whose owner is told that the standby is consumed.
    told: Option<StreamId>,
    /// A test that waits for its point: which one, or the newest; and when the test ends.
    waiting_test: Option<(Option<Watermark>, Duration)>,
    /// The point that a test uses, and when the test ends.
    test: Option<(Watermark, Duration)>,
    /// The number of blocks that the store can give, beyond the host's reserve; below zero: the reserve lacks so many.
    room: i64,
    /// The number of blocks that the last epoch needed at least for which there was no room; 0: there was.
    needs: u64,
    /// What the point that is being kept has to keep, in blocks.
    point_blocks: u64,
    /// The number of the last durable record.
    durable: u64,
    outbox: Outbox<Action>,
}

impl Standby {
    /// Begins a standby with an empty image.
    pub fn begin(settings: Settings, standby: StandbyId) -> Self {
        let record = StandbyRecord {
            standby,
            generation: Generation(0),
            standing: Standing::Receiving,
            watermark: None,
            as_of_ms: 0,
            image: ImageState::Torn,
            sealed: Vec::new(),
            points: Vec::new(),
        };
        Self::restart(settings, record, Journal::Own, Image::AsLeft)
    }

    /// Continues from a record. Spools that it does not name, and points that it does not name, are dropped.
    ///
    /// **N.B.** From the record of a backup the caller removes points and sealed epochs that do not exist any more, and it drops
    /// nothing before the standby has its rights: later points may be all that there is.
    pub fn restart(settings: Settings, record: StandbyRecord, journal: Journal, image: Image) -> Self {
        let rights = match journal {
            Journal::Restored if !broken(Bug::RestoredStandbyReceives) => Rights::None(image),
            Journal::Restored | Journal::Own => Rights::Full,
        };
        let work = if record.standing == Standing::Receiving { Work::Idle } else { Work::Ended };
        let mut standby = Self {
            seals: record.sealed.iter().map(|_| 0).collect(),
            is_partly_applied: !record.sealed.is_empty(),
            settings,
            record,
            rights,
            owner: None,
            announced: None,
            is_reachable: false,
            unsealed: None,
            work,
            grows_at: None,
            order: None,
            told: None,
            waiting_test: None,
            test: None,
            room: i64::MAX,
            needs: 0,
            point_blocks: 0,
            durable: 0,
            outbox: Outbox::new(),
        };
        standby.outbox.push(Action::DropUnsealed);
        match standby.record.standing {
            Standing::Promoted { at } => standby.outbox.push(Action::Own(at)),
            Standing::Consumed => standby.outbox.push(Action::Consumed(standby.record.watermark)),
            Standing::Receiving if rights == Rights::Full && image == Image::Touched => standby.touch(),
            Standing::Receiving => {}
        }
        standby.go_on(Duration::ZERO);
        standby
    }

    /// Returns whether this stream is the owner's.
    pub fn is_owners(&self, stream: StreamId) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.stream == stream)
    }

    /// Returns the record as it was given out last.
    pub fn record(&self) -> &StandbyRecord {
        &self.record
    }

    /// Returns the next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.outbox.pop()
    }

    /// Returns when [`Standby::handle_timeout`] is due, and the reason; `None`: it waits for no time.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        let waiting = self.waiting_test.map(|(_, until)| until);
        let test = self.test.map(|(_, until)| until).or(waiting).map(|until| (until, "the end of a test"));
        let growth = self.grows_at.map(|at| (at, "room for a volume that has grown"));
        test.into_iter().chain(growth).min()
    }

    /// Handles a deadline of [`Standby::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Duration) {
        let is_over = |until: Duration| now >= until;
        if self.test.is_some_and(|(_, until)| is_over(until))
            || self.waiting_test.is_some_and(|(_, until)| is_over(until))
        {
            self.end_test();
        }
        self.grows_at.take_if(|at| now >= *at);
        self.go_on(now);
    }

    /// Handles an event.
    pub fn handle_event(&mut self, now: Duration, event: Event) {
        match event {
            Event::Received(stream, message) => {
                self.is_reachable = true;
                self.receive(now, stream, message);
            }
            Event::OwnerLost => self.is_reachable = false,
            Event::Room(blocks) => self.note_room(blocks),
            Event::StoreFull(blocks) => self.end_full(blocks),
            Event::Measured(blocks) => self.end_measuring(blocks),
            Event::SpoolFlushed(volume) => self.end_spool_flush(volume),
            Event::PointKept => self.end_point(now),
            Event::Opened(grown) => self.end_opening(grown),
            Event::Applied(grown) => self.end_apply(now, grown),
            Event::ImageFlushed => self.end_image_flush(),
            Event::PointRestored => self.end_restoring(),
            Event::Durable(sequence) => self.durable(sequence),
            Event::ImageTouched => self.touch(),
            Event::Promote(order) => self.promote(now, order),
            Event::Consume => self.consume(),
            Event::Returned(image) => self.take_back(image),
            Event::Agreed => self.agree_by_order(),
            Event::TestBegins(point, until) => self.begin_test(point, until),
            Event::TestEnded => self.end_test(),
        }
        self.go_on(now);
    }

    /// Begins what the image waits for.
    fn go_on(&mut self, now: Duration) {
        if self.rights != Rights::Full {
            return;
        }
        self.pin_tested();
        if self.work == Work::Idle && !self.keep_for_test() && !self.apply_next() && !self.open_in_place() {
            self.carry_out_order(now);
        }
    }

    fn make_durable(&mut self) -> u64 {
        let number = self.outbox.next_record();
        self.outbox.push(Action::MakeDurable(number, self.record.clone()));
        number
    }

    /// Returns whether the image is a recovery point, or will be once its spools are applied.
    fn image_is_point(&self) -> bool {
        self.record.image == ImageState::AsOfWatermark && self.record.watermark.is_some()
    }

    fn has_point(&self) -> bool {
        self.image_is_point() && self.rights != Rights::None(Image::Touched)
            || self.record.points.iter().any(|point| self.is_of_use(point))
    }

    /// Returns whether a point holds what it held. One that depends on the image does not if others have changed that.
    fn is_of_use(&self, point: &Point) -> bool {
        match point.kept_by {
            KeptBy::Reflink => true,
            KeptBy::Undo => self.rights != Rights::None(Image::Touched),
            KeptBy::Passed => false,
        }
    }

    /// Returns the newest point that holds what it held.
    fn newest_point(&self) -> Option<Watermark> {
        let of_use = self.record.points.iter().rev().find(|point| self.is_of_use(point));
        of_use.map(|point| point.watermark)
    }

    /// Forgets an epoch without a seal. What of it was written in place stays there, below a point.
    fn drop_unsealed(&mut self) {
        self.announced = None;
        if self.unsealed.take().is_some() {
            self.outbox.push(Action::DropUnsealed);
            if self.work == Work::InPlace {
                self.work = Work::Idle;
            }
        }
    }

    /// Notes that others have changed the image: it is no recovery point, and nothing can be applied to it but everything.
    fn touch(&mut self) {
        // What a promotion copies into the image replaces all of it.
        let is_ending = matches!(self.work, Work::Restoring(_) | Work::FlushingRestored(_) | Work::Ending);
        if broken(Bug::TouchedImageTrusted) || self.record.standing != Standing::Receiving || is_ending {
            return;
        }
        self.drop_unsealed();
        let useless = self.forget_undo_points();
        self.work = match std::mem::replace(&mut self.work, Work::Idle) {
            Work::KeepingPoint(_) => Work::Abandoned(self.record.watermark),
            Work::Applying | Work::Flushing(_) => Work::Abandoned(None),
            Work::Measuring | Work::RecordingPoint(..) | Work::Recording(..) => Work::Idle,
            work => work,
        };
        self.record.watermark = None;
        self.record.image = ImageState::Torn;
        self.is_partly_applied = false;
        self.give_sealed_up();
        useless.into_iter().for_each(|at| self.outbox.push_after_record(Action::DropPoint(at)));
        if let Some(owner) = self.owner {
            let reason = RefusedBecause::BaseMissing;
            self.outbox.push(Action::Send(owner.stream, ToOwner::Refused { reason }));
        }
    }

    /// Removes the points from the record that are of no use once others have changed the image. Returns them.
    fn forget_undo_points(&mut self) -> Vec<Watermark> {
        let keeps = |point: &mut Point| point.kept_by.is_undo();
        let useless: Vec<_> = self.record.points.extract_if(.., keeps).map(|point| point.watermark).collect();
        if self.test.is_some_and(|(tested, _)| useless.contains(&tested)) {
            self.give_test_up();
        }
        useless
    }

    /// Drops sealed epochs, once the record without them is durable.
    fn give_sealed_up(&mut self) {
        self.seals.clear();
        self.grows_at = None;
        let given_up = std::mem::take(&mut self.record.sealed);
        self.make_durable();
        for sealed in given_up {
            self.outbox.push_after_record(Action::UnlinkSpool(sealed.watermark));
        }
    }

    /// Returns the newest epoch of a life that is sealed.
    fn sealed_through(&self, life: LifeId) -> Option<Epoch> {
        let watermarks =
            self.record.sealed.iter().map(|sealed| sealed.watermark).chain(self.record.watermark);
        watermarks.filter(|watermark| watermark.life == life).map(|watermark| watermark.epoch).max()
    }
}
