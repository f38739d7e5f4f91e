//! Tests a volume that is being filled, after a flush of its store has failed.

#[path = "filling/support.rs"]
mod support;

use std::time::Duration;

use chronicle::{BlockRange, ByteRange};
use migration::PacingSettings;
use migration::filling::{
    Filling, FillingAction, FillingEvent, NoteId, RecordingId, RequestId, RewriteId, StoreFault, UNIT_BYTES,
};
use support::units;

const NOW: Duration = Duration::from_secs(1);

/// Does what a caller without faults does, except for flushes, rewrites and fetches.
struct Owner {
    filling: Filling,
    flushes: Vec<RecordingId>,
    rewrites: Vec<(RewriteId, ByteRange)>,
    recorded: Vec<BlockRange>,
    admitted: Vec<u64>,
    flushed: Vec<(u64, Result<(), StoreFault>)>,
}

impl Owner {
    fn new() -> Self {
        let pacing = PacingSettings { depth: 1, chunk_bytes: UNIT_BYTES, bytes_per_second: None };
        Self {
            filling: support::filling(pacing),
            flushes: Vec::new(),
            rewrites: Vec::new(),
            recorded: Vec::new(),
            admitted: Vec::new(),
            flushed: Vec::new(),
        }
    }

    fn event(&mut self, event: FillingEvent) {
        self.filling.handle_event(NOW, event);
        while let Some(action) = self.filling.poll_action() {
            match action {
                FillingAction::Note { note: NoteId(note), .. } => {
                    let noted = FillingEvent::Noted { note: NoteId(note), result: Ok(()) };
                    self.filling.handle_event(NOW, noted);
                }
                FillingAction::Record { recording, units } => {
                    self.recorded.extend(units);
                    let recorded = FillingEvent::Recorded { recording, result: Ok(()) };
                    self.filling.handle_event(NOW, recorded);
                }
                FillingAction::FlushStore { recording, .. } => self.flushes.push(recording),
                FillingAction::Rewrite { rewrite, range } => self.rewrites.push((rewrite, range)),
                FillingAction::Admit { request } => self.admitted.push(request.0),
                FillingAction::Flushed { request, result } => self.flushed.push((request.0, result)),
                _ => {}
            }
        }
    }

    fn write_begins(&mut self, request: u64, range: ByteRange) {
        self.event(FillingEvent::WriteArrived { request: RequestId(request), range });
    }

    fn write_ends(&mut self, request: u64) {
        self.event(FillingEvent::WriteEnded { request: RequestId(request), result: Ok(()) });
    }

    fn write(&mut self, request: u64, range: ByteRange) {
        self.write_begins(request, range);
        self.write_ends(request);
    }

    fn flush_begins(&mut self, request: u64) {
        self.event(FillingEvent::FlushArrived { request: RequestId(request) });
    }

    fn flush_ends(&mut self, result: Result<(), StoreFault>) {
        let recording = self.flushes.remove(0);
        self.event(FillingEvent::StoreFlushed { recording, result });
    }

    fn rewrite_ends(&mut self, result: Result<(), StoreFault>) {
        let (rewrite, _) = self.rewrites.remove(0);
        self.event(FillingEvent::Rewritten { rewrite, result });
    }

    fn rewritten_ranges(&self) -> Vec<ByteRange> {
        self.rewrites.iter().map(|(_, range)| *range).collect()
    }
}

/// Returns an owner whose guest has written units 2 and 3, and whose flush has failed then.
fn owner_with_a_failed_flush() -> Owner {
    let mut owner = Owner::new();
    owner.write(1, units(2, 4));
    owner.flush_begins(2);
    owner.flush_ends(Err(StoreFault));
    assert_eq!(owner.flushed, [(2, Err(StoreFault))]);
    owner
}

#[test]
fn what_a_failed_flush_may_have_lost_is_recorded_only_once_it_is_written_again() {
    let mut owner = owner_with_a_failed_flush();
    assert_eq!(owner.rewritten_ranges(), [units(2, 4)]);
    assert!(owner.filling.missing_in(units(2, 4)).is_empty(), "the guest reads what it wrote");
    owner.flush_begins(3);
    assert!(owner.flushes.is_empty(), "that flush would say that all is durable");
    owner.rewrite_ends(Ok(()));
    assert!(owner.recorded.is_empty());
    owner.flush_ends(Ok(()));
    assert_eq!(owner.recorded, [BlockRange::new(2, 4)]);
    assert_eq!(owner.flushed[1..], [(3, Ok(()))]);
}

#[test]
fn a_flush_that_fails_during_a_rewrite_or_a_change_makes_both_doubted() {
    let mut owner = Owner::new();
    owner.write(1, units(2, 3));
    owner.write(2, units(4, 5));
    owner.flush_begins(3);
    owner.write_begins(4, units(6, 7));
    owner.flush_ends(Err(StoreFault));
    owner.rewrite_ends(Ok(()));
    owner.write_ends(4);
    assert_eq!(owner.rewritten_ranges(), [units(4, 5)]);
    owner.rewrite_ends(Ok(()));
    assert_eq!(owner.rewritten_ranges(), [units(6, 7)], "the flush may have lost what was under way");
    owner.rewrite_ends(Ok(()));
    owner.flush_begins(5);
    owner.flush_ends(Ok(()));
    let recorded = [(2, 3), (4, 5), (6, 7)].map(|(start, end)| BlockRange::new(start, end));
    assert_eq!(owner.recorded, recorded);
}

#[test]
fn a_guests_change_waits_for_a_rewrite_and_a_rewrite_for_a_change() {
    let mut owner = owner_with_a_failed_flush();
    owner.write_begins(3, units(3, 4));
    assert!(!owner.admitted.contains(&3), "the rewrite would undo it");
    owner.rewrite_ends(Err(StoreFault));
    assert!(owner.admitted.contains(&3));
    owner.event(FillingEvent::Rest);
    owner.filling.handle_timeout(NOW * 2);
    owner.event(FillingEvent::GoOn);
    assert!(owner.rewritten_ranges().iter().all(|range| !range.overlaps(&units(3, 4))));
}

#[test]
fn a_flush_fails_if_the_store_does_not_take_a_rewrite_and_later_flushes_do_not_wait() {
    let mut owner = owner_with_a_failed_flush();
    owner.flush_begins(3);
    owner.rewrite_ends(Err(StoreFault));
    assert_eq!(owner.flushed[1..], [(3, Err(StoreFault))]);
    owner.write(4, units(5, 6));
    owner.flush_begins(5);
    owner.flush_ends(Ok(()));
    assert_eq!(owner.flushed[2..], [(5, Ok(()))]);
    assert_eq!(owner.recorded, [BlockRange::new(5, 6)], "units 2 and 3 may be lost");
}
