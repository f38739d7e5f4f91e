//! Applies sealed epochs, and writes those in place that are too large for the spool.

use std::time::Duration;

use super::{Action, Grown, Next, Order, Stage, Standby, Work};
use crate::planted::{Bug, broken};
use crate::record::{ImageState, Point, Sealed, Standing};
use crate::wire::{RefusedBecause, ToOwner};

impl Standby {
    /// Begins to apply the oldest sealed epoch; returns whether there is one whose seal is durable.
    pub(super) fn apply_next(&mut self) -> bool {
        let is_sealed = self.seals.front().is_some_and(|number| *number <= self.durable);
        let Some(sealed) = self.record.sealed.first().filter(|_| is_sealed && !self.cannot_grow) else {
            return false;
        };
        let blocks = sealed.blocks;
        let can_keep = self.image_is_point() && !self.is_partly_applied && self.is_wanted();
        match self.record.watermark.filter(|_| can_keep && self.make_room(blocks)) {
            Some(watermark) => {
                self.work = Work::KeepingPoint(Next::Apply);
                self.outbox.push(Action::KeepPoint(watermark, self.settings.kept_by));
            }
            None => self.apply(),
        }
        true
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
        let Some(unsealed) = self.unsealed.as_ref().filter(|unsealed| unsealed.stage == Stage::Announced) else {
            return false;
        };
        if !self.record.sealed.is_empty() {
            return false;
        }
        let all: u64 = unsealed.sizes.iter().map(|size| size.0).sum();
        match self.record.watermark.filter(|_| self.image_is_point() && !broken(Bug::LastPointOverwritten)) {
            None => self.tear(),
            Some(watermark) if self.record.points.iter().any(|point| point.watermark == watermark) => self.tear(),
            Some(watermark) if self.make_room(all) => {
                self.work = Work::KeepingPoint(Next::WriteInPlace);
                self.outbox.push(Action::KeepPoint(watermark, self.settings.kept_by));
            }
            Some(_) => self.refuse(RefusedBecause::NoSpace),
        }
        true
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
        let Work::KeepingPoint(next) = self.work else { return };
        let blocks = match next {
            Next::Apply => self.record.sealed.first().map(|sealed| sealed.blocks),
            Next::WriteInPlace => self.unsealed.as_ref().map(|u| u.sizes.iter().map(|size| size.0).sum()),
        };
        let kept_by = self.settings.kept_by;
        let arrived_ms = self.record.arrived_ms;
        let point = |watermark| Point { watermark, kept_by, blocks: blocks.unwrap_or(0), arrived_ms };
        self.record.points.extend(self.record.watermark.map(point));
        match next {
            Next::WriteInPlace if self.unsealed.is_some() => self.tear(),
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
            Work::RecordingPoint(Next::WriteInPlace, number) if *number <= sequence => match &self.unsealed {
                Some(unsealed) if self.record.image == ImageState::Torn => {
                    self.work = Work::Opening;
                    self.outbox.push(Action::OpenInPlace(unsealed.sizes.clone()));
                }
                _ => self.work = Work::Idle,
            },
            Work::Recording(sealed, number) if *number <= sequence => {
                let sealed = sealed.clone();
                self.end_recording(&sealed);
            }
            _ => {}
        }
    }

    pub(super) fn end_opening(&mut self, grown: Grown) {
        if self.work != Work::Opening {
            return;
        }
        self.work = Work::Idle;
        match (&mut self.unsealed, grown) {
            (None, _) => {}
            (Some(_), Grown::No) => self.refuse(RefusedBecause::CannotGrow),
            (Some(unsealed), Grown::Yes) => {
                unsealed.stage = Stage::InPlace;
                self.work = Work::InPlace;
                let epoch = unsealed.watermark.epoch;
                let ready = self.owner.map(|owner| Action::Send(owner.stream, ToOwner::Ready { epoch }));
                ready.into_iter().for_each(|ready| self.outbox.push(ready));
            }
        }
    }

    pub(super) fn end_apply(&mut self, grown: Grown) {
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
                self.cannot_grow = true;
                if matches!(self.order, Some(Order::Promote(_))) {
                    self.give_sealed_up();
                } else if let Some(owner) = self.owner {
                    let reason = RefusedBecause::CannotGrow;
                    self.outbox.push(Action::Send(owner.stream, ToOwner::Refused { reason }));
                }
            }
        }
    }

    /// Drops sealed epochs that cannot be applied, because a promotion cannot wait for room.
    fn give_sealed_up(&mut self) {
        for sealed in std::mem::take(&mut self.record.sealed) {
            self.outbox.push(Action::UnlinkSpool(sealed.watermark));
        }
        self.seals.clear();
    }

    pub(super) fn end_image_flush(&mut self) {
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
        self.record.arrived_ms = sealed.arrived_ms;
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
            owner.current_at = owner.current_at.max(Duration::from_millis(sealed.arrived_ms));
            let acknowledged = ToOwner::Acknowledged { epoch: sealed.watermark.epoch };
            self.outbox.push(Action::Send(owner.stream, acknowledged));
        }
        if self.record.standing == Standing::Receiving {
            self.prune();
        }
    }
}
