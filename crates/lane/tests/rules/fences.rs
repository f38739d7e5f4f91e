//! A client that goes from one host to another finds nothing of what it left behind on top of what it writes afterwards.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use block::filter::{Align, Operation as DiskOperation, Operations};
use block::{BlockDevice, Buffer, BufferPool, Durability};
use lane::peer::head::Address;
use lane::peer::{PeerStore, Urgency};
use lane::{Entrance, Home, Passage, Presence, Volume};

use super::peers::Ends;
use super::support::{GENERATION, Scene, play};

/// Longer than anything here takes that does not wait for something.
const MOMENT: Duration = Duration::from_millis(50);

/// A client, and the way that it takes.
struct Client {
    presence: Rc<Connection>,
    device: Rc<dyn BlockDevice>,
}

#[derive(Default)]
struct Connection {
    has_left: Cell<bool>,
}

impl Presence for Connection {
    fn is_there(&self) -> bool {
        !self.has_left.get()
    }
}

impl Client {
    /// Connects to a volume as a lane has it.
    fn connect(scene: &Scene, volume: &Rc<Volume>, aligned: &Align) -> Self {
        let presence = Rc::<Connection>::default();
        let passage = Passage::new(Rc::clone(volume), Rc::clone(&presence) as Rc<dyn Presence>);
        let below = Rc::new(aligned.beside(Rc::new(passage)));
        let device = Rc::new(Entrance::new(Rc::clone(volume), below));
        let client = Self { presence, device };
        // It looks at its disk first, as everybody does.
        let reading = Rc::clone(&client.device);
        scene.handle.spawn(async move { drop(reading.read(0, BufferPool::new().take(4096)).await) });
        client
    }

    /// Writes the first block; what is returned says whether that was answered, and how.
    fn write(&self, scene: &Scene, stamp: u8) -> Rc<Cell<Option<bool>>> {
        let (device, answered) = (Rc::clone(&self.device), Rc::<Cell<Option<bool>>>::default());
        let done = Rc::clone(&answered);
        scene.handle.spawn(async move {
            let written = device.write(0, Buffer::copy_of(&[stamp; 4096]), Durability::Volatile).await;
            done.set(Some(written.is_ok()));
        });
        answered
    }

    fn leave(&self) {
        self.presence.has_left.set(true);
    }
}

/// The volume at its owner, and at a host that leads its clients there.
struct Hosts {
    ends: Ends,
    owner: (Rc<Volume>, Align),
    forwarder: (Rc<Volume>, Align),
}

impl Hosts {
    fn new(scene: &Scene) -> Self {
        let owner = Rc::clone(&scene.volume);
        owner.fences().begin(1);
        let ends = Ends::new(&scene.handle, owner.size());
        ends.service.offer_volume(Rc::clone(&owner));
        let (address, geometry) = (Address::Owner(owner.id().0), ends.memory.geometry());
        let away = PeerStore::new(Rc::clone(&ends.near), address, geometry, Urgency::Awaited);
        let forwarder = Volume::new(
            owner.id(),
            owner.block_size(),
            GENERATION,
            Rc::clone(&ends.memory) as Rc<dyn BlockDevice>,
        );
        forwarder.change_hands(Home::Elsewhere(Rc::new(away)), GENERATION);
        let aligned = |volume: &Volume| Align::new(volume.device(), BufferPool::new(), scene.handle.clone());
        let (owner_align, forwarder_align) = (aligned(&owner), aligned(&forwarder));
        Self { ends, owner: (owner, owner_align), forwarder: (forwarder, forwarder_align) }
    }

    fn at_owner(&self, scene: &Scene) -> Client {
        Client::connect(scene, &self.owner.0, &self.owner.1)
    }

    fn at_forwarder(&self, scene: &Scene) -> Client {
        Client::connect(scene, &self.forwarder.0, &self.forwarder.1)
    }
}

#[test]
fn a_write_that_a_silent_link_holds_is_not_made_after_its_client_has_gone_to_the_owner() {
    play(|scene| async move {
        let hosts = Hosts::new(&scene);
        let (client, stays) = (hosts.at_forwarder(&scene), hosts.at_forwarder(&scene));
        let first = client.write(&scene, 1);
        scene.handle.sleep(MOMENT).await;
        assert_eq!(first.get(), Some(true));
        hosts.ends.line.is_cut.set(true);
        let late = client.write(&scene, 2);
        scene.handle.sleep(MOMENT).await;
        client.leave();
        let client = hosts.at_owner(&scene);
        let (again, newer) = (client.write(&scene, 2), client.write(&scene, 3));
        scene.handle.sleep(MOMENT).await;
        assert_eq!((again.get(), newer.get(), late.get()), (Some(true), Some(true), None));
        hosts.ends.mend();
        scene.handle.sleep(MOMENT).await;
        assert_eq!((late.get(), scene.source.content().await[0]), (Some(false), 3));
        // Whoever is still there is asked for again, with the present fence.
        let other = stays.write(&scene, 4);
        scene.handle.sleep(MOMENT).await;
        assert_eq!((other.get(), scene.source.content().await[0]), (Some(true), 4));
    });
}

#[test]
fn a_write_that_the_link_held_is_made_for_a_client_that_is_still_there() {
    play(|scene| async move {
        let hosts = Hosts::new(&scene);
        let stays = hosts.at_forwarder(&scene);
        stays.write(&scene, 1);
        scene.handle.sleep(MOMENT).await;
        hosts.ends.line.is_cut.set(true);
        let late = stays.write(&scene, 2);
        hosts.at_owner(&scene);
        scene.handle.sleep(MOMENT).await;
        hosts.ends.mend();
        scene.handle.sleep(MOMENT).await;
        assert_eq!((late.get(), scene.source.content().await[0]), (Some(true), 2));
    });
}

#[test]
fn a_write_that_the_owners_store_has_ends_before_its_client_goes_on_at_another_host_or_comes_again() {
    for elsewhere in [false, true] {
        play(move |scene| async move {
            let hosts = Hosts::new(&scene);
            let client = hosts.at_owner(&scene);
            scene.source.delay.set_latency(Operations::of(&[DiskOperation::Write]), MOMENT * 4);
            let slow = client.write(&scene, 1);
            scene.handle.sleep(MOMENT).await;
            scene.source.delay.set_latency(Operations::of(&[DiskOperation::Write]), Duration::ZERO);
            client.leave();
            let client = if elsewhere { hosts.at_forwarder(&scene) } else { hosts.at_owner(&scene) };
            let newer = client.write(&scene, 2);
            scene.handle.sleep(MOMENT).await;
            assert_eq!((slow.get(), newer.get()), (None, None));
            scene.handle.sleep(MOMENT * 6).await;
            assert_eq!((slow.get(), newer.get()), (Some(true), Some(true)));
            assert_eq!(scene.source.content().await[0], 2);
        });
    }
}

#[test]
fn hosts_that_know_no_fences_are_served_and_asked_as_before() {
    for (line_is_old, line_back_is_old) in [(true, false), (false, true)] {
        play(move |scene| async move {
            let hosts = Hosts::new(&scene);
            hosts.ends.line.is_to_old_host.set(line_is_old);
            hosts.ends.line_back.is_to_old_host.set(line_is_old || line_back_is_old);
            let written = hosts.at_forwarder(&scene).write(&scene, 5);
            scene.handle.sleep(MOMENT).await;
            assert_eq!((written.get(), scene.source.content().await[0]), (Some(true), 5));
        });
    }
}
