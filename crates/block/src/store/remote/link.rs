//! The session with a server, over as many connections as it takes, and across the loss of them.
//!
//! ```text
//!            ┌─────────────── dialled, fits, ledger written again ──────────────┐
//!   Connected ──a connection breaks──► Broken: others are drained, then dial with back-off, on a helper thread
//!       └──────────────── the store is dropped ─────────► Closed ◄──────────┘
//! ```
//!
//! A request goes to the connection with the fewest in flight, and is sent again, on a new one, if it is lost. Who waits
//! and for how long is the store's business: while the link is broken, requests wait here.

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

/// Time before a server is dialled for the second time, doubled with each further try. The first is at once: a server
/// that is restarted is soon back.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// Longest time between two tries: so long may a server be back before its guests notice.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A session that has lived for so long has not failed at once: its server is dialled again without a pause.
const GOOD_SESSION: Duration = Duration::from_secs(5);
/// Changes that are written again at the same time.
const REPEATS_IN_FLIGHT_MAX: usize = 64;
/// How long after a flush of our own that failed the next is tried.
const FLUSH_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Link {
    dialer: Dialer,
    /// What the store was made by. Later connections offer at least this.
    terms: Terms,
    /// What every later connection must offer at least, in bytes.
    size: Cell<u64>,
    engine: Rc<dyn Engine>,
    handle: Handle,
    /// Itself, for its tasks.
    own: Weak<Self>,
    zeroes: Buffer,
    state: RefCell<State>,
    ledger: RefCell<Ledger>,
    /// Flushes that the server has refused.
    flushes_failed: Cell<u64>,
    /// When the session was begun, or was taken up again.
    connected_at: Cell<Duration>,
    /// How long to wait before dialling again.
    pause: Cell<Duration>,
    /// Whether the task is there that flushes when the ledger fills up.
    relieving: Cell<bool>,
    /// A connection, an answer, room in the ledger, or the end.
    changed: Signal,
}

enum State {
    Connected(Vec<Rc<Connection>>),
    Broken,
    Closed,
}

/// Whether a request may have reached the server: who gives it up before knows that nothing has happened.
#[derive(Clone, Default)]
pub(super) struct Fate {
    is_out: Rc<Cell<bool>>,
}

impl Fate {
    /// Tells whether the request is with the server, and not answered.
    pub(super) fn is_out(&self) -> bool {
        self.is_out.get()
    }
}

impl Link {
    /// Starts a session on connections that were dialled.
    pub(super) fn start(dialer: Dialer, lines: Lines, handle: &Handle, engine: &Rc<dyn Engine>) -> Rc<Self> {
        let link = Rc::new_cyclic(|own| Self {
            dialer,
            terms: *lines.terms(),
            size: Cell::new(lines.terms().size),
            engine: Rc::clone(engine),
            handle: handle.clone(),
            own: Weak::clone(own),
            zeroes: Buffer::zeroed(ZERO_PAYLOAD_MAX as usize),
            state: RefCell::new(State::Broken),
            ledger: RefCell::default(),
            flushes_failed: Cell::new(0),
            connected_at: Cell::new(handle.now()),
            pause: Cell::new(Duration::ZERO),
            relieving: Cell::new(false),
            changed: Signal::default(),
        });
        let connections = link.connections(lines);
        link.state.replace(State::Connected(connections));
        link
    }

    /// What the store may count on.
    pub(super) fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Has a request answered, on as many connections as that takes. A read brings its `buffer`.
    ///
    /// # Errors
    /// What the server says, or [`IoError::Closed`]. It waits for as long as there is no server.
    pub(super) async fn perform(
        &self,
        request: &Request,
        mut buffer: Option<Buffer>,
        fate: &Fate,
    ) -> Result<Answer, IoError> {
        loop {
            let connection = self.changed.wait_for(|| self.least_loaded()).await?;
            if matches!(request, Request::Describe(_)) && !connection.describes() {
                // A server that was restarted in another way: nothing is lost by not knowing.
                return Err(IoError::Unsupported);
            }
            if let (Request::Read(range), None) = (request, &buffer) {
                // That of the first try went down with its connection.
                buffer = Some(self.engine.buffers().take(range.length as usize));
            }
            fate.is_out.set(true);
            let answer = connection.submit(request, buffer.take(), &self.zeroes).await;
            fate.is_out.set(false);
            match answer.unwrap_or(Err(Failure::Lost)) {
                Ok(answer) => return Ok(answer),
                // It has not done it, and will not do anything else on this connection.
                Err(Failure::Refused(error::ESHUTDOWN)) => connection.lose("the server is shutting down"),
                Err(Failure::Refused(code)) => return Err(request.failure(code)),
                Err(Failure::Lost) => {}
            }
        }
    }

    /// Makes durable what was answered before.
    ///
    /// **N.B.** A server that cannot flush may have dropped what it had answered, and says so once. What is in the ledger stays
    /// there and is made again, before anything else is asked for; no flush that was under way meanwhile vouches for it.
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
                self.connection_lost("it could not flush, and what it had answered is written again");
                Err(error)
            }
        }
    }

    /// Waits until a further change may be begun.
    pub(super) async fn room(&self) -> Result<(), IoError> {
        let look = || match &*self.state.borrow() {
            State::Closed => Some(Err(IoError::Closed)),
            _ => self.ledger.borrow().has_room().then_some(Ok(())),
        };
        self.changed.wait_for(look).await
    }

    /// Notes a change that was answered; flushes if there are too many.
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

    /// To be called when a connection takes requests again.
    pub(super) fn answered(&self) {
        self.changed.notify();
    }

    /// To be called when a connection breaks. Its requests wait for the next one.
    pub(super) fn connection_lost(&self, reason: &'static str) {
        let Some(others) = self.give_up_connections() else { return };
        tracing::warn!(uri = %self.dialer.uri, reason, "lost the connection to a remote store; dialling again");
        if self.handle.now().saturating_sub(self.connected_at.get()) >= GOOD_SESSION {
            self.pause.set(Duration::ZERO);
        }
        let own = Weak::clone(&self.own);
        self.handle.spawn(reconnect(own, others));
    }

    /// Ends the session; requests fail from now on.
    pub(super) fn close(&self) {
        if let State::Connected(connections) = self.state.replace(State::Closed) {
            for connection in connections {
                connection.close(&self.handle);
            }
        }
        self.changed.notify();
    }

    /// Lets requests wait for other connections than those there are.
    fn give_up_connections(&self) -> Option<Vec<Rc<Connection>>> {
        let mut state = self.state.borrow_mut();
        let State::Connected(connections) = &mut *state else { return None };
        let former = std::mem::take(connections);
        *state = State::Broken;
        Some(former)
    }

    fn least_loaded(&self) -> Option<Result<Rc<Connection>, IoError>> {
        match &*self.state.borrow() {
            State::Connected(connections) => {
                let open = connections.iter().filter_map(|connection| Some((connection.load()?, connection)));
                open.min_by_key(|(load, _)| *load).map(|(_, connection)| Ok(Rc::clone(connection)))
            }
            State::Broken => None,
            State::Closed => Some(Err(IoError::Closed)),
        }
    }

    fn connections(self: &Rc<Self>, lines: Lines) -> Vec<Rc<Connection>> {
        let lines = std::iter::once(lines.first).chain(lines.further);
        lines.map(|line| Connection::start(line, self, &self.handle, &self.engine)).collect()
    }

    /// Goes on with new connections, once the server has again what it had answered.
    async fn resume(self: &Rc<Self>, lines: Lines) -> Result<(), &'static str> {
        self.check(lines.terms())?;
        let connections = self.connections(lines);
        let Some(first) = connections.first() else { return Err("it takes no connection") };
        let repeated = self.repeat_changes(first).await;
        let is_open = !matches!(*self.state.borrow(), State::Closed);
        if repeated.is_err() || !is_open {
            for connection in connections {
                connection.close(&self.handle);
            }
            return repeated;
        }
        // N.B. from here on requests that were in flight are sent again: the server has all that came before them.
        let is_whole = connections.iter().all(|connection| connection.load().is_some());
        self.state.replace(State::Connected(connections));
        self.connected_at.set(self.handle.now());
        if !is_whole {
            // One was lost before anybody could be told.
            self.connection_lost("the server closed it");
        }
        self.changed.notify();
        Ok(())
    }

    /// Makes every change of the ledger again, overlapping ones in their order.
    async fn repeat_changes(&self, connection: &Rc<Connection>) -> Result<(), &'static str> {
        let changes = self.ledger.borrow().changes();
        if !changes.is_empty() {
            tracing::info!(uri = %self.dialer.uri, changes = changes.len(), "writing again what was not flushed");
        }
        let order = RangeLock::new();
        let mut running = FuturesUnordered::new();
        for change in changes {
            if running.len() >= REPEATS_IN_FLIGHT_MAX {
                running.next().await.unwrap_or(Ok(()))?;
            }
            // In the order of the entries: claims are granted in the order in which they are made.
            let claim = order.claim(change.range(), Claim::Exclusive);
            let request = Request::Change(change.volatile());
            running.push(async move {
                let _claimed = claim.await;
                match connection.submit(&request, None, &self.zeroes).await {
                    Ok(Ok(_)) => Ok(()),
                    Ok(Err(Failure::Refused(_))) => Err("it does not take again what it had taken"),
                    Ok(Err(Failure::Lost)) | Err(_) => Err("it was lost again"),
                }
            });
        }
        while let Some(repeated) = running.next().await {
            repeated?;
        }
        Ok(())
    }

    /// Flushes until the ledger has room to spare.
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

// What it takes to use more of an export that has grown.
impl Link {
    /// Connects besides the connections that there are.
    ///
    /// # Errors
    /// As the system calls it; the log says more.
    pub(super) async fn dial(&self) -> Result<Lines, IoError> {
        let dialer = self.dialer.clone();
        run_blocking(&self.engine, move || dialer.dial()).await?.map_err(|error| {
            tracing::warn!(uri = %self.dialer.uri, %error, "a remote store takes no further connection");
            let errno = std::error::Error::source(&error)
                .and_then(|cause| Errno::from_io_error(cause.downcast_ref()?));
            IoError::os("connect once more", errno.unwrap_or(Errno::CONNREFUSED))
        })
    }

    /// Demands an export of so many bytes from every later connection.
    pub(super) fn expect_size(&self, size: u64) {
        self.size.set(size);
    }

    /// Goes on over `lines`, with an export of at least `size` bytes; requests wait while the last are answered on the
    /// former connections.
    ///
    /// # Errors
    /// [`Errno::AGAIN`] if the session is broken at this moment, or it is no longer the export that it was: nothing has
    /// changed.
    pub(super) async fn renew(&self, lines: Lines, size: u64) -> Result<(), IoError> {
        self.check(lines.terms()).map_err(|what| {
            tracing::warn!(uri = %self.dialer.uri, what, "a remote store is not what it was");
            IoError::os("connect once more", Errno::STALE)
        })?;
        let again = IoError::os("connect once more", Errno::AGAIN);
        let link = self.own.upgrade().ok_or(IoError::Closed)?;
        let former = self.give_up_connections().ok_or(again)?;
        self.expect_size(size);
        drain(former, &self.handle, self.dialer.options.answer_deadline).await;
        if let Err(reason) = link.resume(lines).await {
            tracing::warn!(uri = %self.dialer.uri, reason, "lost the connection to a remote store; dialling again");
            self.handle.spawn(reconnect(Weak::clone(&self.own), Vec::new()));
        }
        Ok(())
    }

    fn check(&self, terms: &Terms) -> Result<(), &'static str> {
        self.terms.with_size(self.size.get()).check_kept_by(terms)
    }
}

/// Waits, not for ever, for the last answers on connections that are not used any more, and closes them: their server
/// may live, and what it works on is not sent a second time while it does.
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

/// Dials until there is a connection, or nobody wants one any more.
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
        matches!(*self.state.borrow(), State::Closed)
    }
}

/// Cuts a range into pieces of at most `length` bytes.
pub(super) fn pieces(range: ByteRange, length: u64) -> impl Iterator<Item = ByteRange> {
    let mut offset = range.offset;
    std::iter::from_fn(move || {
        let length = length.min(range.end() - offset);
        let piece = ByteRange::new(offset, length);
        offset += length;
        (length > 0).then_some(piece)
    })
}
