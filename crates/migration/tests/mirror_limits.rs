//! Tests which faults and delays a mirror tolerates, and for how long.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::journal::FailureCode;
use migration::strategy::{
    ChunkId, Copied, CopyFault, Copying, CopyingSettings, HotBlocks, Route, Strategy, TargetFault,
    VolumeAction, VolumeEvent, WriteId,
};

const BLOCK: u64 = 4096;
const NO_PROGRESS_MAX: Duration = Duration::from_secs(300);

fn mirror_of(blocks: u64) -> Copying {
    mirror_with(blocks, Strategy::Mirror)
}

/// Returns a mirror whose guests do not wait for the target.
fn asynchronous_mirror_of(blocks: u64) -> Copying {
    let (buffer_bytes_max, drain_max) = (2 * BLOCK, Duration::from_millis(100));
    mirror_with(blocks, Strategy::AsynchronousMirror { buffer_bytes_max, drain_max, hot: HotBlocks::PutOff })
}

fn mirror_with(blocks: u64, strategy: Strategy) -> Copying {
    let mut mirror = Copying::new(
        CopyingSettings {
            block_size: BlockSize::new(4096).unwrap(),
            size_bytes: blocks * BLOCK,
            pacing: PacingSettings { depth: 8, chunk_bytes: BLOCK, bytes_per_second: None },
            wait_max: Duration::from_secs(1),
            no_progress_max: NO_PROGRESS_MAX,
        },
        strategy,
    );
    mirror.handle_event(Duration::ZERO, VolumeEvent::Allocated(ByteRange::new(0, blocks * BLOCK)));
    mirror.handle_event(Duration::ZERO, VolumeEvent::AllocationKnown);
    mirror
}

fn actions(mirror: &mut Copying) -> Vec<VolumeAction> {
    std::iter::from_fn(|| mirror.poll_action()).collect()
}

#[test]
fn a_request_that_hangs_is_noticed_although_others_are_answered() {
    let mut mirror = mirror_of(2);
    let chunks = actions(&mut mirror);
    assert_eq!(chunks.iter().filter(|action| matches!(action, VolumeAction::Copy { .. })).count(), 2);
    let result = Ok(Copied { bytes_written: BLOCK, ..Copied::default() });
    mirror.handle_event(Duration::ZERO, VolumeEvent::ChunkCopied { chunk: ChunkId(0), result });
    // The second chunk is never answered, but every second a mirrored write to the first block is.
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
    let landed = |mirror: &mut Copying| {
        let copies = actions(mirror).into_iter().filter_map(|action| match action {
            VolumeAction::Copy { chunk, .. } => Some(chunk),
            _ => None,
        });
        for chunk in copies {
            let result = Ok(Copied { bytes_written: BLOCK, ..Copied::default() });
            mirror.handle_event(now, VolumeEvent::ChunkCopied { chunk, result });
        }
    };
    landed(&mut mirror);
    assert_eq!(mirror.blocks_remaining(), 0);
    // Block 3 is missing, and may not be copied at once.
    mirror.set_bandwidth(now, Some(1));
    let result = Err(TargetFault::Error);
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
    let result = Ok(Copied { bytes_written: BLOCK, ..Copied::default() });
    mirror.handle_event(Duration::ZERO, VolumeEvent::ChunkCopied { chunk: ChunkId(0), result });
    // The second pass over block 0 may not read it before the write has ended.
    assert!(mirror.waits_for().is_some());
    mirror.handle_event(Duration::ZERO, VolumeEvent::SourceWritten { write, result: Ok(()) });
    assert_eq!(mirror.waits_for(), None);
}

fn copy_all(mirror: &mut Copying, now: Duration) -> Vec<VolumeAction> {
    let mut said = Vec::new();
    loop {
        let asked = actions(mirror);
        let copies: Vec<_> = asked
            .iter()
            .filter_map(|action| match action {
                VolumeAction::Copy { chunk, .. } => Some(*chunk),
                _ => None,
            })
            .collect();
        said.extend(asked);
        if copies.is_empty() {
            return said;
        }
        for chunk in copies {
            let result = Ok(Copied { bytes_written: BLOCK, ..Copied::default() });
            mirror.handle_event(now, VolumeEvent::ChunkCopied { chunk, result });
        }
    }
}

fn arrive(mirror: &mut Copying, now: Duration, number: u64, block: u64) -> Option<Route> {
    let range = ByteRange::new(block * BLOCK, BLOCK);
    mirror.handle_event(now, VolumeEvent::WriteArrived { write: WriteId(number), range });
    actions(mirror).into_iter().find_map(|action| match action {
        VolumeAction::Admit { write, route } if write == WriteId(number) => Some(route),
        _ => None,
    })
}

#[test]
fn writes_go_by_value_while_the_buffer_has_room_and_are_bits_beyond() {
    let mut mirror = asynchronous_mirror_of(8);
    let now = Duration::from_secs(1);
    copy_all(&mut mirror, now);
    assert_eq!(arrive(&mut mirror, now, 0, 0), Some(Route::Both));
    assert_eq!(arrive(&mut mirror, now, 1, 1), Some(Route::Both));
    // The buffer is full.
    assert_eq!(arrive(&mut mirror, now, 2, 2), Some(Route::SourceOnly));
    assert_eq!(mirror.tally().writes_as_bits, 1);
    // The source's completion answers the guest; the target's makes room again.
    for write in [WriteId(0), WriteId(1)] {
        mirror.handle_event(now, VolumeEvent::SourceWritten { write, result: Ok(()) });
        assert!(actions(&mut mirror).contains(&VolumeAction::Complete { write }));
    }
    assert_eq!(arrive(&mut mirror, now, 3, 3), Some(Route::SourceOnly));
    mirror.handle_event(now, VolumeEvent::TargetWritten { write: WriteId(0), result: Ok(()) });
    assert_eq!(arrive(&mut mirror, now, 4, 4), Some(Route::Both));
    // A block in flight is not sent once more.
    assert_eq!(arrive(&mut mirror, now, 5, 4), Some(Route::SourceOnly));
}

#[test]
fn a_migration_that_is_paused_copies_nothing_says_so_and_goes_on() {
    let mut mirror = asynchronous_mirror_of(64);
    let now = Duration::from_secs(1);
    actions(&mut mirror);
    mirror.handle_event(now, VolumeEvent::Pause);
    for chunk in 0..8 {
        let result = Ok(Copied { bytes_written: BLOCK, ..Copied::default() });
        mirror.handle_event(now, VolumeEvent::ChunkCopied { chunk: ChunkId(chunk), result });
    }
    assert!(!actions(&mut mirror).iter().any(|action| matches!(action, VolumeAction::Copy { .. })));
    assert!(mirror.is_paused());
    assert_eq!(mirror.waits_for(), Some("an administrator to resume it"));
    // Due guest writes are still mirrored, and do not wait.
    assert_eq!(arrive(&mut mirror, now, 0, 0), Some(Route::Both));
    assert_eq!(arrive(&mut mirror, now, 1, 63), Some(Route::SourceOnly));
    for write in [WriteId(0), WriteId(1)] {
        mirror.handle_event(now, VolumeEvent::SourceWritten { write, result: Ok(()) });
        mirror.handle_event(now, VolumeEvent::TargetWritten { write, result: Ok(()) });
    }
    mirror.handle_event(now, VolumeEvent::Resume);
    assert!(copy_all(&mut mirror, now).contains(&VolumeAction::Converged));
    mirror.handle_event(now, VolumeEvent::Pause);
    assert_eq!(actions(&mut mirror), [VolumeAction::Behind], "a paused migration is not handed over");
}

#[test]
fn a_link_that_is_away_for_an_hour_fails_nothing_and_holds_nobody() {
    let mut mirror = asynchronous_mirror_of(64);
    let mut now = Duration::from_secs(1);
    actions(&mut mirror);
    mirror.handle_event(now, VolumeEvent::LinkLost);
    assert!(matches!(actions(&mut mirror)[..], [VolumeAction::Suspended { .. }]));
    for number in 0..3600 {
        now += Duration::from_secs(1);
        mirror.handle_timeout(now);
        assert_eq!(arrive(&mut mirror, now, number, number % 64), Some(Route::SourceOnly));
        let write = WriteId(number);
        mirror.handle_event(now, VolumeEvent::SourceWritten { write, result: Ok(()) });
    }
    assert_eq!(actions(&mut mirror), []);
    assert_eq!(mirror.waits_for(), Some("the other host to be reachable again"));
    mirror.handle_event(now, VolumeEvent::LinkBack);
    // Nothing is sent before the requests under way are resolved.
    assert_eq!(actions(&mut mirror), []);
    for chunk in 0..8 {
        let result = Err(CopyFault::Target(TargetFault::Error));
        mirror.handle_event(now, VolumeEvent::ChunkCopied { chunk: ChunkId(chunk), result });
    }
    let said = copy_all(&mut mirror, now);
    assert!(said.contains(&VolumeAction::Resumed) && said.contains(&VolumeAction::Converged));
}

/// Runs a mirror whose link is back for four of every five seconds. `answers` says whether the target answers a chunk in each of
/// these times. Returns when the migration has failed.
fn failed_on_a_flapping_link(answers: bool) -> Option<Duration> {
    let mut mirror = mirror_of(2048);
    let (second, mut now) = (Duration::from_secs(1), Duration::ZERO);
    let mut sent = Vec::new();
    for _ in 0..100 {
        now += 4 * second;
        mirror.handle_timeout(now);
        for action in actions(&mut mirror) {
            match action {
                VolumeAction::Copy { chunk, .. } => sent.push(chunk),
                VolumeAction::Failed { code, .. } => {
                    assert_eq!(code, FailureCode::TargetHung);
                    return Some(now);
                }
                _ => {}
            }
        }
        mirror.handle_event(now, VolumeEvent::LinkLost);
        now += second;
        mirror.handle_event(now, VolumeEvent::LinkBack);
        if answers {
            let result = Ok(Copied { bytes_written: BLOCK, ..Copied::default() });
            mirror.handle_event(now, VolumeEvent::ChunkCopied { chunk: sent.remove(0), result });
        }
    }
    None
}

#[test]
fn a_link_that_comes_back_and_carries_nothing_does_not_prolong_the_wait() {
    // 300 s of waiting, and a second without a link after every four of them.
    let failed = failed_on_a_flapping_link(false);
    assert!(failed.is_some_and(|at| (370..380).contains(&at.as_secs())), "{failed:?}");
    assert_eq!(failed_on_a_flapping_link(true), None, "it moves");
}

#[test]
fn a_write_that_has_waited_at_a_gate_is_not_kept_waiting_for_as_long_again() {
    let second = Duration::from_secs(1);
    // How long the gate was closed, when the write came after its opening, and how long the target may delay it.
    for (closed_for, after, patience) in [
        (Duration::ZERO, Duration::ZERO, second),
        (second / 4, Duration::ZERO, second * 3 / 4),
        (second / 4, Duration::from_millis(1), Duration::from_millis(749)),
        (second / 4, second / 10, second),
    ] {
        let mut mirror = mirror_of(1);
        let result = Ok(Copied { bytes_written: BLOCK, ..Copied::default() });
        mirror.handle_event(Duration::ZERO, VolumeEvent::ChunkCopied { chunk: ChunkId(0), result });
        mirror.handle_event(second, VolumeEvent::GateCloses);
        mirror.handle_event(second + closed_for, VolumeEvent::GateOpens);
        let now = second + closed_for + after;
        let (write, range) = (WriteId(1), ByteRange::new(0, BLOCK));
        mirror.handle_event(now, VolumeEvent::WriteArrived { write, range });
        let is_mirrored = actions(&mut mirror).contains(&VolumeAction::Admit { write, route: Route::Both });
        assert!(is_mirrored, "closed for {closed_for:?}");
        mirror.handle_event(now, VolumeEvent::SourceWritten { write, result: Ok(()) });
        assert_eq!(
            mirror.poll_timeout().unwrap().0,
            now + patience,
            "closed for {closed_for:?}, {after:?} ago"
        );
    }
    // A write whose wait is over goes to the source alone, and is answered by it.
    let mut mirror = mirror_of(1);
    let result = Ok(Copied { bytes_written: BLOCK, ..Copied::default() });
    mirror.handle_event(Duration::ZERO, VolumeEvent::ChunkCopied { chunk: ChunkId(0), result });
    mirror.handle_event(second, VolumeEvent::GateCloses);
    mirror.handle_event(second * 2, VolumeEvent::GateOpens);
    let (write, range) = (WriteId(1), ByteRange::new(0, BLOCK));
    mirror.handle_event(second * 2, VolumeEvent::WriteArrived { write, range });
    assert!(actions(&mut mirror).contains(&VolumeAction::Admit { write, route: Route::SourceOnly }));
}
