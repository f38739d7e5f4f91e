//! The server: listens, counts its connections, and shuts down in order.
//!
//! ```text
//!   Serving ──┬─ shutdown ──► Draining ──┬── all gone, or the deadline ──► Closed
//!             │               │ no connection and no request is accepted;
//!             │               └ requests in flight end and are answered
//!             └─ pass ──────► Passing ───┘
//!                             as Draining, but plain connections stay open for another server
//! ```

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use block::engine::{Engine, Interrupt};
use block::{Handle, IoError};
use slab::Slab;

use crate::nbd::budget::Budget;
use crate::nbd::client::{Client, ClientProcess};
use crate::nbd::connection;
use crate::nbd::export::Exports;
use crate::nbd::limits::Limits;
use crate::nbd::passing::{PassedConnection, PassedSession};
use crate::nbd::tls::Encryption;

/// Pause after a failed accept. Most often the process has no descriptors left, and an immediate retry would keep the
/// lane from its guests.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Serves exports on sockets. A clone is another handle to the same server.
///
/// Everything happens on the executor's thread. Dropping the last handle stops nothing; see [`Server::shutdown`].
#[derive(Clone)]
pub struct Server {
    shared: Rc<Shared>,
}

/// One connection, for the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// The phase that it is in.
    pub phase: ConnectionPhase,
    /// The client at its other end.
    pub client: Client,
    /// The client's process, if it is one of this host and the kernel reports it.
    pub process: Option<ClientProcess>,
    /// Whether an export is used over TLS.
    pub encrypted: bool,
    /// Requests whose replies have not been sent.
    pub requests_in_flight: usize,
    /// Bytes of memory reserved for their payload.
    pub payload_in_flight: usize,
    /// Requests that were answered since the connection was made, including replies that were dropped because
    /// the client was gone.
    pub requests_answered: u64,
}

/// The phase of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionPhase {
    /// The client has not chosen an export.
    Negotiating,
    /// The client uses the export of this name.
    Serving(String),
    /// No request is accepted; those in flight end.
    Draining(String),
}

/// How a shutdown ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Connections that the deadline cut: their clients have not got all replies.
    pub connections_cut: usize,
}

impl Server {
    /// Makes a server that does not listen yet.
    pub fn new(handle: Handle, engine: Rc<dyn Engine>, exports: Exports, limits: Limits) -> Self {
        let shared = Rc::new(Shared {
            handle,
            engine,
            exports,
            budget: Budget::new(limits.payload_in_flight_total_max, limits.payload_allowance),
            limits,
            stage: Cell::new(Stage::Serving),
            interrupt: Interrupt::default(),
            passed: RefCell::default(),
            members: RefCell::default(),
            watching: RefCell::default(),
        });
        Self { shared }
    }

    /// Accepts connections on `listener`, a listening stream socket, until the server shuts down.
    ///
    /// It may be called for several listeners, and returns at once.
    pub fn serve(&self, listener: Arc<OwnedFd>) {
        self.serve_encrypted(listener, Encryption::Off);
    }

    /// Does the same for a listener whose clients may or must encrypt.
    pub fn serve_encrypted(&self, listener: Arc<OwnedFd>, encryption: Encryption) {
        let shared = Rc::clone(&self.shared);
        self.shared.handle.spawn(async move { accept(&shared, &listener, &encryption).await });
    }

    /// Serves one connection that was made elsewhere.
    pub fn serve_connection(&self, socket: OwnedFd) {
        admit(&self.shared, socket, &Encryption::Off, None);
    }

    /// Continues a connection that another server has passed on. If it cannot, it closes the connection.
    ///
    /// `encryption` is for a client that has not sent anything yet.
    pub fn take_up(&self, connection: PassedConnection, encryption: &Encryption) {
        let PassedConnection { socket, session } = connection;
        admit(&self.shared, socket, encryption, session);
    }

    /// Returns the present connections, for the status.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        self.shared.members.borrow().iter().map(|(_, member)| member.info()).collect()
    }

    /// Shuts down: stops accepting and reading, finishes the requests in flight, sends the replies, and closes.
    ///
    /// Connections that are not done `deadline` from now are cut. Requests that had not been accepted get no reply: a client that
    /// reconnects sends them again. When this returns, no connection is left.
    pub async fn shutdown(&self, deadline: Duration) -> Drained {
        self.end(Stage::Draining, deadline).await
    }

    /// Shuts down like [`Server::shutdown`], but leaves connections open for another server. Those that are encrypted, and those
    /// that are not done `deadline` from now, are closed.
    pub async fn pass(&self, deadline: Duration) -> (Drained, Vec<PassedConnection>) {
        let drained = self.end(Stage::Passing, deadline).await;
        (drained, self.shared.passed.take())
    }

    async fn end(&self, by: Stage, deadline: Duration) -> Drained {
        let shared = &self.shared;
        shared.interrupt.raise();
        shared.enter(by);
        let mut deadline = pin!(shared.handle.sleep(deadline));
        let drained = poll_fn(|context| {
            if shared.watch_until(context, || shared.members.borrow().is_empty()).is_ready() {
                return Poll::Ready(true);
            }
            deadline.as_mut().poll(context).map(|()| false)
        })
        .await;
        let connections_cut = if drained { 0 } else { shared.members.borrow().len() };
        shared.enter(Stage::Closed);
        poll_fn(|context| shared.watch_until(context, || shared.members.borrow().is_empty())).await;
        Drained { connections_cut }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Serving,
    Draining,
    /// As before, and another server continues the connections.
    Passing,
    Closed,
}

pub(super) struct Shared {
    pub(super) handle: Handle,
    pub(super) engine: Rc<dyn Engine>,
    pub(super) exports: Exports,
    pub(super) limits: Limits,
    pub(super) budget: Rc<Budget>,
    stage: Cell<Stage>,
    interrupt: Interrupt,
    /// Connections that are left open for another server.
    pub(super) passed: RefCell<Vec<PassedConnection>>,
    members: RefCell<Slab<Rc<Member>>>,
    /// Tasks other than connections that wait for a new stage or for a connection to leave.
    watching: RefCell<Vec<Waker>>,
}

impl Shared {
    pub(super) fn stage(&self) -> Stage {
        self.stage.get()
    }

    fn enter(&self, stage: Stage) {
        self.stage.set(stage);
        for (_, member) in self.members.borrow().iter() {
            if let Some(waker) = &*member.waker.borrow() {
                waker.wake_by_ref();
            }
        }
        self.wake_watching();
    }

    fn wake_watching(&self) {
        for waker in self.watching.take() {
            waker.wake();
        }
    }

    /// Ready when `reached` returns `true`; it is called when the stage changes and when a connection leaves.
    fn watch_until(&self, context: &Context<'_>, reached: impl Fn() -> bool) -> Poll<()> {
        if reached() {
            return Poll::Ready(());
        }
        let mut watching = self.watching.borrow_mut();
        if !watching.iter().any(|waker| waker.will_wake(context.waker())) {
            watching.push(context.waker().clone());
        }
        Poll::Pending
    }
}

/// State of a connection that others may read, and its waker.
pub(super) struct Member {
    pub(super) phase: RefCell<ConnectionPhase>,
    pub(super) encrypted: Cell<bool>,
    client: Client,
    process: Option<ClientProcess>,
    pub(super) requests_in_flight: Cell<usize>,
    pub(super) payload_in_flight: Cell<usize>,
    pub(super) requests_answered: Cell<u64>,
    waker: RefCell<Option<Waker>>,
}

impl Member {
    /// Registers the task to wake when the server's stage changes.
    pub(super) fn wake_on_stage(&self, context: &Context<'_>) {
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            *waker = Some(context.waker().clone());
        }
    }

    fn info(&self) -> ConnectionInfo {
        ConnectionInfo {
            phase: self.phase.borrow().clone(),
            client: self.client,
            process: self.process,
            encrypted: self.encrypted.get(),
            requests_in_flight: self.requests_in_flight.get(),
            payload_in_flight: self.payload_in_flight.get(),
            requests_answered: self.requests_answered.get(),
        }
    }
}

/// A connection's place among the members, which it leaves when this is dropped.
struct Membership {
    shared: Rc<Shared>,
    key: usize,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.shared.members.borrow_mut().try_remove(self.key);
        self.shared.wake_watching();
    }
}

async fn accept(shared: &Rc<Shared>, listener: &Arc<OwnedFd>, encryption: &Encryption) {
    let serving_ends = || shared.stage() != Stage::Serving;
    loop {
        let mut accepting = shared.engine.accept_unless(&shared.interrupt, listener);
        let accepted = poll_fn(|context| {
            // Woken when serving ends: the interrupt has been raised then.
            let _ = shared.watch_until(context, serving_ends);
            accepting.as_mut().poll(context)
        })
        .await;
        match accepted {
            Ok(None) | Err(IoError::Closed) => return,
            // It came in the last moment, and nothing has been sent to it.
            Ok(Some(socket)) if shared.stage() == Stage::Passing => {
                shared.passed.borrow_mut().push(PassedConnection { socket, session: None });
            }
            Ok(Some(socket)) => admit(shared, socket, encryption, None),
            Err(error) => {
                tracing::warn!(%error, "failed to accept an NBD connection");
                shared.handle.sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

/// Gives a connection a place and a task, or closes it if there is none. `session` is its state from another server.
fn admit(shared: &Rc<Shared>, socket: OwnedFd, encryption: &Encryption, session: Option<PassedSession>) {
    let client = Client::of(&socket);
    let mut members = shared.members.borrow_mut();
    let has_place = shared.stage() == Stage::Serving
        && members.iter().filter(|(_, member)| member.client.shares_places_with(client)).count()
            < shared.limits.connections_max
        && client.may_have_another(&shared.limits, || {
            members.iter().filter(|(_, member)| member.client.counts_as(client)).count()
        });
    if !has_place {
        tracing::warn!(%client, connections = members.len(), "refused an NBD connection");
        return;
    }
    client.prepare(&socket);
    let member = Rc::new(Member {
        phase: RefCell::new(ConnectionPhase::Negotiating),
        encrypted: Cell::new(false),
        client,
        process: ClientProcess::of(&socket),
        requests_in_flight: Cell::new(0),
        payload_in_flight: Cell::new(0),
        requests_answered: Cell::new(session.as_ref().map_or(0, |session| session.requests_answered)),
        waker: RefCell::new(None),
    });
    let key = members.insert(Rc::clone(&member));
    let membership = Membership { shared: Rc::clone(shared), key };
    drop(members);
    let encryption = encryption.clone();
    shared.handle.spawn(async move {
        let (server, socket) = (&membership.shared, Arc::new(socket));
        match session {
            None => connection::run(server, &member, &socket, &encryption).await,
            Some(session) => connection::take_up(server, &member, &socket, session).await,
        }
    });
}
