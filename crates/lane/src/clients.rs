//! The clients of a volume on all hosts: local ones, and those that other hosts forward to this one.
//!
//! ```text
//!   connection ──► here ─────────────┐
//!   another host: "A: 2, D: 1" ──► way ─┴──► all clients, by host ──► shown, block removal, reported to the owner
//! ```
//! Each host reports its own clients, and those reported to it, to the next host towards the owner
//! ([`Operation::Clients`](crate::peer::head::Operation)). So the owner knows all clients, and a host on the way knows for which
//! clients it is still needed.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use block::signal::Signal;
use migration::HostId;
use serde::{Deserialize, Serialize};

/// The limit of hosts in one list: more than ever forward clients to one volume.
const HOSTS_MAX: usize = 256;
/// The identity by which a host names itself in its own list. The receiver knows the sender.
const SPEAKER: HostId = HostId([0; 32]);
/// How long to wait until the host that the volume came from reports its clients. It reports once it has learned that the volume
/// is here. A host that was restarted meanwhile and has no clients reports nothing.
const WORD_WAIT_MAX: Duration = Duration::from_secs(60);

/// The number of a volume's clients at each host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ByHost(BTreeMap<HostId, u32>);

/// The clients of one volume, local and forwarded.
#[derive(Default)]
pub struct Clients {
    host: Cell<Option<HostId>>,
    here: Cell<u32>,
    ways: RefCell<BTreeMap<u64, (HostId, ByHost)>>,
    next_way: Cell<u64>,
    awaits_word: Cell<Option<Duration>>,
    changed: Signal,
}

/// A client of this host. Dropping it ends the registration.
pub(crate) struct Client(Rc<Clients>);

/// A way by which another host forwards clients to this one. Dropping it ends the registration.
pub(crate) struct Way {
    clients: Rc<Clients>,
    host: HostId,
    number: u64,
    /// The number of the latest report; older ones may arrive later.
    said: u64,
}

impl ByHost {
    /// Returns each host with its number of clients.
    pub fn iter(&self) -> impl Iterator<Item = (HostId, u32)> {
        self.0.iter().map(|(host, clients)| (*host, *clients))
    }

    /// Returns the number of clients at all hosts.
    pub fn total(&self) -> usize {
        self.0.values().map(|clients| *clients as usize).sum()
    }

    /// Returns the number of clients at one host.
    pub fn at(&self, host: HostId) -> u32 {
        self.0.get(&host).copied().unwrap_or(0)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let list: Vec<_> =
            self.0.iter().map(|(host, clients)| Entry(host.0, *clients)).take(HOSTS_MAX).collect();
        postcard::to_stdvec(&list).unwrap_or_default()
    }

    pub(crate) fn decode(bytes: &[u8], speaker: HostId) -> Option<Self> {
        let (list, rest) = postcard::take_from_bytes::<Vec<Entry>>(bytes).ok()?;
        let fits = rest.is_empty() && list.len() <= HOSTS_MAX;
        let known = |host| if HostId(host) == SPEAKER { speaker } else { HostId(host) };
        fits.then(|| Self(list.into_iter().map(|Entry(host, clients)| (known(host), clients)).collect()))
    }
}

#[derive(Serialize, Deserialize)]
struct Entry([u8; 32], u32);

impl Clients {
    /// Sets the identity of this host.
    pub fn are_at(&self, host: HostId) {
        self.host.set(Some(host));
    }

    /// Returns the clients that other hosts forward to this one.
    pub fn elsewhere(&self) -> ByHost {
        let mut all = BTreeMap::<HostId, u32>::new();
        for (_, way) in self.ways.borrow().values() {
            for (host, clients) in way.iter().filter(|(host, _)| Some(*host) != self.host.get()) {
                let known = all.entry(host).or_default();
                // The same host may be reported by two ways.
                *known = clients.max(*known);
            }
        }
        all.retain(|_, clients| *clients > 0);
        ByHost(all)
    }

    pub(crate) fn everywhere(&self) -> ByHost {
        let mut all = self.elsewhere();
        all.0.insert(SPEAKER, self.here.get());
        all
    }

    /// Returns the hosts that forward clients to this one, even if they have none at present.
    pub fn ways(&self) -> Vec<HostId> {
        self.ways.borrow().values().map(|(host, _)| *host).collect()
    }

    /// Returns the number of this host's clients.
    pub fn here(&self) -> u32 {
        self.here.get()
    }

    pub(crate) fn expect_word(&self, now: Duration) {
        self.awaits_word.set(Some(now));
    }

    pub(crate) fn expect_no_word(&self) {
        self.awaits_word.set(None);
    }

    /// Returns whether the report of the volume's former host is still due.
    pub fn awaits_word(&self, now: Duration) -> bool {
        self.awaits_word.get().is_some_and(|since| now < since + WORD_WAIT_MAX)
    }

    pub(crate) fn comes(self: &Rc<Self>) -> Client {
        self.here.set(self.here.get() + 1);
        self.changed.notify();
        Client(Rc::clone(self))
    }

    pub(crate) fn way(self: &Rc<Self>, host: HostId) -> Way {
        let number = self.next_way.get();
        self.next_way.set(number + 1);
        self.ways.borrow_mut().insert(number, (host, ByHost::default()));
        Way { clients: Rc::clone(self), host, number, said: 0 }
    }

    /// Resolves when `look` returns something. Calls it at once, and whenever clients have come or gone.
    pub(crate) fn wait_for(&self, look: impl FnMut() -> Option<()>) -> impl Future<Output = ()> {
        self.changed.wait_for(look)
    }

    pub(crate) fn notify(&self) {
        self.changed.notify();
    }
}

impl Way {
    pub(crate) fn says(&mut self, number: u64, clients: ByHost) {
        if number < self.said {
            return;
        }
        self.said = number;
        self.clients.awaits_word.set(None);
        self.clients.ways.borrow_mut().insert(self.number, (self.host, clients));
        self.clients.changed.notify();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.0.here.set(self.0.here.get() - 1);
        self.0.changed.notify();
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        self.clients.ways.borrow_mut().remove(&self.number);
        self.clients.changed.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(number: u8) -> HostId {
        HostId([number; 32])
    }

    fn list(entries: &[(u8, u32)]) -> ByHost {
        ByHost(entries.iter().map(|(number, clients)| (host(*number), *clients)).collect())
    }

    #[test]
    fn clients_are_known_by_host_until_they_or_the_way_of_their_host_are_gone() {
        let clients = Rc::<Clients>::default();
        clients.are_at(host(1));
        let (client, mut way) = (clients.comes(), clients.way(host(2)));
        way.says(1, list(&[(2, 3), (4, 1)]));
        assert_eq!(clients.elsewhere(), list(&[(2, 3), (4, 1)]));
        assert_eq!(clients.everywhere(), list(&[(0, 1), (2, 3), (4, 1)]));
        drop(client);
        way.says(3, list(&[(2, 1)]));
        way.says(2, list(&[(2, 9)]));
        assert_eq!(clients.everywhere(), list(&[(0, 0), (2, 1)]), "words may arrive in another order");
        drop(way);
        assert_eq!((clients.elsewhere().total(), clients.ways().len()), (0, 0));
    }

    #[test]
    fn a_hosts_own_clients_are_not_told_of_by_others() {
        let clients = Rc::<Clients>::default();
        clients.are_at(host(1));
        let mut way = clients.way(host(2));
        way.says(1, list(&[(1, 7), (2, 1)]));
        assert_eq!(clients.elsewhere(), list(&[(2, 1)]));
    }

    #[test]
    fn the_host_that_a_volume_came_from_is_awaited_until_it_has_said_something() {
        let clients = Rc::<Clients>::default();
        clients.expect_word(Duration::ZERO);
        let mut way = clients.way(host(2));
        assert!(clients.awaits_word(WORD_WAIT_MAX / 2) && !clients.awaits_word(WORD_WAIT_MAX));
        way.says(1, list(&[]));
        assert!(!clients.awaits_word(Duration::ZERO));
    }

    #[test]
    fn what_is_no_list_is_not_taken_for_one() {
        let said = list(&[(0, 2), (1, 5)]);
        assert_eq!(ByHost::decode(&said.encode(), host(9)), Some(list(&[(9, 2), (1, 5)])));
        for bytes in [&[][..], &[1], &[255, 255, 255, 255, 15]] {
            assert_eq!(ByHost::decode(bytes, host(9)), None);
        }
    }
}
