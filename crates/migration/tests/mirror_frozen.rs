//! Tests that a mirror whose target is about to promise sends nothing, whatever happens, until the gate opens again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::strategy::{
    Copied, Copying, CopyingSettings, HotBlocks, Strategy, TellingId, VolumeAction, VolumeEvent,
};

const NOW: Duration = Duration::from_secs(1);
const BYTES: u64 = 4 << 20;

fn settings() -> CopyingSettings {
    CopyingSettings {
        block_size: BlockSize::new(4096).unwrap(),
        size_bytes: BYTES,
        pacing: PacingSettings::default(),
        wait_max: Duration::from_secs(1),
        no_progress_max: Duration::from_secs(300),
    }
}

/// Returns a mirror behind a closed gate, with all blocks copied, but few of them durably.
fn copied() -> Copying {
    let mut mirror = Copying::new(
        settings(),
        Strategy::AsynchronousMirror {
            buffer_bytes_max: 64 << 20,
            drain_max: Duration::from_millis(250),
            hot: HotBlocks::PutOff,
        },
    );
    mirror.handle_event(NOW, VolumeEvent::GateCloses);
    mirror.handle_event(NOW, VolumeEvent::Allocated(ByteRange::new(0, BYTES)));
    mirror.handle_event(NOW, VolumeEvent::AllocationKnown);
    while let Some(action) = mirror.poll_action() {
        if let VolumeAction::Copy { chunk, range } = action {
            let copied = Copied { bytes_written: range.length, ..Copied::default() };
            mirror.handle_event(NOW, VolumeEvent::ChunkCopied { chunk, result: Ok(copied) });
        }
    }
    assert_eq!(mirror.blocks_remaining(), 0);
    mirror
}

fn actions(mirror: &mut Copying) -> Vec<VolumeAction> {
    std::iter::from_fn(|| mirror.poll_action()).collect()
}

fn sends(actions: &[VolumeAction]) -> bool {
    actions
        .iter()
        .any(|action| matches!(action, VolumeAction::Copy { .. } | VolumeAction::FlushTarget { .. }))
}

#[test]
fn a_frozen_mirror_sends_nothing_to_a_target_that_has_restarted() {
    let mut mirror = copied();
    mirror.handle_event(NOW, VolumeEvent::Freeze);
    mirror.handle_event(NOW, VolumeEvent::TargetRestarted);
    mirror.handle_event(NOW, VolumeEvent::FlushWanted);
    let said = actions(&mut mirror);
    assert!(!sends(&said), "{said:?}");
    assert!(said.contains(&VolumeAction::Behind), "{said:?}");
    assert!(mirror.blocks_remaining() > 0, "what was not durable there is lost");
    mirror.handle_event(NOW, VolumeEvent::GateOpens);
    assert!(sends(&actions(&mut mirror)), "the try is over, and the copying goes on");
}

#[test]
fn a_mirror_that_is_not_frozen_goes_on_at_once() {
    let mut mirror = copied();
    mirror.handle_event(NOW, VolumeEvent::TargetRestarted);
    assert!(sends(&actions(&mut mirror)));
    // The attempt must have closed the gate before it can freeze it.
    let mut mirror = copied();
    mirror.handle_event(NOW, VolumeEvent::GateOpens);
    mirror.handle_event(NOW, VolumeEvent::Freeze);
    mirror.handle_event(NOW, VolumeEvent::TargetRestarted);
    assert!(sends(&actions(&mut mirror)));
}

/// Returns a post-copy without rounds behind its closing gate, with everything missing, and its missing-set update.
fn left_behind() -> (Copying, TellingId) {
    let mut copying = Copying::new(settings(), Strategy::PostCopy { rounds_max: 0 });
    copying.handle_event(NOW, VolumeEvent::GateCloses);
    copying.handle_event(NOW, VolumeEvent::Allocated(ByteRange::new(0, BYTES)));
    copying.handle_event(NOW, VolumeEvent::AllocationKnown);
    let telling = told(&actions(&mut copying)).unwrap();
    (copying, telling)
}

fn told(actions: &[VolumeAction]) -> Option<TellingId> {
    actions.iter().find_map(|action| match action {
        VolumeAction::TellMissing { telling } => Some(*telling),
        _ => None,
    })
}

#[test]
fn a_target_that_has_promised_and_restarted_is_told_nothing_before_the_try_is_over() {
    let (mut copying, telling) = left_behind();
    copying.handle_event(NOW, VolumeEvent::MissingTold { telling, result: Ok(()) });
    assert!(actions(&mut copying).contains(&VolumeAction::Synchronised));
    copying.handle_event(NOW, VolumeEvent::Freeze);
    copying.handle_event(NOW, VolumeEvent::TargetRestarted);
    let said = actions(&mut copying);
    assert_eq!(told(&said), None, "it would take its promise back: {said:?}");
    assert!(said.contains(&VolumeAction::Behind), "{said:?}");
    copying.handle_event(NOW, VolumeEvent::GateOpens);
    let flush = actions(&mut copying).into_iter().find_map(|action| match action {
        VolumeAction::FlushTarget { flush } => Some(flush),
        _ => None,
    });
    copying.handle_event(NOW, VolumeEvent::TargetFlushed { flush: flush.unwrap(), result: Ok(()) });
    assert!(told(&actions(&mut copying)).is_some(), "the try is over, and it is told anew");
}

#[test]
fn what_is_being_told_is_answered_before_anything_is_promised_even_if_it_counts_no_more() {
    let (mut copying, first) = left_behind();
    copying.handle_event(NOW, VolumeEvent::TargetRestarted);
    let said = actions(&mut copying);
    assert_eq!(told(&said), None, "the first is on its way, and may come late: {said:?}");
    copying.handle_event(NOW, VolumeEvent::MissingTold { telling: first, result: Ok(()) });
    let said = actions(&mut copying);
    assert!(!said.contains(&VolumeAction::Synchronised), "that was another process: {said:?}");
    let telling = told(&said).unwrap();
    copying.handle_event(NOW, VolumeEvent::MissingTold { telling, result: Ok(()) });
    assert!(actions(&mut copying).contains(&VolumeAction::Synchronised));
}
