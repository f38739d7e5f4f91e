//! Recovery points: which are kept, which give way, and tests of them.

use std::time::Duration;

use chronicle::BlockCount;

use super::{Action, Order, Refusal, Standby};
use crate::identity::Watermark;
use crate::planted::{Bug, broken};
use crate::record::Point;
use crate::retention::{Keep, surplus};

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
        let gone: Vec<Point> = surplus(&self.record.points, self.settings.keep);
        let gone: Vec<_> =
            gone.into_iter().map(|point| point.watermark).filter(|at| self.may_go(*at)).collect();
        self.drop_points(&gone);
    }

    /// Deletes the oldest points until this many blocks more fit into the quota of volumes of these sizes; returns whether they do
    /// (case 14).
    pub(super) fn make_room(&mut self, blocks: u64, sizes: &[BlockCount]) -> bool {
        let used: u64 = self.record.points.iter().map(|point| point.blocks).sum();
        let quota = self.settings.points_blocks.unwrap_or_else(|| sizes.iter().map(|size| size.0).sum());
        let mut excess = (used + blocks).saturating_sub(quota);
        let mut gone = Vec::new();
        for point in self.record.points.iter().filter(|point| self.may_go(point.watermark)) {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(point.blocks);
            gone.push(point.watermark);
        }
        if excess > 0 {
            return false;
        }
        self.drop_points(&gone);
        true
    }

    /// Returns whether a point may be deleted unasked: not if a test uses it, and not if it is the last recovery point.
    fn may_go(&self, at: Watermark) -> bool {
        let is_tested = self.test.is_some_and(|(tested, _)| tested == at) && !broken(Bug::TestedPointPruned);
        let is_ordered = matches!(self.order, Some(Order::Promote(Some(point), _)) if point == at);
        let is_newest = self.record.points.last().is_some_and(|newest| newest.watermark == at);
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

    pub(super) fn begin_test(&mut self, point: Watermark, until: Duration) {
        if self.is_kept(point) && self.test.is_none() {
            self.test = Some((point, until));
            self.outbox.push(Action::Clone(point));
        } else {
            self.outbox.push(Action::Refuse(Refusal::NoSuchPoint));
        }
    }

    pub(super) fn end_test(&mut self) {
        if self.test.take().is_some() {
            self.outbox.push(Action::EndTest);
            self.prune();
        }
    }
}
