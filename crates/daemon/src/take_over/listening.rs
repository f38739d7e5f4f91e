//! The listening sockets of volumes, and the clients that wait for volumes: they outlive a daemon.
//!
//! ```text
//!   an earlier daemon ── left ──► waits here, by volume ──► claimed by the volume's lane ── made anew, or kept ──► left again
//! ```
//! A listening socket here is a clone of the lane's: it stays open when the lane ends, and is handed to the next daemon. The
//! service manager has a clone too, under a name with everything that is needed after a crash.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lane::PassedConnection;
use migration::VolumeId;

use super::{Estate, ListenerPlace, PassedClient, PassedListener, ServiceManager};
use crate::service_manager;

/// The listening sockets, and the clients that wait.
pub(crate) struct Listening {
    manager: ServiceManager,
    state: Mutex<PassedSockets>,
}

#[derive(Default)]
struct PassedSockets {
    paths: BTreeMap<String, Socket>,
    ports: BTreeMap<String, Socket>,
    /// Clients of an earlier daemon whose volumes have no lane.
    clients: BTreeMap<VolumeId, Vec<PassedConnection>>,
}

struct Socket {
    socket: OwnedFd,
    place: ListenerPlace,
    origin: Origin,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// An earlier daemon has made it, and no lane of this one has it.
    Left,
    /// This daemon has made it, or one of its lanes has it.
    Ours,
}

impl Listening {
    /// Begins with the restart state of an earlier daemon.
    pub(crate) fn new(manager: ServiceManager, left: Estate) -> Self {
        let mut state = PassedSockets::default();
        for PassedListener { volume, place, socket } in left.listeners {
            let kind = state.kind(place);
            kind.insert(volume, Socket { socket, place, origin: Origin::Left });
        }
        for PassedClient { volume, connection } in left.clients {
            state.clients.entry(volume).or_default().push(connection);
        }
        Self { manager, state: Mutex::new(state) }
    }

    /// Returns an earlier daemon's socket at a volume's path, if it is the one that exists there.
    pub(crate) fn claim_path(&self, volume: &str, path: &Path) -> Option<OwnedFd> {
        let found = std::fs::symlink_metadata(path).ok()?;
        let mut state = self.lock();
        let left = state.paths.get_mut(volume)?;
        if left.origin != Origin::Left || left.place != place_of(&found) {
            return None;
        }
        left.claim()
    }

    /// Returns an earlier daemon's socket at a volume's port, if it has this address.
    pub(crate) fn claim_port(&self, volume: &str, address: &str) -> Option<OwnedFd> {
        let mut state = self.lock();
        let left = state.ports.get_mut(volume)?;
        let listened = TcpListener::from(left.socket.try_clone().ok()?).local_addr().ok()?;
        if left.origin != Origin::Left || address.parse::<SocketAddr>().ok()? != listened {
            return None;
        }
        left.claim()
    }

    pub(crate) fn made_path(&self, volume: &str, socket: &OwnedFd, path: &Path) {
        let kept =
            std::fs::symlink_metadata(path).and_then(|found| Ok((socket.try_clone()?, place_of(&found))));
        self.made(volume, kept);
    }

    pub(crate) fn made_port(&self, volume: &str, socket: BorrowedFd<'_>) {
        self.made(volume, socket.try_clone_to_owned().map(|socket| (socket, ListenerPlace::Port)));
    }

    fn made(&self, volume: &str, kept: io::Result<(OwnedFd, ListenerPlace)>) {
        let (socket, place) = match kept {
            Ok(kept) => kept,
            Err(error) => {
                return tracing::warn!(
                    %volume, %error,
                    "cannot pass the volume's socket on: clients are refused during the daemon's next restart"
                );
            }
        };
        let mut state = self.lock();
        if let Some(former) = state.kind(place).remove(volume) {
            self.keep_no_longer(&name_of(volume, former.place));
        }
        self.keep(&name_of(volume, place), &socket);
        state.kind(place).insert(volume.to_owned(), Socket { socket, place, origin: Origin::Ours });
    }

    /// Returns an earlier daemon's clients of a volume, for its lane.
    pub(crate) fn claim_clients(&self, volume: VolumeId) -> Vec<PassedConnection> {
        self.lock().clients.remove(&volume).unwrap_or_default()
    }

    pub(crate) fn forget(&self, volume: &str) {
        let mut state = self.lock();
        let former = [state.paths.remove(volume), state.ports.remove(volume)];
        drop(state);
        for socket in former.into_iter().flatten() {
            self.keep_no_longer(&name_of(volume, socket.place));
        }
    }

    /// Returns whether an earlier daemon's clients of a volume wait.
    pub(crate) fn has_clients_of(&self, volume: VolumeId) -> bool {
        self.lock().clients.contains_key(&volume)
    }

    /// Closes an earlier daemon's connections to unknown volumes; returns their number.
    pub(crate) fn close_clients(&self, is_known: impl Fn(VolumeId) -> bool) -> usize {
        let mut state = self.lock();
        let unknown: Vec<VolumeId> =
            state.clients.keys().copied().filter(|volume| !is_known(*volume)).collect();
        unknown.iter().filter_map(|volume| state.clients.remove(volume)).map(|clients| clients.len()).sum()
    }

    /// Returns the volumes with an earlier daemon's sockets that no lane has.
    pub(crate) fn unclaimed(&self) -> Vec<String> {
        let state = self.lock();
        let sockets = state.paths.iter().chain(&state.ports);
        let left = sockets.filter(|(_, socket)| socket.origin == Origin::Left);
        left.map(|(volume, _)| volume.clone()).collect()
    }

    /// Returns how many clients wait for the lane of their volume.
    pub(crate) fn waiting(&self) -> usize {
        self.lock().clients.values().map(Vec::len).sum()
    }

    /// Returns the restart state, without the clients that lanes have passed on.
    pub(crate) fn leave(&self) -> Estate {
        let state = std::mem::take(&mut *self.lock());
        let listeners = state.paths.into_iter().chain(state.ports);
        let listeners =
            listeners.map(|(volume, Socket { socket, place, .. })| PassedListener { volume, place, socket });
        let clients = state.clients.into_iter().flat_map(|(volume, connections)| {
            connections.into_iter().map(move |connection| PassedClient { volume, connection })
        });
        Estate { since_unix_ms: 0, listeners: listeners.collect(), clients: clients.collect() }
    }

    fn keep(&self, name: &str, socket: &OwnedFd) {
        if self.manager == ServiceManager::Present
            && let Err(error) = service_manager::keep(name, socket.as_fd())
        {
            tracing::warn!(%name, %error, "the service manager does not keep a socket");
        }
    }

    fn keep_no_longer(&self, name: &str) {
        if self.manager == ServiceManager::Present {
            service_manager::keep_no_longer(name);
        }
    }

    fn lock(&self) -> MutexGuard<'_, PassedSockets> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PassedSockets {
    fn kind(&mut self, place: ListenerPlace) -> &mut BTreeMap<String, Socket> {
        match place {
            ListenerPlace::Path { .. } => &mut self.paths,
            ListenerPlace::Port => &mut self.ports,
        }
    }
}

impl Socket {
    fn claim(&mut self) -> Option<OwnedFd> {
        let socket = self.socket.try_clone().ok()?;
        self.origin = Origin::Ours;
        Some(socket)
    }
}

fn place_of(found: &Metadata) -> ListenerPlace {
    ListenerPlace::Path { device: found.dev(), inode: found.ino() }
}

/// Returns the service manager's name of a socket. Neither part has a colon, which it does not accept.
pub(super) fn name_of(volume: &str, place: ListenerPlace) -> String {
    match place {
        ListenerPlace::Path { device, inode } => format!("path.{device}.{inode}.{volume}"),
        ListenerPlace::Port => format!("port.{volume}"),
    }
}

pub(super) fn named(name: &str) -> Option<(String, ListenerPlace)> {
    if let Some(volume) = name.strip_prefix("port.") {
        return Some((volume.to_owned(), ListenerPlace::Port));
    }
    let mut parts = name.strip_prefix("path.")?.splitn(3, '.');
    let device = parts.next()?.parse().ok()?;
    let inode = parts.next()?.parse().ok()?;
    Some((parts.next()?.to_owned(), ListenerPlace::Path { device, inode }))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_socket_goes_on_at_its_path_and_at_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.sock");
        let before = Listening::new(ServiceManager::Absent, Estate::default());
        before.made_path("v", &UnixListener::bind(&path).unwrap().into(), &path);
        let mut waiting = UnixStream::connect(&path).unwrap();
        let after = Listening::new(ServiceManager::Absent, before.leave());
        assert!(after.claim_path("w", &path).is_none());
        assert_eq!(after.unclaimed(), ["v"]);
        let other = folder.path().join("other.sock");
        let _other = UnixListener::bind(&other).unwrap();
        assert!(after.claim_path("v", &other).is_none(), "somebody has put another one there");
        let listener = UnixListener::from(after.claim_path("v", &path).unwrap());
        listener.accept().unwrap().0.write_all(b"x").unwrap();
        waiting.read_exact(&mut [0]).unwrap();
        assert!(after.claim_path("v", &path).is_none() && after.unclaimed().is_empty(), "a lane has it");
        after.forget("v");
        drop(listener);
        assert!(UnixStream::connect(&path).is_err());
    }

    #[test]
    fn a_port_goes_on_at_its_address() {
        let before = Listening::new(ServiceManager::Absent, Estate::default());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        before.made_port("v", listener.as_fd());
        let after = Listening::new(ServiceManager::Absent, before.leave());
        let another = SocketAddr::new(address.ip(), address.port() ^ 1);
        assert!(after.claim_port("v", &another.to_string()).is_none());
        assert!(after.claim_port("v", &address.to_string()).is_some());
    }

    #[test]
    fn what_nobody_knows_is_closed() {
        let (mut client, server) = UnixStream::pair().unwrap();
        let connection = PassedConnection { socket: server.into(), session: None };
        let left = Estate {
            clients: vec![PassedClient { volume: VolumeId([1; 16]), connection }],
            ..Estate::default()
        };
        let listening = Listening::new(ServiceManager::Absent, left);
        assert_eq!(listening.close_clients(|_| true), 0);
        assert!(listening.has_clients_of(VolumeId([1; 16])) && !listening.has_clients_of(VolumeId([2; 16])));
        assert_eq!(listening.waiting(), 1);
        assert_eq!(listening.close_clients(|volume| volume == VolumeId([2; 16])), 1);
        assert_eq!((listening.waiting(), client.read(&mut [0]).unwrap()), (0, 0));
    }

    #[test]
    fn names_tell_which_socket_it_is() {
        for (volume, place) in
            [("a.b-c", ListenerPlace::Path { device: 24, inode: u64::MAX }), ("0", ListenerPlace::Port)]
        {
            let name = name_of(volume, place);
            assert!(!name.contains(':') && name.len() < 255);
            assert_eq!(named(&name), Some((volume.to_owned(), place)));
        }
        for name in ["", "path.", "path.1.2", "path.x.2.v", "connection"] {
            assert_eq!(named(name), None, "{name}");
        }
    }
}
