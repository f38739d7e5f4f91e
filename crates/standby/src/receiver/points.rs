//! Recovery points: which are kept, which give way, and tests of them.

use std::time::Duration;

use chronicle::BlockCount;

use super::{Action, Next, Order, Refusal, Rights, Stage, Standby, Unsealed, Work};
use crate::identity::Watermark;
use crate::planted::{Bug, broken};
use crate::record::{KeptBy, Point, Standing};
use crate::retention::{Keep, surplus};
use crate::wire::{RefusedBecause, ToOwner};

impl Standby {
    /// Returns whether points are kept at all.
    pub(super) fn is_wanted(&self) -> bool {
        self.settings.keep != Keep::NONE
    }

    pub(super) fn is_kept(&self, at: Watermark) -> bool {
        self.record.points.iter().any(|point| point.watermark == at)
    }

    /// Deletes points that the order does not keep.
    pub(super) fn prune(&mut self) {
        let is_point = |point: &&Point| point.kept_by != KeptBy::Passed;
        let (points, passed): (Vec<&Point>, Vec<&Point>) = self.record.points.iter().partition(is_point);
        let points: Vec<Point> = points.into_iter().copied().collect();
        let gone = surplus(&points, self.settings.keep).into_iter().chain(passed.into_iter().copied());
        let gone: Vec<_> = gone.map(|point| point.watermark).filter(|at| self.may_go(*at)).collect();
        self.drop_points(&gone);
    }

    /// Deletes the oldest points until this many blocks more fit into the quota of volumes of these sizes, and into the store;
    /// returns whether they do (case 14). If they cannot, nothing is deleted.
    pub(super) fn make_room(&mut self, blocks: u64, sizes: &[BlockCount]) -> bool {
        let used: u64 = self.record.points.iter().map(|point| point.blocks).sum();
        let quota = self.settings.points_blocks.unwrap_or_else(|| sizes.iter().map(|size| size.0).sum());
        let over_quota = used.saturating_add(blocks).saturating_sub(quota);
        let (gone, freed) = self.oldest_points(over_quota.max(self.lacking(blocks)));
        let excess = over_quota.saturating_sub(freed).max(self.lacking(blocks).saturating_sub(freed));
        if excess > 0 {
            return false;
        }
        self.free(&gone, freed);
        true
    }

    /// Notes how much room the store has. The oldest points give way to what others are to have.
    pub(super) fn note_room(&mut self, blocks: i64) {
        self.room = blocks;
        if self.record.standing == Standing::Receiving && self.rights == Rights::Full && !self.is_ending() {
            let (gone, freed) = self.oldest_points(self.lacking(0));
            self.free(&gone, freed);
        }
    }

    /// Ends an epoch for whose next extent there is no room. The owner sends it again, merged with later ones.
    pub(super) fn end_full(&mut self, blocks: u64) {
        let receives = |unsealed: &&Unsealed| matches!(unsealed.stage, Stage::Spooled | Stage::InPlace);
        let Some(unsealed) = self.unsealed.as_ref().filter(receives) else { return };
        self.needs = unsealed.blocks.saturating_add(blocks);
        // What of it was spooled is deleted.
        let spooled = if unsealed.stage == Stage::Spooled { unsealed.blocks } else { 0 };
        self.refuse_for_room(self.lacking(blocks).saturating_sub(spooled));
    }

    /// Refuses the epoch that is announced if the last one that had no room would have none now; returns whether it does.
    pub(super) fn is_full_for(&mut self, blocks: u64) -> bool {
        let lacking = self.lacking(blocks.min(self.needs));
        let is_full = lacking > 0 && self.needs > 0;
        if is_full {
            let (gone, freed) = self.oldest_points(lacking);
            self.free(&gone, freed);
        }
        is_full
    }

    fn refuse_for_room(&mut self, lacking: u64) {
        let (gone, freed) = self.oldest_points(lacking);
        self.free(&gone, freed);
        self.drop_unsealed();
        if let Some(owner) = self.owner {
            let reason = RefusedBecause::NoSpace;
            self.outbox.push(Action::Send(owner.stream, ToOwner::Refused { reason }));
        }
    }

    /// Returns how many blocks must be freed before the standby may have so many more.
    fn lacking(&self, blocks: u64) -> u64 {
        u64::try_from(i128::from(blocks) - i128::from(self.room)).unwrap_or(0)
    }

    /// Returns the oldest points that have this many blocks together, or all that may go, and what they have.
    fn oldest_points(&self, blocks: u64) -> (Vec<Watermark>, u64) {
        let (mut gone, mut freed) = (Vec::new(), 0_u64);
        for point in self.record.points.iter().filter(|point| self.may_go(point.watermark)) {
            if freed >= blocks {
                break;
            }
            freed = freed.saturating_add(point.blocks);
            gone.push(point.watermark);
        }
        (gone, freed)
    }

    /// Deletes points of this many blocks.
    fn free(&mut self, gone: &[Watermark], blocks: u64) {
        self.room = self.room.saturating_add_unsigned(blocks);
        self.drop_points(gone);
    }

    /// Returns whether a point may be deleted unasked: not if a test uses it, and not if it is the last recovery point.
    fn may_go(&self, at: Watermark) -> bool {
        let is_tested = self.test.is_some_and(|(tested, _)| tested == at) && !broken(Bug::TestedPointPruned);
        let is_ordered = matches!(self.order, Some(Order::Promote(Some(point), _)) if point == at);
        let is_newest = self.newest_point() == Some(at);
        let is_last = is_newest && !self.image_is_point() && !broken(Bug::LastPointPruned);
        !is_tested && !is_ordered && !is_last
    }

    /// Deletes points, once the record without them is durable.
    fn drop_points(&mut self, gone: &[Watermark]) {
        if gone.is_empty() {
            return;
        }
        self.record.points.retain(|point| !gone.contains(&point.watermark));
        self.make_durable();
        gone.iter().for_each(|at| self.outbox.push_after_record(Action::DropPoint(*at)));
    }

    /// Begins a test of a point, or of the newest state, which becomes a point first.
    pub(super) fn begin_test(&mut self, point: Option<Watermark>, until: Duration) {
        let refusal = if self.is_ending() {
            Some(Refusal::Ended)
        } else if self.rights != Rights::Full {
            Some(Refusal::Unsure)
        } else if !self.has_point() {
            Some(Refusal::NoRecoveryPoint)
        } else if self.test.is_some() || self.waiting_test.is_some() {
            Some(Refusal::NoSuchPoint)
        } else {
            None
        };
        match refusal {
            Some(refusal) => self.outbox.push(Action::RefuseTest(refusal)),
            None => self.waiting_test = Some((point, until)),
        }
    }

    /// Has a clone made of the point that a test waits for, whatever is being done to the image: the point stays as it is.
    pub(super) fn pin_tested(&mut self) {
        let Some((point, until)) = self.waiting_test else { return };
        let image = self.record.watermark.filter(|_| self.image_is_point());
        let is_point =
            |at| self.record.points.iter().any(|point| point.watermark == at && self.is_of_use(point));
        match point.or(image).or(self.newest_point()) {
            Some(at) if is_point(at) => {
                self.waiting_test = None;
                self.test = Some((at, until));
                self.outbox.push(Action::Clone(at));
            }
            // The image is that state, and becomes a point once it is at rest.
            Some(at) if image == Some(at) => {}
            _ => {
                self.waiting_test = None;
                self.outbox.push(Action::RefuseTest(Refusal::NoSuchPoint));
            }
        }
    }

    /// Keeps the image, which is at rest, as a point for the test that waits for it. Returns whether one does.
    pub(super) fn keep_for_test(&mut self) -> bool {
        let image = self.record.watermark.filter(|_| self.waiting_test.is_some() && !self.is_partly_applied);
        let Some(at) = image else { return false };
        self.work = Work::KeepingPoint(Next::Test);
        self.outbox.push(Action::KeepPoint(at, self.settings.kept_by));
        true
    }

    /// Returns whether the image was kept as a point for a test, and nothing was counted yet of what that point has to keep.
    pub(super) fn is_kept_uncounted(&self, at: Watermark) -> bool {
        self.record.points.last().is_some_and(|point| point.watermark == at && point.blocks == 0)
    }

    /// Notes what the point of this cut has to keep, in blocks.
    pub(super) fn count_point(&mut self, at: Watermark, blocks: u64) {
        if let Some(point) = self.record.points.iter_mut().find(|point| point.watermark == at) {
            point.blocks = blocks;
        }
    }

    pub(super) fn end_test(&mut self) {
        if self.test.is_some() || self.waiting_test.is_some() {
            self.give_test_up();
            if self.record.standing == Standing::Receiving && !self.is_ending() {
                self.prune();
            }
        }
    }

    /// Ends a test whose point may change from now on.
    pub(super) fn give_test_up(&mut self) {
        if self.test.take().is_some() | self.waiting_test.take().is_some() {
            self.outbox.push(Action::EndTest);
        }
    }
}
