//! Receives offers and epochs.

use std::time::Duration;

use chronicle::{BlockRange, Epoch, Generation};

use super::{Action, Announcement, Image, Owner, Rights, Stage, Standby, Unsealed, Work};
use crate::asking::{Question, Word};
use crate::identity::{LifeId, StandbyId, VolumeIndex, Watermark};
use crate::planted::{Bug, broken};
use crate::record::{ImageState, Sealed, Standing};
use crate::wire::{Answer, Content, RefusedBecause, StreamId, ToOwner, ToStandby};

impl Standby {
    pub(super) fn receive(&mut self, now: Duration, stream: StreamId, message: ToStandby) {
        if let ToStandby::Offer { standby, generation, life, acknowledged } = message {
            return self.answer(stream, standby, generation, life, acknowledged);
        }
        let is_owner = |owner: &&mut Owner| owner.stream == stream || broken(Bug::FenceNotChecked);
        let Some(owner) = self.owner.as_mut().filter(is_owner) else { return };
        let life = owner.life;
        match message {
            ToStandby::Offer { .. } => {}
            ToStandby::StillCurrent => {
                owner.current_at = now;
                self.outbox.push(Action::Send(stream, ToOwner::Heard));
            }
            ToStandby::Begin { epoch, base, blocks, sizes } => {
                let answer_to = owner.stream;
                let watermark = Watermark { standby: self.record.standby, life, epoch };
                if let Some(answer) = self.announce(Announcement { watermark, base, blocks, sizes }) {
                    self.outbox.push(Action::Send(answer_to, answer));
                }
            }
            ToStandby::Extent { volume, blocks, content } => self.take_extent(volume, blocks, content),
            ToStandby::Seal { epoch, age_ms } => {
                self.take_seal(now.saturating_sub(Duration::from_millis(age_ms)), epoch);
            }
        }
    }

    /// Answers the owner's question whether the standby was promoted.
    pub fn word(&self, question: Question) -> Word {
        let is_durable = self.outbox.is_settled(self.durable);
        match self.record.standing {
            _ if question.standby != self.record.standby => Word::Unsure,
            Standing::Promoted { .. } if is_durable => Word::Promoted,
            Standing::Consumed if is_durable => Word::Used,
            // Which of both it becomes is not durable yet.
            _ if self.is_ending() => Word::Unsure,
            Standing::Receiving
                if self.agrees(question.life, question.acknowledged) || broken(Bug::RestoredDenies) =>
            {
                Word::NotPromoted
            }
            _ => Word::Unsure,
        }
    }

    /// Answers an offer, once the fence is durable.
    fn answer(
        &mut self,
        stream: StreamId,
        standby: StandbyId,
        generation: Generation,
        life: LifeId,
        acknowledged: Option<Epoch>,
    ) {
        let is_ours = standby == self.record.standby;
        let is_fenced = generation < self.record.generation && !broken(Bug::FenceNotChecked);
        let is_ended = self.is_ending();
        let answer = match self.record.standing {
            _ if !is_ours => Answer::Unsure,
            Standing::Promoted { .. } if !broken(Bug::PromotedReceives) => Answer::Promoted,
            Standing::Consumed => Answer::Consumed,
            _ if is_fenced => Answer::Fenced,
            // Which of both it becomes is not durable yet.
            Standing::Receiving if is_ended || !self.agrees(life, acknowledged) => Answer::Unsure,
            _ => {
                self.rights = Rights::Full;
                self.drop_unsealed();
                self.owner = Some(Owner { stream, life, current_at: Duration::ZERO });
                if generation > self.record.generation {
                    self.record.generation = generation;
                    self.make_durable();
                }
                let watermark = self.record.watermark;
                if self.work == Work::Ended {
                    self.work = Work::Idle;
                }
                let sealed_through = self.sealed_through(life).unwrap_or_default();
                let is_mixed = watermark.is_some() && self.record.image == ImageState::Torn;
                Answer::Receiving { watermark, sealed_through, has_point: self.has_point(), is_mixed }
            }
        };
        self.outbox.push_after_record(Action::Send(stream, ToOwner::Answer(answer)));
        self.outbox.durable(self.durable);
    }

    /// Returns whether the standby may receive. After a restored journal both sides must name the same watermark (case 21), and
    /// nothing may have been on its way into the image at the time of the backup.
    fn agrees(&self, life: LifeId, acknowledged: Option<Epoch>) -> bool {
        let Rights::None(image) = self.rights else { return true };
        let is_same = self
            .record
            .watermark
            .is_some_and(|watermark| watermark.life == life && Some(watermark.epoch) == acknowledged);
        image == Image::AsLeft && is_same && self.image_is_point() && self.record.sealed.is_empty()
    }

    /// Gives a standby of a restored journal its rights. What its image holds is not known.
    pub(super) fn agree_by_order(&mut self) {
        if self.rights != Rights::Full {
            self.rights = Rights::Full;
            self.touch();
        }
    }

    /// Takes an announcement; returns the answer, if there is one at once.
    fn announce(&mut self, announcement: Announcement) -> Option<ToOwner> {
        if matches!(&self.unsealed, Some(Unsealed { stage: Stage::Sealing(..), .. })) {
            self.announced = Some(announcement);
            return None;
        }
        let Announcement { watermark, base, blocks, sizes } = announcement;
        let Watermark { life, epoch, .. } = watermark;
        if self.grows_at.is_some() {
            self.drop_unsealed();
            return Some(ToOwner::Refused { reason: RefusedBecause::CannotGrow });
        }
        let newest = self.sealed_through(life);
        if base.is_some() && (newest < base || newest >= Some(epoch)) {
            self.drop_unsealed();
            return Some(ToOwner::Refused { reason: RefusedBecause::BaseMissing });
        }
        if self.is_full_for(blocks) {
            self.drop_unsealed();
            return Some(ToOwner::Refused { reason: RefusedBecause::NoSpace });
        }
        let received = self.unsealed.as_ref().map_or(0, |unsealed| unsealed.blocks);
        let sealed: u64 = self.record.sealed.iter().map(|sealed| sealed.blocks).sum();
        let blocks_max = received.saturating_add(blocks);
        let fits = sealed.saturating_add(blocks_max) <= self.settings.spool_blocks;
        let before = self.unsealed.take();
        let has_same_sizes = before.as_ref().is_some_and(|before| before.sizes == sizes);
        let stage = match before.map(|before| before.stage) {
            Some(Stage::Spooled) if fits => Stage::Spooled,
            Some(Stage::Spooled | Stage::Sealing(..)) => {
                self.outbox.push(Action::DropUnsealed);
                return Some(ToOwner::Refused { reason: RefusedBecause::NoSpace });
            }
            Some(stage @ (Stage::InPlace | Stage::Announced)) => stage,
            None if fits => Stage::Spooled,
            None => Stage::Announced,
        };
        let is_in_place = stage == Stage::InPlace;
        let is_ready = stage == Stage::Spooled || is_in_place && has_same_sizes;
        self.unsealed = Some(Unsealed { watermark, sizes, blocks: received, blocks_max, stage });
        if is_in_place && !has_same_sizes {
            self.grow_in_place();
        }
        is_ready.then_some(ToOwner::Ready { epoch })
    }

    fn take_extent(&mut self, volume: VolumeIndex, blocks: BlockRange, content: Content) {
        let Some(unsealed) = &mut self.unsealed else { return };
        // A range of zeroes needs no room.
        let count = if content == Content::Zeroes { 1 } else { blocks.len() };
        let size = unsealed.sizes.get(volume.index()).map_or(0, |size| size.0);
        // More than was announced is the owner's error, or its fraud.
        let is_too_much = unsealed.blocks.saturating_add(count) > unsealed.blocks_max;
        if blocks.is_empty() || blocks.end.0 > size || is_too_much && !broken(Bug::RewritesSent) {
            return self.drop_unsealed();
        }
        match unsealed.stage {
            Stage::Spooled => self.outbox.push(Action::Spool(volume, blocks, content)),
            Stage::InPlace => self.outbox.push(Action::WriteInPlace(volume, blocks, content)),
            // N.B. It is content of an epoch that has no room yet. Without it, that epoch must never be sealed.
            Stage::Announced => return self.refuse_untimely(),
            Stage::Sealing(..) if self.announced.is_some() => return self.refuse_untimely(),
            Stage::Sealing(..) => return,
        }
        unsealed.blocks += count;
    }

    /// Drops an epoch that was sent before it had room, and says so. One that is being sealed stays.
    fn refuse_untimely(&mut self) {
        if self.announced.take().is_none() {
            self.drop_unsealed();
        }
        if let Some(owner) = self.owner {
            let reason = RefusedBecause::NoSpace;
            self.outbox.push(Action::Send(owner.stream, ToOwner::Refused { reason }));
        }
    }

    fn take_seal(&mut self, cut_at: Duration, epoch: Epoch) {
        let Some(unsealed) = self.unsealed.as_mut().filter(|unsealed| unsealed.watermark.epoch == epoch)
        else {
            return;
        };
        self.needs = 0;
        let volumes = (0..unsealed.sizes.len() as u16).map(VolumeIndex);
        match unsealed.stage {
            Stage::Spooled => {
                self.outbox.push(Action::NameSpools(unsealed.watermark));
                unsealed.stage = Stage::Sealing(volumes.clone().collect(), cut_at);
                volumes.for_each(|volume| self.outbox.push(Action::FlushSpool(volume)));
            }
            Stage::InPlace => {
                let sealed = self.unsealed.take().map(|unsealed| unsealed.seal(cut_at));
                self.outbox.push(Action::FlushImage);
                self.work = sealed.map_or(Work::Idle, Work::Flushing);
            }
            Stage::Announced | Stage::Sealing(..) => {}
        }
    }

    /// Seals the group's epoch once the spools of all its volumes are durable (case 10).
    pub(super) fn end_spool_flush(&mut self, volume: VolumeIndex) {
        let Some(Unsealed { stage: Stage::Sealing(waits, arrived), .. }) = &mut self.unsealed else { return };
        let arrived = *arrived;
        waits.remove(&volume);
        if !waits.is_empty() && !broken(Bug::VolumeSealsAlone) {
            return;
        }
        self.record.sealed.extend(self.unsealed.take().map(|unsealed| unsealed.seal(arrived)));
        let number = self.make_durable();
        self.seals.push_back(number);
        let answer = self.announced.take().and_then(|announced| self.announce(announced));
        if let (Some(owner), Some(answer)) = (self.owner, answer) {
            self.outbox.push(Action::Send(owner.stream, answer));
        }
    }
}

impl Unsealed {
    pub(super) fn seal(self, as_of: Duration) -> Sealed {
        let Self { watermark, sizes, blocks, .. } = self;
        let as_of_ms = u64::try_from(as_of.as_millis()).unwrap_or(u64::MAX);
        Sealed { watermark, blocks, sizes, as_of_ms }
    }
}

#[cfg(test)]
mod tests {
    use chronicle::BlockCount;

    use super::*;
    use crate::receiver::{Event, Grown, Settings};
    use crate::record::KeptBy;
    use crate::retention::Keep;

    const STREAM: StreamId = StreamId(1);

    /// A standby whose spools have four blocks, and that has answered an owner.
    fn standby() -> Standby {
        let settings =
            Settings { spool_blocks: 4, points_blocks: None, kept_by: KeptBy::Undo, keep: Keep::NONE };
        let mut standby = Standby::begin(settings, StandbyId(1));
        let (generation, life) = (Generation(1), LifeId(1));
        let offer = ToStandby::Offer { standby: StandbyId(1), generation, life, acknowledged: None };
        after(&mut standby, Event::Received(STREAM, offer));
        after(&mut standby, Event::Durable(1));
        standby
    }

    fn after(standby: &mut Standby, event: Event) -> Vec<Action> {
        standby.handle_event(Duration::ZERO, event);
        std::iter::from_fn(|| standby.poll_action()).collect()
    }

    fn begin(epoch: Epoch, base: Option<Epoch>, blocks: u64) -> Event {
        let sizes = vec![BlockCount(blocks)];
        Event::Received(STREAM, ToStandby::Begin { epoch, base, blocks, sizes })
    }

    fn seal(epoch: Epoch) -> Event {
        Event::Received(STREAM, ToStandby::Seal { epoch, age_ms: 0 })
    }

    #[test]
    fn an_epoch_that_is_sent_before_it_has_room_is_refused_and_never_sealed() {
        let mut standby = standby();
        let announced = after(&mut standby, begin(Epoch(1), None, 8));
        assert!(matches!(announced[..], [Action::MakeDurable(2, _)]), "{announced:?}");
        let blocks = BlockRange::new(0, 2);
        let extent = ToStandby::Extent { volume: VolumeIndex(0), blocks, content: Content::Payload };
        let refused = Action::Send(STREAM, ToOwner::Refused { reason: RefusedBecause::NoSpace });
        assert_eq!(after(&mut standby, Event::Received(STREAM, extent)), [Action::DropUnsealed, refused]);
        assert_eq!(after(&mut standby, Event::Durable(2)), []);
        assert_eq!(after(&mut standby, seal(Epoch(1))), []);
    }

    #[test]
    fn a_volume_that_has_grown_has_room_for_an_epoch_that_is_written_in_place() {
        let mut standby = standby();
        after(&mut standby, begin(Epoch(1), None, 8));
        after(&mut standby, Event::Durable(2));
        after(&mut standby, Event::Opened(Grown::Yes));
        assert_eq!(after(&mut standby, seal(Epoch(1))), [Action::FlushImage]);
        after(&mut standby, Event::ImageFlushed);
        after(&mut standby, Event::Durable(3));
        let at = Watermark { standby: StandbyId(1), life: LifeId(1), epoch: Epoch(1) };
        assert_eq!(standby.record().watermark, Some(at));
        let announced = after(&mut standby, begin(Epoch(2), Some(Epoch(1)), 12));
        assert_eq!(announced, [Action::KeepPoint(at, KeptBy::Undo)]);
    }
}
