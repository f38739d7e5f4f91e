//! Applies sealed epochs, and writes those in place that are too large for the spool.

use std::time::Duration;

use super::{Action, GROW_AGAIN, Grown, Next, Order, Refusal, Stage, Standby, Work};
use crate::planted::{Bug, broken};
use crate::record::{ImageState, Point, Sealed, Standing};
use crate::wire::{RefusedBecause, ToOwner};

impl Standby {
    /// Begins to apply the oldest sealed epoch; returns whether there is one whose seal is durable.
    pub(super) fn apply_next(&mut self) -> bool {
        let is_sealed = self.seals.front().is_some_and(|number| *number <= self.durable);
        let Some(sealed) = self.record.sealed.first().filter(|_| is_sealed && self.grows_at.is_none()) else {
            return false;
        };
        let is_kept = self.record.watermark.is_some_and(|at| self.is_kept(at));
        let is_uncounted = self.record.watermark.is_some_and(|at| self.is_kept_uncounted(at));
        let is_wanted = is_uncounted || self.is_wanted() && !is_kept;
        if self.image_is_point() && !self.is_partly_applied && is_wanted {
            self.work = Work::Measuring;
            self.outbox.push(Action::Measure(sealed.clone()));
        } else {
            self.apply();
        }
        true
    }

    /// Keeps a point before the oldest sealed epoch is applied, if there is room for what it has to keep.
    pub(super) fn end_measuring(&mut self, blocks: u64) {
        if self.work != Work::Measuring {
            return;
        }
        self.point_blocks = blocks;
        let sizes = self.record.sealed.first().map_or_else(Vec::new, |sealed| sealed.sizes.clone());
        let has_room = self.make_room(blocks, &sizes);
        match self.record.watermark {
            // It was kept for a test.
            Some(watermark) if self.is_kept(watermark) => {
                self.count_point(watermark, blocks);
                self.apply();
            }
            Some(watermark) if has_room => {
                self.work = Work::KeepingPoint(Next::Apply);
                self.outbox.push(Action::KeepPoint(watermark, self.settings.kept_by));
            }
            _ => self.apply(),
        }
    }

    fn apply(&mut self) {
        let Some(sealed) = self.record.sealed.first() else {
            self.work = Work::Idle;
            return;
        };
        self.work = Work::Applying;
        self.is_partly_applied = true;
        self.outbox.push(Action::Apply(sealed.clone()));
    }

    /// Begins to write an epoch in place; returns whether one waits for it. The last recovery point is kept first (case 13).
    pub(super) fn open_in_place(&mut self) -> bool {
        if !self.record.sealed.is_empty() {
            return false;
        }
        let spool_blocks = self.settings.spool_blocks;
        let Some(unsealed) = self.unsealed.as_mut().filter(|unsealed| unsealed.stage == Stage::Announced)
        else {
            return false;
        };
        if unsealed.blocks_max <= spool_blocks {
            // Only epochs before it, which are applied, had left no room for it.
            unsealed.stage = Stage::Spooled;
            self.be_ready();
            return false;
        }
        let sizes = unsealed.sizes.clone();
        let all: u64 = sizes.iter().map(|size| size.0).sum();
        match self.record.watermark.filter(|_| self.image_is_point() && !broken(Bug::LastPointOverwritten)) {
            None => self.tear(),
            Some(watermark) if self.is_kept(watermark) => self.tear(),
            Some(watermark) if self.make_room(all, &sizes) => {
                self.work = Work::KeepingPoint(Next::WriteInPlace);
                self.outbox.push(Action::KeepPoint(watermark, self.settings.kept_by));
            }
            Some(_) => self.refuse(RefusedBecause::NoSpace),
        }
        true
    }

    /// Says that the epoch without a seal may be sent.
    fn be_ready(&mut self) {
        if let (Some(owner), Some(unsealed)) = (self.owner, &self.unsealed) {
            let ready = ToOwner::Ready { epoch: unsealed.watermark.epoch };
            self.outbox.push(Action::Send(owner.stream, ready));
        }
    }

    fn is_announced(&self) -> bool {
        self.unsealed.as_ref().is_some_and(|unsealed| unsealed.stage == Stage::Announced)
    }

    /// Makes durable that the image is a mixture.
    fn tear(&mut self) {
        self.record.image = ImageState::Torn;
        let number = self.make_durable();
        self.work = Work::RecordingPoint(Next::WriteInPlace, number);
    }

    fn refuse(&mut self, reason: RefusedBecause) {
        self.unsealed = None;
        self.work = Work::Idle;
        if let Some(owner) = self.owner {
            self.outbox.push(Action::Send(owner.stream, ToOwner::Refused { reason }));
        }
    }

    pub(super) fn end_point(&mut self, _: Duration) {
        if self.abandon() {
            return;
        }
        let Work::KeepingPoint(next) = self.work else { return };
        let blocks = match next {
            Next::Apply => Some(self.point_blocks),
            // It is counted before an epoch is applied. What a migration overwrites is the migration's, unless that fails.
            Next::Test | Next::Consume => Some(0),
            Next::WriteInPlace => self.unsealed.as_ref().map(|u| u.sizes.iter().map(|size| size.0).sum()),
        };
        let kept_by = self.settings.kept_by;
        let as_of_ms = self.record.as_of_ms;
        let point = |watermark| Point { watermark, kept_by, blocks: blocks.unwrap_or(0), as_of_ms };
        self.record.points.extend(self.record.watermark.map(point));
        match next {
            Next::WriteInPlace if self.is_announced() => self.tear(),
            _ => {
                let number = self.make_durable();
                self.work = Work::RecordingPoint(next, number);
            }
        }
    }

    /// Goes on after a record has become durable.
    pub(super) fn durable(&mut self, sequence: u64) {
        self.durable = self.durable.max(sequence);
        self.outbox.durable(sequence);
        match &self.work {
            Work::RecordingPoint(Next::Apply, number) if *number <= sequence => self.apply(),
            Work::RecordingPoint(Next::Test | Next::Consume, number) if *number <= sequence => {
                self.work = Work::Idle;
            }
            Work::RecordingPoint(Next::WriteInPlace, number) if *number <= sequence => {
                self.work = Work::Idle;
                if self.record.image == ImageState::Torn && self.is_announced() {
                    self.grow_in_place();
                }
            }
            Work::Recording(sealed, number) if *number <= sequence => {
                let sealed = sealed.clone();
                self.end_recording(&sealed);
            }
            _ => {}
        }
    }

    /// Gives the images the sizes of the epoch without a seal, which is written in place.
    pub(super) fn grow_in_place(&mut self) {
        if let Some(unsealed) = &mut self.unsealed {
            unsealed.stage = Stage::Announced;
            self.work = Work::Opening(unsealed.sizes.clone());
            self.outbox.push(Action::OpenInPlace(unsealed.sizes.clone()));
        }
    }

    pub(super) fn end_opening(&mut self, grown: Grown) {
        let Work::Opening(sizes) = std::mem::replace(&mut self.work, Work::Idle) else { return };
        match (&mut self.unsealed, grown) {
            // It was dropped meanwhile, and another one may go to the spool.
            (None, _) => {}
            (Some(unsealed), _) if unsealed.stage != Stage::Announced => {}
            (Some(_), Grown::No) => self.refuse(RefusedBecause::CannotGrow),
            (Some(unsealed), Grown::Yes) if unsealed.sizes != sizes => self.grow_in_place(),
            (Some(unsealed), Grown::Yes) => {
                unsealed.stage = Stage::InPlace;
                self.work = Work::InPlace;
                self.be_ready();
            }
        }
    }

    /// Ends what no longer counts; returns whether something did not.
    fn abandon(&mut self) -> bool {
        let Work::Abandoned(point) = self.work else { return false };
        self.work = Work::Idle;
        point.into_iter().for_each(|at| self.outbox.push(Action::DropPoint(at)));
        true
    }

    pub(super) fn end_apply(&mut self, now: Duration, grown: Grown) {
        if self.abandon() {
            return;
        }
        let Some(sealed) = self.record.sealed.first().filter(|_| self.work == Work::Applying).cloned() else {
            return;
        };
        match grown {
            Grown::Yes if broken(Bug::SpoolUnlinkedEarly) => self.record_watermark(sealed),
            Grown::Yes => {
                self.work = Work::Flushing(sealed);
                self.outbox.push(Action::FlushImage);
            }
            Grown::No => {
                self.work = Work::Idle;
                let arrived = Duration::from_millis(self.record.as_of_ms);
                match self.order {
                    // A promotion cannot wait for room.
                    Some(Order::Promote(None, accepted)) if arrived < accepted => {
                        self.order = None;
                        self.outbox.push(Action::Refuse(Refusal::TooOld(now.saturating_sub(arrived))));
                    }
                    Some(Order::Promote(..)) => return self.give_sealed_up(),
                    Some(Order::Consume) | None => {}
                }
                self.grows_at = Some(now + GROW_AGAIN);
                if let Some(owner) = self.owner {
                    let reason = RefusedBecause::CannotGrow;
                    self.outbox.push(Action::Send(owner.stream, ToOwner::Refused { reason }));
                }
            }
        }
    }

    pub(super) fn end_image_flush(&mut self) {
        if self.abandon() {
            return;
        }
        match &self.work {
            Work::Flushing(sealed) => {
                let sealed = sealed.clone();
                self.record_watermark(sealed);
            }
            Work::FlushingRestored(at) => {
                let at = *at;
                self.end_promotion(at);
            }
            _ => {}
        }
    }

    fn record_watermark(&mut self, sealed: Sealed) {
        self.record.watermark = Some(sealed.watermark);
        self.record.as_of_ms = sealed.as_of_ms;
        self.record.image = ImageState::AsOfWatermark;
        if self.record.sealed.first() == Some(&sealed) {
            self.record.sealed.remove(0);
            self.seals.pop_front();
        }
        let number = self.make_durable();
        self.work = Work::Recording(sealed, number);
    }

    fn end_recording(&mut self, sealed: &Sealed) {
        self.is_partly_applied = false;
        self.work = Work::Idle;
        self.outbox.push(Action::UnlinkSpool(sealed.watermark));
        if let Some(owner) = self.owner.as_mut().filter(|owner| owner.life == sealed.watermark.life) {
            owner.current_at = owner.current_at.max(Duration::from_millis(sealed.as_of_ms));
            let acknowledged = ToOwner::Acknowledged { epoch: sealed.watermark.epoch };
            self.outbox.push(Action::Send(owner.stream, acknowledged));
        }
        if self.record.standing == Standing::Receiving {
            self.prune();
        }
    }
}
