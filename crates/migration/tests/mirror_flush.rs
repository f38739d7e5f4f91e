//! Tests failed flushes of a mirror's target: blocks that may be lost are missing again, whatever caused the flush.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::strategy::{
    Copied, Copying, CopyingSettings, FlushId, HotBlocks, Strategy, TargetFault, VolumeAction, VolumeEvent,
};

const BYTES: u64 = 1 << 20;
const BLOCKS: u64 = BYTES / 4096;
/// Longer than the pause of a mirror after a fault.
const PAUSE: Duration = Duration::from_secs(1);

struct Scene {
    mirror: Copying,
    now: Duration,
}

impl Scene {
    /// Returns a mirror that has copied everything and waits for the returned flush.
    fn copied(strategy: Strategy) -> (Self, FlushId) {
        let mirror = Copying::new(
            CopyingSettings {
                block_size: BlockSize::new(4096).unwrap(),
                size_bytes: BYTES,
                pacing: PacingSettings::default(),
                wait_max: Duration::from_secs(1),
                no_progress_max: Duration::from_secs(300),
            },
            strategy,
        );
        let mut scene = Self { mirror, now: PAUSE };
        scene.tell(VolumeEvent::Allocated(ByteRange::new(0, BYTES)));
        scene.tell(VolumeEvent::AllocationKnown);
        let (copied, _) = scene.go_on();
        assert_eq!(copied, BLOCKS);
        scene.tell(VolumeEvent::FlushWanted);
        let (_, flush) = scene.go_on();
        (scene, flush.unwrap_or(FlushId(0)))
    }

    fn tell(&mut self, event: VolumeEvent) {
        self.mirror.handle_event(self.now, event);
    }

    fn flushed(&mut self, flush: FlushId, result: Result<(), TargetFault>) {
        self.tell(VolumeEvent::TargetFlushed { flush, result });
    }

    fn pause(&mut self) {
        self.now += PAUSE;
        self.mirror.handle_timeout(self.now);
    }

    /// Completes all requested copies; returns the number of blocks, and the requested flush.
    fn go_on(&mut self) -> (u64, Option<FlushId>) {
        let (mut blocks, mut asked) = (0, None);
        while let Some(action) = self.mirror.poll_action() {
            match action {
                VolumeAction::Copy { chunk, range } => {
                    blocks += range.length / 4096;
                    let copied = Copied { bytes_written: range.length, ..Copied::default() };
                    self.tell(VolumeEvent::ChunkCopied { chunk, result: Ok(copied) });
                }
                VolumeAction::FlushTarget { flush } => asked = Some(flush),
                VolumeAction::Failed { detail, .. } => panic!("{detail}"),
                _ => {}
            }
        }
        (blocks, asked)
    }
}

fn source_alone() -> Strategy {
    Strategy::AsynchronousMirror {
        buffer_bytes_max: 64 << 20,
        drain_max: Duration::from_millis(250),
        hot: HotBlocks::PutOff,
    }
}

#[test]
fn what_a_failed_flush_may_have_lost_is_copied_again() {
    for strategy in [Strategy::Mirror, source_alone()] {
        let (mut scene, flush) = Scene::copied(strategy);
        scene.flushed(flush, Err(TargetFault::Error));
        assert_eq!(scene.mirror.blocks_remaining(), BLOCKS);
        scene.pause();
        let (copied, again) = scene.go_on();
        assert_eq!(copied, BLOCKS, "a flush that succeeds later vouches for none of it");
        if let Some(again) = again {
            scene.flushed(again, Ok(()));
        }
        assert_eq!((scene.mirror.blocks_remaining(), scene.go_on().0), (0, 0));
    }
}

#[test]
fn what_was_on_its_way_when_a_flush_failed_is_copied_again_although_it_is_answered() {
    let (mut scene, flush) = Scene::copied(Strategy::Mirror);
    scene.tell(VolumeEvent::Allocated(ByteRange::new(0, 4096)));
    let Some(VolumeAction::Copy { chunk, range }) = scene.mirror.poll_action() else {
        panic!("nothing is copied")
    };
    scene.flushed(flush, Err(TargetFault::Error));
    let copied = Copied { bytes_written: range.length, ..Copied::default() };
    scene.tell(VolumeEvent::ChunkCopied { chunk, result: Ok(copied) });
    assert_eq!(scene.mirror.blocks_remaining(), BLOCKS);
}

#[test]
fn after_a_try_that_was_given_up_the_target_is_asked_whether_a_flush_of_its_own_has_failed() {
    for strategy in [Strategy::Mirror, source_alone()] {
        let (mut scene, flush) = Scene::copied(strategy);
        scene.flushed(flush, Ok(()));
        scene.tell(VolumeEvent::GateCloses);
        scene.tell(VolumeEvent::Freeze);
        scene.go_on();
        scene.tell(VolumeEvent::GateOpens);
        let asked: Vec<_> = std::iter::from_fn(|| scene.mirror.poll_action()).collect();
        let flush = asked.iter().find_map(|action| match action {
            VolumeAction::FlushTarget { flush } => Some(*flush),
            _ => None,
        });
        let Some(flush) = flush else { panic!("{asked:?}") };
        scene.tell(VolumeEvent::GateCloses);
        let said: Vec<_> = std::iter::from_fn(|| scene.mirror.poll_action()).collect();
        assert!(!said.contains(&VolumeAction::Synchronised), "{said:?}: how that ends is not known yet");
        scene.flushed(flush, Ok(()));
        let said: Vec<_> = std::iter::from_fn(|| scene.mirror.poll_action()).collect();
        assert!(said.contains(&VolumeAction::Synchronised), "{said:?}");
    }
}

#[test]
fn a_flush_that_confirms_nothing_any_more_is_waited_for_and_what_it_may_have_lost_is_copied_again() {
    for strategy in [Strategy::Mirror, source_alone()] {
        let (mut scene, flush) = Scene::copied(strategy);
        scene.tell(VolumeEvent::TargetRestarted);
        let (copied, again) = scene.go_on();
        assert_eq!((copied, again), (BLOCKS, None), "no other flush beside it");
        // Later writes may be lost with it.
        scene.flushed(flush, Err(TargetFault::Error));
        let (copied, again) = scene.go_on();
        assert_eq!(copied, BLOCKS);
        if let Some(again) = again {
            scene.flushed(again, Ok(()));
        }
        assert_eq!((scene.mirror.blocks_remaining(), scene.go_on().0), (0, 0));
    }
}
