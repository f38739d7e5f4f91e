//! Agrees with the standby's host on what it has, and on who owns the group.

use std::time::Duration;

use chronicle::Epoch;

use super::sending::Stream;
use super::{Action, Phase, Replication};
use crate::identity::Watermark;
use crate::planted::{Bug, broken};
use crate::wire::{Answer, RefusedBecause, StreamId, ToOwner, ToStandby};

impl Replication {
    /// Offers the group on a new stream. What an older one has carried without a seal is lost.
    pub(super) fn offer(&mut self, id: StreamId) {
        self.stream = Some(Stream::new(id));
        self.send_offer(id);
    }

    pub(super) fn send_offer(&mut self, id: StreamId) {
        let offer = ToStandby::Offer {
            standby: self.record.standby,
            generation: self.record.generation,
            life: self.record.life,
            acknowledged: self.record.acknowledged,
        };
        self.outbox.push(Action::Send(id, offer));
    }

    pub(super) fn receive(&mut self, now: Duration, id: StreamId, message: &ToOwner) {
        let Some(stream) = self.stream.as_mut().filter(|stream| stream.id == id) else { return };
        match *message {
            ToOwner::Answer(answer) => self.agree(now, answer),
            ToOwner::Ready { epoch } => {
                self.ages.refused = None;
                stream.ready(epoch);
            }
            ToOwner::Refused { reason } => {
                if !stream.is_agreed() {
                    return;
                }
                stream.refuse(reason);
                if reason == RefusedBecause::BaseMissing {
                    stream.base = None;
                }
                let base = stream.base;
                self.ages.refused = Some(reason);
                if base.is_none() {
                    self.lack_everything();
                }
                self.forget_sent(base);
            }
            ToOwner::Acknowledged { epoch } => self.confirm(epoch),
            ToOwner::Heard => self.ages.as_of = stream.heard().max(self.ages.as_of),
        }
    }

    fn agree(&mut self, now: Duration, answer: Answer) {
        let stream = self.stream.as_mut();
        match answer {
            Answer::Receiving { .. } => {}
            Answer::Unsure => stream.into_iter().for_each(Stream::be_unsure),
            Answer::Promoted | Answer::Consumed | Answer::Fenced | Answer::GivenUp => {
                stream.into_iter().for_each(Stream::end);
            }
        }
        match answer {
            Answer::Receiving { watermark, sealed_through, has_point, is_mixed } => {
                self.ages.is_used = false;
                let confirmed = watermark.and_then(|watermark| self.known(watermark));
                // An epoch that is sealed will be applied, whatever the image is meanwhile.
                let sealed = (sealed_through > Epoch(0)).then_some(Watermark {
                    standby: self.record.standby,
                    life: self.record.life,
                    epoch: sealed_through,
                });
                let sealed = sealed.and_then(|sealed| self.known(sealed));
                if let Some(epoch) = confirmed {
                    self.confirm(epoch);
                }
                self.ages.has_point = has_point;
                if is_mixed {
                    self.mix_all();
                }
                match confirmed.max(sealed) {
                    Some(base) => self.agree_as_of(Some(base)),
                    None => {
                        self.lack_everything();
                        self.agree_as_of(None);
                    }
                }
                if self.epochs.frozen_len() == 0 && self.epochs.open_is_empty() {
                    self.ages.as_of = Some(now);
                }
            }
            Answer::Promoted if broken(Bug::DivergedQuietly) => {}
            Answer::Promoted | Answer::Fenced if self.phase == Phase::Serving => self.diverge(),
            Answer::Consumed => {
                self.ages.has_point = false;
                self.ages.is_used = true;
            }
            Answer::GivenUp => {
                self.phase = Phase::Serving;
                self.ages.has_point = false;
            }
            // Unknown is never "no": nothing is sent (law 37).
            Answer::Promoted | Answer::Fenced | Answer::Unsure => {}
        }
    }

    /// Notes that another host owns the group as well. No epoch is sent any more, so no write waits for a copy.
    fn diverge(&mut self) {
        self.phase = Phase::Diverged;
        if broken(Bug::ReturnSinceNewest)
            && let Some(newest) = self.epochs.newest_sealed()
        {
            self.epochs.confirm(newest);
        }
        if let Some(oldest) = self.epochs.oldest() {
            self.mix(oldest);
        }
    }

    /// Returns the epoch of a watermark if everything that was written since is known here.
    fn known(&self, watermark: Watermark) -> Option<Epoch> {
        let Watermark { standby, life, epoch } = watermark;
        let is_ours = standby == self.record.standby && life == self.record.life;
        let is_in_range = self.record.acknowledged <= Some(epoch) && epoch <= self.record.numbered_through;
        (is_ours && is_in_range).then_some(epoch)
    }

    /// Merges all epochs into the open one, and sends that even if it has no blocks: the image is as of a cut only once it has an
    /// epoch that is cut from here on.
    fn mix_all(&mut self) {
        if let Some(oldest) = self.epochs.oldest() {
            self.mix(oldest);
        }
        self.epochs.send_open();
    }

    /// Begins anew: the standby has nothing that is known here. Its points stay until it has everything.
    fn lack_everything(&mut self) {
        if let Some(oldest) = self.epochs.oldest() {
            self.mix(oldest);
        }
        self.epochs.lacks_all();
        self.ages.acknowledged = None;
    }

    fn agree_as_of(&mut self, base: Option<Epoch>) {
        self.stream.iter_mut().for_each(|stream| stream.agree(base));
        self.forget_sent(base);
    }

    /// Sends epochs again whose seals the standby does not have. One that cannot be sent again is a mixture.
    fn forget_sent(&mut self, through: Option<Epoch>) {
        self.catch_up = None;
        if let Some(lossy) = self.epochs.begin_stream(through) {
            self.mix(lossy);
        }
    }

    /// Notes that the standby's image is durably as of an epoch.
    fn confirm(&mut self, epoch: Epoch) {
        if self.ages.acknowledged >= Some(epoch) {
            return;
        }
        let (confirmed, cut_at) = self.epochs.confirm(epoch);
        for epoch in confirmed {
            self.writes.release(epoch);
            self.outbox.push(Action::Release(epoch));
        }
        self.ages.acknowledged = Some(epoch);
        self.ages.has_point = true;
        self.ages.as_of = cut_at.or(self.ages.as_of);
        // What was recorded in earlier epochs may be carried again by a later one: only that one's end lets it be forgotten.
        if epoch >= self.carried_by {
            self.flush_before_forgetting(epoch);
        }
    }
}
