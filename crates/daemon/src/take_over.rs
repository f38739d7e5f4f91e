//! A restart that no guest notices: the volumes' sockets and the connections of their clients outlive the daemon.
//!
//! ```text
//!   the earlier daemon                                                        the next one
//!   requests end ─► lanes end ─► image locks go ─► state ════════════════════► waits ─► data folder ─► lanes ─► requests
//!                                                   │  by `serve --take-over`: over a socket in the data folder
//!                                                   └  or kept by the service manager, until it starts the next one
//! ```
//! A connection is handed over when no request is in flight and every reply has been sent, together with the data that its
//! client has sent. The next daemon's lane treats it like a new client: fencing tokens and residencies begin as after every
//! restart. So losing a connection at any point does no harm: its client connects again, and repeats unanswered requests.
//! If a daemon dies in between, the kernel closes its connections. After `kill -9` only the listening sockets remain, which the
//! service manager has from the moment they are made: a connection would be in the middle of a request.

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

use crate::{custody, service_manager};

/// The service manager's name of the restart state's document.
const DOCUMENT: &str = "take-over";
/// The prefix of its names of connections, before their number.
const CLIENT: &str = "client.";

/// Passes the restart state to the service manager, for the next daemon. Blocks. After an error the next daemon may find a part
/// of it, and does not use that.
pub(crate) fn keep(estate: &Estate) -> io::Result<()> {
    // It has the listening sockets since they were made.
    let document = estate.write_clients()?;
    for (number, client) in estate.clients.iter().enumerate() {
        service_manager::keep(&format!("{CLIENT}{number}"), client.connection.socket.as_fd())?;
    }
    service_manager::keep(DOCUMENT, document.as_fd())?;
    service_manager::wait_until_heard()
}

/// Returns the restart state that the service manager has kept. Call this once, before anything is opened.
pub(crate) fn kept() -> Estate {
    sort(service_manager::kept(), service_manager::keep_no_longer, custody::continue_freeing)
}

/// Assigns descriptors by their names. Makes the service manager close those that are used up or not used.
fn sort(kept: Vec<(String, OwnedFd)>, keep_no_longer: impl Fn(&str), free: impl Fn(OwnedFd)) -> Estate {
    let (mut listeners, mut clients, mut document) = (Vec::new(), BTreeMap::new(), None);
    for (name, descriptor) in kept {
        if let Some((volume, place)) = listening::named(&name) {
            listeners.push(PassedListener { volume, place, socket: descriptor });
            continue;
        }
        // The service manager keeps it until it is empty.
        if custody::is_deleted_file(&name) {
            free(descriptor);
            continue;
        }
        // N.B. The service manager gives its copies up: they would keep connections open that the daemon closes.
        keep_no_longer(&name);
        if name == DOCUMENT {
            document = Some(descriptor);
        } else if let Some(number) = name.strip_prefix(CLIENT).and_then(|number| number.parse::<u64>().ok()) {
            clients.insert(number, descriptor);
        } else {
            tracing::warn!(%name, "the service manager has kept an unknown descriptor");
        }
    }
    let mut estate = Estate { listeners, ..Estate::default() };
    if let Some(document) = document {
        match Estate::read(document, clients.into_values().collect()) {
            Ok(left) => {
                estate.clients = left.clients;
                estate.since_unix_ms = left.since_unix_ms;
            }
            Err(reason) => tracing::warn!(%reason, "closed connections of an earlier daemon"),
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

    /// Returns what a service manager would have of two clients, and their other ends.
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
        let estate = sort(kept, |name| gone.borrow_mut().push(name.to_owned()), |_| ());
        let volumes: Vec<_> = estate.clients.iter().map(|client| client.volume.0[0]).collect();
        assert_eq!((volumes, estate.since_unix_ms), (vec![0, 1], 3));
        assert_eq!(gone.into_inner(), ["client.1", "client.0", "take-over"]);
        assert!(!ends.iter_mut().any(is_closed));
    }

    #[test]
    fn deleted_files_are_freed_further_and_kept_until_they_are_empty() {
        let (gone, freed) = (RefCell::new(0), RefCell::new(0));
        let file = || tempfile::tempfile().unwrap().into();
        let kept = vec![("deleted.1.2".to_owned(), file()), ("deleted.1.3".to_owned(), file())];
        sort(kept, |_| *gone.borrow_mut() += 1, |_| *freed.borrow_mut() += 1);
        assert_eq!((gone.into_inner(), freed.into_inner()), (0, 2));
    }

    #[test]
    fn of_a_part_nothing_is_used_and_connections_are_closed() {
        for missing in 0..3 {
            let (mut kept, mut ends) = kept_clients();
            kept.remove(missing);
            let estate = sort(kept, |_| (), |_| ());
            assert!(estate.clients.is_empty() && estate.listeners.is_empty());
            assert!(ends.iter_mut().all(is_closed), "without {missing}");
        }
    }
}
