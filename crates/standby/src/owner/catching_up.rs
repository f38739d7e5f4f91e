//! Catches up: much that only the disk has is sent before its epoch is cut.
//!
//! ```text
//!   a cut is due ──► only the disk has much ──► sent from the open epoch, pass by pass ──► nothing is left ──► cut
//!                                                      │ a pass has gained little ─────────────────────────► cut
//!                                                      └ a new stream, or a mixture: the next interval decides anew
//! ```
//! After a cut, each block that only the disk has is in the guests' way: a guest that writes everywhere overwrites one before all
//! are sent, and the epoch is a mixture, over and over. Before the cut nothing has to be protected. A block that is written again
//! is unsent again, and is sent once more within the same epoch, where later extents replace earlier ones. Two rules keep the
//! order: nothing is read beside a write to it, and no block is read twice at a time.

use chronicle::{BlockIndex, BlockRange};

use super::Replication;
use crate::identity::VolumeIndex;
use crate::planted::{Bug, broken};

/// The blocks that are sent before the next cut.
#[derive(Debug)]
pub(super) struct CatchUp {
    /// The number of blocks that this pass has still to send.
    left: u64,
    /// The number of blocks that only the disk had when this pass began.
    behind: u64,
    /// Where the next look begins, so that no block waits for others that are written over and over.
    cursor: (usize, BlockIndex),
}

impl CatchUp {
    fn new(behind: u64) -> Self {
        Self { left: behind, behind, cursor: (0, BlockIndex(0)) }
    }

    /// Notes that blocks are being sent.
    pub(super) fn advance(&mut self, volume: VolumeIndex, blocks: BlockRange, behind: u64) {
        self.cursor = (volume.index(), blocks.end);
        self.left = self.left.saturating_sub(blocks.len());
        // Another pass is of use if guests have written less than half as fast as this one has sent.
        if self.left == 0 && behind <= self.behind / 2 {
            (self.left, self.behind) = (behind, behind);
        }
    }
}

impl Replication {
    /// Returns whether a cut that is due waits until what only the disk has was sent.
    pub(super) fn has_to_catch_up(&mut self) -> bool {
        let behind = self.epochs.open().exposed();
        if self.catch_up.is_none() && behind > self.settings.catch_up_blocks && !broken(Bug::CutWhileBehind) {
            self.catch_up = Some(CatchUp::new(behind));
        }
        self.catch_up.is_some()
    }

    /// Returns the next run to send before the cut.
    pub(super) fn next_early(&self) -> Option<(VolumeIndex, BlockRange)> {
        let catch_up = self.catch_up.as_ref().filter(|catch_up| catch_up.left > 0)?;
        let (contents, (first, cursor)) = (&self.epochs.open().contents, catch_up.cursor);
        // The volume at the cursor has a part before it.
        (0..=contents.len()).find_map(|step| {
            let index = (first + step) % contents.len();
            let volume = VolumeIndex(u16::try_from(index).ok()?);
            let mut from = if step == 0 { cursor } else { BlockIndex(0) };
            while let Some(run) = contents[index].next_exposed(from, self.settings.extent_blocks) {
                match self.writes.undisturbed(volume, run) {
                    Ok(part) => return Some((volume, part)),
                    Err(end) => from = end,
                }
            }
            None
        })
    }

    /// Cuts once nothing more is sent before.
    pub(super) fn end_catching_up(&mut self) {
        let is_over = self.catch_up.is_some() && self.next_early().is_none() && !self.is_read_to_send();
        if is_over && self.close_gates() {
            self.catch_up = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use chronicle::{BlockCount, Epoch};

    use super::*;
    use crate::content::Place;
    use crate::identity::{LifeId, StandbyId};
    use crate::owner::{Action, Event, Outcome, ReadId, Settings, WriteId, WriteKind};
    use crate::wire::{Answer, RefusedBecause, StreamId, ToOwner, ToStandby};

    const STREAM: StreamId = StreamId(1);
    const VOLUME: VolumeIndex = VolumeIndex(0);

    /// A group of one volume of eight blocks, whose standby has answered and lacks everything. Extents have two blocks.
    struct Group {
        machine: Replication,
        now: Duration,
    }

    impl Group {
        fn new(ring_blocks: u64) -> Self {
            let settings = Settings {
                every: Duration::from_secs(1),
                first_cut: Duration::from_secs(1),
                rpo: Duration::from_secs(3),
                wait_max: Duration::from_secs(1),
                ring_blocks,
                spool_blocks: 0,
                extent_blocks: 2,
                catch_up_blocks: 3,
            };
            let machine = Replication::begin(settings, StandbyId(1), LifeId(1), vec![BlockCount(8)]);
            let mut group = Self { machine, now: Duration::ZERO };
            for action in group.actions() {
                if let Action::MakeDurable(number, _) = action {
                    group.event(Event::Durable(number));
                }
            }
            group.event(Event::StreamBegins(STREAM));
            let answer = Answer::Receiving {
                watermark: None,
                sealed_through: Epoch(0),
                has_point: false,
                is_mixed: false,
            };
            group.event(Event::Received(STREAM, ToOwner::Answer(answer)));
            group.actions();
            group
        }

        fn event(&mut self, event: Event) {
            self.machine.handle_event(self.now, event);
        }

        fn actions(&mut self) -> Vec<Action> {
            std::iter::from_fn(|| self.machine.poll_action()).collect()
        }

        /// The interval ends; returns what follows.
        fn interval(&mut self) -> Vec<Action> {
            self.now = self.machine.poll_timeout().0;
            self.machine.handle_timeout(self.now);
            self.actions()
        }

        /// The standby's host has room for what was announced.
        fn ready(&mut self) {
            self.event(Event::Received(STREAM, ToOwner::Ready { epoch: Epoch(1) }));
        }

        /// Permits to send; returns what is sent.
        fn send(&mut self, blocks: u64) -> Vec<Action> {
            self.event(Event::MaySend(blocks));
            self.actions()
        }

        fn read_ends(&mut self, read: u64) -> Vec<Action> {
            self.event(Event::ReadEnded { read: ReadId(read), outcome: Outcome::Done });
            self.actions()
        }

        /// A guest writes blocks. Returns whether the write was passed at once.
        fn begin_write(&mut self, write: u64, start: u64, end: u64) -> bool {
            let (blocks, kind) = (BlockRange::new(start, end), WriteKind::Write);
            self.event(Event::WriteAsked { write: WriteId(write), volume: VOLUME, blocks, kind });
            self.actions().contains(&Action::Pass(WriteId(write)))
        }

        fn end_write(&mut self, write: u64) -> Vec<Action> {
            self.event(Event::WriteEnded { write: WriteId(write), outcome: Outcome::Done });
            self.actions()
        }
    }

    fn begin(blocks: u64, size: u64) -> Action {
        let sizes = vec![BlockCount(size)];
        Action::Send(STREAM, ToStandby::Begin { epoch: Epoch(1), base: None, blocks, sizes })
    }

    fn extent(read: u64, start: u64, end: u64, place: Place) -> Action {
        let (epoch, blocks) = (Epoch(1), BlockRange::new(start, end));
        Action::SendExtent { stream: STREAM, read: ReadId(read), epoch, volume: VOLUME, blocks, place }
    }

    #[test]
    fn a_guest_that_writes_everywhere_does_not_put_the_first_copy_off() {
        let mut group = Group::new(100);
        assert_eq!(group.interval(), [begin(8, 8)], "the epoch is announced, and not cut");
        group.ready();
        assert_eq!(group.send(2), [extent(1, 0, 2, Place::Disk)]);
        assert_eq!(group.read_ends(1), []);
        // One write to what was sent, and one to what was not. Neither waits.
        for (write, block) in [(1, 1), (2, 5)] {
            assert!(group.begin_write(write, block, block + 1));
            group.end_write(write);
        }
        let sent = [extent(2, 2, 4, Place::Disk), extent(3, 4, 5, Place::Disk), extent(4, 6, 8, Place::Disk)];
        assert_eq!(group.send(100), sent);
        for read in 2..4 {
            assert_eq!(group.read_ends(read), []);
        }
        assert_eq!(group.read_ends(4), [Action::CloseGates], "nothing is left that only the disk has");
        group.event(Event::GatesClosed);
        // What was written meanwhile goes from memory, and the epoch is complete: nothing was merged.
        let rest = [
            Action::OpenGates { ended: Epoch(1) },
            extent(4, 1, 2, Place::Ring),
            extent(4, 5, 6, Place::Ring),
            Action::Send(STREAM, ToStandby::Seal { epoch: Epoch(1), age_ms: 0 }),
        ];
        let mut sent = group.actions();
        // One block more is to be sent than was announced: block 1 again.
        let again = sent.iter().position(|action| *action == begin(1, 8)).expect("it is announced again");
        sent.remove(again);
        assert_eq!(again, 2);
        group.ready();
        sent.extend(group.send(100));
        assert_eq!(sent, rest);
    }

    #[test]
    fn what_is_being_written_or_read_is_not_read_before_the_cut() {
        let mut group = Group::new(0);
        group.interval();
        group.ready();
        assert!(group.begin_write(1, 2, 3));
        let sent = [extent(1, 0, 2, Place::Disk), extent(2, 3, 5, Place::Disk), extent(3, 5, 7, Place::Disk)];
        assert_eq!(group.send(6), sent);
        // Block 4 changes while it is read. It is sent again once that read has ended, after what the read has found.
        assert!(group.begin_write(2, 4, 5));
        assert_eq!(group.end_write(2), []);
        assert_eq!(group.send(1), [extent(4, 7, 8, Place::Disk)]);
        assert_eq!(group.end_write(1), []);
        assert_eq!(group.send(1), [extent(5, 2, 3, Place::Disk)]);
        for read in [1, 3, 4, 5] {
            assert_eq!(group.read_ends(read), []);
        }
        assert_eq!(group.read_ends(2), [begin(1, 8)]);
        group.ready();
        assert_eq!(group.send(1), [extent(6, 4, 5, Place::Disk)]);
    }

    #[test]
    fn a_guest_that_is_faster_than_the_link_does_not_put_the_cut_off_for_ever() {
        let mut group = Group::new(0);
        group.interval();
        for round in 0..4 {
            group.ready();
            group.send(2);
            // What was sent is written again.
            for write in 0..8 {
                assert!(group.begin_write(round * 8 + write, write, write + 1));
                group.end_write(round * 8 + write);
            }
            group.read_ends(round + 1);
        }
        group.event(Event::GatesClosed);
        assert!(group.actions().contains(&Action::OpenGates { ended: Epoch(1) }));
    }

    #[test]
    fn doubted_blocks_are_sent_again_with_the_next_epoch() {
        let mut group = Group::new(100);
        group.interval();
        group.ready();
        group.send(100);
        (1..5).for_each(|read| drop(group.read_ends(read)));
        group.event(Event::GatesClosed);
        group.actions();
        group.event(Event::Received(STREAM, ToOwner::Acknowledged { epoch: Epoch(1) }));
        group.event(Event::StoresFlushed);
        group.actions();
        group.event(Event::Doubted { volume: VOLUME, blocks: BlockRange::new(5, 6) });
        group.interval();
        group.event(Event::GatesClosed);
        let begun = group.actions();
        let sizes = vec![BlockCount(8)];
        let begin = ToStandby::Begin { epoch: Epoch(2), base: Some(Epoch(1)), blocks: 1, sizes };
        assert!(begun.contains(&Action::Send(STREAM, begin)), "{begun:?}");
    }

    #[test]
    fn a_volume_that_grows_is_announced_again_once_the_first_announcement_is_answered() {
        let mut group = Group::new(0);
        group.interval();
        group.event(Event::Grown { volume: VOLUME, size: BlockCount(10) });
        assert_eq!(group.send(0), [], "the announcement before has no answer yet");
        group.ready();
        assert_eq!(group.actions(), [begin(8, 10)]);
        group.ready();
        assert_eq!(group.send(2), [extent(1, 0, 2, Place::Disk)]);
    }

    #[test]
    fn an_epoch_of_which_a_part_found_no_room_is_announced_as_a_whole() {
        let mut group = Group::new(0);
        group.interval();
        group.ready();
        group.send(2);
        group.read_ends(1);
        assert!(group.begin_write(1, 0, 1));
        group.end_write(1);
        group.send(6);
        let announced: Vec<_> = (2..5).flat_map(|read| group.read_ends(read)).collect();
        assert_eq!(announced, [begin(1, 8)], "one block is sent again");
        let refused = || Event::Received(STREAM, ToOwner::Refused { reason: RefusedBecause::NoSpace });
        group.event(refused());
        assert_eq!(group.interval(), [begin(9, 8)]);
        group.event(refused());
        assert_eq!(group.interval(), [begin(8, 8)], "that was refused as well");
    }
}
