//! What a mirror puts up with, and for how long.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::journal::FailureCode;
use migration::strategy::{ChunkId, Copied, Mirror, MirrorSettings, VolumeAction, VolumeEvent, WriteId};

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
