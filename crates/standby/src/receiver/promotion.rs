//! Ends a standby: by a promotion after the owner is lost, or by a migration that uses its image.

use std::time::Duration;

use super::{Action, Image, Next, Order, Rights, Stage, Standby, Work};
use crate::identity::Watermark;
use crate::planted::{Bug, broken};
use crate::record::{ImageState, KeptBy, Standing};
use crate::reprotection::BASE;
use crate::wire::{Answer, ToOwner};

/// An order to promote a standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromoteOrder {
    /// Whether the administrator says that the owner is lost: its host is off, or serves the volumes no more.
    pub owner_is_lost: bool,
    /// The greatest age that the administrator accepts (`--older-than-ok`).
    pub age_max: Duration,
    /// The point to promote; `None`: the newest.
    pub point: Option<Watermark>,
}

/// Why an order is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The owner can be reached: migrate the group instead.
    OwnerReachable,
    /// The order must say that the owner is lost. Nothing else is in the way.
    ForceNeeded,
    /// The standby is this old. The order must name an age of at least that.
    TooOld(Duration),
    /// There is no recovery point.
    NoRecoveryPoint,
    /// There is no such point, or a test is under way.
    NoSuchPoint,
    /// The standby has ended, or is ending.
    Ended,
    /// The journal was restored. An administrator must say first that this is a standby ([`super::Event::Agreed`]).
    Unsure,
}

impl Standby {
    pub(super) fn promote(&mut self, now: Duration, order: PromoteOrder) {
        // The image is the newest point.
        let names_image = order.point.is_some()
            && order.point == self.record.watermark
            && self.image_is_point()
            && self.record.sealed.is_empty();
        let order = PromoteOrder { point: order.point.filter(|_| !names_image), ..order };
        if let Some(refusal) = self.refusal(now, order) {
            return self.outbox.push(Action::Refuse(refusal));
        }
        // N.B. From here on nothing that arrives is taken, although that is not durable yet: the order is not answered either.
        if self.rights == Rights::None(Image::Touched) {
            self.rights = Rights::Full;
            self.touch();
        }
        self.rights = Rights::Full;
        let unsealed = self
            .unsealed
            .take_if(|unsealed| broken(Bug::UnsealedApplied) && matches!(unsealed.stage, Stage::Spooled));
        self.end_receiving(Order::Promote(order.point, now.saturating_sub(order.age_max)));
        if let Some(unsealed) = unsealed {
            self.outbox.push(Action::NameSpools(unsealed.watermark));
            self.record.sealed.push(unsealed.seal(now));
            self.seals.push_back(0);
        }
        if broken(Bug::PromotedHalfApplied) && self.work == Work::Applying {
            self.end_promotion_of(order.point);
        }
    }

    fn refusal(&self, now: Duration, order: PromoteOrder) -> Option<Refusal> {
        let age = now.saturating_sub(self.promoted_at(order.point));
        let is_kept = |at: Watermark| {
            self.record.points.iter().any(|point| point.watermark == at && self.is_of_use(point))
        };
        if self.is_ending() {
            Some(Refusal::Ended)
        } else if self.is_reachable && !broken(Bug::PromotedBesideOwner) {
            Some(Refusal::OwnerReachable)
        } else if !self.has_point() {
            Some(Refusal::NoRecoveryPoint)
        } else if order.point.is_some_and(|at| !is_kept(at)) {
            Some(Refusal::NoSuchPoint)
        } else if age > order.age_max && !broken(Bug::AgeNotNamed) {
            Some(Refusal::TooOld(age))
        } else if !order.owner_is_lost {
            // The last one: after it an administrator switches the owner's host off.
            Some(Refusal::ForceNeeded)
        } else {
            None
        }
    }

    /// Returns the time up to which a promotion has what the owner had.
    fn promoted_at(&self, point: Option<Watermark>) -> Duration {
        let of_points = self.record.points.iter().filter(|kept| self.is_of_use(kept));
        let of_points = of_points.filter(|kept| point.is_none_or(|at| at == kept.watermark));
        let of_points = of_points.map(|kept| kept.as_of_ms).max();
        let is_image =
            point.is_none() && self.image_is_point() && self.rights != Rights::None(Image::Touched);
        if !is_image {
            return Duration::from_millis(of_points.unwrap_or(0));
        }
        let newest = self.record.sealed.last().map_or(self.record.as_of_ms, |sealed| sealed.as_of_ms);
        let newest = Duration::from_millis(newest);
        self.owner.map_or(newest, |owner| owner.current_at.max(newest))
    }

    pub(super) fn is_ending(&self) -> bool {
        self.order.is_some() || matches!(self.work, Work::Ending | Work::Ended)
    }

    /// Gives the image to a migration, once nothing is being applied.
    pub(super) fn consume(&mut self) {
        if self.is_ending() {
            return self.outbox.push(Action::Refuse(Refusal::Ended));
        }
        if self.rights != Rights::Full {
            return self.outbox.push(Action::Refuse(Refusal::Unsure));
        }
        // N.B. What a former owner has written is in no chronicle of the migration's source before an epoch has carried it.
        if self.record.watermark.is_some_and(|at| at.epoch == BASE) && !broken(Bug::FormerConsumed) {
            return self.outbox.push(Action::Refuse(Refusal::NoRecoveryPoint));
        }
        let owner = self.owner;
        self.end_receiving(Order::Consume);
        self.told = owner.map(|owner| owner.stream);
    }

    /// Receives again, because the migration that used the image has failed.
    ///
    /// What that has written is content of the owner. Blocks that were not written since the watermark have what they had. The
    /// others are missing here for the owner, but may be newer than any epoch that it cut before it learns of this: *mixed*.
    pub(super) fn take_back(&mut self, image: Image) {
        if self.record.standing != Standing::Consumed {
            return;
        }
        self.record.standing = Standing::Receiving;
        self.order = None;
        self.work = Work::Idle;
        let useless = match image {
            Image::AsLeft => Vec::new(),
            Image::Touched => {
                self.record.image = ImageState::Torn;
                self.forget_undo_points()
            }
        };
        self.make_durable();
        useless.into_iter().for_each(|at| self.outbox.push_after_record(Action::DropPoint(at)));
    }

    fn end_receiving(&mut self, order: Order) {
        self.drop_unsealed();
        self.give_test_up();
        self.owner = None;
        self.grows_at = None;
        self.order = Some(order);
    }

    /// Carries an order out. The image is at rest.
    pub(super) fn carry_out_order(&mut self, _: Duration) {
        match self.order {
            // A seal that is not durable yet is applied once it is.
            _ if !self.record.sealed.is_empty()
                && self.order.is_some_and(|order| order != Order::Consume) => {}
            Some(Order::Promote(point, _)) => self.end_promotion_of(point),
            // N.B. One record ends the spools. What follows writes to the image (case 17).
            Some(Order::Consume) => {
                if self.keep_before_lending() {
                    return;
                }
                let spools = self.record.sealed.clone();
                if self.is_partly_applied {
                    self.record.image = ImageState::Torn;
                }
                self.is_partly_applied = false;
                if !broken(Bug::ConsumedSpoolKept) {
                    self.record.standing = Standing::Consumed;
                    self.record.sealed.clear();
                    self.seals.clear();
                }
                self.make_durable();
                self.work = Work::Ending;
                self.outbox.push_after_record(Action::Consumed(self.record.watermark));
                if let Some(stream) = self.told.take() {
                    let answer = ToOwner::Answer(Answer::Consumed);
                    self.outbox.push_after_record(Action::Send(stream, answer));
                }
                if !broken(Bug::ConsumedSpoolKept) {
                    for sealed in spools {
                        self.outbox.push_after_record(Action::UnlinkSpool(sealed.watermark));
                    }
                }
            }
            None => {}
        }
    }

    /// Keeps the image as a point before a migration writes to it, if that costs nothing; returns whether it does (case 13).
    fn keep_before_lending(&mut self) -> bool {
        let is_free = self.settings.kept_by == KeptBy::Reflink;
        let can_keep = is_free && self.image_is_point() && !self.is_partly_applied;
        let Some(watermark) = self.record.watermark.filter(|at| can_keep && !self.is_kept(*at)) else {
            return false;
        };
        self.work = Work::KeepingPoint(Next::Consume);
        self.outbox.push(Action::KeepPoint(watermark, self.settings.kept_by));
        true
    }

    fn end_promotion_of(&mut self, point: Option<Watermark>) {
        let newest = self.newest_point();
        match point.or(newest.filter(|_| !self.image_is_point())) {
            Some(at) => {
                // A restart may find the image half-way between both.
                self.record.image = ImageState::Torn;
                self.record.watermark = None;
                self.pass_points_after(at);
                self.make_durable();
                self.work = Work::Restoring(at);
                self.outbox.push_after_record(Action::RestorePoint(at));
            }
            None => match self.record.watermark {
                Some(at) => self.end_promotion(at),
                None => {
                    self.order = None;
                    self.outbox.push(Action::Refuse(Refusal::NoRecoveryPoint));
                }
            },
        }
    }

    /// Ends the points that are newer than one that is put back from what was overwritten since. **N.B.** The image may have blocks
    /// from before them from now on, which what they keep does not replace.
    fn pass_points_after(&mut self, at: Watermark) {
        let points = &mut self.record.points;
        let since = points.iter().position(|point| point.watermark == at).unwrap_or(points.len());
        let put_back = points.get(since).is_some_and(|point| point.kept_by.is_undo());
        for point in points.iter_mut().skip(since + 1).filter(|point| put_back && point.kept_by.is_undo()) {
            if !broken(Bug::PassedPointKept) {
                point.kept_by = KeptBy::Passed;
            }
        }
    }

    pub(super) fn end_restoring(&mut self) {
        if let Work::Restoring(at) = self.work {
            self.work = Work::FlushingRestored(at);
            self.outbox.push(Action::FlushImage);
        }
    }

    /// Makes *promoted* durable. **N.B.** Only then is the group owned here (law 28).
    pub(super) fn end_promotion(&mut self, at: Watermark) {
        self.record.standing = Standing::Promoted { at };
        self.record.image = ImageState::AsOfWatermark;
        self.record.watermark = Some(at);
        self.record.sealed.clear();
        self.seals.clear();
        self.work = Work::Ending;
        if broken(Bug::OwnedBeforeDurable) {
            self.outbox.push(Action::Own(at));
            self.make_durable();
        } else {
            self.make_durable();
            self.outbox.push_after_record(Action::Own(at));
        }
    }
}
