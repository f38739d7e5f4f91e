//! Sends the oldest epoch without a seal, as fast as the pacer and the link allow; while it catches up, the open one.
//!
//! An epoch is announced again if more is to be sent than was announced, or if a volume has grown. That happens only after the
//! standby's host has answered the announcement before, so that its answers cannot be confused.

use std::time::Duration;

use chronicle::{BlockCount, BlockIndex, BlockRange, Epoch};

use super::epochs::Pending;
use super::{Action, Phase, Replication};
use crate::content::Place;
use crate::identity::VolumeIndex;
use crate::planted::{Bug, broken};
use crate::wire::{RefusedBecause, StreamId, ToStandby};

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
    announced: Announced,
    /// When it was said that nothing was written; `None`: the standby's host has heard it.
    unheard_since: Option<Duration>,
}

/// What the last announcement has said of an epoch.
#[derive(Debug, Default)]
struct Announced {
    /// The sizes of the volumes.
    sizes: Vec<BlockCount>,
    /// The number of blocks that may still be sent.
    left: u64,
    /// The number of blocks that the stream has carried since the last seal.
    carried: u64,
    /// The number of blocks to be announced at least: with less, an epoch was refused when part of it was sent.
    at_least: u64,
}

/// A run of blocks that can be sent.
#[derive(Clone, Copy, Debug)]
struct Next {
    volume: VolumeIndex,
    blocks: BlockRange,
    place: Place,
}

impl Next {
    /// Returns the room that the standby's host counts for it.
    fn cost(&self) -> u64 {
        if self.place == Place::Zeroes { 1 } else { self.blocks.len() }
    }
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
        Self {
            id,
            stage: Stage::Offered,
            may_send: 0,
            base: None,
            announced: Announced::default(),
            unheard_since: None,
        }
    }

    pub(super) fn has_answered(&self) -> bool {
        !matches!(self.stage, Stage::Offered | Stage::Unsure)
    }

    /// Notes that `StillCurrent` is due. Returns whether it is sent: the one before was answered.
    pub(super) fn tell_current(&mut self, now: Duration) -> bool {
        let has_heard = self.unheard_since.is_none();
        self.unheard_since.get_or_insert(now);
        has_heard
    }

    /// Returns the moment up to which nothing was written, as the standby's host has heard.
    pub(super) fn heard(&mut self) -> Option<Duration> {
        self.unheard_since.take()
    }

    /// Returns whether the standby's host answers.
    pub(super) fn is_heard(&self) -> bool {
        self.has_answered() && self.unheard_since.is_none()
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
        self.announced = Announced::default();
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

    /// Notes that the standby's host takes no more of the epoch, and has dropped what came before.
    ///
    /// If it had room for a part, the whole is announced at once the next time: that may be written in place. If there is no room
    /// for that either, the spool is tried again.
    pub(super) fn refuse(&mut self, reason: RefusedBecause) {
        self.hold();
        let Announced { left, carried, at_least, .. } = self.announced;
        let was_part = reason == RefusedBecause::NoSpace && carried > 0 && at_least == 0;
        let at_least = if was_part { carried + left } else { 0 };
        self.announced = Announced { at_least, ..Announced::default() };
    }

    pub(super) fn try_again(&mut self) {
        if self.stage == Stage::Held {
            self.stage = Stage::Agreed;
        }
    }
}

impl Replication {
    /// Sends what it may.
    pub(super) fn send(&mut self, now: Duration) {
        while self.may_send_at_all() && self.send_step(now) {}
    }

    fn may_send_at_all(&self) -> bool {
        !self.pauses.is_ordered && self.phase == Phase::Serving
    }

    /// Returns whether there is something that [`Event::MaySend`](super::Event::MaySend) would let go.
    pub fn wants_to_send(&self) -> bool {
        let (Some(stream), Some(pending)) = (&self.stream, self.to_send()) else { return false };
        self.may_send_at_all()
            && stream.stage == Stage::Ready(pending.number)
            && self.next().is_some_and(|next| self.as_announced(next).is_some())
    }

    /// Returns the epoch that is sent: the oldest one without a seal; while the group catches up and there is none, the open one.
    fn to_send(&self) -> Option<&Pending> {
        let open = || self.catch_up.as_ref().filter(|_| !self.pauses.is_filling).map(|_| self.epochs.open());
        self.epochs.first_unsealed().or_else(open)
    }

    /// Returns the next run of the epoch that is sent.
    fn next(&self) -> Option<Next> {
        let Some(pending) = self.epochs.first_unsealed() else {
            self.to_send()?;
            let (volume, blocks) = self.next_early()?;
            return Some(Next { volume, blocks, place: Place::Disk });
        };
        // What a write in flight leaves on the disk is not known before it has ended (case 7).
        if self.writes.is_awaited(pending.number) {
            return None;
        }
        let most = self.settings.extent_blocks;
        let contents = || pending.contents.iter().zip((0..).map(VolumeIndex));
        // What only the disk has goes first: no guest may overwrite it before.
        let exposed = contents().find_map(|(content, volume)| {
            let blocks = content.next_exposed(BlockIndex(0), most)?;
            Some(Next { volume, blocks, place: Place::Disk })
        });
        let unsent = || {
            contents().find_map(|(content, volume)| {
                let (blocks, place) = content.next_unsent(most)?;
                Some(Next { volume, blocks, place })
            })
        };
        exposed.or_else(unsent)
    }

    /// Returns the part of a run that the last announcement covers.
    fn as_announced(&self, next: Next) -> Option<Next> {
        let left = self.stream.as_ref().filter(|_| self.has_announced_sizes())?.announced.left;
        if next.cost() <= left {
            return Some(next);
        }
        let start = next.blocks.start.0;
        (left > 0).then(|| Next { blocks: BlockRange::new(start, start + left), ..next })
    }

    fn has_announced_sizes(&self) -> bool {
        let announced = self.stream.as_ref().map(|stream| &stream.announced.sizes);
        let is_same = announced.is_some_and(|sizes| self.to_send().is_some_and(|it| it.sizes() == *sizes));
        is_same || broken(Bug::SizesNotAnnouncedAgain)
    }

    pub(super) fn is_read_to_send(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| self.writes.is_read_for(stream.id))
    }

    /// Returns whether there is another step.
    fn send_step(&mut self, now: Duration) -> bool {
        let Some(pending) = self.to_send() else { return false };
        let (epoch, unsent) = (pending.number, pending.unsent());
        let Some(stream) = &self.stream else { return false };
        match stream.stage {
            Stage::Offered | Stage::Unsure | Stage::Over | Stage::Held => false,
            Stage::Ready(ready) if ready == epoch => match self.next() {
                Some(next) => match self.as_announced(next) {
                    Some(next) => stream.may_send > 0 && self.send_extent(epoch, next),
                    None => self.announce(epoch),
                },
                None if !self.is_complete(epoch, unsent) => false,
                None if !self.has_announced_sizes() => self.announce(epoch),
                None => self.seal(now, epoch),
            },
            Stage::Begun(begun) if begun == epoch => false,
            Stage::Agreed | Stage::Begun(_) | Stage::Ready(_) => {
                let is_due = self.next().is_some() || self.is_complete(epoch, unsent);
                is_due && self.announce(epoch)
            }
        }
    }

    /// Returns whether an epoch was cut, and all of it was sent.
    fn is_complete(&self, epoch: Epoch, unsent: u64) -> bool {
        let is_cut = self.epochs.first_unsealed().is_some();
        is_cut && unsent == 0 && !self.writes.is_awaited(epoch) && !self.is_read_to_send()
    }

    /// Announces an epoch; returns whether there is another step.
    fn announce(&mut self, epoch: Epoch) -> bool {
        // What is still read for an epoch that has become a mixture, or before a cut, must not arrive after newer content of its
        // blocks.
        if epoch > self.numbers.durable || self.is_read_to_send() {
            return false;
        }
        let is_cut = self.epochs.first_unsealed().is_some();
        let Some(pending) = self.to_send() else { return false };
        let (sizes, blocks) = (pending.sizes(), if is_cut { pending.unsent() } else { pending.exposed() });
        let Some(stream) = &mut self.stream else { return false };
        let announced = &mut stream.announced;
        let blocks = blocks.max(announced.at_least.saturating_sub(announced.carried));
        (announced.left, announced.sizes) = (blocks, sizes.clone());
        stream.stage = Stage::Begun(epoch);
        let begin = ToStandby::Begin { epoch, base: stream.base, blocks, sizes };
        self.outbox.push(Action::Send(stream.id, begin));
        false
    }

    /// Sends a run; returns whether there is another step.
    fn send_extent(&mut self, epoch: Epoch, next: Next) -> bool {
        let Next { volume, blocks, place } = next;
        self.epochs.content_mut(epoch, volume).mark_sent(blocks);
        if self.epochs.open_number() == epoch {
            let behind = self.epochs.open().exposed();
            self.catch_up.iter_mut().for_each(|catch_up| catch_up.advance(volume, blocks, behind));
        }
        let Some(stream) = &mut self.stream else { return false };
        stream.may_send = stream.may_send.saturating_sub(next.cost());
        stream.announced.left -= next.cost();
        stream.announced.carried += next.cost();
        let id = stream.id;
        let read = self.writes.read_to_send(id, epoch, volume, blocks, place);
        let extent = Action::SendExtent { stream: id, read, epoch, volume, blocks, place };
        if broken(Bug::RewritesSent) && place != Place::Disk {
            self.outbox.push(extent.clone());
        }
        self.outbox.push(extent);
        true
    }

    /// Ends an epoch that is complete; returns whether there is another step.
    fn seal(&mut self, now: Duration, epoch: Epoch) -> bool {
        let Some(pending) = self.epochs.first_unsealed_mut() else { return false };
        pending.is_sealed = true;
        let age =
            if broken(Bug::SealWithoutAge) { Duration::ZERO } else { now.saturating_sub(pending.cut_at) };
        let Some(stream) = &mut self.stream else { return false };
        stream.base = Some(epoch);
        stream.stage = Stage::Agreed;
        stream.announced = Announced::default();
        self.outbox.push(Action::Send(stream.id, ToStandby::Seal { epoch, age_ms: milliseconds(age) }));
        true
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
