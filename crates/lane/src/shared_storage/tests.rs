//! Tests of leasing an image over a channel, between two ends on one executor, with real files and their locks.

use std::cell::Cell;
use std::future::Future;
use std::path::PathBuf;

use block::engine::{EngineChoice, EngineDriver};
use block::{BufferPool, Executor};
use futures_channel::mpsc;

use super::*;
use crate::peer::head::Address;
use crate::peer::{CallsOnly, Channel, ChannelEvent, PeerStore, RequestPriority, RpcChannel, Service};
use block::device::ALIGNMENT;
use block::store::image::Caching;
use block::store::{Access, Image};
use block::{BlockDevice, Buffer, Durability, Geometry, Handle, IoError};
use bytes::Bytes;
use std::rc::Rc;

const SIZE: u64 = 1 << 20;
const ADDRESS: Address = Address::Replica(0);
const WATCHED: std::time::Duration = std::time::Duration::from_millis(50);

#[test]
fn what_is_written_to_a_borrowed_image_is_there_when_it_is_given_back() {
    play(|scene| async move {
        let (lease, store) = scene.replica(scene.shared.clone());
        store.write(0, filled(7), Durability::Volatile).await.unwrap();
        assert_eq!(scene.way.get(), Some(DataPath::Shared));
        assert!(scene.leased.here().is_none(), "the target has closed it");
        let waiting = Buffer::zeroed(4096);
        assert_eq!(scene.leased.read(0, waiting).await.unwrap().as_slice(), &[7; 4096], "and may read it");
        lease.give_back().await.unwrap();
        let taken = scene.leased.promise().await.unwrap();
        assert_eq!(taken.read(0, Buffer::zeroed(4096)).await.unwrap().as_slice(), &[7; 4096]);
    });
}

#[test]
fn a_promise_waits_for_the_borrower_and_keeps_the_image() {
    play(|scene| async move {
        let (lease, store) = scene.replica(scene.shared.clone());
        let store = Rc::new(store);
        store.write(0, filled(1), Durability::Volatile).await.unwrap();
        let (leased, promised) = (Rc::clone(&scene.leased), Rc::new(Cell::new(false)));
        let says = Rc::clone(&promised);
        scene.handle.spawn(async move {
            leased.promise().await.unwrap();
            says.set(true);
        });
        scene.handle.sleep(WATCHED).await;
        assert!(!promised.get(), "the source has it open");
        lease.give_back().await.unwrap();
        until(&scene.handle, || promised.get()).await;

        // A source that continues waits until the attempt is over.
        let written = Rc::new(Cell::new(false));
        let (says, writes) = (Rc::clone(&written), Rc::clone(&store));
        scene.handle.spawn(async move {
            writes.write(4096, filled(2), Durability::Volatile).await.unwrap();
            says.set(true);
        });
        scene.handle.sleep(WATCHED).await;
        assert!(!written.get() && scene.leased.here().is_some());
        scene.leased.promise_nothing();
        until(&scene.handle, || written.get()).await;
        assert_eq!(scene.way.get(), Some(DataPath::Shared));
    });
}

#[test]
fn an_image_that_is_not_the_same_is_not_leased() {
    play(|scene| async move {
        // A copy of the folder has image and token as well.
        let copy = scene.folder.join("copy");
        std::fs::create_dir(&copy).unwrap();
        for entry in std::fs::read_dir(scene.shared.path.parent().unwrap()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                std::fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
            }
        }
        let path = copy.join("v.img");
        let shared = SharedImage { path: path.clone(), ..scene.shared.clone() };
        assert!(shared.is_there(), "it shows the token");
        let (_borrowing, store) = scene.replica(shared);
        store.write(0, filled(3), Durability::Volatile).await.unwrap();
        assert_eq!(scene.way.get(), Some(DataPath::Link));
        assert_eq!(std::fs::read(path).unwrap()[0], 0, "nothing was written there");
        assert_eq!(scene.leased.read(0, Buffer::zeroed(4096)).await.unwrap().as_slice(), &[3; 4096]);
    });
}

#[test]
fn an_image_whose_lock_the_other_host_does_not_feel_is_not_leased() {
    play(|scene| async move {
        // The folder is the same, but not the file in it, as if each host had locks of its own.
        let away = scene.shared.path.with_extension("away");
        std::fs::rename(&scene.shared.path, &away).unwrap();
        Image::create(&scene.shared.path, SIZE).unwrap();
        let (leased_to, shared) = (scene.shared.path.clone(), scene.shared.clone());
        let leased = Leasable { image: None, shared, size_bytes: SIZE, promise: Promise::None };
        let leased = LeasedImage::new(leased, &scene.handle, &scene.engine);
        assert_eq!(leased.is_locked().await, Err(IoError::Unsupported), "nobody has locked it");
        let taken = Image::open(&leased_to, Access::ReadWrite).unwrap();
        assert_eq!(leased.is_locked().await, Ok(()));
        drop(taken);
    });
}

#[test]
fn nothing_is_written_to_another_file_that_has_come_to_the_name_of_the_image() {
    play(|scene| async move {
        let (path, away) = (scene.shared.path.clone(), scene.shared.path.with_extension("away"));
        let (lease, store) = scene.replica(scene.shared.clone());
        store.write(0, filled(1), Durability::Volatile).await.unwrap();
        lease.give_back().await.unwrap();
        std::fs::rename(&path, &away).unwrap();
        drop(Image::create(&path, SIZE).unwrap());
        // The daemon of the target starts again, and opens the image by its name.
        let again =
            Leasable { image: None, shared: scene.shared.clone(), size_bytes: SIZE, promise: Promise::None };
        let again = LeasedImage::new(again, &scene.handle, &scene.engine);
        again.write(4096, filled(2), Durability::Volatile).await.unwrap_err();
        again.read(4096, Buffer::zeroed(4096)).await.unwrap_err();
        store.write(4096, filled(3), Durability::Volatile).await.unwrap_err();
        let others = std::fs::read(&path).unwrap();
        assert!(others.iter().all(|byte| *byte == 0), "nothing was written there");
    });
}

#[test]
fn blocks_go_over_the_link_when_a_share_breaks() {
    play(|scene| async move {
        let (lease, store) = scene.replica(scene.shared.clone());
        store.write(0, filled(1), Durability::Volatile).await.unwrap();
        // It is given back after an attempt, and then the share disappears at the source.
        lease.give_back().await.unwrap();
        remove(&scene.shared.path).unwrap();
        store.write(4096, filled(2), Durability::Volatile).await.unwrap();
        assert_eq!((scene.way.get(), scene.losses.get()), (Some(DataPath::Link), 1));
        assert_eq!(scene.leased.read(4096, Buffer::zeroed(4096)).await.unwrap().as_slice(), &[2; 4096]);
    });
}

#[test]
fn everybody_who_wants_an_image_after_a_restart_has_it_as_soon_as_one_of_them_has_locked_it() {
    play(|scene| async move {
        let path = scene.folder.join("again.img");
        let image = Image::create(&path, SIZE).unwrap();
        let shared = SharedImage::offer(&path, &**image.held()).unwrap();
        drop(image);
        let leasable = Leasable { image: None, shared, size_bytes: SIZE, promise: Promise::None };
        let leased = LeasedImage::new(leasable, &scene.handle, &scene.engine);
        let writes = (0..8_u8)
            .map(|number| leased.write(u64::from(number) * 4096, filled(number), Durability::Volatile));
        let written = futures_util::future::join_all(writes).await;
        assert!(written.iter().all(Result::is_ok), "{written:?}");
    });
}

#[test]
fn nothing_is_written_when_the_copying_has_ended() {
    play(|scene| async move {
        let (lease, store) = scene.replica(scene.shared.clone());
        store.write(0, filled(1), Durability::Volatile).await.unwrap();
        lease.close();
        assert_eq!(store.write(0, filled(2), Durability::Volatile).await, Err(IoError::Closed));
        scene.leased.promise().await.unwrap();
    });
}

struct Scene {
    folder: PathBuf,
    handle: Handle,
    engine: Rc<dyn block::engine::Engine>,
    near: Rc<RpcChannel>,
    _far: Rc<RpcChannel>,
    shared: SharedImage,
    leased: Rc<LeasedImage>,
    way: Rc<Cell<Option<DataPath>>>,
    losses: Rc<Cell<u32>>,
}

struct Wire(mpsc::UnboundedSender<ChannelEvent>);

impl Channel for Wire {
    fn send(&self, _: RequestPriority, head: Bytes, payload: Bytes) {
        let _ = self.0.unbounded_send(ChannelEvent::Message { head, payload, credit: Box::new(()) });
    }
}

impl Scene {
    fn new(folder: PathBuf, handle: Handle, engine: Rc<dyn block::engine::Engine>) -> Self {
        let path = folder.join("v.img");
        let image = Image::create(&path, SIZE).unwrap();
        let shared = SharedImage::offer(&path, &**image.held()).unwrap();
        let leasable =
            Leasable { image: Some(image), shared: shared.clone(), size_bytes: SIZE, promise: Promise::None };
        let leased = LeasedImage::new(leasable, &handle, &engine);
        let ((to_near, near_hears), (to_far, far_hears)) = (mpsc::unbounded(), mpsc::unbounded());
        let (near, far) = (RpcChannel::new(Box::new(Wire(to_far))), RpcChannel::new(Box::new(Wire(to_near))));
        let (service, nothing) = (
            Service::new(handle.clone(), BufferPool::new()),
            Service::new(handle.clone(), BufferPool::new()),
        );
        service.offer(ADDRESS, Rc::clone(&leased) as Rc<dyn BlockDevice>);
        service.offer_lease(ADDRESS, Rc::clone(&leased));
        handle.spawn(near.run(near_hears, nothing, Rc::new(CallsOnly)));
        handle.spawn(far.run(far_hears, service, Rc::new(CallsOnly)));
        let (way, losses) = (Rc::default(), Rc::default());
        Self { folder, handle, engine, near, _far: far, shared, leased, way, losses }
    }

    fn replica(&self, shared: SharedImage) -> (Rc<HeldLease>, ReplicaStore) {
        let geometry = Geometry { size: SIZE, alignment: ALIGNMENT, read_only: false, discards: true };
        let (told, losses) = (Rc::clone(&self.way), Rc::clone(&self.losses));
        let lease = HeldLease::new(
            self.handle.clone(),
            Rc::clone(&self.engine),
            Rc::clone(&self.near),
            ADDRESS,
            shared,
            geometry,
            Box::new(move |way| told.set(Some(way))),
        );
        lease.on_loss(Box::new(move || losses.set(losses.get() + 1)));
        let link = PeerStore::new(Rc::clone(&self.near), ADDRESS, geometry, RequestPriority::Bulk);
        let store = ReplicaStore::new(Rc::clone(&lease), link);
        (lease, store)
    }
}

fn play<F: Future<Output = ()> + 'static>(test: impl FnOnce(Scene) -> F + 'static) {
    let (driver, engine) = block::engine::open(EngineChoice::Threads).unwrap();
    let mut executor = Executor::<EngineDriver>::new(driver);
    // Inline, because a test takes the parts of its scene.
    let folder = tempfile::tempdir().unwrap();
    let trial = Image::create(&folder.path().join("trial.img"), SIZE).unwrap();
    if trial.caching() != Caching::Direct {
        return omission::kernel_lacks("direct I/O in the folder of temporary files");
    }
    drop(trial);
    let scene = Scene::new(folder.path().to_owned(), executor.handle(), engine);
    executor.run(test(scene));
}

fn filled(byte: u8) -> Buffer {
    let mut buffer = Buffer::zeroed(4096);
    buffer.fill_from(&[byte; 4096]);
    buffer
}

async fn until(handle: &Handle, is_so: impl Fn() -> bool) {
    while !is_so() {
        handle.sleep(std::time::Duration::from_millis(1)).await;
    }
}
