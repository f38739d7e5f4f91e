//! Tests when a reservoir serves its new owner, and which reads.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, BufferPool, ByteRange, Change, IoError};
use lane::Rest;
use lane::reservoir::Reservoir;
use migration::MigrationId;

use crate::support::{SIZE, Scene, play};

const DEPARTURE: MigrationId = MigrationId(1);
const BLOCK: usize = 4096;
const MOMENT: Duration = Duration::from_secs(60);

fn devices(
    scene: &Scene,
    reservoir: &Rc<Reservoir>,
    migration: MigrationId,
) -> (Rc<dyn BlockDevice>, Rc<dyn BlockDevice>) {
    let geometry = scene.source.device.geometry();
    let background = reservoir.in_background(migration, geometry, scene.handle.clone());
    (reservoir.of(migration, geometry), background)
}

async fn read(device: &Rc<dyn BlockDevice>) -> Result<(), IoError> {
    device.read(0, BufferPool::new().take(BLOCK)).await.map(drop)
}

fn begin_to_read(scene: &Scene, device: &Rc<dyn BlockDevice>) -> Rc<Cell<bool>> {
    let (is_read, device) = (Rc::<Cell<bool>>::default(), Rc::clone(device));
    let done = Rc::clone(&is_read);
    scene.handle.spawn(async move { done.set(read(&device).await.is_ok()) });
    is_read
}

#[test]
fn after_a_restart_only_what_guests_wait_for_is_read_before_the_migration_goes_on() {
    play(|scene| async move {
        let reservoir = Rc::<Reservoir>::default();
        let (for_guests, background) = devices(&scene, &reservoir, DEPARTURE);
        reservoir.reopen(DEPARTURE, Rc::clone(&scene.source.device));
        let is_read = begin_to_read(&scene, &background);
        scene.handle.sleep(MOMENT).await;
        assert!(!is_read.get(), "nobody has said how fast");
        read(&for_guests).await.unwrap();
        reservoir.rest(Rest::Resume);
        scene.handle.sleep(MOMENT).await;
        assert!(is_read.get());
        // An open reservoir stays as it is.
        reservoir.reopen(DEPARTURE, Rc::clone(&scene.source.device));
        read(&background).await.unwrap();
    });
}

#[test]
fn only_the_migration_that_it_is_open_for_reads_it_and_nobody_writes_there() {
    play(|scene| async move {
        let reservoir = Rc::<Reservoir>::default();
        let (device, _) = devices(&scene, &reservoir, DEPARTURE);
        let (of_another, _) = devices(&scene, &reservoir, MigrationId(2));
        assert_eq!(read(&device).await, Err(IoError::Closed), "it is not open yet");
        reservoir.open(DEPARTURE, Rc::clone(&scene.source.device));
        read(&device).await.unwrap();
        assert_eq!(read(&of_another).await, Err(IoError::Closed));
        assert!(device.geometry().read_only);
        let discard = Change::Discard(ByteRange::new(0, SIZE));
        assert_eq!(device.change(discard).await, Err(IoError::ReadOnly));
        reservoir.open(MigrationId(2), Rc::clone(&scene.source.device));
        assert_eq!(read(&device).await, Err(IoError::Closed), "one at a time");
        read(&of_another).await.unwrap();
    });
}
