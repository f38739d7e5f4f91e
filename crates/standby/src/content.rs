//! What one epoch of a group has to carry, and where its content is kept.
//!
//! ```text
//!   written ─┬─ in the ring                     a block is in one of these
//!            ├─ in the spool
//!            └─ only on the disk ── overwritten: the epoch is a mixture, unless it was copied or sent before
//!   zeroed ──── nowhere: a range says all
//! ```

use chronicle::{BlockCount, BlockIndex, BlockRange, LayeredBitmap};

use crate::planted::{Bug, broken};

/// Where the content of a block of an epoch is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the lane's memory.
    Ring,
    /// In the owner's spool file.
    Spool,
    /// On the volume, which may be read as long as the block is not written again.
    Disk,
    /// Nowhere: it reads as zeroes.
    Zeroes,
}

/// The number of blocks that fit into the ring and into the spool, of all epochs of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) ring: u64,
    pub(crate) spool: u64,
}

impl Room {
    /// Takes room for a write, the ring first; `None` if neither has it.
    pub(crate) fn take(&mut self, blocks: u64) -> Option<Place> {
        if self.ring >= blocks {
            self.ring -= blocks;
            return Some(Place::Ring);
        }
        self.take_spool(blocks)
    }

    /// Takes room in the spool only.
    pub(crate) fn take_spool(&mut self, blocks: u64) -> Option<Place> {
        self.spool = self.spool.checked_sub(blocks)?;
        Some(Place::Spool)
    }

    fn give_back(&mut self, freed: Room) {
        self.ring += freed.ring;
        self.spool += freed.spool;
    }
}

/// What one epoch carries of one volume. Sets of blocks.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    /// Blocks with content. Disjoint with `zeroed`.
    written: LayeredBitmap,
    /// Blocks that read as zeroes.
    zeroed: LayeredBitmap,
    /// Blocks of `written` that the ring has.
    ring: LayeredBitmap,
    /// Blocks of `written` that the spool has. Disjoint with `ring`.
    spool: LayeredBitmap,
    /// Blocks that this stream has carried.
    sent: LayeredBitmap,
    /// Blocks that were only on the disk, were sent, and were then overwritten: they cannot be sent again as of this epoch.
    lost: LayeredBitmap,
    pub(crate) size: BlockCount,
}

impl Content {
    pub(crate) fn new(size: BlockCount) -> Self {
        let empty = LayeredBitmap::new(size);
        Self {
            written: empty.clone(),
            zeroed: empty.clone(),
            ring: empty.clone(),
            spool: empty.clone(),
            sent: empty.clone(),
            lost: empty,
            size,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.written.is_empty() && self.zeroed.is_empty()
    }

    /// Returns the number of blocks that have not been sent.
    pub(crate) fn unsent(&self) -> u64 {
        self.written.count() + self.zeroed.count() - self.sent.count()
    }

    pub(crate) fn is_lossy(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Returns all blocks of the epoch.
    pub(crate) fn blocks(&self) -> LayeredBitmap {
        let mut all = self.written.clone();
        all.union_with(&self.zeroed);
        all
    }

    /// Notes that a range may be changing: its content is only on the disk from now on.
    pub(crate) fn change(&mut self, range: BlockRange, room: &mut Room) {
        room.give_back(Room { ring: self.ring.remove(range), spool: self.spool.remove(range) });
        self.zeroed.remove(range);
        self.sent.remove(range);
        self.written.insert(range);
    }

    /// Notes that a range reads as zeroes.
    pub(crate) fn zero(&mut self, range: BlockRange, room: &mut Room) {
        self.change(range, room);
        self.written.remove(range);
        self.zeroed.insert(range);
    }

    /// Notes that the payload of a range is kept, in a place for which room was taken.
    pub(crate) fn keep(&mut self, range: BlockRange, place: Place) {
        match place {
            Place::Ring => self.ring.insert(range),
            Place::Spool => self.spool.insert(range),
            Place::Disk | Place::Zeroes => 0,
        };
    }

    /// Returns the first run of the range that is only on the disk and was not sent.
    pub(crate) fn first_exposed(&self, range: BlockRange) -> Option<BlockRange> {
        if self.written.count_in(range) == 0 {
            return None;
        }
        let exposed = |block: &BlockIndex| self.is_on_disk(*block) && !self.sent.contains(*block);
        let start = range.iter().find(exposed)?;
        let length = BlockRange::new(start.0, range.end.0).iter().take_while(exposed).count();
        Some(BlockRange::new(start.0, start.0 + length as u64))
    }

    /// Notes that the disk no longer has what this epoch has there.
    pub(crate) fn overwrite(&mut self, range: BlockRange) {
        let mut gone = LayeredBitmap::new(self.size);
        for run in self.written.runs().map(|run| run.intersect(&range)).filter(|run| !run.is_empty()) {
            gone.insert(run);
        }
        gone.subtract(&self.ring);
        gone.subtract(&self.spool);
        self.lost.union_with(&gone);
    }

    /// Takes over what an older epoch carries and this one does not. Returns the room that the older one does not need.
    pub(crate) fn absorb(&mut self, mut older: Self, room: &mut Room) {
        let newer = self.blocks();
        for set in [&mut older.written, &mut older.zeroed, &mut older.sent] {
            set.subtract(&newer);
        }
        let (ring, spool) = (older.ring.count(), older.spool.count());
        older.ring.subtract(&newer);
        older.spool.subtract(&newer);
        room.give_back(Room { ring: ring - older.ring.count(), spool: spool - older.spool.count() });
        // What is lost was overwritten later, so the newer epoch has it. Otherwise it is read from the disk once more.
        older.sent.subtract(&older.lost);
        self.written.union_with(&older.written);
        self.zeroed.union_with(&older.zeroed);
        self.ring.union_with(&older.ring);
        self.spool.union_with(&older.spool);
        self.sent.union_with(&older.sent);
    }

    /// Gives all room back.
    pub(crate) fn release(&self, room: &mut Room) {
        room.give_back(Room { ring: self.ring.count(), spool: self.spool.count() });
    }

    /// Returns the next run to send, up to `blocks_max` blocks that are kept in one place.
    pub(crate) fn next_unsent(&self, blocks_max: u64) -> Option<(BlockRange, Place)> {
        let mut unsent = self.blocks();
        unsent.subtract(&self.sent);
        let run = unsent.next_run(BlockIndex(0), u64::MAX)?;
        let place = self.place(run.start);
        // A range of zeroes is one message however long it is.
        let most = match place {
            Place::Zeroes if broken(Bug::DiscardsByBlock) => 1,
            Place::Zeroes => u64::MAX,
            _ => blocks_max,
        };
        let same = run.iter().take_while(|block| self.place(*block) == place);
        let length = same.take(usize::try_from(most).unwrap_or(usize::MAX)).count() as u64;
        (length > 0).then(|| (BlockRange::new(run.start.0, run.start.0 + length), place))
    }

    pub(crate) fn mark_sent(&mut self, range: BlockRange) {
        self.sent.insert(range);
    }

    pub(crate) fn mark_unsent(&mut self, range: BlockRange) {
        self.sent.remove(range);
    }

    pub(crate) fn mark_all_unsent(&mut self) {
        self.sent.clear();
    }

    fn place(&self, block: BlockIndex) -> Place {
        if self.zeroed.contains(block) {
            Place::Zeroes
        } else if self.ring.contains(block) {
            Place::Ring
        } else if self.spool.contains(block) {
            Place::Spool
        } else {
            Place::Disk
        }
    }

    fn is_on_disk(&self, block: BlockIndex) -> bool {
        self.written.contains(block) && self.place(block) == Place::Disk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content() -> (Content, Room) {
        (Content::new(BlockCount(100)), Room { ring: 4, spool: 4 })
    }

    #[test]
    fn a_block_is_sent_once_however_often_it_is_written() {
        let (mut content, mut room) = content();
        for _ in 0..10 {
            content.change(BlockRange::new(3, 5), &mut room);
            let place = room.take(2);
            assert_eq!(place, Some(Place::Ring));
            content.keep(BlockRange::new(3, 5), Place::Ring);
        }
        assert_eq!(room, Room { ring: 2, spool: 4 });
        assert_eq!((content.unsent(), content.next_unsent(9)), (2, Some((BlockRange::new(3, 5), Place::Ring))));
        content.mark_sent(BlockRange::new(3, 5));
        assert_eq!((content.unsent(), content.next_unsent(9)), (0, None));
    }

    #[test]
    fn the_newest_of_write_and_discard_wins_and_a_discard_is_one_range() {
        let (mut content, mut room) = content();
        content.change(BlockRange::new(3, 5), &mut room);
        content.keep(BlockRange::new(3, 5), room.take(2).unwrap());
        content.zero(BlockRange::new(0, 90), &mut room);
        assert_eq!(room.ring, 4);
        assert_eq!(content.next_unsent(1), Some((BlockRange::new(0, 90), Place::Zeroes)));
        content.change(BlockRange::new(10, 11), &mut room);
        assert_eq!(content.next_unsent(1), Some((BlockRange::new(0, 10), Place::Zeroes)));
        assert_eq!(content.first_exposed(BlockRange::new(0, 90)), Some(BlockRange::new(10, 11)));
    }

    #[test]
    fn an_older_epoch_gives_only_what_the_newer_one_lacks() {
        let (mut older, mut room) = content();
        older.change(BlockRange::new(0, 4), &mut room);
        older.keep(BlockRange::new(0, 4), room.take(4).unwrap());
        older.mark_sent(BlockRange::new(0, 2));
        let mut newer = Content::new(BlockCount(100));
        newer.change(BlockRange::new(1, 3), &mut room);
        newer.absorb(older, &mut room);
        assert_eq!(room.ring, 2, "what was overwritten is freed");
        assert_eq!(newer.next_unsent(9), Some((BlockRange::new(1, 3), Place::Disk)));
        newer.mark_sent(BlockRange::new(1, 3));
        assert_eq!(newer.next_unsent(9), Some((BlockRange::new(3, 4), Place::Ring)));
    }
}
