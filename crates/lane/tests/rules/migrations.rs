//! Tests of the rules that one host can break, each with its faults (design §5).

use std::time::Duration;

use crate::support::{GENERATION, LIMITS, SIZE, Scene, block_range, location, play};
use block::filter::fault::FaultRule;
use block::filter::{Operation, Operations};
use block::{BlockDevice as _, Buffer, Durability, IoError};
use lane::TargetContent;
use migration::VolumeIndex;
use migration::journal::{FailureCode, Outcome, Record};
use rustix::io::Errno;

/// How far the clock may exceed a limit: not at all, but tasks run in turns.
const SLACK: Duration = Duration::from_millis(5);

fn eio(operation: &'static str) -> IoError {
    IoError::os(operation, Errno::IO)
}

fn moved() -> Outcome {
    Outcome::Moved { left_over: String::new() }
}

async fn check_still_at_source(scene: &Scene) {
    assert_eq!(scene.volume.generation(), GENERATION);
    assert_eq!(*scene.control.discarded.borrow(), [location("target")]);
    assert!(scene.control.retired.borrow().is_empty());
    let before = scene.target.content().await;
    scene.write(3, 99).await;
    assert_eq!(scene.source.content().await[block_range(3).offset as usize], 99);
    assert_eq!(scene.target.content().await, before, "nothing goes to the target any more");
}

#[test]
fn after_a_migration_the_target_has_everything_and_the_source_serves_nothing() {
    play(|scene| async move {
        scene.fill(512).await;
        let expected = scene.source.content().await;
        assert_eq!(scene.migrate_to_the_end().await, moved());
        assert!(scene.target.content().await == expected);
        assert_eq!(scene.volume.generation(), GENERATION.next());
        assert_eq!(*scene.control.retired.borrow(), [location("source")]);
        // A source that fails every request goes unnoticed.
        scene.source.fault.add(FaultRule::always(Operations::ALL, eio("anything")));
        scene.write(5, 200).await;
        scene.device().flush().await.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(scene.source.fault.failed(), 0);
    });
}

#[test]
fn a_target_that_hangs_holds_a_write_no_longer_than_the_limit_and_the_migration_goes_on_later() {
    play(|scene| async move {
        scene.fill(1024).await;
        let (_, outcome) = scene.migrate_slowly(2 << 20);
        // Long enough for the cursor to pass the first blocks.
        scene.handle.sleep(Duration::from_millis(300)).await;
        scene.target.delay.hang(Operations::CHANGES);
        let took = scene.write(0, 77).await;
        assert!(took <= LIMITS.mirror_wait_max + SLACK, "{took:?}");
        assert!(took > Duration::from_millis(900), "it was not mirrored: {took:?}");
        scene.handle.sleep(Duration::from_millis(200)).await;
        let said = scene.control.progress.borrow().last().and_then(|progress| progress.suspended);
        assert!(said.is_some(), "nobody is told that mirroring is suspended");
        let suspended = scene.write(1, 78).await;
        assert!(suspended <= SLACK, "{suspended:?}");
        scene.target.delay.release();
        assert_eq!(scene.outcome(&outcome).await, moved());
        let target = scene.target.content().await;
        assert_eq!((target[0], target[4096]), (77, 78));
    });
}

#[test]
fn a_target_that_fails_for_good_fails_the_migration_and_never_the_guest() {
    play(|scene| async move {
        scene.fill(1024).await;
        scene.target.fault.add(FaultRule::always(Operations::CHANGES, eio("write")));
        let (_, outcome) = scene.migrate();
        let mut block = 0;
        while outcome.borrow().is_none() {
            let took = scene.write(block % 1024, 50).await;
            assert!(took <= LIMITS.mirror_wait_max + SLACK);
            block += 1;
            scene.handle.sleep(Duration::from_millis(3)).await;
        }
        let outcome = scene.outcome(&outcome).await;
        assert!(matches!(outcome, Outcome::Failed { code: FailureCode::TargetFaulty, .. }), "{outcome:?}");
        check_still_at_source(&scene).await;
    });
}

#[test]
fn a_target_that_fails_now_and_then_costs_time_only() {
    play(|scene| async move {
        scene.fill(1024).await;
        let rule = FaultRule { count: Some(3), ..FaultRule::always(Operations::CHANGES, eio("write")) };
        scene.target.fault.add(rule);
        let expected = scene.source.content().await;
        assert_eq!(scene.migrate_to_the_end().await, moved());
        assert_eq!(scene.target.fault.failed(), 3);
        assert!(scene.target.content().await == expected);
    });
}

#[test]
fn a_target_that_held_something_else_holds_the_volume_and_nothing_else_afterwards() {
    // The declared content of the target decides whether the copy is right.
    for (said, is_right) in [(TargetContent::Unknown, true), (TargetContent::Zero, false)] {
        play(move |mut scene| async move {
            scene.target_content = said;
            scene.write(5, 200).await;
            let dirt = Buffer::copy_of(&vec![0xD1; usize::try_from(SIZE).unwrap_or(0)]);
            let dirty = scene.target.memory.write(0, dirt, Durability::Volatile).await;
            dirty.unwrap_or_else(|error| panic!("{error}"));
            let (_, outcome) = scene.migrate();
            // Guests write, discard and zero meanwhile, in holes and in data.
            scene.write(300, 201).await;
            let range = block::ByteRange::new(4 * 4096, 4 * 4096);
            scene.device().discard(range).await.unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(scene.outcome(&outcome).await, moved());
            let (source, target) = (scene.source.content().await, scene.target.content().await);
            assert_eq!(source == target, is_right, "with a target that is said to be {said:?}");
        });
    }
}

#[test]
fn a_full_target_fails_the_migration_and_says_so() {
    play(|scene| async move {
        scene.fill(1024).await;
        let full = IoError::os("write", Errno::NOSPC);
        let rule = FaultRule {
            probability: 300_000,
            ..FaultRule::always(Operations::of(&[Operation::Write]), full)
        };
        scene.target.fault.add(rule);
        let outcome = scene.migrate_to_the_end().await;
        assert!(matches!(outcome, Outcome::Failed { code: FailureCode::TargetFull, .. }), "{outcome:?}");
        check_still_at_source(&scene).await;
    });
}

#[test]
fn a_source_that_cannot_be_read_fails_the_migration_and_names_the_place() {
    play(|scene| async move {
        scene.fill(1024).await;
        let reads = Operations::of(&[Operation::Read]);
        let rule = FaultRule { range: Some(block_range(700)), ..FaultRule::always(reads, eio("read")) };
        scene.source.fault.add(rule);
        match scene.migrate_to_the_end().await {
            Outcome::Failed { code: FailureCode::SourceUnreadable, detail } => {
                assert!(detail.contains("cannot be read"), "{detail}");
            }
            outcome => panic!("{outcome:?}"),
        }
        check_still_at_source(&scene).await;
    });
}

#[test]
fn a_source_that_fails_a_guests_write_fails_it_as_it_would_without_a_migration() {
    play(|scene| async move {
        scene.fill(64).await;
        let writes = Operations::of(&[Operation::Write]);
        let rule = FaultRule { range: Some(block_range(9)), ..FaultRule::always(writes, eio("write")) };
        scene.source.fault.add(rule);
        let (_, outcome) = scene.migrate();
        let data = Buffer::copy_of(&[4; 4096]);
        let failed = scene.device().write(9 * 4096, data, Durability::Volatile).await;
        assert_eq!(failed, Err(eio("write")));
        assert_eq!(scene.outcome(&outcome).await, moved());
        // The source has the old block, and so has the target.
        assert!(scene.target.content().await == scene.source.content().await);
    });
}

#[test]
fn a_target_that_does_not_answer_after_the_commit_point_gives_the_volume_back() {
    play(|scene| async move {
        scene.fill(64).await;
        let reads = Operations::of(&[Operation::Read]);
        scene.target.fault.add(FaultRule::always(reads, eio("read")));
        let outcome = scene.migrate_to_the_end().await;
        assert!(matches!(outcome, Outcome::HandedBack { .. }), "{outcome:?}");
        assert_eq!(scene.volume.generation(), GENERATION.next().next());
        assert_eq!(*scene.control.discarded.borrow(), [location("target")]);
        scene.write(3, 99).await;
        assert_eq!(scene.source.content().await[block_range(3).offset as usize], 99);
    });
}

#[test]
fn a_switch_over_that_takes_too_long_is_given_up_and_tried_again() {
    play(|scene| async move {
        scene.fill(64).await;
        // The target's last flush hangs: the gate must not stay closed for that.
        let (_, outcome) = scene.migrate();
        let mut longest = Duration::ZERO;
        scene.target.delay.set_latency(Operations::of(&[Operation::Flush]), Duration::from_millis(700));
        for round in 0..300u64 {
            if round == 200 {
                scene.target.delay.clear();
            }
            longest = longest.max(scene.write(round % 64, 1 + (round % 200) as u8).await);
            scene.handle.sleep(Duration::from_millis(20)).await;
        }
        assert!(longest <= LIMITS.switch_over_max + SLACK, "{longest:?}");
        assert!(longest > Duration::from_millis(100), "no try was made while the target was slow");
        assert_eq!(scene.outcome(&outcome).await, moved());
        let aborted = |record: &Record| matches!(record, Record::AttemptAborted { .. });
        assert!(scene.control.records.borrow().iter().any(aborted));
        assert!(scene.target.content().await[..64 * 4096].iter().all(|byte| *byte > 0));
    });
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zeroes_at_the_target() {
    play(|scene| async move {
        scene.fill(1024).await;
        let (driver, outcome) = scene.migrate_slowly(1 << 20);
        let mut block = 0;
        while outcome.borrow().is_none() {
            let device = scene.device();
            if block % 2 == 0 {
                device.discard(block_range(block % 1024)).await.unwrap_or_else(|error| panic!("{error}"));
            } else {
                let mode = block::ZeroMode::MayUnmap;
                let zeroed = device.write_zeroes(block_range(block % 1024), mode, Durability::Volatile).await;
                zeroed.unwrap_or_else(|error| panic!("{error}"));
            }
            block += 7;
            if block > 3000 {
                driver.set_bandwidth(None);
            }
            scene.handle.sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(scene.outcome(&outcome).await, moved());
        let (source, target) = (scene.source.content().await, scene.target.content().await);
        assert!(source == target);
        assert!(target[..4096].iter().all(|byte| *byte == 0));
    });
}

#[test]
fn writes_into_holes_ahead_of_the_cursor_arrive() {
    play(|scene| async move {
        // The volume is sparse: one block in sixteen.
        for block in (0..SIZE / 4096).step_by(16) {
            scene.write(block, 5).await;
        }
        // The copying does not end meanwhile.
        let (driver, outcome) = scene.migrate_slowly(128 << 10);
        for block in (1..SIZE / 4096).step_by(7) {
            scene.write(block, 6).await;
            scene.handle.sleep(Duration::from_millis(1)).await;
        }
        driver.set_bandwidth(None);
        assert_eq!(scene.outcome(&outcome).await, moved());
        assert!(scene.target.content().await == scene.source.content().await);
    });
}

#[test]
fn progress_never_falls_and_is_whole_only_past_the_commit_point() {
    play(|scene| async move {
        scene.fill(1024).await;
        let (_, outcome) = scene.migrate_slowly(4 << 20);
        let mut block = 0;
        while outcome.borrow().is_none() {
            scene.write(block * 13 % 1024, 7).await;
            block += 1;
            scene.handle.sleep(Duration::from_millis(2)).await;
        }
        let progress = scene.control.progress.borrow();
        assert!(progress.len() > 5);
        assert!(progress.windows(2).all(|pair| pair[0].fraction <= pair[1].fraction));
        let whole = progress.iter().filter(|progress| progress.fraction >= 1.0);
        assert!(whole.clone().count() > 0);
        assert!(whole.into_iter().all(|progress| progress.phase >= migration::Phase::Committing));
    });
}

#[test]
fn a_migration_that_fails_never_shows_the_whole() {
    play(|scene| async move {
        scene.fill(1024).await;
        let (driver, outcome) = scene.migrate_slowly(4 << 20);
        scene.handle.sleep(Duration::from_millis(300)).await;
        driver.cancel();
        assert_eq!(scene.outcome(&outcome).await, Outcome::Cancelled);
        let progress = scene.control.progress.borrow();
        assert!(progress.iter().any(|progress| progress.phase == migration::Phase::Discarding));
        assert!(progress.iter().all(|progress| progress.fraction < 1.0));
    });
}

#[test]
fn a_write_that_an_earlier_migration_let_through_is_not_missed_by_the_next() {
    play(|scene| async move {
        scene.fill(1024).await;
        let (driver, outcome) = scene.migrate_slowly(1 << 20);
        scene.handle.sleep(Duration::from_millis(10)).await;
        scene.source.delay.hang(Operations::CHANGES);
        let device = scene.device();
        scene.handle.spawn(async move {
            let written = device.write(0, Buffer::copy_of(&[88; 4096]), Durability::Volatile).await;
            assert_eq!(written, Ok(()));
        });
        scene.handle.sleep(Duration::from_millis(10)).await;
        driver.cancel();
        assert_eq!(scene.outcome(&outcome).await, Outcome::Cancelled);
        // The write is in a stack that is two changes old when this migration begins.
        let (_, outcome) = scene.migrate();
        scene.handle.sleep(Duration::from_millis(100)).await;
        scene.source.delay.release();
        assert_eq!(scene.outcome(&outcome).await, moved());
        assert_eq!(scene.target.content().await[0], 88);
    });
}

#[test]
fn a_target_that_restarts_past_the_commit_point_is_not_copied_to() {
    play(|scene| async move {
        scene.fill(1024).await;
        let (driver, outcome) = scene.migrate();
        scene.reach(&driver, migration::Phase::Committing).await;
        scene.source.fault.add(FaultRule::always(Operations::ALL, eio("anything")));
        driver.target_restarted(VolumeIndex(0));
        assert_eq!(scene.outcome(&outcome).await, moved());
        assert_eq!(scene.source.fault.failed(), 0);
    });
}

#[test]
fn a_guest_does_not_notice_a_target_that_fails_its_trial() {
    play(|scene| async move {
        scene.fill(64).await;
        scene.target.delay.hang(Operations::of(&[Operation::Read]));
        let (driver, outcome) = scene.migrate();
        scene.reach(&driver, migration::Phase::Committing).await;
        // It arrives during the target's trial; the source, which has the volume back, answers it.
        let read = scene.device().read(0, Buffer::zeroed(4096)).await;
        assert_eq!(read.map(|buffer| buffer.as_slice()[0]), Ok(1));
        assert!(matches!(scene.outcome(&outcome).await, Outcome::HandedBack { .. }));
        assert_eq!(scene.target.delay.hanging(), 0, "a guest's request is still at the target");
    });
}
