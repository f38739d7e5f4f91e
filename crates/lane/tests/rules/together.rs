//! Tests volumes that leave together, one of them on a slow thread: a restart of the target's host counts from when the driver
//! learns of it. With a VM, the last requests of its hypervisor are not held.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::filter::fault::FaultRule;
use block::filter::{Aligner, Operations};
use block::{BlockDevice, BufferPool, IoError, ZeroMode};
use bytes::Bytes;
use chronicle::BlockSize;
use lane::peer::{Channel, PriorityBoost, RequestPriority, RpcChannel};
use lane::{
    Control, CopySettings, GivesWay, OutgoingGroup, OutgoingVolume, Replica, SourceDriver, SourceHandle,
    SourcePlan, TargetContent, Volume,
};
use migration::journal::Record;
use migration::message::{ToSource, ToTarget};
use migration::source::{Moves, Peer};
use migration::strategy::Strategy;
use migration::{Attempt, Carried, MigrationId, PacingSettings, VolumeId};
use rustix::io::Errno;

use crate::support::{GENERATION, LIMITS, Scene, Store, location, play};

/// Longer than an attempt at the handover and the pause before it.
const LONG: Duration = Duration::from_millis(300);

/// Two volumes in migration, the messages to their target, and the priorities of the first one's line in turn.
struct Together {
    driver: SourceHandle,
    told: Rc<RefCell<Vec<ToTarget>>>,
    boosts: Rc<RefCell<Vec<PriorityBoost>>>,
}

struct Quiet {
    boosts: Rc<RefCell<Vec<PriorityBoost>>>,
}

impl Channel for Quiet {
    fn send(&self, _: RequestPriority, _: Bytes, _: Bytes) {}

    fn set_boost(&self, boost: PriorityBoost) {
        self.boosts.borrow_mut().push(boost);
    }
}

impl Together {
    /// Begins; the returned future is the other volume's thread, which receives nothing before it runs.
    fn begin(scene: &Scene, moves: Moves) -> (Self, impl Future<Output = ()> + use<>) {
        let (source, target) = (Store::new(&scene.handle), Store::new(&scene.handle));
        let aligner = Aligner::new(BufferPool::new(), scene.handle.clone());
        let other = Volume::new(VolumeId([8; 16]), BlockSize::DEFAULT, GENERATION, source.device, aligner);
        let boosts = Rc::<RefCell<Vec<PriorityBoost>>>::default();
        let quiet = Quiet { boosts: Rc::clone(&boosts) };
        let channel = Some(RpcChannel::new(Box::new(quiet)));
        let leaving = |volume: &Rc<Volume>, target: &Rc<dyn BlockDevice>| OutgoingVolume {
            volume: Rc::clone(volume),
            replica: Replica {
                bulk: Rc::clone(target),
                mirrored: Rc::clone(target),
                content: TargetContent::Zero,
                known: None,
                carried: Carried::default(),
                zeroes: ZeroMode::MayUnmap,
                chunks: lane::Chunks::Copied,
                guests_there: None,
                manifest: None,
            },
            reservoir: None,
            filling: None,
            source_image: location("source"),
            successor: None,
            channel: None,
            to: None,
            lease: None,
        };
        let copying = CopySettings {
            pacing: PacingSettings::default(),
            gives_way: GivesWay::default(),
            limits: LIMITS,
            strategy: Strategy::Mirror,
        };
        let mut group = OutgoingGroup::default();
        let participation = group.add(other.id(), GENERATION, location("other"));
        let buffers = BufferPool::new();
        let leased = leaving(&other, &target.device);
        let (_, follows) = participation.follow(&scene.handle, &buffers, Some(&copying), leased);
        let plan = SourcePlan {
            migration: MigrationId(1),
            volumes: vec![OutgoingVolume { channel, ..leaving(&scene.volume, &scene.target.device) }],
            group,
            keep_source: false,
            copying,
            switch_over_max: LIMITS.switch_over_max,
            peer: Peer::OtherHost,
            moves,
        };
        let told = Rc::<RefCell<Vec<ToTarget>>>::default();
        let tells = Rc::clone(&told);
        let control = Rc::clone(&scene.control) as Rc<dyn Control>;
        let post = Box::new(move |message| tells.borrow_mut().push(message));
        let (driver, source) = SourceDriver::new(scene.handle.clone(), control, &buffers, plan, post);
        scene.handle.spawn(async move { drop(driver.run().await) });
        (Self { driver: source, told, boosts }, follows)
    }

    async fn asked(&self, scene: &Scene) -> Attempt {
        loop {
            let found = self.told.borrow().iter().rev().find_map(|message| match message {
                ToTarget::Prepare(attempt) => Some(*attempt),
                _ => None,
            });
            if let Some(attempt) = found {
                return attempt;
            }
            scene.handle.sleep(Duration::from_millis(1)).await;
        }
    }
}

#[test]
fn nothing_is_released_on_the_word_of_a_target_that_has_restarted_since() {
    play(|scene| async move {
        scene.fill(64).await;
        let (group, follows) = Together::begin(&scene, Moves::Volumes);
        scene.handle.spawn(follows);
        let attempt = group.asked(&scene).await;
        // Both arrive before the driver runs.
        group.driver.peer_restarted();
        group.driver.deliver(ToSource::Prepared(attempt));
        scene.handle.sleep(LONG).await;
        let released = |record: &Record| matches!(record, Record::Released { .. });
        assert!(!scene.control.records.borrow().iter().any(released));
    });
}

#[test]
fn what_a_volume_says_that_has_not_heard_of_a_restart_begins_no_handover() {
    play(|scene| async move {
        scene.fill(64).await;
        let (group, follows) = Together::begin(&scene, Moves::Volumes);
        group.driver.peer_restarted();
        // Meanwhile the other volume's copying ends, and reports that.
        scene.handle.sleep(LONG).await;
        let attempts = scene.control.progress.borrow().last().unwrap().attempt;
        assert_eq!((attempts, group.told.borrow().len()), (0, 0));
        scene.handle.spawn(follows);
        group.asked(&scene).await;
    });
}

#[test]
fn what_a_hypervisor_still_wants_of_its_disks_is_not_held() {
    play(|scene| async move {
        scene.fill(64).await;
        let (group, follows) = Together::begin(&scene, Moves::Vm);
        scene.handle.spawn(follows);
        let attempt = group.asked(&scene).await;
        assert_eq!(*group.boosts.borrow(), [PriorityBoost::AboveMemory], "what was left is downtime");
        let (device, answered) = (scene.device(), Rc::new(Cell::new(false)));
        let tells = Rc::clone(&answered);
        scene.handle.spawn(async move { tells.set(device.flush().await.is_ok()) });
        scene.handle.sleep(LONG).await;
        assert!(answered.get(), "the VM would not come to an end");
        assert_eq!(group.told.borrow().last(), Some(&ToTarget::Abort(attempt)));
        assert_eq!(group.boosts.borrow()[1], PriorityBoost::Off, "the next try waits for the memory");
    });
}

#[test]
fn disks_that_fall_behind_while_memory_is_sent_go_before_it_until_they_have_caught_up() {
    play(|scene| async move {
        scene.fill(64).await;
        let (group, follows) = Together::begin(&scene, Moves::Vm);
        scene.handle.spawn(follows);
        group.asked(&scene).await;
        // It ends the early attempt: the memory is still sent, and the gates are open.
        scene.write(0, 7).await;
        group.boosts.borrow_mut().clear();
        let fails_once = FaultRule {
            count: Some(1),
            ..FaultRule::always(Operations::CHANGES, IoError::os("write", Errno::IO))
        };
        scene.target.fault.add(fails_once);
        scene.write(1, 7).await;
        scene.handle.sleep(Duration::from_secs(2)).await;
        assert_eq!(*group.boosts.borrow(), [PriorityBoost::AboveMemory, PriorityBoost::Off]);
    });
}
