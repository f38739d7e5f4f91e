//! The session with a server, over several connections, and across their loss.
//!
//! ```text
//!            ┌─────────────── dialled, fits, ledger repeated ─ ──────────────┐
//!   Connected ──a connection breaks──► Broken: others are drained, then dial with back-off, on a helper thread
//!       └──────────────── the store is dropped ─────────► Closed ◄──────────┘
//! ```
//!
//! A request goes to the connection with the fewest in flight. If that is lost, the request is sent again on a new one. Requests
//! wait here while the link is broken; the store limits their wait.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};
use nbd_protocol::error;
use rustix::io::Errno;

use super::connection::Connection;
use super::dial::{Dialer, Lines};
use super::in_flight::{Answer, Failure};
use super::ledger::Ledger;
use super::request::{Request, ZERO_PAYLOAD_MAX};
use super::terms::Terms;
use crate::buffer::Buffer;
use crate::change::Change;
use crate::device::ByteRange;
use crate::engine::{Engine, run_blocking};
use crate::error::IoError;
use crate::executor::Handle;
use crate::range_lock::{Claim, RangeLock};
use crate::signal::Signal;

/// The pause before the second attempt to dial, doubled with each further one. The first is at once: a restarted
/// server is soon back.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// The longest pause between two attempts: a returned server may go unnoticed that long.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The age from which a broken session is dialled again without a pause.
const GOOD_SESSION: Duration = Duration::from_secs(5);
const REPEATS_IN_FLIGHT_MAX: usize = 64;
const FLUSH_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Link {
    dialer: Dialer,
    /// The terms when the store was made. Later connections offer at least this.
    terms: Terms,
    /// The minimum size of every later connection's export, in bytes.
    size: Cell<u64>,
    engine: Rc<dyn Engine>,
    handle: Handle,
    own: Weak<Self>,
    zeroes: Buffer,
    state: RefCell<LinkState>,
    ledger: RefCell<Ledger>,
    flushes_failed: Cell<u64>,
    connected_at: Cell<Duration>,
    pause: Cell<Duration>,
    relieving: Cell<bool>,
    changed: Signal,
}

enum LinkState {
    Connected(Vec<Rc<Connection>>),
    Broken,
    Closed,
}

/// Whether a request may have reached the server. If not, giving it up has no effect.
#[derive(Clone, Default)]
pub(super) struct Fate {
    is_out: Rc<Cell<bool>>,
}

impl Fate {
    pub(super) fn is_out(&self) -> bool {
        self.is_out.get()
    }
}

impl Link {
    pub(super) fn start(dialer: Dialer, lines: Lines, handle: &Handle, engine: &Rc<dyn Engine>) -> Rc<Self> {
        let link = Rc::new_cyclic(|own| Self {
            dialer,
            terms: *lines.terms(),
            size: Cell::new(lines.terms().size),
            engine: Rc::clone(engine),
            handle: handle.clone(),
            own: Weak::clone(own),
            zeroes: Buffer::zeroed(ZERO_PAYLOAD_MAX as usize),
            state: RefCell::new(LinkState::Broken),
            ledger: RefCell::default(),
            flushes_failed: Cell::new(0),
            connected_at: Cell::new(handle.now()),
            pause: Cell::new(Duration::ZERO),
            relieving: Cell::new(false),
            changed: Signal::default(),
        });
        let connections = link.connections(lines);
        link.state.replace(LinkState::Connected(connections));
        link
    }

    pub(super) fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Sends a request, on as many connections as needed, and returns the answer. A read brings its `buffer`. Waits while there
    /// is no server. Fails with the server's error, or with [`IoError::Closed`].
    pub(super) async fn perform(
        &self,
        request: &Request,
        mut buffer: Option<Buffer>,
        fate: &Fate,
    ) -> Result<Answer, IoError> {
        loop {
            let connection = self.changed.wait_for(|| self.least_loaded()).await?;
            if matches!(request, Request::Describe(_)) && !connection.describes() {
                // The restarted server has other abilities; allocation is dispensable.
                return Err(IoError::Unsupported);
            }
            if let (Request::Read(range), None) = (request, &buffer) {
                // The buffer of the first attempt was lost with its connection.
                buffer = Some(self.engine.buffers().take(range.length as usize));
            }
            fate.is_out.set(true);
            let answer = connection.submit(request, buffer.take(), &self.zeroes).await;
            fate.is_out.set(false);
            match answer.unwrap_or(Err(Failure::Lost)) {
                Ok(answer) => return Ok(answer),
                // It has not done it, and will do nothing else on this connection.
                Err(Failure::Refused(error::ESHUTDOWN)) => connection.lose("the server is shutting down"),
                Err(Failure::Refused(code)) => return Err(request.failure(code)),
                Err(Failure::Lost) => {}
            }
        }
    }

    /// Makes all answered changes durable.
    ///
    /// **N.B.** A server that cannot flush may have dropped answered changes, and reports that once. The ledger keeps its changes
    /// and repeats them before any other request. No concurrent flush counts for them.
    pub(super) async fn flush(&self, fate: &Fate) -> Result<(), IoError> {
        let (mark, failures) = (self.ledger.borrow().mark(), self.flushes_failed.get());
        match self.perform(&Request::Flush, None, fate).await {
            Ok(_) if self.flushes_failed.get() == failures => {
                self.ledger.borrow_mut().forget(mark);
                self.changed.notify();
                Ok(())
            }
            Ok(_) => Err(IoError::os("flush", Errno::IO)),
            Err(IoError::Closed) => Err(IoError::Closed),
            Err(error) => {
                self.flushes_failed.set(self.flushes_failed.get() + 1);
                self.connection_lost("a flush failed, and the unflushed writes are repeated");
                Err(error)
            }
        }
    }

    pub(super) async fn room(&self) -> Result<(), IoError> {
        let look = || match &*self.state.borrow() {
            LinkState::Closed => Some(Err(IoError::Closed)),
            _ => self.ledger.borrow().has_room().then_some(Ok(())),
        };
        self.changed.wait_for(look).await
    }

    pub(super) fn record(&self, change: Change) {
        let mut ledger = self.ledger.borrow_mut();
        ledger.record(change);
        if ledger.is_pressed() && !self.relieving.replace(true) {
            let own = Weak::clone(&self.own);
            self.handle.spawn(async move {
                if let Some(link) = own.upgrade() {
                    link.relieve().await;
                }
            });
        }
    }

    /// Called when a connection takes requests again.
    pub(super) fn answered(&self) {
        self.changed.notify();
    }

    /// Called when a connection breaks. Its requests wait for the next one.
    pub(super) fn connection_lost(&self, reason: &'static str) {
        let Some(others) = self.give_up_connections() else { return };
        tracing::warn!(uri = %self.dialer.uri, reason, "lost the connection to a remote store; connecting again");
        if self.handle.now().saturating_sub(self.connected_at.get()) >= GOOD_SESSION {
            self.pause.set(Duration::ZERO);
        }
        let own = Weak::clone(&self.own);
        self.handle.spawn(reconnect(own, others));
    }

    pub(super) fn close(&self) {
        if let LinkState::Connected(connections) = self.state.replace(LinkState::Closed) {
            for connection in connections {
                connection.close(&self.handle);
            }
        }
        self.changed.notify();
    }

    /// Lets requests wait for other connections than the present ones.
    fn give_up_connections(&self) -> Option<Vec<Rc<Connection>>> {
        let mut state = self.state.borrow_mut();
        let LinkState::Connected(connections) = &mut *state else { return None };
        let former = std::mem::take(connections);
        *state = LinkState::Broken;
        Some(former)
    }

    fn least_loaded(&self) -> Option<Result<Rc<Connection>, IoError>> {
        match &*self.state.borrow() {
            LinkState::Connected(connections) => {
                let open = connections.iter().filter_map(|connection| Some((connection.load()?, connection)));
                open.min_by_key(|(load, _)| *load).map(|(_, connection)| Ok(Rc::clone(connection)))
            }
            LinkState::Broken => None,
            LinkState::Closed => Some(Err(IoError::Closed)),
        }
    }

    fn connections(self: &Rc<Self>, lines: Lines) -> Vec<Rc<Connection>> {
        let lines = std::iter::once(lines.first).chain(lines.further);
        lines.map(|line| Connection::start(line, self, &self.handle, &self.engine)).collect()
    }

    /// Continues with new connections, once the server has all answered changes again.
    async fn resume(self: &Rc<Self>, lines: Lines) -> Result<(), &'static str> {
        self.check(lines.terms())?;
        let connections = self.connections(lines);
        let Some(first) = connections.first() else { return Err("it takes no connection") };
        let repeated = self.repeat_changes(first).await;
        let is_open = !matches!(*self.state.borrow(), LinkState::Closed);
        if repeated.is_err() || !is_open {
            for connection in connections {
                connection.close(&self.handle);
            }
            return repeated;
        }
        // N.B. From here on requests in flight are sent again, because the server has all earlier changes.
        let is_whole = connections.iter().all(|connection| connection.load().is_some());
        self.state.replace(LinkState::Connected(connections));
        self.connected_at.set(self.handle.now());
        if !is_whole {
            // A connection broke before the link was connected.
            self.connection_lost("the server closed it");
        }
        self.changed.notify();
        Ok(())
    }

    /// Repeats every change of the ledger, overlapping ones in their order.
    async fn repeat_changes(&self, connection: &Rc<Connection>) -> Result<(), &'static str> {
        let changes = self.ledger.borrow().changes();
        if !changes.is_empty() {
            tracing::info!(uri = %self.dialer.uri, changes = changes.len(), "repeating the unflushed writes");
        }
        let order = RangeLock::new();
        let mut running = FuturesUnordered::new();
        for change in changes {
            if running.len() >= REPEATS_IN_FLIGHT_MAX {
                running.next().await.unwrap_or(Ok(()))?;
            }
            // Claimed in the order of the entries: claims are granted in the order of the calls.
            let claim = order.claim(change.range(), Claim::Exclusive);
            let request = Request::Change(change.volatile());
            running.push(async move {
                let _claimed = claim.await;
                match connection.submit(&request, None, &self.zeroes).await {
                    Ok(Ok(_)) => Ok(()),
                    Ok(Err(Failure::Refused(_))) => Err("it rejects a repeated write that it had accepted"),
                    Ok(Err(Failure::Lost)) | Err(_) => Err("it was lost again"),
                }
            });
        }
        while let Some(repeated) = running.next().await {
            repeated?;
        }
        Ok(())
    }

    async fn relieve(&self) {
        while self.ledger.borrow().is_pressed() {
            match self.flush(&Fate::default()).await {
                Ok(()) => {}
                Err(IoError::Closed) => break,
                Err(error) => {
                    tracing::warn!(uri = %self.dialer.uri, %error, "a remote store cannot be flushed; trying again");
                    self.handle.sleep(FLUSH_PAUSE).await;
                }
            }
        }
        self.relieving.set(false);
    }
}

impl Link {
    /// Opens further connections to the server. Fails with the system's error; the log says more.
    pub(super) async fn dial(&self) -> Result<Lines, IoError> {
        let dialer = self.dialer.clone();
        run_blocking(&self.engine, move || dialer.dial()).await?.map_err(|error| {
            tracing::warn!(uri = %self.dialer.uri, %error, "a remote store takes no further connection");
            let errno = std::error::Error::source(&error)
                .and_then(|cause| Errno::from_io_error(cause.downcast_ref()?));
            IoError::os("connect once more", errno.unwrap_or(Errno::CONNREFUSED))
        })
    }

    pub(super) fn expect_size(&self, size: u64) {
        self.size.set(size);
    }

    /// Continues over `lines`, with an export of at least `size` bytes. Requests wait until the former connections have
    /// answered the last ones. Fails with [`Errno::AGAIN`] if the session is broken at this moment, or the export has
    /// changed: nothing has happened.
    pub(super) async fn renew(&self, lines: Lines, size: u64) -> Result<(), IoError> {
        self.check(lines.terms()).map_err(|what| {
            tracing::warn!(uri = %self.dialer.uri, what, "a remote store has changed");
            IoError::os("connect once more", Errno::STALE)
        })?;
        let again = IoError::os("connect once more", Errno::AGAIN);
        let link = self.own.upgrade().ok_or(IoError::Closed)?;
        let former = self.give_up_connections().ok_or(again)?;
        self.expect_size(size);
        drain(former, &self.handle, self.dialer.options.answer_deadline).await;
        if let Err(reason) = link.resume(lines).await {
            tracing::warn!(uri = %self.dialer.uri, reason, "lost the connection to a remote store; connecting again");
            self.handle.spawn(reconnect(Weak::clone(&self.own), Vec::new()));
        }
        Ok(())
    }

    fn check(&self, terms: &Terms) -> Result<(), &'static str> {
        self.terms.with_size(self.size.get()).check_kept_by(terms)
    }
}

/// Waits at most `wait_max` for the last answers on unused connections, and closes them. Their server may live, and its requests
/// in progress are not sent again meanwhile.
async fn drain(connections: Vec<Rc<Connection>>, handle: &Handle, wait_max: Duration) {
    let deadline = handle.now() + wait_max;
    for connection in connections {
        let drained = Box::pin(connection.drained());
        if let Either::Right(_) = select(drained, handle.sleep_until(deadline)).await {
            connection.lose("the server has stopped answering");
        }
        Rc::clone(&connection).close(handle);
    }
}

async fn reconnect(own: Weak<Link>, others: Vec<Rc<Connection>>) {
    let Some(link) = own.upgrade() else { return };
    let handle = link.handle.clone();
    let wait_max = link.dialer.options.answer_deadline;
    drop(link);
    drain(others, &handle, wait_max).await;
    loop {
        let Some(link) = own.upgrade().filter(|link| !link.is_closed()) else { return };
        let pause = link.pause.get();
        link.pause.set((pause * 2).clamp(PAUSE_MIN, PAUSE_MAX));
        drop(link);
        handle.sleep(pause).await;
        let Some(link) = own.upgrade().filter(|link| !link.is_closed()) else { return };
        let dialer = link.dialer.clone();
        let dialled = match run_blocking(&link.engine, move || dialer.dial()).await {
            Ok(dialled) => dialled,
            // The engine is shut down: there is no thread to dial on.
            Err(_) => return,
        };
        let failure = match dialled {
            Ok(lines) => match link.resume(lines).await {
                Ok(()) => {
                    tracing::info!(uri = %link.dialer.uri, "connected to a remote store again");
                    return;
                }
                Err(reason) => reason.to_owned(),
            },
            Err(error) => error.to_string(),
        };
        tracing::debug!(uri = %link.dialer.uri, %failure, "cannot connect to a remote store again");
    }
}

impl Link {
    fn is_closed(&self) -> bool {
        matches!(*self.state.borrow(), LinkState::Closed)
    }
}

pub(super) fn pieces(range: ByteRange, length: u64) -> impl Iterator<Item = ByteRange> {
    let mut offset = range.offset;
    std::iter::from_fn(move || {
        let length = length.min(range.end() - offset);
        let piece = ByteRange::new(offset, length);
        offset += length;
        (length > 0).then_some(piece)
    })
}
