//! Tests that no old write of a client which changes hosts lands on top of its later writes.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use block::filter::{Aligner, Delay, Operation as DiskOperation, Operations};
use block::{BlockDevice, Buffer, BufferPool, ByteRange, Durability, MemoryStore, ZeroMode};
use lane::{ClientRequests, ClientSession, Home, Presence, Volume};
use migration::HostId;

use super::peers::Ends;
use super::support::{GENERATION, SIZE, Scene, play};

const ELSEWHERE: HostId = HostId([2; 32]);
/// Longer than anything here takes that does not wait.
const MOMENT: Duration = Duration::from_millis(50);

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
    fn connect(scene: &Scene, volume: &Rc<Volume>) -> Self {
        let presence = Rc::<Connection>::default();
        let known = Rc::clone(&presence) as Rc<dyn Presence>;
        let requests = ClientRequests::new(Rc::clone(volume), Rc::clone(&known));
        let device = Rc::new(ClientSession::new(Rc::clone(volume), known, Rc::new(requests)));
        let client = Self { presence, device };
        // Like most clients, it reads its disk first.
        let reading = Rc::clone(&client.device);
        scene.handle.spawn(async move { drop(reading.read(0, BufferPool::new().take(4096)).await) });
        client
    }

    /// Writes the first block; the cell holds whether that was answered, and how.
    fn write(&self, scene: &Scene, stamp: u8) -> Rc<Cell<Option<bool>>> {
        self.write_at(scene, 0, vec![stamp; 4096])
    }

    fn write_at(&self, scene: &Scene, offset: u64, bytes: Vec<u8>) -> Rc<Cell<Option<bool>>> {
        let (device, answered) = (Rc::clone(&self.device), Rc::<Cell<Option<bool>>>::default());
        let done = Rc::clone(&answered);
        scene.handle.spawn(async move {
            let written = device.write(offset, Buffer::copy_of(&bytes), Durability::Volatile).await;
            done.set(Some(written.is_ok()));
        });
        answered
    }

    fn leave(&self) {
        self.presence.has_left.set(true);
    }
}

struct Hosts {
    ends: Ends,
    owner: Rc<Volume>,
    forwarder: Rc<Volume>,
}

impl Hosts {
    fn new(scene: &Scene) -> Self {
        let owner = Rc::clone(&scene.volume);
        owner.fencing().begin(1);
        let ends = Ends::new(&scene.handle, owner.size());
        ends.service.offer_volume(Rc::clone(&owner), ELSEWHERE);
        let forwarder = Volume::new(
            owner.id(),
            owner.block_size(),
            GENERATION,
            Rc::clone(&ends.memory) as Rc<dyn BlockDevice>,
            Aligner::new(BufferPool::new(), scene.handle.clone()),
        );
        forwarder.change_hands(Home::Elsewhere(ends.volume(&scene.handle, owner.id())), GENERATION);
        Self { ends, owner, forwarder }
    }

    fn at_owner(&self, scene: &Scene) -> Client {
        Client::connect(scene, &self.owner)
    }

    fn at_forwarder(&self, scene: &Scene) -> Client {
        Client::connect(scene, &self.forwarder)
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
        // A change of a client that is still connected is repeated with the present fence.
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
fn clients_at_two_hosts_write_parts_of_one_block_and_neither_undoes_the_other() {
    play(|scene| async move {
        let hosts = Hosts::new(&scene);
        let (here, there) = (hosts.at_owner(&scene), hosts.at_forwarder(&scene));
        scene.handle.sleep(MOMENT).await;
        let both = Operations::of(&[DiskOperation::Read, DiskOperation::Write]);
        scene.source.delay.set_latency(both, Duration::from_millis(3));
        for turn in 1..=20 {
            // Neither is answered before the other has begun, at varying moments.
            let first = there.write_at(&scene, 512, vec![turn; 512]);
            scene.handle.sleep(Duration::from_millis(u64::from(turn) % 8)).await;
            let second = here.write_at(&scene, 1024, vec![turn + 100; 512]);
            scene.handle.sleep(MOMENT).await;
            assert_eq!((first.get(), second.get()), (Some(true), Some(true)));
            let content = scene.source.content().await;
            assert_eq!((content[512], content[1024]), (turn, turn + 100), "turn {turn}");
        }
    });
}

#[test]
fn a_client_that_has_gone_is_waited_for_no_longer_by_what_it_left_on_a_silent_link() {
    play(|scene| async move {
        let hosts = Hosts::new(&scene);
        let client = hosts.at_forwarder(&scene);
        scene.handle.sleep(MOMENT).await;
        hosts.ends.line.is_cut.set(true);
        let (read, written) = (Rc::<Cell<bool>>::default(), client.write(&scene, 1));
        let (device, ended) = (Rc::clone(&client.device), Rc::clone(&read));
        scene.handle.spawn(async move {
            drop(device.read(0, Buffer::zeroed(8 << 20)).await);
            ended.set(true);
        });
        scene.handle.sleep(Duration::from_secs(60)).await;
        assert_eq!((written.get(), read.get()), (None, false), "who is there waits");
        client.leave();
        scene.handle.sleep(Duration::from_secs(2)).await;
        assert_eq!((written.get(), read.get()), (Some(false), true));
        assert_eq!(hosts.forwarder.gate().in_flight(), 0, "nothing keeps the volume from moving");
    });
}

#[test]
fn the_owner_knows_who_its_clients_are_wherever_they_come_and_go() {
    play(|scene| async move {
        let hosts = Hosts::new(&scene);
        let known = || hosts.owner.clients().elsewhere().iter().collect::<Vec<_>>();
        let (first, second) = (hosts.at_forwarder(&scene), hosts.at_forwarder(&scene));
        scene.handle.sleep(MOMENT).await;
        assert_eq!(known(), [(ELSEWHERE, 2)]);
        drop(first);
        scene.handle.sleep(MOMENT).await;
        assert_eq!(known(), [(ELSEWHERE, 1)]);
        // The owner's next process knows no clients, and gets a new report.
        hosts.ends.restart_far();
        scene.handle.sleep(MOMENT).await;
        assert_eq!(known(), [(ELSEWHERE, 1)]);
        drop(second);
        scene.handle.sleep(MOMENT).await;
        assert_eq!((known(), hosts.owner.clients().ways()), (Vec::new(), vec![ELSEWHERE]));
        // No client is forwarded there.
        drop(hosts.forwarder);
        scene.handle.sleep(MOMENT).await;
        assert_eq!(hosts.owner.clients().ways(), []);
    });
}

#[test]
fn who_connects_while_a_long_range_is_zeroed_waits_for_a_part_of_it() {
    play(|mut scene| async move {
        const GIB: u64 = 1 << 30;
        let (slow, delay) = Delay::new(Rc::new(MemoryStore::new(2 * GIB)), scene.handle.clone());
        scene.replace_source(Rc::new(slow));
        let first = Client::connect(&scene, &scene.volume);
        scene.handle.sleep(MOMENT).await;
        delay.set_latency(Operations::of(&[DiskOperation::WriteZeroes]), Duration::from_secs(2));
        let (device, zeroed) = (Rc::clone(&first.device), Rc::<Cell<bool>>::default());
        let done = Rc::clone(&zeroed);
        scene.handle.spawn(async move {
            let range = ByteRange::new(512, 2 * GIB - 512);
            done.set(device.write_zeroes(range, ZeroMode::MayUnmap, Durability::Volatile).await.is_ok());
        });
        scene.handle.sleep(MOMENT).await;
        let written = Client::connect(&scene, &scene.volume).write(&scene, 1);
        scene.handle.sleep(Duration::from_secs(5)).await;
        assert_eq!((written.get(), zeroed.get()), (Some(true), false));
        scene.handle.sleep(Duration::from_secs(60)).await;
        assert!(zeroed.get());
    });
}

/// A volume that returns while the link to its former owner is silent, and its client's requests there.
struct SilentWay {
    hosts: Hosts,
    stays: Client,
    late: Rc<Cell<Option<bool>>>,
    read: Rc<Cell<bool>>,
}

impl SilentWay {
    async fn home(scene: &Scene) -> Self {
        let hosts = Hosts::new(scene);
        let stays = hosts.at_forwarder(scene);
        scene.handle.sleep(MOMENT).await;
        hosts.ends.line.is_cut.set(true);
        let (late, read) = (stays.write(scene, 1), Rc::<Cell<bool>>::default());
        let (device, done) = (Rc::clone(&stays.device), Rc::clone(&read));
        scene.handle.spawn(async move {
            let is_read = device.read(4096, BufferPool::new().take(4096)).await.is_ok();
            done.set(is_read && device.flush().await.is_ok());
        });
        scene.handle.sleep(MOMENT).await;
        assert_eq!((late.get(), read.get()), (None, false));
        let home = Rc::clone(&hosts.ends.memory) as Rc<dyn BlockDevice>;
        hosts.forwarder.change_hands(Home::Here(home), GENERATION.next());
        Self { hosts, stays, late, read }
    }
}

#[test]
fn what_a_silent_former_owner_was_asked_for_is_asked_for_again_once_the_volume_is_home() {
    play(|scene| async move {
        let SilentWay { hosts, stays, late, read } = SilentWay::home(&scene).await;
        scene.handle.sleep(MOMENT).await;
        assert_eq!((late.get(), read.get()), (Some(true), true));
        let newer = stays.write(&scene, 2);
        scene.handle.sleep(MOMENT).await;
        assert_eq!(newer.get(), Some(true));
        let found = hosts.ends.memory.read(0, BufferPool::new().take(4096)).await.unwrap();
        assert_eq!(found.as_slice()[0], 2);
    });
}

#[test]
fn who_comes_once_the_volume_is_home_does_not_wait_for_what_others_have_under_way_at_its_former_owner() {
    play(|scene| async move {
        let way = SilentWay::home(&scene).await;
        let comes = way.hosts.at_forwarder(&scene).write(&scene, 2);
        scene.handle.sleep(MOMENT).await;
        assert_eq!((comes.get(), way.late.get()), (Some(true), Some(true)));
    });
}

#[test]
fn a_volume_that_grows_is_offered_so_by_the_host_that_leads_clients_there() {
    play(|scene| async move {
        let larger = SIZE + (4 << 20);
        let hosts = Hosts::new(&scene);
        let Home::Elsewhere(owner) = hosts.forwarder.home() else { return };
        let heard = Rc::<Cell<Option<u64>>>::default();
        let (asked, said) = (Rc::clone(&owner), Rc::clone(&heard));
        scene.handle.spawn(async move { said.set(Some(asked.grows().await)) });
        scene.handle.sleep(MOMENT).await;
        assert_eq!(heard.get(), None);
        lane::growth::grow(&hosts.owner, None, &*scene.control, larger).await.unwrap();
        scene.handle.sleep(MOMENT).await;
        assert_eq!(heard.get(), Some(larger));
        let client = hosts.at_forwarder(&scene);
        let refused = client.write_at(&scene, larger - 4096, vec![7; 4096]);
        scene.handle.sleep(MOMENT).await;
        assert_eq!(refused.get(), Some(false), "it is not offered yet");
        hosts.forwarder.grew_elsewhere(&owner, larger);
        assert_eq!(hosts.forwarder.size(), larger);
        let made = client.write_at(&scene, larger - 4096, vec![7; 4096]);
        scene.handle.sleep(MOMENT).await;
        assert_eq!(made.get(), Some(true));
    });
}

/// A VM that is migrated over a shared disk has two clients for a while: its target connects, and reads, long before it takes over.
#[test]
fn what_is_left_behind_does_not_land_after_the_first_write_of_a_client_that_had_read() {
    play(|scene| async move {
        let hosts = Hosts::new(&scene);
        let source = hosts.at_forwarder(&scene);
        source.write(&scene, 1);
        scene.handle.sleep(MOMENT).await;
        let target = hosts.at_owner(&scene);
        scene.handle.sleep(MOMENT).await;
        let goes_on = source.write(&scene, 2);
        scene.handle.sleep(MOMENT).await;
        assert_eq!(goes_on.get(), Some(true), "it is not shut out by the target's read");
        hosts.ends.line.is_cut.set(true);
        let late = source.write(&scene, 3);
        scene.handle.sleep(MOMENT).await;
        source.leave();
        let first = target.write(&scene, 4);
        scene.handle.sleep(MOMENT).await;
        assert_eq!((first.get(), late.get()), (Some(true), None));
        hosts.ends.mend();
        scene.handle.sleep(MOMENT).await;
        assert_eq!((late.get(), scene.source.content().await[0]), (Some(false), 4));
    });
}

#[test]
fn the_first_write_of_a_client_that_had_read_waits_for_what_is_left_in_the_store() {
    for target_is_elsewhere in [false, true] {
        play(move |scene| async move {
            let hosts = Hosts::new(&scene);
            let source = hosts.at_owner(&scene);
            let target = match target_is_elsewhere {
                false => hosts.at_owner(&scene),
                true => hosts.at_forwarder(&scene),
            };
            scene.handle.sleep(MOMENT).await;
            source.write(&scene, 1);
            scene.handle.sleep(MOMENT).await;
            scene.source.delay.set_latency(Operations::of(&[DiskOperation::Write]), MOMENT * 4);
            let slow = source.write(&scene, 2);
            scene.handle.sleep(MOMENT).await;
            source.leave();
            scene.source.delay.set_latency(Operations::of(&[DiskOperation::Write]), Duration::ZERO);
            let first = target.write(&scene, 3);
            scene.handle.sleep(MOMENT).await;
            assert_eq!((slow.get(), first.get()), (None, None), "the store may reverse their order");
            scene.handle.sleep(MOMENT * 8).await;
            assert_eq!((first.get(), scene.source.content().await[0]), (Some(true), 3));
        });
    }
}
