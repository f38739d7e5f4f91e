//! Compares contents with the standby's host: before they are sent, and to find damage.

use bytes::Bytes;
use lane::capture::{BLOCK_BYTES, extent};
use standby::VolumeIndex;
use standby::owner::{Event, Outcome, ReadId};
use standby::verification::Comparison;
use standby::wire::{Content, StreamId};
use transport::Priority;

use super::{Done, Pending, Running, SourceLine};
use crate::journal::now_unix_ms;
use crate::standbys::frames::Frame;
use crate::standbys::source::checking::{Check, Portion};
use crate::standbys::source::naming::Wanted;
use crate::standbys::source::reading::{Run, read_hashes};

impl<'a> Running<'a> {
    /// Forgets what was named on a stream that is over.
    pub(super) fn forget_named(&mut self) {
        self.check_asked = None;
        for read in self.naming.begin() {
            self.group.handle(Event::ReadEnded { read, outcome: Outcome::Done });
        }
    }

    /// Asks the standby's host whether it has the content of blocks.
    pub(super) fn name(&mut self, line: &SourceLine, read: ReadId, volume: VolumeIndex, run: Run) {
        let Run { blocks, bytes, hashes, .. } = run;
        self.under_way += blocks.len();
        self.share -= hashes.len() as f64 / BLOCK_BYTES as f64;
        self.source.show(|shown| shown.bytes_sent += hashes.len() as u64);
        let number = self.naming.ask(read, volume, blocks, bytes);
        let frame = Frame::Named { stream: self.stream, number, volume, blocks };
        line.send(Priority::Bulk, frame.encode(), hashes);
    }

    /// Sends what the standby's host does not have of what was named.
    pub(super) fn send_wanted(&mut self, line: &SourceLine, wanted: Wanted) {
        let Wanted { volume, named, runs, ended } = wanted;
        self.under_way = self.under_way.saturating_sub(named.len());
        let sent: u64 = runs.iter().map(|(blocks, _)| blocks.len()).sum();
        self.source.show(|shown| shown.bytes_found += (named.len() - sent) * BLOCK_BYTES);
        for (blocks, bytes) in runs {
            self.send(line, self.stream, extent(volume, blocks, Content::Payload), bytes);
        }
        if let Some(read) = ended {
            // N.B. After the message, as for every read.
            self.group.handle(Event::ReadEnded { read, outcome: Outcome::Done });
        }
    }

    /// Begins to compare everything, unless that has begun.
    pub(super) fn begin_check(&mut self, is_ordered: bool) -> Option<Pending<'a>> {
        if self.check.is_some() {
            return None;
        }
        let lacks = self.group.look(|machine, _| machine.unforgotten())?;
        let check = Check::begin(lacks.iter().map(chronicle::LayeredBitmap::blocks).collect());
        let comparison = Comparison::begin(now_unix_ms(), check.tally.total, is_ordered);
        self.check = Some(check);
        // Nothing is read before: what follows it is noted after it.
        self.is_hashing = true;
        Some(self.note(comparison))
    }

    /// Goes on after a comparison was noted.
    pub(super) fn noted(&mut self) -> Option<Pending<'a>> {
        self.is_hashing = false;
        self.compare_next()
    }

    fn note(&self, comparison: Comparison) -> Pending<'a> {
        let (source, with) = (self.source, self.with);
        Box::pin(async move {
            source.note_comparison(with, comparison).await;
            Done::Noted
        })
    }

    /// Ends the comparison. An error is one of reading.
    fn end_check(&mut self, error: Option<&str>) -> Option<Pending<'a>> {
        let tally = self.check.take()?.tally;
        let mut comparison = self.source.shown().compared?.last?;
        tally.show_in(&mut comparison);
        match error {
            Some(error) => comparison.interrupt(now_unix_ms(), error, true),
            None => comparison.ended_ms = Some(now_unix_ms()),
        }
        // One that is ordered now begins after that was noted.
        self.is_hashing = true;
        Some(self.note(comparison))
    }

    /// Has the next blocks read and hashed, one portion at a time, while the standby's host answers.
    pub(super) fn compare_next(&mut self) -> Option<Pending<'a>> {
        if self.check_asked.is_some() || self.is_hashing || !self.naming.is_agreed() {
            return None;
        }
        let check = self.check.as_mut()?;
        let Some(portion) = check.next() else {
            let (standby, differing) = (&self.config.name, check.tally.differing);
            tracing::info!(%standby, differing, "all blocks of a standby were compared");
            return self.end_check(None);
        };
        check.begun(portion, self.group.watch(portion.volume, portion.blocks)?);
        self.is_hashing = true;
        let (lane, stream) = (&self.lanes[portion.volume.index()], self.stream);
        Some(Box::pin(async move { Done::Hashed(stream, portion, read_hashes(lane, portion.blocks).await) }))
    }

    /// Asks the standby's host whether it has the same.
    pub(super) fn compare(
        &mut self,
        line: &SourceLine,
        stream: StreamId,
        portion: Portion,
        hashes: Result<Bytes, String>,
    ) -> Option<Pending<'a>> {
        self.is_hashing = false;
        let hashes = match hashes {
            Ok(hashes) => hashes,
            Err(error) => {
                tracing::error!(standby = %self.config.name, error, "a standby cannot be compared");
                return self.end_check(Some(&error));
            }
        };
        // The answer to it would be of a stream that is over.
        if stream != self.stream {
            return self.compare_next();
        }
        let (number, Portion { volume, blocks }) = (self.naming.number(), portion);
        self.check_asked = Some(number);
        self.share -= hashes.len() as f64 / BLOCK_BYTES as f64;
        self.source.show(|shown| shown.bytes_sent += hashes.len() as u64);
        line.send(Priority::Bulk, Frame::Compare { stream, number, volume, blocks }.encode(), hashes);
        None
    }

    /// Takes which of the compared blocks differ. What nothing explains is sent again.
    pub(super) fn end_portion(&mut self, runs: &[(u64, u64)]) -> Option<Pending<'a>> {
        let written = self.group.unwatch();
        let check = self.check.as_mut()?;
        let before = check.tally.differing;
        let Some((volume, doubted)) = check.ended(runs, &written) else {
            self.end_stream("the standby's host has answered another question".to_owned());
            return None;
        };
        let tally = check.tally;
        self.source.show_comparison(|comparison| tally.show_in(comparison));
        // N.B. Only the first is logged: the other host says which they are.
        if let Some(blocks) = doubted.first().filter(|_| before == 0) {
            let (standby, first) = (&self.config.name, blocks.start.0);
            tracing::error!(%standby, volume = volume.0, first, "blocks of a standby differ, and are sent again");
        }
        for blocks in doubted {
            self.group.handle(Event::Doubted { volume, blocks });
        }
        self.compare_next()
    }
}
