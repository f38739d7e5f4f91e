//! A restart that no guest notices: the sockets of volumes and the connections of their clients outlive the daemon.
//!
//! ```text
//!   the daemon before                                                         the next one
//!   requests end ─► lanes end ─► image locks go ─► estate ═══════════════════► waits ─► data folder ─► lanes ─► requests
//!                                                   │  by `serve --take-over`: over a socket in the data folder
//!                                                   └  or kept by the service manager, until that starts the next one
//! ```
//! A connection is cut where no request is in flight and every reply has been sent; what its client had sent already goes along.
//! The next daemon's lane is told of it as of a client that comes: fencing tokens and stays begin as after every restart. So a
//! connection that is passed on is worth no more than one that is made anew, and no less: whoever drops one at any point has its
//! client connect again, and send again what was not answered.
//!
//! Whoever dies in between takes along what it has, and the kernel closes it. After `kill -9` there is nothing but the listening
//! sockets, which the service manager has from when they are made: a connection would be in the midst of a request.

mod channel;
mod decision;
mod document;
mod listening;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

pub use channel::TakeOverError;
pub(crate) use channel::{Asked, Successors, take_over};
pub(crate) use decision::{Action, Clients, Departure, Event, Heir, Refusal, ServiceManager, Successor};
pub(crate) use document::{Estate, ListenerPlace, PassedClient, PassedListener};
pub(crate) use listening::Listening;

use crate::service_manager;

/// What the service manager calls the list of what is left.
const DOCUMENT: &str = "take-over";
/// And connections, before their number.
const CLIENT: &str = "client.";

/// Has the service manager keep what is left, for the daemon that it starts next; sleeps.
///
/// # Errors
/// What the system answers; the next daemon may find a part, and uses none of that.
pub(crate) fn keep(estate: &Estate) -> io::Result<()> {
    // It has the sockets that are listened on since they were made.
    let document = estate.write_clients()?;
    for (number, client) in estate.clients.iter().enumerate() {
        service_manager::keep(&format!("{CLIENT}{number}"), client.connection.socket.as_fd())?;
    }
    service_manager::keep(DOCUMENT, document.as_fd())?;
    service_manager::wait_until_heard()
}

/// What the service manager has kept of a daemon before. To be called once, before anything is opened.
pub(crate) fn kept() -> Estate {
    sort(service_manager::kept(), service_manager::keep_no_longer)
}

/// Tells by their names what descriptors are. Has what is used up, or not used, kept no longer.
fn sort(kept: Vec<(String, OwnedFd)>, keep_no_longer: impl Fn(&str)) -> Estate {
    let (mut listeners, mut clients, mut document) = (Vec::new(), BTreeMap::new(), None);
    for (name, descriptor) in kept {
        if let Some((volume, place)) = listening::named(&name) {
            listeners.push(PassedListener { volume, place, socket: descriptor });
            continue;
        }
        // N.B. its copies would keep connections open that the daemon closes.
        keep_no_longer(&name);
        if name == DOCUMENT {
            document = Some(descriptor);
        } else if let Some(number) = name.strip_prefix(CLIENT).and_then(|number| number.parse::<u64>().ok()) {
            clients.insert(number, descriptor);
        } else {
            tracing::warn!(%name, "the service manager has kept a descriptor that nobody here knows");
        }
    }
    let mut estate = Estate { listeners, ..Estate::default() };
    if let Some(document) = document {
        match Estate::read(document, clients.into_values().collect()) {
            Ok(left) => {
                estate.clients = left.clients;
                estate.since_unix_ms = left.since_unix_ms;
            }
            Err(reason) => tracing::warn!(%reason, "connections of a daemon before are closed"),
        }
    }
    estate
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use lane::PassedConnection;
    use migration::VolumeId;

    use super::*;

    /// What a service manager would have of two clients, and their other ends.
    fn kept_clients() -> (Vec<(String, OwnedFd)>, Vec<UnixStream>) {
        let (mut clients, mut ends) = (Vec::new(), Vec::new());
        for number in 0..2 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ends.push(ours);
            let connection = PassedConnection { socket: theirs.into(), session: None };
            clients.push(PassedClient { volume: VolumeId([number; 16]), connection });
        }
        let estate = Estate { since_unix_ms: 3, listeners: Vec::new(), clients };
        let mut kept = vec![(DOCUMENT.to_owned(), estate.write_clients().unwrap())];
        let sockets = estate.clients.into_iter().map(|client| client.connection.socket).enumerate();
        kept.extend(sockets.map(|(number, socket)| (format!("{CLIENT}{number}"), socket)));
        (kept, ends)
    }

    fn is_closed(end: &mut UnixStream) -> bool {
        end.set_nonblocking(true).unwrap();
        matches!(end.read(&mut [0]), Ok(0))
    }

    #[test]
    fn what_was_kept_is_found_in_any_order_and_kept_no_longer() {
        let (mut kept, mut ends) = kept_clients();
        kept.reverse();
        let gone = RefCell::new(Vec::new());
        let estate = sort(kept, |name| gone.borrow_mut().push(name.to_owned()));
        let volumes: Vec<_> = estate.clients.iter().map(|client| client.volume.0[0]).collect();
        assert_eq!((volumes, estate.since_unix_ms), (vec![0, 1], 3));
        assert_eq!(gone.into_inner(), ["client.1", "client.0", "take-over"]);
        assert!(!ends.iter_mut().any(is_closed));
    }

    #[test]
    fn of_a_part_nothing_is_used_and_connections_are_closed() {
        for missing in 0..3 {
            let (mut kept, mut ends) = kept_clients();
            kept.remove(missing);
            let estate = sort(kept, |_| ());
            assert!(estate.clients.is_empty() && estate.listeners.is_empty());
            assert!(ends.iter_mut().all(is_closed), "without {missing}");
        }
    }
}
