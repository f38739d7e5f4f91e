//! Tests the promises of another host's device, and a broken line.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use block::conformance::Suite;
use block::filter::Aligner;
use block::{BlockDevice, Buffer, BufferPool, Durability, Handle, IoError, MemoryStore};
use bytes::Bytes;
use chronicle::{BlockSize, Generation};
use futures_channel::{mpsc, oneshot};
use futures_util::future::join_all;
use lane::Volume;
use lane::peer::head::{Address, Head, HeldBack, Operation};
use lane::peer::{
    ArrivingChunks, Channel, ChannelEvent, ChannelEvents, Listener, PeerStore, PeerVolume, RequestPriority,
    RpcChannel, Service,
};
use lane::stack::{Gate, GateMode};
use migration::{HostId, VolumeId};

use super::support::{SIZE, play};

const VOLUME: VolumeId = VolumeId([7; 16]);
/// The longest journey of a message in milliseconds: each takes a random time, so messages overtake each other.
const JOURNEY_MAX_MS: u64 = 7;

struct Wire {
    handle: Handle,
    arrivals: mpsc::UnboundedSender<ChannelEvent>,
    state: Rc<WireState>,
}

pub(crate) struct WireState {
    sent: Cell<u64>,
    pub(crate) is_cut: Cell<bool>,
    held: Cell<usize>,
    window: Cell<usize>,
    queued: RefCell<VecDeque<(Bytes, Bytes)>>,
    kept: RefCell<VecDeque<(Bytes, Bytes)>>,
}

impl Default for WireState {
    fn default() -> Self {
        Self {
            sent: Cell::default(),
            is_cut: Cell::default(),
            held: Cell::default(),
            window: Cell::new(usize::MAX),
            queued: RefCell::default(),
            kept: RefCell::default(),
        }
    }
}

impl Channel for Wire {
    fn send(&self, _: RequestPriority, head: Bytes, payload: Bytes) {
        if self.state.is_cut.get() {
            self.state.kept.borrow_mut().push_back((head, payload));
            return;
        }
        self.state.queued.borrow_mut().push_back((head, payload));
        self.carry();
    }
}

impl Wire {
    /// Carries messages as far as there is credit; the rest waits for released payloads.
    fn carry(&self) {
        let state = &self.state;
        loop {
            let next = state.queued.borrow().front().map(|(_, payload)| payload.len());
            let Some(bytes) = next.filter(|bytes| state.held.get() + bytes <= state.window.get()) else {
                return;
            };
            state.held.set(state.held.get() + bytes);
            let Some((head, payload)) = state.queued.borrow_mut().pop_front() else { return };
            let number = state.sent.get() + 1;
            state.sent.set(number);
            let wire = Self {
                handle: self.handle.clone(),
                arrivals: self.arrivals.clone(),
                state: Rc::clone(state),
            };
            let (returned, released) = oneshot::channel::<()>();
            self.handle.spawn(async move {
                wire.handle.sleep(Duration::from_millis(number * 7919 % JOURNEY_MAX_MS)).await;
                let credit = Box::new(returned);
                let _ = wire.arrivals.unbounded_send(ChannelEvent::Message { head, payload, credit });
                // It is dropped, never sent.
                let _ = released.await;
                wire.state.held.set(wire.state.held.get() - bytes);
                wire.carry();
            });
        }
    }
}

#[derive(Default)]
struct Heard(RefCell<Vec<String>>);

impl Listener for Heard {
    fn message(&self, message: &[u8]) {
        self.0.borrow_mut().push(String::from_utf8_lossy(message).into_owned());
    }

    fn link_lost(&self, reason: &str) {
        self.0.borrow_mut().push(format!("lost: {reason}"));
    }

    fn link_restored(&self) {
        self.0.borrow_mut().push("back".into());
    }

    fn peer_restarted(&self) {
        self.0.borrow_mut().push("restarted".into());
    }
}

/// Two ends of a line; the far one serves a store in memory.
pub(crate) struct Ends {
    pub(crate) near: Rc<RpcChannel>,
    far: Rc<RpcChannel>,
    pub(crate) service: Rc<Service>,
    pub(crate) memory: Rc<MemoryStore>,
    heard: Rc<Heard>,
    to_near: mpsc::UnboundedSender<ChannelEvent>,
    to_far: mpsc::UnboundedSender<ChannelEvent>,
    pub(crate) line: Rc<WireState>,
    pub(crate) line_back: Rc<WireState>,
}

impl Ends {
    pub(crate) fn new(handle: &Handle, size: u64) -> Self {
        let (to_near, near_arrivals) = mpsc::unbounded();
        let (to_far, far_arrivals) = mpsc::unbounded();
        let (line, line_back) = (Rc::<WireState>::default(), Rc::<WireState>::default());
        let wire = |arrivals: &mpsc::UnboundedSender<ChannelEvent>, state| {
            Box::new(Wire { handle: handle.clone(), arrivals: arrivals.clone(), state })
        };
        let near = RpcChannel::new(wire(&to_far, Rc::clone(&line)));
        let far = RpcChannel::new(wire(&to_near, Rc::clone(&line_back)));
        let memory = Rc::new(MemoryStore::new(size));
        let service = Service::new(handle.clone(), BufferPool::new());
        service.offer(Address::Replica(0), Rc::clone(&memory) as Rc<dyn BlockDevice>);
        let heard = Rc::<Heard>::default();
        let nothing = Service::new(handle.clone(), BufferPool::new());
        handle.spawn(Rc::clone(&near).run(near_arrivals, nothing, Rc::clone(&heard) as Rc<dyn Listener>));
        let far_heard = Rc::clone(&heard) as Rc<dyn Listener>;
        handle.spawn(Rc::clone(&far).run(far_arrivals, Rc::clone(&service), far_heard));
        Self { near, far, service, memory, heard, to_near, to_far, line, line_back }
    }

    /// Mends the line: messages that the near end sent meanwhile arrive.
    pub(crate) fn mend(&self) {
        self.line.is_cut.set(false);
        for (head, payload) in self.line.kept.take() {
            let _ = self.to_far.unbounded_send(ChannelEvent::Message { head, payload, credit: Box::new(()) });
        }
    }

    pub(crate) fn volume(&self, handle: &Handle, volume: VolumeId) -> Rc<PeerVolume> {
        let geometry = self.memory.geometry();
        PeerVolume::new(Rc::clone(&self.near), volume, geometry, handle.clone())
    }

    /// Restarts the far end's process; to that process, the near end is a new one as well.
    pub(crate) fn restart_far(&self) {
        for end in [&self.to_near, &self.to_far] {
            // An end that is gone receives nothing.
            let _ = end.unbounded_send(ChannelEvent::PeerRestarted);
        }
    }

    fn limit_to(&self, bytes: usize) {
        self.line.window.set(bytes);
        self.line_back.window.set(bytes);
    }

    fn store(&self) -> PeerStore {
        let geometry = self.memory.geometry();
        PeerStore::new(Rc::clone(&self.near), Address::Replica(0), geometry, RequestPriority::Bulk)
    }
}

#[test]
fn a_store_of_another_host_keeps_the_contract() {
    play(|scene| async move {
        let kept = RefCell::new(Vec::new());
        let handle = scene.handle.clone();
        let factory = |size| {
            let ends = Ends::new(&handle, size);
            let store = Rc::new(ends.store()) as Rc<dyn BlockDevice>;
            kept.borrow_mut().push(ends);
            store
        };
        let name = "a store of another host";
        Suite::new(name, scene.handle.clone(), factory).sizes(&[(3 << 20) + 512, (96 << 10) + 1]).run().await;
    });
}

#[test]
fn a_volume_of_another_host_keeps_the_contract() {
    play(|scene| async move {
        let kept = RefCell::new(Vec::new());
        let handle = scene.handle.clone();
        let factory = |size| {
            let ends = Ends::new(&handle, size);
            let aligner = Aligner::new(BufferPool::new(), handle.clone());
            let below = Rc::clone(&ends.memory) as Rc<dyn BlockDevice>;
            let owner = Volume::new(VOLUME, BlockSize::DEFAULT, Generation(1), below, aligner);
            ends.service.offer_volume(owner, HostId([2; 32]));
            let volume = ends.volume(&handle, VOLUME) as Rc<dyn BlockDevice>;
            kept.borrow_mut().push(ends);
            volume
        };
        let name = "a volume of another host";
        Suite::new(name, scene.handle.clone(), factory).sizes(&[(3 << 20) + 512, (96 << 10) + 1]).run().await;
    });
}

const LARGEST: usize = 32 << 20;

#[test]
fn requests_of_any_size_are_answered_over_a_line_that_carries_little_at_a_time() {
    play(|scene| async move {
        let ends = Ends::new(&scene.handle, LARGEST as u64);
        ends.limit_to(2 << 20);
        ends.service.offer(Address::Owner(VOLUME.0), Rc::clone(&ends.memory) as Rc<dyn BlockDevice>);
        let volume = ends.volume(&scene.handle, VOLUME);
        volume.write(0, Buffer::copy_of(&vec![7; LARGEST]), Durability::Durable).await.unwrap();
        // Several at once, none of which may keep what the others wait for.
        let reads = (0..3).map(|_| volume.read(0, Buffer::zeroed(LARGEST)));
        for read in join_all(reads).await {
            assert!(read.unwrap().as_slice().iter().all(|byte| *byte == 7));
        }
        let store = ends.store();
        let read = store.read(0, Buffer::zeroed(LARGEST)).await.unwrap();
        assert!(read.as_slice().iter().all(|byte| *byte == 7));
    });
}

#[test]
fn a_volume_that_hangs_at_its_owner_keeps_nothing_of_the_line_from_others() {
    play(|scene| async move {
        let ends = Ends::new(&scene.handle, LARGEST as u64);
        ends.limit_to(12 << 20);
        let stuck = Rc::new(Gate::new(Rc::new(MemoryStore::new(LARGEST as u64))));
        stuck.set_mode(GateMode::Hold);
        let other = VolumeId([8; 16]);
        ends.service.offer(Address::Owner(VOLUME.0), stuck);
        ends.service.offer(Address::Owner(other.0), Rc::clone(&ends.memory) as Rc<dyn BlockDevice>);
        let (hangs, works) = (ends.volume(&scene.handle, VOLUME), ends.volume(&scene.handle, other));
        for _ in 0..4 {
            let hangs = Rc::clone(&hangs);
            scene.handle.spawn(async move {
                let _ = hangs.write(0, Buffer::zeroed(LARGEST), Durability::Volatile).await;
            });
        }
        scene.handle.sleep(Duration::from_secs(1)).await;
        assert_eq!(ends.line.held.get(), 0, "what waits for a volume is set aside");
        works.write(0, Buffer::copy_of(&vec![7; LARGEST]), Durability::Volatile).await.unwrap();
        works.read(0, Buffer::zeroed(LARGEST)).await.unwrap();
    });
}

#[test]
fn a_peer_that_sends_without_end_is_given_no_credit_back_for_more_than_is_set_aside() {
    const CALLS: u64 = 64;
    const SET_ASIDE: u64 = 8;
    play(|scene| async move {
        let ends = Ends::new(&scene.handle, LARGEST as u64);
        let stuck = Rc::new(Gate::new(Rc::new(MemoryStore::new(LARGEST as u64))));
        stuck.set_mode(GateMode::Hold);
        ends.service.offer(Address::Owner(VOLUME.0), Rc::clone(&stuck) as Rc<dyn BlockDevice>);
        // A correct host would wait for answers instead.
        let credit = Arc::new(());
        for call in 1..=CALLS {
            let operation = Operation::Write { offset: 0, durable: false };
            let head = Head::Call { call, address: Address::Owner(VOLUME.0), operation }.encode();
            let (payload, credit) = (Bytes::from(vec![0; 1 << 20]), Box::new(Arc::clone(&credit)));
            ends.to_far.unbounded_send(ChannelEvent::Message { head, payload, credit }).unwrap();
        }
        let kept_back = || Arc::strong_count(&credit) as u64 - 1;
        scene.handle.sleep(Duration::from_secs(1)).await;
        assert_eq!(kept_back(), CALLS - SET_ASIDE, "MiB");
        stuck.set_mode(GateMode::Open);
        scene.handle.sleep(Duration::from_secs(1)).await;
        assert_eq!(kept_back(), 0, "they are done");
    });
}

#[test]
fn requests_wait_while_the_line_is_cut_and_fail_when_the_peer_has_restarted() {
    play(|scene| async move {
        let ends = Ends::new(&scene.handle, SIZE);
        let store = Rc::new(ends.store());
        ends.line.is_cut.set(true);
        let result = Rc::new(Cell::new(None));
        let (writer, written) = (Rc::clone(&store), Rc::clone(&result));
        scene.handle.spawn(async move {
            written.set(Some(writer.write(0, Buffer::copy_of(&[7; 4096]), Durability::Volatile).await));
        });
        scene.handle.sleep(Duration::from_secs(60)).await;
        assert_eq!(result.get(), None, "it waits for the line, however long that takes");
        ends.to_near.unbounded_send(ChannelEvent::PeerRestarted).unwrap();
        scene.handle.sleep(Duration::from_millis(1)).await;
        assert!(matches!(result.get(), Some(Err(_))), "{:?}", result.get());
        assert_eq!(*ends.heard.0.borrow(), ["restarted"]);
    });
}

#[test]
fn owner_that_has_restarted_is_asked_again() {
    play(|scene| async move {
        let ends = Ends::new(&scene.handle, SIZE);
        ends.service.offer(Address::Owner(VOLUME.0), Rc::clone(&ends.memory) as Rc<dyn BlockDevice>);
        let volume = ends.volume(&scene.handle, VOLUME);
        ends.line.is_cut.set(true);
        let result = Rc::new(Cell::new(None));
        let written = Rc::clone(&result);
        scene.handle.spawn(async move {
            written.set(Some(volume.write(0, Buffer::copy_of(&[7; 4096]), Durability::Durable).await));
        });
        scene.handle.sleep(Duration::from_millis(1)).await;
        ends.line.is_cut.set(false);
        ends.to_near.unbounded_send(ChannelEvent::PeerRestarted).unwrap();
        scene.handle.sleep(Duration::from_secs(1)).await;
        assert_eq!(result.get(), Some(Ok(())));
        let read = ends.memory.read(0, Buffer::zeroed(4096)).await.unwrap();
        assert_eq!(read.as_slice(), [7; 4096]);
    });
}

#[test]
fn withdrawn_replica_takes_nothing_any_more() {
    play(|scene| async move {
        let ends = Ends::new(&scene.handle, SIZE);
        let store = ends.store();
        store.write(0, Buffer::copy_of(&[1; 4096]), Durability::Durable).await.unwrap();
        ends.service.withdraw(Address::Replica(0));
        let refused = store.write(0, Buffer::copy_of(&[2; 4096]), Durability::Durable).await;
        assert_eq!(refused, Err(IoError::Closed));
        let read = ends.memory.read(0, Buffer::zeroed(4096)).await.unwrap();
        assert_eq!(read.as_slice(), [1; 4096]);
    });
}

/// A disk of the far end with a guest, whose requests take 100 µs until it is stuck.
struct BusyDisk {
    disk: Arc<pacer::Store>,
    is_stuck: Rc<Cell<bool>>,
}

impl BusyDisk {
    fn new(handle: &Handle) -> Self {
        let (disk, is_stuck) = (pacer::Store::new(), Rc::<Cell<bool>>::default());
        let (handle, stuck, gauge) = (handle.clone(), Rc::clone(&is_stuck), pacer::Gauge::default());
        gauge.join(&disk);
        handle.clone().spawn(async move {
            loop {
                let request = gauge.arrived(handle.now());
                handle.sleep(Duration::from_micros(100)).await;
                while stuck.get() {
                    handle.sleep(Duration::from_millis(10)).await;
                }
                request.ended(handle.now(), pacer::RequestClass::read(4096));
            }
        });
        Self { disk, is_stuck }
    }
}

#[test]
fn chunks_give_way_to_guests_of_the_targets_disk_and_guests_writes_do_not() {
    play(|scene| async move {
        let (handle, ends) = (scene.handle.clone(), Ends::new(&scene.handle, SIZE));
        let busy = BusyDisk::new(&handle);
        let disks = pacer::Stores::default().and(Arc::clone(&busy.disk));
        ends.service.offer_chunks(Address::Replica(0), ArrivingChunks::new(handle.clone(), disks));
        let (geometry, near) = (ends.memory.geometry(), Rc::clone(&ends.near));
        let bulk = Rc::new(PeerStore::new(near, Address::ReplicaInBulk(0), geometry, RequestPriority::Bulk));
        let chunk = || Buffer::copy_of(&[3; 1 << 20]);
        assert!(!bulk.give_way(None).await.unwrap().is_paced);
        let impact = pacer::Impact::percent(20);
        bulk.give_way(impact).await.unwrap();
        for _ in 0..4 {
            bulk.write(0, chunk(), Durability::Volatile).await.unwrap();
        }
        busy.is_stuck.set(true);
        handle.sleep(Duration::from_millis(100)).await;
        let is_written = Rc::<Cell<bool>>::default();
        let (writes, written) = (Rc::clone(&bulk), Rc::clone(&is_written));
        handle.spawn(async move {
            writes.write(0, chunk(), Durability::Volatile).await.unwrap();
            written.set(true);
        });
        handle.sleep(Duration::from_millis(200)).await;
        let given_way = bulk.give_way(impact).await.unwrap();
        assert_eq!((given_way.held_back, given_way.bytes_arrived), (HeldBack::ByGuests, 1 << 20));
        assert!(given_way.is_paced && given_way.has_guests && !is_written.get(), "{given_way:?}");
        ends.store().write(2 << 20, Buffer::copy_of(&[4; 4096]), Durability::Durable).await.unwrap();
        assert!(!is_written.get(), "a guest's write waits for no chunk");
        // Guests are held for the handover: what is under way goes on at full speed.
        bulk.give_way(None).await.unwrap();
        handle.sleep(Duration::from_millis(100)).await;
        assert!(is_written.get());
        busy.is_stuck.set(false);
        ends.service.withdraw(Address::Replica(0));
        assert_eq!(bulk.give_way(impact).await, Err(IoError::Unsupported));
        assert_eq!(busy.disk.status(handle.now()), None, "nobody is measured for a copy that is over");
    });
}

#[test]
fn a_chunk_that_waits_for_guests_ends_when_its_source_has_restarted() {
    play(|scene| async move {
        let (handle, ends) = (scene.handle.clone(), Ends::new(&scene.handle, SIZE));
        let busy = BusyDisk::new(&handle);
        let disks = pacer::Stores::default().and(Arc::clone(&busy.disk));
        ends.service.offer_chunks(Address::Replica(0), ArrivingChunks::new(handle.clone(), disks));
        let (geometry, near) = (ends.memory.geometry(), Rc::clone(&ends.near));
        let bulk = Rc::new(PeerStore::new(near, Address::ReplicaInBulk(0), geometry, RequestPriority::Bulk));
        bulk.give_way(pacer::Impact::percent(20)).await.unwrap();
        handle.sleep(Duration::from_millis(50)).await;
        busy.is_stuck.set(true);
        let chunk = Rc::clone(&bulk);
        handle.spawn(async move {
            chunk.write(0, Buffer::copy_of(&[3; 1 << 20]), Durability::Volatile).await.unwrap_err();
        });
        handle.sleep(Duration::from_millis(50)).await;
        ends.restart_far();
        handle.sleep(Duration::from_millis(1)).await;
        let restarted = handle.now();
        // The first write of the new process waits for those of the former one.
        ends.store().write(0, Buffer::copy_of(&[5; 4096]), Durability::Volatile).await.unwrap();
        assert!(handle.now() - restarted <= Duration::from_millis(2 * JOURNEY_MAX_MS));
        handle.sleep(Duration::from_secs(5)).await;
        let read = ends.memory.read(0, Buffer::zeroed(4096)).await.unwrap();
        assert_eq!(read.as_slice(), [5; 4096]);
        busy.is_stuck.set(false);
    });
}

#[test]
fn messages_reach_the_other_end_and_garbage_harms_nobody() {
    play(|scene| async move {
        let ends = Ends::new(&scene.handle, SIZE);
        ends.near.send_message(b"to the far end".to_vec());
        ends.far.send_message(b"to the near end".to_vec());
        for garbage in [&[][..], &[0xFF; 9], &[0, 1, 2]] {
            let (head, payload) = (Bytes::copy_from_slice(garbage), Bytes::from_static(&[1; 100]));
            ends.to_near
                .unbounded_send(ChannelEvent::Message { head, payload, credit: Box::new(()) })
                .unwrap();
        }
        ends.to_near.unbounded_send(ChannelEvent::Lost("cut".into())).unwrap();
        ends.to_near.unbounded_send(ChannelEvent::Restored).unwrap();
        ends.store().flush().await.unwrap();
        scene.handle.sleep(Duration::from_millis(JOURNEY_MAX_MS)).await;
        let mut heard = ends.heard.0.borrow().clone();
        heard.sort();
        assert_eq!(heard, ["back", "lost: cut", "to the far end", "to the near end"]);
    });
}

/// One end that hears what a test says to it, and what nobody has heard of that.
struct End {
    service: Rc<Service>,
    heard: Rc<Heard>,
    unheard: Arc<Mutex<Vec<Bytes>>>,
    arrivals: mpsc::UnboundedSender<ChannelEvent>,
    _rpc: Rc<RpcChannel>,
}

impl End {
    fn new(handle: &Handle) -> Self {
        let (arrivals, receiver) = mpsc::unbounded();
        let unheard = Arc::new(Mutex::new(Vec::new()));
        let taken = Arc::clone(&unheard);
        let events = ChannelEvents::or_else(receiver, move |arrival| {
            if let (ChannelEvent::Message { payload, .. }, Ok(mut unheard)) = (arrival, taken.lock()) {
                unheard.push(payload);
            }
        });
        let wire = Wire { handle: handle.clone(), arrivals: arrivals.clone(), state: Rc::default() };
        let (rpc, heard) = (RpcChannel::new(Box::new(wire)), Rc::<Heard>::default());
        let service = Service::new(handle.clone(), BufferPool::new());
        handle.spawn(rpc.run(events, Rc::clone(&service), Rc::clone(&heard) as Rc<dyn Listener>));
        Self { service, heard, unheard, arrivals, _rpc: rpc }
    }

    /// Says something; returns whether somebody seems to hear it.
    fn say(&self, what: &'static [u8]) -> bool {
        let (head, payload) = (Head::Message.encode(), Bytes::from_static(what));
        self.arrivals.unbounded_send(ChannelEvent::Message { head, payload, credit: Box::new(()) }).is_ok()
    }
}

#[test]
fn what_comes_after_a_service_has_ended_finds_whoever_else_may_hear_it() {
    play(|scene| async move {
        let (handle, end) = (scene.handle.clone(), End::new(&scene.handle));
        assert!(end.say(b"before"));
        handle.sleep(Duration::from_millis(1)).await;
        assert_eq!(end.heard.0.borrow().len(), 1);
        end.service.end().await;
        handle.sleep(Duration::from_millis(1)).await;
        assert!(!end.say(b"COMMIT"), "somebody seems to hear it, and nobody does");
        assert_eq!(end.heard.0.borrow().len(), 1);
        assert!(end.unheard.lock().unwrap().is_empty());
    });
}

#[test]
fn a_service_takes_nothing_from_its_end_on_however_much_has_arrived() {
    play(|scene| async move {
        let (handle, end) = (scene.handle.clone(), End::new(&scene.handle));
        handle.sleep(Duration::from_millis(1)).await;
        assert!(end.say(b"one") && end.say(b"two"));
        end.service.end().await;
        handle.sleep(Duration::from_millis(1)).await;
        assert!(end.heard.0.borrow().is_empty(), "it was said that no call is under way");
        assert_eq!(*end.unheard.lock().unwrap(), ["one", "two"]);
    });
}
