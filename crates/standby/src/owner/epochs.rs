//! The open epoch and the frozen ones that the standby has not confirmed.

use std::collections::VecDeque;
use std::time::Duration;

use chronicle::{BlockCount, BlockRange, Epoch, LayeredBitmap};

use crate::content::{Content, Place, Room};
use crate::identity::VolumeIndex;
use crate::planted::{Bug, broken};

/// One epoch of the group.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) number: Epoch,
    /// Of each volume, in the group's order.
    pub(super) contents: Vec<Content>,
    /// When it was cut; zero while it is open.
    pub(super) cut_at: Duration,
    /// Whether its seal was sent on this stream, or is known to be at the standby.
    pub(super) is_sealed: bool,
    /// Whether it is sent even if there is no content: the standby may have other sizes, or its image is a mixture.
    has_new_sizes: bool,
}

impl Pending {
    fn new(number: Epoch, sizes: impl Iterator<Item = BlockCount>) -> Self {
        let contents = sizes.map(Content::new).collect();
        Self { number, contents, cut_at: Duration::ZERO, is_sealed: false, has_new_sizes: false }
    }

    pub(super) fn unsent(&self) -> u64 {
        self.contents.iter().map(Content::unsent).sum()
    }

    /// Returns the number of blocks that only the disk has and that were not sent.
    pub(super) fn exposed(&self) -> u64 {
        self.contents.iter().map(Content::exposed).sum()
    }

    pub(super) fn sizes(&self) -> Vec<BlockCount> {
        self.contents.iter().map(|content| content.size).collect()
    }
}

/// The epochs, the oldest first, and the room for what is kept of them.
#[derive(Debug)]
pub(super) struct Epochs {
    frozen: VecDeque<Pending>,
    open: Pending,
    room: Room,
}

/// Epochs that were merged.
#[derive(Debug)]
pub(super) struct Merged {
    /// Their numbers, the newest first.
    pub(super) from: Vec<Epoch>,
    pub(super) into: Epoch,
}

impl Epochs {
    pub(super) fn new(first: Epoch, sizes: &[BlockCount], ring: u64, spool: u64) -> Self {
        let mut open = Pending::new(first, sizes.iter().copied());
        open.has_new_sizes = true;
        Self { frozen: VecDeque::new(), open, room: Room { ring, spool } }
    }

    /// Adds blocks of each volume to the open epoch.
    pub(super) fn lacks(&mut self, missing: &[LayeredBitmap]) {
        for (content, missing) in self.open.contents.iter_mut().zip(missing) {
            missing.runs().for_each(|run| content.change(run, &mut self.room));
        }
    }

    /// Adds all blocks to the open epoch.
    pub(super) fn lacks_all(&mut self) {
        for content in &mut self.open.contents {
            content.change(BlockRange::new(0, content.size.0), &mut self.room);
        }
    }

    pub(super) fn open(&self) -> &Pending {
        &self.open
    }

    pub(super) fn open_number(&self) -> Epoch {
        self.open.number
    }

    pub(super) fn open_is_empty(&self) -> bool {
        !self.open.has_new_sizes && self.open.contents.iter().all(Content::is_empty)
    }

    /// Lets the open epoch be sent even if it has no blocks.
    pub(super) fn send_open(&mut self) {
        self.open.has_new_sizes = true;
    }

    pub(super) fn frozen_len(&self) -> usize {
        self.frozen.len()
    }

    pub(super) fn is_frozen(&self, number: Epoch) -> bool {
        self.frozen.iter().any(|pending| pending.number == number)
    }

    /// Returns the oldest epoch without a seal.
    pub(super) fn first_unsealed(&self) -> Option<&Pending> {
        self.frozen.iter().find(|pending| !pending.is_sealed)
    }

    pub(super) fn first_unsealed_mut(&mut self) -> Option<&mut Pending> {
        self.frozen.iter_mut().find(|pending| !pending.is_sealed)
    }

    /// Returns the content of an epoch; that of the open one if it was merged.
    pub(super) fn content_mut(&mut self, number: Epoch, volume: VolumeIndex) -> &mut Content {
        let frozen = self.frozen.iter_mut().find(|pending| pending.number == number);
        &mut frozen.unwrap_or(&mut self.open).contents[volume.index()]
    }

    pub(super) fn grow(&mut self, volume: VolumeIndex, size: BlockCount) {
        let content = &mut self.open.contents[volume.index()];
        if !broken(Bug::GrowthLeftOut) {
            content.size = content.size.max(size);
            self.open.has_new_sizes = true;
        }
    }

    /// Ends the open epoch and returns its number.
    pub(super) fn freeze(&mut self, now: Duration) -> Epoch {
        let number = self.open.number;
        let sizes = self.open.contents.iter().map(|content| content.size);
        let next = Pending::new(number.next(), sizes.collect::<Vec<_>>().into_iter());
        let frozen = std::mem::replace(&mut self.open, next);
        self.frozen.push_back(Pending { cut_at: now, ..frozen });
        number
    }

    pub(super) fn change_open(&mut self, volume: VolumeIndex, blocks: BlockRange) {
        self.open.contents[volume.index()].change(blocks, &mut self.room);
    }

    pub(super) fn zero(&mut self, number: Epoch, volume: VolumeIndex, blocks: BlockRange) {
        let frozen = self.frozen.iter_mut().find(|pending| pending.number == number);
        let pending = frozen.unwrap_or(&mut self.open);
        pending.contents[volume.index()].zero(blocks, &mut self.room);
    }

    /// Takes room for the payload of a write; `None` if there is none.
    pub(super) fn take_room(&mut self, blocks: u64) -> Option<Place> {
        self.room.take(blocks)
    }

    /// Takes room for a copy of what is overwritten: in the spool, because it was read from a disk.
    pub(super) fn take_spool(&mut self, blocks: u64) -> Option<Place> {
        self.room.take_spool(blocks)
    }

    pub(super) fn give_spool_back(&mut self, blocks: u64) {
        self.room.spool += blocks;
    }

    /// Returns the first run of a range that a frozen epoch has only on the disk and has not sent, and the epoch.
    pub(super) fn first_exposed(
        &self,
        volume: VolumeIndex,
        range: BlockRange,
    ) -> Option<(Epoch, BlockRange)> {
        let exposed = |pending: &Pending| pending.contents[volume.index()].first_exposed(range);
        self.frozen.iter().find_map(|pending| exposed(pending).map(|run| (pending.number, run)))
    }

    /// Notes that a range is about to change on the disk.
    pub(super) fn overwrite(&mut self, volume: VolumeIndex, range: BlockRange) {
        for pending in &mut self.frozen {
            pending.contents[volume.index()].overwrite(range);
        }
    }

    /// Merges an epoch, and all later ones, into the open one: it is a mixture, and no recovery point (case 8).
    pub(super) fn mix(&mut self, number: Epoch) -> Merged {
        let mut from = Vec::new();
        while self.frozen.back().is_some_and(|last| last.number >= number) {
            let Some(older) = self.frozen.pop_back() else { break };
            from.push(older.number);
            self.open.has_new_sizes |= older.has_new_sizes;
            for (content, older) in self.open.contents.iter_mut().zip(older.contents) {
                content.absorb(older, &mut self.room);
            }
        }
        Merged { from, into: self.open.number }
    }

    /// Returns the oldest epoch.
    pub(super) fn oldest(&self) -> Option<Epoch> {
        self.frozen.front().map(|pending| pending.number)
    }

    /// Removes sealed epochs up to this one, which the standby has confirmed. Returns their numbers and the last cut.
    pub(super) fn confirm(&mut self, through: Epoch) -> (Vec<Epoch>, Option<Duration>) {
        let (mut confirmed, mut cut_at) = (Vec::new(), None);
        while self.frozen.front().is_some_and(|first| first.number <= through) {
            let Some(first) = self.frozen.pop_front() else { break };
            first.contents.iter().for_each(|content| content.release(&mut self.room));
            confirmed.push(first.number);
            cut_at = Some(first.cut_at);
        }
        (confirmed, cut_at)
    }

    /// Forgets what streams have carried, except for epochs up to `through`, whose seals the standby has. Returns the first epoch
    /// that cannot be sent again.
    pub(super) fn begin_stream(&mut self, through: Option<Epoch>) -> Option<Epoch> {
        for pending in self.frozen.iter_mut().chain([&mut self.open]) {
            let was_sent = pending.is_sealed && broken(Bug::SentCountsAsReceived);
            pending.is_sealed = was_sent || through.is_some_and(|through| pending.number <= through);
            if !pending.is_sealed {
                pending.contents.iter_mut().for_each(Content::mark_all_unsent);
            }
        }
        let is_lossy =
            |pending: &&Pending| !pending.is_sealed && pending.contents.iter().any(Content::is_lossy);
        self.frozen.iter().find(is_lossy).map(|pending| pending.number)
    }

    /// Returns the blocks of each volume that the standby has not confirmed (law 27).
    pub(super) fn missing(&self) -> Vec<LayeredBitmap> {
        let mut missing: Vec<_> =
            self.open.contents.iter().map(|open| LayeredBitmap::new(open.size)).collect();
        for pending in self.frozen.iter().chain([&self.open]) {
            for (missing, content) in missing.iter_mut().zip(&pending.contents) {
                missing.union_with(&content.blocks());
            }
        }
        missing
    }

    /// Returns the newest epoch whose seal was sent.
    pub(super) fn newest_sealed(&self) -> Option<Epoch> {
        self.frozen.iter().filter(|pending| pending.is_sealed).map(|pending| pending.number).max()
    }
}
