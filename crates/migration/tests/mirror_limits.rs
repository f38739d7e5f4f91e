//! What a mirror puts up with, and for how long.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::journal::FailureCode;
use migration::strategy::{
    ChunkId, Copied, Mirror, MirrorSettings, Route, VolumeAction, VolumeEvent, WriteId,
};

const BLOCK: u64 = 4096;
const NO_PROGRESS_MAX: Duration = Duration::from_secs(300);

fn mirror_of(blocks: u64) -> Mirror {
    let mut mirror = Mirror::new(MirrorSettings {
        block_size: BlockSize::new(4096).unwrap(),
        size_bytes: blocks * BLOCK,
        pacing: PacingSettings { depth: 8, chunk_bytes: BLOCK, bytes_per_second: None },
        wait_max: Duration::from_secs(1),
        no_progress_max: NO_PROGRESS_MAX,
    });
    mirror.handle_event(Duration::ZERO, VolumeEvent::Allocated(ByteRange::new(0, blocks * BLOCK)));
    mirror.handle_event(Duration::ZERO, VolumeEvent::AllocationKnown);
    mirror
}

fn actions(mirror: &mut Mirror) -> Vec<VolumeAction> {
    std::iter::from_fn(|| mirror.poll_action()).collect()
}

#[test]
fn a_request_that_hangs_is_noticed_although_others_are_answered() {
    let mut mirror = mirror_of(2);
    let chunks = actions(&mut mirror);
    assert_eq!(chunks.iter().filter(|action| matches!(action, VolumeAction::Copy { .. })).count(), 2);
    let result = Ok(Copied { bytes_written: BLOCK, bytes_zero: 0 });
    mirror.handle_event(Duration::ZERO, VolumeEvent::ChunkCopied { chunk: ChunkId(0), result });
    // The second chunk is never answered; mirrored writes to the first block are, every second.
    let mut now = Duration::ZERO;
    for number in 0.. {
        now += Duration::from_secs(1);
        let write = WriteId(number);
        mirror.handle_event(now, VolumeEvent::WriteArrived { write, range: ByteRange::new(0, BLOCK) });
        mirror.handle_event(now, VolumeEvent::TargetWritten { write, result: Ok(()) });
        mirror.handle_event(now, VolumeEvent::SourceWritten { write, result: Ok(()) });
        let failed = actions(&mut mirror).into_iter().find_map(|action| match action {
            VolumeAction::Failed { code, .. } => Some(code),
            _ => None,
        });
        match failed {
            Some(code) => {
                assert_eq!((code, now), (FailureCode::TargetHung, NO_PROGRESS_MAX));
                return;
            }
            None => assert!(now < NO_PROGRESS_MAX, "nobody notices"),
        }
    }
}

#[test]
fn a_large_write_does_not_undo_what_has_been_copied() {
    let mut mirror = mirror_of(8);
    let now = Duration::from_secs(1);
    let write = |number, first: u64, count: u64| VolumeEvent::WriteArrived {
        write: WriteId(number),
        range: ByteRange::new(first * BLOCK, count * BLOCK),
    };
    let landed = |mirror: &mut Mirror| {
        let copies = actions(mirror).into_iter().filter_map(|action| match action {
            VolumeAction::Copy { chunk, .. } => Some(chunk),
            _ => None,
        });
        for chunk in copies {
            let result = Ok(Copied { bytes_written: BLOCK, bytes_zero: 0 });
            mirror.handle_event(now, VolumeEvent::ChunkCopied { chunk, result });
        }
    };
    landed(&mut mirror);
    assert_eq!(mirror.blocks_remaining(), 0);
    // Block 3 is behind, and may not be copied at once.
    mirror.set_bandwidth(now, Some(1));
    let result = Err(migration::strategy::TargetFault::Error);
    mirror.handle_event(now, write(0, 3, 1));
    mirror.handle_event(now, VolumeEvent::TargetWritten { write: WriteId(0), result });
    mirror.handle_event(now, VolumeEvent::SourceWritten { write: WriteId(0), result: Ok(()) });
    mirror.handle_timeout(now + Duration::from_millis(200));
    actions(&mut mirror);
    let behind = mirror.blocks_remaining();
    mirror.handle_event(now + Duration::from_millis(200), write(1, 0, 8));
    let admitted = actions(&mut mirror).into_iter().find_map(|action| match action {
        VolumeAction::Admit { write: WriteId(1), route } => Some(route),
        _ => None,
    });
    let parts = vec![ByteRange::new(0, 3 * BLOCK), ByteRange::new(4 * BLOCK, 4 * BLOCK)];
    assert_eq!(admitted, Some(Route::BothInPart(parts)));
    assert!(mirror.blocks_remaining() <= behind + 1, "{} blocks are behind", mirror.blocks_remaining());
}

#[test]
fn a_mirror_that_waits_for_the_guests_own_disk_says_so() {
    let mut mirror = mirror_of(2);
    assert_eq!(mirror.waits_for(), None);
    actions(&mut mirror);
    let write = WriteId(0);
    mirror.handle_event(Duration::ZERO, VolumeEvent::WriteArrived { write, range: ByteRange::new(0, BLOCK) });
    let result = Ok(Copied { bytes_written: BLOCK, bytes_zero: 0 });
    mirror.handle_event(Duration::ZERO, VolumeEvent::ChunkCopied { chunk: ChunkId(0), result });
    // The second pass over block 0 may not read it before the write has ended.
    assert!(mirror.waits_for().is_some());
    mirror.handle_event(Duration::ZERO, VolumeEvent::SourceWritten { write, result: Ok(()) });
    assert_eq!(mirror.waits_for(), None);
}
