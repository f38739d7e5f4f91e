//! What one epoch of a group has to carry, and where its content is kept.
//!
//! ```text
//!   written ─┬─ in the ring                     a block is in one of these four sets
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

/// What one epoch carries of one volume. Sets of blocks: no call walks the volume, except for those that say so.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    /// Blocks that read as zeroes. A block of the epoch is in exactly one of this set and the next three.
    zeroed: LayeredBitmap,
    /// Blocks that the ring has.
    ring: LayeredBitmap,
    /// Blocks that the spool has.
    spool: LayeredBitmap,
    /// Blocks that only the disk has.
    disk: LayeredBitmap,
    /// Blocks that this stream has not carried.
    unsent: LayeredBitmap,
    /// Blocks of `disk` that are in `unsent`: a write must not overwrite them.
    exposed: LayeredBitmap,
    /// Blocks that were only on the disk, were sent, and were then overwritten: they cannot be sent again as of this epoch.
    lost: LayeredBitmap,
    pub(crate) size: BlockCount,
}

impl Content {
    pub(crate) fn new(size: BlockCount) -> Self {
        let empty = LayeredBitmap::new(size);
        Self {
            zeroed: empty.clone(),
            ring: empty.clone(),
            spool: empty.clone(),
            disk: empty.clone(),
            unsent: empty.clone(),
            exposed: empty.clone(),
            lost: empty,
            size,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.zeroed.is_empty() && self.ring.is_empty() && self.spool.is_empty() && self.disk.is_empty()
    }

    /// Returns the number of blocks that have not been sent.
    pub(crate) fn unsent(&self) -> u64 {
        self.unsent.count()
    }

    pub(crate) fn is_lossy(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Returns all blocks of the epoch. Walks its sets.
    pub(crate) fn blocks(&self) -> LayeredBitmap {
        let mut all = self.disk.clone();
        [&self.zeroed, &self.ring, &self.spool].into_iter().for_each(|set| all.union_with(set));
        all
    }

    /// Returns the number of blocks that only the disk has and that were not sent.
    pub(crate) fn exposed(&self) -> u64 {
        self.exposed.count()
    }

    /// Notes that a range may be changing: its content is only on the disk from now on.
    pub(crate) fn change(&mut self, range: BlockRange, room: &mut Room) {
        let was_sent = self.disk.contains_all(range) && !self.unsent.contains_any(range);
        if was_sent && broken(Bug::EarlyNotSentAgain) {
            return;
        }
        room.give_back(Room { ring: self.ring.remove(range), spool: self.spool.remove(range) });
        self.zeroed.remove(range);
        [&mut self.disk, &mut self.unsent, &mut self.exposed].into_iter().for_each(|set| {
            set.insert(range);
        });
    }

    /// Notes that a range reads as zeroes.
    pub(crate) fn zero(&mut self, range: BlockRange, room: &mut Room) {
        self.change(range, room);
        self.disk.remove(range);
        self.exposed.remove(range);
        self.zeroed.insert(range);
    }

    /// Notes that the payload of a range is kept, in a place for which room was taken.
    pub(crate) fn keep(&mut self, range: BlockRange, place: Place) {
        let kept = match place {
            Place::Ring => &mut self.ring,
            Place::Spool => &mut self.spool,
            Place::Disk | Place::Zeroes => return,
        };
        kept.insert(range);
        self.disk.remove(range);
        self.exposed.remove(range);
    }

    /// Returns the first run of the range that is only on the disk and was not sent.
    pub(crate) fn first_exposed(&self, range: BlockRange) -> Option<BlockRange> {
        first_in(&self.exposed, range)
    }

    /// Notes that the disk no longer has what this epoch has there.
    pub(crate) fn overwrite(&mut self, range: BlockRange) {
        let mut rest = range;
        while let Some(run) = first_in(&self.disk, rest) {
            self.lost.insert(run);
            rest = BlockRange::new(run.end.0, range.end.0);
        }
    }

    /// Takes over what an older epoch carries and this one does not. Returns the room that the older one does not need. Walks the
    /// sets of both.
    pub(crate) fn absorb(&mut self, mut older: Self, room: &mut Room) {
        let newer = self.blocks();
        let (ring, spool) = (older.ring.count(), older.spool.count());
        // What is lost was overwritten later, so the newer epoch has it. Otherwise it is read from the disk once more.
        older.unsent.union_with(&older.lost);
        older.exposed.union_with(&older.lost);
        let sets = [
            (&mut self.zeroed, &mut older.zeroed),
            (&mut self.ring, &mut older.ring),
            (&mut self.spool, &mut older.spool),
            (&mut self.disk, &mut older.disk),
            (&mut self.unsent, &mut older.unsent),
            (&mut self.exposed, &mut older.exposed),
        ];
        for (into, from) in sets {
            from.subtract(&newer);
            into.union_with(from);
        }
        room.give_back(Room { ring: ring - older.ring.count(), spool: spool - older.spool.count() });
    }

    /// Gives all room back.
    pub(crate) fn release(&self, room: &mut Room) {
        room.give_back(Room { ring: self.ring.count(), spool: self.spool.count() });
    }

    /// Returns the next run from a block on that only the disk has and that was not sent, up to `blocks_max` blocks.
    pub(crate) fn next_exposed(&self, from: BlockIndex, blocks_max: u64) -> Option<BlockRange> {
        self.exposed.next_run(from, blocks_max.max(1))
    }

    /// Returns the next run to send, up to `blocks_max` blocks that are kept in one place.
    pub(crate) fn next_unsent(&self, blocks_max: u64) -> Option<(BlockRange, Place)> {
        let run = self.unsent.next_run(BlockIndex(0), u64::MAX)?;
        let (place, set) = self.place(run.start);
        // A range of zeroes is one message however long it is.
        let most = match place {
            Place::Zeroes if broken(Bug::DiscardsByBlock) => 1,
            Place::Zeroes => u64::MAX,
            _ => blocks_max.max(1),
        };
        let same = set.next_run(run.start, most)?;
        Some((same.intersect(&run), place))
    }

    pub(crate) fn mark_sent(&mut self, range: BlockRange) {
        self.unsent.remove(range);
        self.exposed.remove(range);
    }

    /// Notes that the blocks of the epoch in a range were not sent after all.
    pub(crate) fn mark_unsent(&mut self, range: BlockRange) {
        for set in [&self.zeroed, &self.ring, &self.spool, &self.disk] {
            let mut rest = range;
            while let Some(run) = first_in(set, rest) {
                self.unsent.insert(run);
                rest = BlockRange::new(run.end.0, range.end.0);
            }
        }
        let mut rest = range;
        while let Some(run) = first_in(&self.disk, rest) {
            self.exposed.insert(run);
            rest = BlockRange::new(run.end.0, range.end.0);
        }
    }

    /// Notes that a new stream begins. Walks the sets.
    pub(crate) fn mark_all_unsent(&mut self) {
        self.unsent = self.blocks();
        self.exposed = self.disk.clone();
    }

    /// Returns where a block of the epoch is kept, and the set of all that are kept there.
    fn place(&self, block: BlockIndex) -> (Place, &LayeredBitmap) {
        let kept = [(Place::Zeroes, &self.zeroed), (Place::Ring, &self.ring), (Place::Spool, &self.spool)];
        kept.into_iter().find(|(_, set)| set.contains(block)).unwrap_or((Place::Disk, &self.disk))
    }
}

/// Returns the first run of a set in a range.
fn first_in(set: &LayeredBitmap, range: BlockRange) -> Option<BlockRange> {
    let run = set.next_run(range.start, range.len())?.intersect(&range);
    (!run.is_empty()).then_some(run)
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
        assert_eq!(
            (content.unsent(), content.next_unsent(9)),
            (2, Some((BlockRange::new(3, 5), Place::Ring)))
        );
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
