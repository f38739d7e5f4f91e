//! A mirror whose target is about to promise: it sends nothing, whatever it hears, until the gate opens again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::strategy::{Copied, Copying, CopyingSettings, HotBlocks, Strategy, VolumeAction, VolumeEvent};

const NOW: Duration = Duration::from_secs(1);
const BYTES: u64 = 4 << 20;

/// A mirror behind a closed gate, all of whose blocks have been copied; few of them durably.
fn copied() -> Copying {
    let mut mirror = Copying::new(
        CopyingSettings {
            block_size: BlockSize::new(4096).unwrap(),
            size_bytes: BYTES,
            pacing: PacingSettings::default(),
            wait_max: Duration::from_secs(1),
            no_progress_max: Duration::from_secs(300),
        },
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
            let copied = Copied { bytes_written: range.length, bytes_zero: 0 };
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
    // Only a try whose gate is closed can freeze it.
    let mut mirror = copied();
    mirror.handle_event(NOW, VolumeEvent::GateOpens);
    mirror.handle_event(NOW, VolumeEvent::Freeze);
    mirror.handle_event(NOW, VolumeEvent::TargetRestarted);
    assert!(sends(&actions(&mut mirror)));
}
