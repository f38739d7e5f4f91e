//! Sends the oldest epoch without a seal, as fast as the pacer and the link allow.

use chronicle::Epoch;

use super::epochs::Epochs;
use super::{Action, Phase, Replication};
use crate::content::Place;
use crate::identity::VolumeIndex;
use crate::planted::{Bug, broken};
use crate::wire::{StreamId, ToStandby};

/// The messages between this process and one of the standby's host.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) id: StreamId,
    /// How far both sides are.
    stage: Stage,
    /// The number of blocks that may be sent.
    pub(super) may_send: u64,
    /// The newest epoch whose seal the standby has, or gets before anything later.
    pub(super) base: Option<Epoch>,
}

/// How far a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The offer has no answer.
    Offered,
    /// The standby's host cannot tell yet. The next interval asks again.
    Unsure,
    /// The answer ends the replication.
    Over,
    /// Both sides agree.
    Agreed,
    /// The epoch was announced.
    Begun(Epoch),
    /// The standby has room for it.
    Ready(Epoch),
    /// The standby has refused an epoch, or a read has failed. The next interval tries again.
    Held,
}

impl Stream {
    pub(super) fn new(id: StreamId) -> Self {
        Self { id, stage: Stage::Offered, may_send: 0, base: None }
    }

    pub(super) fn has_answered(&self) -> bool {
        !matches!(self.stage, Stage::Offered | Stage::Unsure)
    }

    pub(super) fn is_agreed(&self) -> bool {
        !matches!(self.stage, Stage::Offered | Stage::Unsure | Stage::Over)
    }

    pub(super) fn is_unsure(&self) -> bool {
        self.stage == Stage::Unsure
    }

    pub(super) fn be_unsure(&mut self) {
        self.stage = Stage::Unsure;
    }

    pub(super) fn end(&mut self) {
        self.stage = Stage::Over;
    }

    pub(super) fn agree(&mut self, base: Option<Epoch>) {
        self.stage = Stage::Agreed;
        self.base = base;
    }

    pub(super) fn ready(&mut self, epoch: Epoch) {
        if self.stage == Stage::Begun(epoch) {
            self.stage = Stage::Ready(epoch);
        }
    }

    pub(super) fn hold(&mut self) {
        if self.is_agreed() {
            self.stage = Stage::Held;
        }
    }

    pub(super) fn try_again(&mut self) {
        if self.stage == Stage::Held {
            self.stage = Stage::Agreed;
        }
    }

    pub(super) fn wants_to_send(&self, epochs: &Epochs) -> bool {
        let Stage::Ready(epoch) = self.stage else { return false };
        epochs.first_unsealed().is_some_and(|pending| pending.number == epoch && pending.unsent() > 0)
    }
}

impl Replication {
    /// Sends what it may.
    pub(super) fn send(&mut self) {
        while !self.pauses.is_ordered && self.phase == Phase::Serving && self.send_step() {}
    }

    /// Returns whether there is another step.
    fn send_step(&mut self) -> bool {
        let Some(stream) = &mut self.stream else { return false };
        let Some(pending) = self.epochs.first_unsealed_mut() else { return false };
        let epoch = pending.number;
        match stream.stage {
            Stage::Offered | Stage::Unsure | Stage::Over | Stage::Held => false,
            Stage::Ready(ready) if ready == epoch => {
                let next = pending.contents.iter_mut().zip(0..).find_map(|(content, volume)| {
                    let (blocks, place) = content.next_unsent(self.settings.extent_blocks)?;
                    (stream.may_send > 0).then(|| {
                        content.mark_sent(blocks);
                        (VolumeIndex(volume), blocks, place)
                    })
                });
                if let Some((volume, blocks, place)) = next {
                    let cost = if place == Place::Zeroes { 1 } else { blocks.len() };
                    stream.may_send = stream.may_send.saturating_sub(cost);
                    let id = stream.id;
                    let read = self.writes.read_to_send(id, epoch, volume, blocks, place);
                    let extent = Action::SendExtent { stream: id, read, epoch, volume, blocks, place };
                    if broken(Bug::RewritesSent) && place != Place::Disk {
                        self.outbox.push(extent.clone());
                    }
                    self.outbox.push(extent);
                    return true;
                }
                if pending.unsent() > 0 || self.writes.is_read_for(stream.id) {
                    return false;
                }
                pending.is_sealed = true;
                stream.base = Some(epoch);
                stream.stage = Stage::Agreed;
                self.outbox.push(Action::Send(stream.id, ToStandby::Seal { epoch }));
                true
            }
            Stage::Begun(begun) if begun == epoch => false,
            Stage::Agreed | Stage::Begun(_) | Stage::Ready(_) => {
                // What a write in flight leaves on the disk is not known before it has ended (case 7). What is still read for an
                // epoch that has become a mixture must not arrive after newer content of its blocks.
                let is_read = self.writes.is_read_for(stream.id);
                if epoch > self.numbers.durable || is_read || self.writes.is_awaited(epoch) {
                    return false;
                }
                stream.stage = Stage::Begun(epoch);
                let (base, blocks) = (stream.base, pending.unsent());
                let sizes = pending.contents.iter().map(|content| content.size).collect();
                self.outbox.push(Action::Send(stream.id, ToStandby::Begin { epoch, base, blocks, sizes }));
                false
            }
        }
    }
}
