//! Tests a volume that returns to a host where it has left clients: they are forwarded to its owner until it has arrived. Also
//! tests a volume that is promoted by force, whatever its source still sends.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use block::filter::FlushDebt;
use block::filter::fault::FaultRule;
use block::filter::{Operation as DiskOperation, Operations};
use block::{BlockDevice, Buffer, BufferPool, Durability, IoError};
use bytes::Bytes;
use chronicle::BranchId;
use futures_channel::mpsc;
use lane::peer::head::{Address, Head, Operation};
use lane::peer::{CallsOnly, Channel, ChannelEvent, RequestPriority, RpcChannel, Service};
use lane::{
    Control, IncomingGroup, IncomingVolume, Promoted, TargetDriver, TargetHandle, TargetPlan, Volume,
};
use migration::journal::{
    Entry, ExportSettings, MigratingVolume, MigrationState, Promotion, Record, Side, State, VolumeRecord,
};
use migration::message::{ToSource, ToTarget};
use migration::source::Moves;
use migration::{Attempt, HostId, MigrationId, VolumeId};
use rustix::io::Errno;

use crate::support::{GENERATION, LIMITS, Scene, location, play};

const ATTEMPT: Attempt = Attempt(1);
/// Longer than anything here takes, and shorter than a trial may.
const MOMENT: Duration = Duration::from_millis(50);

struct ComingHome {
    driver: TargetHandle,
    told: Rc<RefCell<Vec<ToSource>>>,
    volume: Rc<Volume>,
    service: Rc<Service>,
}

struct ToNobody;

impl Channel for ToNobody {
    fn send(&self, _: RequestPriority, _: Bytes, _: Bytes) {}
}

impl ComingHome {
    /// Begins: clients are forwarded to the scene's source, and the volume arrives at the scene's target.
    fn begin(scene: &Scene) -> Self {
        Self::go_on(scene, None)
    }

    fn go_on(scene: &Scene, recorded: Option<&MigrationState>) -> Self {
        let (volume, buffers) = (Rc::clone(&scene.volume), BufferPool::new());
        let store = FlushDebt::new(Rc::clone(&scene.target.device));
        let service = Service::new(scene.handle.clone(), buffers.clone());
        service.offer(Address::Replica(0), Rc::clone(&store) as Rc<dyn BlockDevice>);
        let plan = TargetPlan {
            migration: MigrationId(1),
            volumes: vec![IncomingVolume {
                volume: Rc::clone(&volume),
                store,
                leased: None,
                image: location("target"),
                filling: None,
            }],
            group: IncomingGroup::default(),
            trial_max: LIMITS.mirror_wait_max,
            service: Some(Rc::clone(&service)),
            moves: Moves::Volumes,
            patience: None,
        };
        let told = Rc::<RefCell<Vec<ToSource>>>::default();
        let tells = Rc::clone(&told);
        let post = Box::new(move |message| tells.borrow_mut().push(message));
        let control = Rc::clone(&scene.control) as Rc<dyn Control>;
        let handle = scene.handle.clone();
        let (driver, target) = match recorded {
            None => TargetDriver::new(handle, control, &buffers, plan, post),
            Some(recorded) => TargetDriver::resume(handle, control, &buffers, plan, post, recorded).unwrap(),
        };
        scene.handle.spawn(async move { drop(driver.run().await) });
        Self { driver: target, told, volume, service }
    }

    async fn prepare(&self, scene: &Scene) {
        self.driver.deliver(ToTarget::Prepare(ATTEMPT));
        scene.handle.sleep(MOMENT).await;
        assert!(self.told.borrow().contains(&ToSource::Prepared(ATTEMPT)));
    }

    async fn commit(&self, scene: &Scene) {
        self.prepare(scene).await;
        let generations = vec![(self.volume.id(), GENERATION.next())];
        self.driver.deliver(ToTarget::Commit { attempt: ATTEMPT, generations });
    }

    fn write(&self, scene: &Scene, stamp: u8) -> Rc<RefCell<bool>> {
        let (device, answered) = (self.volume.device(), Rc::<RefCell<bool>>::default());
        let done = Rc::clone(&answered);
        scene.handle.spawn(async move {
            device.write(0, Buffer::copy_of(&[stamp; 4096]), Durability::Volatile).await.unwrap();
            *done.borrow_mut() = true;
        });
        answered
    }
}

#[test]
fn clients_write_only_once_the_store_has_answered() {
    play(|scene| async move {
        let home = ComingHome::begin(&scene);
        scene.target.delay.set_latency(Operations::of(&[DiskOperation::Read]), MOMENT * 4);
        home.commit(&scene).await;
        scene.handle.sleep(MOMENT).await;
        let answered = home.write(&scene, 7);
        scene.handle.sleep(MOMENT).await;
        assert_eq!((scene.source.content().await[0], scene.target.content().await[0]), (0, 0));
        scene.handle.sleep(MOMENT * 20).await;
        assert!(*answered.borrow());
        assert_eq!((scene.source.content().await[0], scene.target.content().await[0]), (0, 7));
    });
}

#[test]
fn clients_of_a_volume_that_is_handed_back_are_led_to_its_owner_again() {
    play(|scene| async move {
        let home = ComingHome::begin(&scene);
        scene
            .target
            .fault
            .add(FaultRule::always(Operations::of(&[DiskOperation::Read]), IoError::os("read", Errno::IO)));
        home.commit(&scene).await;
        scene.handle.sleep(Duration::ZERO).await;
        let answered = home.write(&scene, 7);
        scene.handle.sleep(MOMENT).await;
        let is_handed_back = |message: &ToSource| matches!(message, ToSource::HandedBack { .. });
        assert!(home.told.borrow().iter().any(is_handed_back));
        home.driver.deliver(ToTarget::Discard);
        scene.handle.sleep(MOMENT).await;
        assert!(*answered.borrow());
        assert_eq!((scene.source.content().await[0], scene.target.content().await[0]), (7, 0));
        assert_eq!(home.volume.generation(), GENERATION);
    });
}

async fn source_changes(scene: &Scene, home: &ComingHome) {
    source_asks(scene, home, Operation::Write { offset: 0, durable: false }).await;
}

async fn source_asks(scene: &Scene, home: &ComingHome, operation: Operation) {
    let (to_service, arrivals) = mpsc::unbounded();
    let channel = RpcChannel::new(Box::new(ToNobody));
    scene.handle.spawn(channel.run(arrivals, Rc::clone(&home.service), Rc::new(CallsOnly)));
    let head = Head::Call { call: 1, address: Address::Replica(0), operation }.encode();
    let payload = Bytes::from_static(&[9; 4096]);
    to_service.unbounded_send(ChannelEvent::Message { head, payload, credit: Box::new(()) }).unwrap();
    scene.handle.sleep(MOMENT).await;
}

/// Forces a promotion; returns whether it was durable a moment later.
async fn forced(scene: &Scene, home: &ComingHome) -> bool {
    let promotion = Promotion::Force { branches: vec![(home.volume.id(), BranchId([1; 16]))] };
    let generations = vec![(home.volume.id(), GENERATION.next())];
    home.driver.promote(Promoted { attempt: ATTEMPT, generations, promotion });
    scene.handle.sleep(MOMENT).await;
    scene.control.records.borrow().iter().any(|record| matches!(record, Record::Promoted { .. }))
}

#[test]
fn a_copy_that_its_source_has_begun_to_change_is_not_promoted_by_force() {
    for goes_on in [false, true] {
        play(move |scene| async move {
            let home = ComingHome::begin(&scene);
            source_changes(&scene, &home).await;
            home.prepare(&scene).await;
            if goes_on {
                source_changes(&scene, &home).await;
            }
            assert_eq!(forced(&scene, &home).await, !goes_on);
            // If refused, it continues as before. If promoted, it takes no change of its former source.
            scene.target.memory.write(0, Buffer::copy_of(&[1; 4096]), Durability::Volatile).await.unwrap();
            source_changes(&scene, &home).await;
            assert_eq!(scene.target.content().await[0], if goes_on { 9 } else { 1 });
        });
    }
}

fn promised(volume: VolumeId) -> MigrationState {
    let migration = MigrationId(1);
    let record = VolumeRecord {
        volume,
        name: "v".to_owned(),
        size_bytes: 1 << 20,
        block_size_bytes: 65536,
        image: location("target"),
        generation: GENERATION,
        export: ExportSettings::default(),
    };
    let (peer, peer_name) = (HostId([7; 32]), "a".to_owned());
    let side = Side::Incoming { peer, peer_name, remote: migration, volumes: vec![record] };
    let volumes = vec![MigratingVolume { volume, source: location("source"), target: location("target") }];
    let started = Record::MigrationStarted { migration, volumes, keep_source: false, side };
    let records = vec![started, Record::TargetPrepared { migration, attempt: ATTEMPT }];
    let mut state = State::default();
    state.apply(&Entry { at_unix_ms: 0, records }).unwrap();
    state.migrations[&migration].clone()
}

#[test]
fn what_was_promised_before_a_restart_is_not_changed_before_the_promise_is_taken_back() {
    for goes_on in [false, true] {
        play(move |scene| async move {
            let home = ComingHome::go_on(&scene, Some(&promised(scene.volume.id())));
            if goes_on {
                scene.control.commits_take.set(MOMENT * 3);
                source_changes(&scene, &home).await;
                assert_eq!(scene.target.content().await[0], 0, "that it is taken back is not durable yet");
            }
            assert_eq!(forced(&scene, &home).await, !goes_on);
            scene.handle.sleep(MOMENT * 5).await;
            assert_eq!(scene.target.content().await[0], if goes_on { 9 } else { 0 });
            let aborted = Record::AttemptAborted { migration: MigrationId(1), attempt: ATTEMPT };
            assert_eq!(scene.control.records.borrow().contains(&aborted), goes_on);
        });
    }
}

#[test]
fn a_target_whose_flush_has_failed_promises_nothing_before_its_source_knows() {
    play(|scene| async move {
        let home = ComingHome::begin(&scene);
        source_asks(&scene, &home, Operation::Write { offset: 0, durable: false }).await;
        let failing =
            FaultRule::always(Operations::of(&[DiskOperation::Flush]), IoError::os("flush", Errno::IO));
        scene.target.fault.add(FaultRule { count: Some(1), ..failing });
        for attempt in 1..=3 {
            // The store itself reports the failure once.
            home.driver.deliver(ToTarget::Prepare(Attempt(attempt)));
            scene.handle.sleep(MOMENT).await;
            assert_eq!(*home.told.borrow(), [ToSource::Query(Attempt::NONE)], "try {attempt}");
        }
        // The source learns of it, and copies the lost blocks again.
        source_asks(&scene, &home, Operation::Flush).await;
        home.driver.deliver(ToTarget::Prepare(Attempt(4)));
        scene.handle.sleep(MOMENT).await;
        assert!(home.told.borrow().contains(&ToSource::Prepared(Attempt(4))), "{:?}", home.told.borrow());
    });
}
