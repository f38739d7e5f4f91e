//! Clients at several hosts at once, which repeatedly write neighbouring sectors of one block.
//!
//! ```text
//!   block that no guest uses:   | sector of the 1st | sector of the 2nd | …
//!                                      ▲ at A               ▲ at B          each writes, reads, and checks
//! ```
//! Some clients hand over to themselves as a migrated VM does: they connect to the other host, and read there, before they hang up
//! at the first one, whose last write may be unanswered.
//!
//! Each client alone writes its sector, one request at a time. So it must read its last write: neither its neighbour, nor its own
//! old writes at another host, may undo it. Its writes are durable, because hosts lose power.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, Buffer, BufferPool, Durability, Handle};

use super::Fleet;
use super::place::Place;
use crate::disk::SECTOR_BYTES;
use crate::guest::Caller;
use crate::random::Random;
use crate::scenario::VolumePlan;

/// Bytes at the end of a volume for these clients: at least a whole block, wherever the volume ends.
const RESERVED_BYTES: u64 = 8 << 10;
const NEIGHBOURS_PERCENT: u64 = 50;
const PER_VOLUME: u64 = 2;
const WRITES: u64 = 60;
const PAUSE: Duration = Duration::from_millis(20);
/// The percentage of looks at which a connected client goes to another host.
const WANDER_PERCENT: u64 = 3;
/// The percentage of looks at which a connected client hands over to itself at another host.
const HAND_OVER_PERCENT: u64 = 3;
/// The random stream of these; separate, so that other simulations stay as they are.
const HAND_OVER_STREAM: u64 = 0x4A4D_0F0E;

pub(super) struct Neighbours {
    clients: Vec<Rc<Neighbour>>,
    random: RefCell<Random>,
    hands_over: RefCell<Random>,
}

/// Returns the bytes at the end of a volume that no guest uses: none of a small volume.
fn reserved(size_bytes: u64) -> u64 {
    if size_bytes >= 8 * RESERVED_BYTES { RESERVED_BYTES } else { 0 }
}

/// Returns the plan of a volume without the reserved part.
pub(super) fn leave_room(plan: &VolumePlan) -> VolumePlan {
    let mut plan = plan.clone();
    plan.guest.size_bytes -= reserved(plan.guest.size_bytes);
    plan
}

struct Neighbour {
    volume: usize,
    offset: u64,
    /// Its last number, answered or not.
    written: Cell<u64>,
    connection: RefCell<Option<(Place, Rc<Caller>)>>,
    /// The host to which it is about to hand over.
    comes_to: Cell<Option<Place>>,
    random: RefCell<Random>,
}

impl Neighbours {
    pub(super) fn draw(random: &mut Random, seed: u64, sizes: impl Iterator<Item = u64>) -> Self {
        let mut clients = Vec::new();
        for (volume, size) in sizes.enumerate() {
            if !random.percent(NEIGHBOURS_PERCENT) {
                continue;
            }
            let block = (size - reserved(size)).next_multiple_of(4096);
            for number in 0..if reserved(size) > 0 { PER_VOLUME } else { 0 } {
                clients.push(Rc::new(Neighbour {
                    volume,
                    offset: block + number * SECTOR_BYTES,
                    written: Cell::default(),
                    connection: RefCell::default(),
                    comes_to: Cell::default(),
                    random: RefCell::new(random.fork()),
                }));
            }
        }
        let hands_over = RefCell::new(Random::new(seed ^ HAND_OVER_STREAM));
        Self { clients, random: RefCell::new(random.fork()), hands_over }
    }

    pub(super) fn none(random: &mut Random, seed: u64) -> Self {
        Self::draw(random, seed, std::iter::empty())
    }

    /// Connects the unconnected clients to hosts that forward to the volumes; some clients change hosts.
    pub(super) fn look(&self, fleet: &Rc<Fleet>) {
        // After a forced promotion a client would see one of two histories.
        if fleet.branches.all().len() > 1 {
            self.clients.iter().for_each(|client| client.hang_up());
            return;
        }
        for client in self.clients.iter().filter(|client| client.written.get() < WRITES) {
            let mut random = self.random.borrow_mut();
            if random.percent(WANDER_PERCENT) {
                client.hang_up();
            }
            if client.connection.borrow().is_some() {
                drop(random);
                self.perhaps_hand_over(fleet, client);
                continue;
            }
            let welcoming: Vec<_> =
                fleet.hosts.iter().filter(|host| host.welcomes_clients()).map(|host| host.place).collect();
            if !welcoming.is_empty() {
                client.connect(fleet, random.pick(&welcoming));
            }
        }
    }

    fn perhaps_hand_over(&self, fleet: &Rc<Fleet>, client: &Rc<Neighbour>) {
        let mut random = self.hands_over.borrow_mut();
        if !random.percent(HAND_OVER_PERCENT) {
            return;
        }
        let Some(at) = client.connection.borrow().as_ref().map(|(at, _)| *at) else { return };
        let others = fleet.hosts.iter().filter(|host| host.place != at && host.welcomes_clients());
        let others: Vec<_> = others.map(|host| host.place).collect();
        if !others.is_empty() {
            client.hand_over(fleet, random.pick(&others));
        }
    }

    pub(super) fn has_any_at(&self, place: Place) -> bool {
        let is_there = |client: &Rc<Neighbour>| {
            let connected = client.connection.borrow().as_ref().is_some_and(|(at, _)| *at == place);
            connected || client.comes_to.get() == Some(place)
        };
        self.clients.iter().any(is_there)
    }

    pub(super) fn crashed(&self, place: Place) {
        for client in self.clients.iter().filter(|client| client.comes_to.get() == Some(place)) {
            client.comes_to.set(None);
        }
        let is_there =
            |client: &&Rc<Neighbour>| client.connection.borrow().as_ref().is_some_and(|(at, _)| *at == place);
        self.clients.iter().filter(is_there).for_each(|client| client.hang_up());
    }
}

/// What a client does before its first write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    Read,
}

impl Neighbour {
    fn hang_up(&self) {
        if let Some((_, caller)) = self.connection.take() {
            caller.hang_up();
        }
    }

    fn connect(self: &Rc<Self>, fleet: &Rc<Fleet>, place: Place) {
        self.connect_after(fleet, place, Before::Nothing);
    }

    /// Connects to another host, and reads there, while the client still works at the first one; then it hangs up there.
    fn hand_over(self: &Rc<Self>, fleet: &Rc<Fleet>, place: Place) {
        if self.comes_to.get().is_none() {
            self.connect_after(fleet, place, Before::Read);
        }
    }

    fn connect_after(self: &Rc<Self>, fleet: &Rc<Fleet>, place: Place, before: Before) {
        let host = fleet.host(place);
        let Some((device, caller)) = host.way_of_client(self.volume) else { return };
        match before {
            Before::Nothing => *self.connection.borrow_mut() = Some((place, Rc::clone(&caller))),
            Before::Read => self.comes_to.set(Some(place)),
        }
        let (me, fleet, handle) = (Rc::clone(self), Rc::downgrade(fleet), host.handle.clone());
        let asked = handle.clone();
        handle.spawn(async move {
            if before == Before::Read {
                let buffer = BufferPool::new().take(SECTOR_BYTES as usize);
                let read = device.read(me.offset, buffer).await;
                me.comes_to.set(None);
                if read.is_err() || me.written.get() >= WRITES {
                    return;
                }
                // For as long as a QEMU works on while its target waits.
                let pause = me.random.borrow_mut().duration(Duration::ZERO, PAUSE);
                asked.sleep(pause).await;
                me.hang_up();
                *me.connection.borrow_mut() = Some((place, Rc::clone(&caller)));
            }
            let wrong = me.work(&device, &asked, &caller).await;
            // An answer after it had hung up, or with two histories, proves nothing.
            let Some(fleet) = fleet.upgrade().filter(|_| caller.is_connected()) else { return };
            me.hang_up();
            if let Some(wrong) = wrong.filter(|_| fleet.branches.all().len() == 1) {
                fleet.world.violated("content", || wrong);
            }
        });
    }

    /// Writes and reads until a request fails, or its work is done; returns what is wrong.
    async fn work(&self, device: &Rc<dyn BlockDevice>, handle: &Handle, caller: &Caller) -> Option<String> {
        let buffers = BufferPool::new();
        while caller.is_connected() && self.written.get() < WRITES {
            let number = self.written.get() + 1;
            self.written.set(number);
            let mut bytes = vec![0; SECTOR_BYTES as usize];
            bytes[..8].copy_from_slice(&number.to_le_bytes());
            device.write(self.offset, Buffer::copy_of(&bytes), Durability::Durable).await.ok()?;
            let read = device.read(self.offset, buffers.take(bytes.len())).await.ok()?;
            if caller.is_connected() && read.as_slice() != bytes {
                let found = read.as_slice().first_chunk().map_or(0, |found| u64::from_le_bytes(*found));
                let (volume, offset) = (self.volume, self.offset);
                return Some(format!(
                    "a neighbour at byte {offset} of volume {volume} wrote {number} and reads {found}"
                ));
            }
            let pause = self.random.borrow_mut().duration(Duration::ZERO, PAUSE);
            handle.sleep(pause).await;
        }
        None
    }
}
