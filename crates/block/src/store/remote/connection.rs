//! One connection to a server: sends requests in batches, and matches replies to requests by cookie.
//!
//! ```text
//!   submit ─► in flight, queue ─► sender task ─► socket ─► receiver task ─► completed ─► ledger, then the caller
//!                    └───────────── lost: every request fails, the link makes a new connection ──┘
//! ```
//!
//! Both tasks end with the connection. A request whose future is dropped stays in flight, because its answer has to be read.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use futures_channel::oneshot;
use futures_util::future::{Either, select};
use nbd_protocol::reply::HEAD_LENGTH_MAX;
use nbd_protocol::{REQUEST_LENGTH, RequestHeader};
use rustix::net::Shutdown;

use super::dial::Line;
use super::in_flight::{Answer, Completed, Failure, InFlight};
use super::link::Link;
use super::receiver::Receiver;
use super::request::{DISCONNECT, Request};
use super::terms::Terms;
use crate::buffer::Buffer;
use crate::engine::{Engine, SEND_PIECES_MAX};
use crate::executor::Handle;
use crate::signal::Signal;

/// The limit of requests in flight on one connection: as many as Linux's own client keeps.
const REQUESTS_MAX: usize = 128;
/// Memory for received replies, in bytes: some dozens of small reads at a time.
const RECEIVE_LENGTH: usize = 128 << 10;
/// Whatever room the start of a head leaves, the rest of it can be received.
const _: () = assert!(RECEIVE_LENGTH > HEAD_LENGTH_MAX);
const HEADERS_LENGTH: usize = 4096;
/// How long a server may take to close a connection after a goodbye.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct Connection {
    socket: Arc<OwnedFd>,
    terms: Terms,
    link: Weak<Link>,
    state: RefCell<ConnectionState>,
    changed: Signal,
}

#[derive(Default)]
struct ConnectionState {
    in_flight: InFlight,
    queue: VecDeque<Outgoing>,
    phase: Phase,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Open,
    SayingGoodbye,
    Gone,
}

struct Outgoing {
    header: [u8; REQUEST_LENGTH],
    payload: Option<Buffer>,
}

impl Connection {
    pub(super) fn start(line: Line, link: &Rc<Link>, handle: &Handle, engine: &Rc<dyn Engine>) -> Rc<Self> {
        let connection = Rc::new(Self {
            socket: Arc::new(line.socket),
            terms: line.terms,
            link: Rc::downgrade(link),
            state: RefCell::default(),
            changed: Signal::default(),
        });
        let (sender, receiver) = (Rc::clone(&connection), Rc::clone(&connection));
        let engines = (Rc::clone(engine), Rc::clone(engine));
        handle.spawn(async move { sender.send_all(&engines.0).await });
        handle.spawn(async move { receiver.receive_all(&engines.1).await });
        connection
    }

    /// Sends a request; `buffer` takes a read's data. The answer comes by the receiver.
    pub(super) fn submit(
        &self,
        request: &Request,
        buffer: Option<Buffer>,
        zeroes: &Buffer,
    ) -> oneshot::Receiver<Result<Answer, Failure>> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state.borrow_mut();
        if state.phase != Phase::Open {
            // The receiver is still held here.
            let _ = sender.send(Err(Failure::Lost));
            return receiver;
        }
        let (header, payload) = request.encode(&self.terms, zeroes);
        let cookie = state.in_flight.insert(request, buffer, self.terms.allocation, sender);
        state.queue.push_back(Outgoing { header: RequestHeader { cookie, ..header }.encode(), payload });
        drop(state);
        self.changed.notify();
        receiver
    }

    pub(super) fn load(&self) -> Option<usize> {
        let state = self.state.borrow();
        let load = state.in_flight.len();
        (state.phase == Phase::Open && load < REQUESTS_MAX).then_some(load)
    }

    pub(super) fn describes(&self) -> bool {
        self.terms.allocation.is_some()
    }

    pub(super) async fn drained(&self) {
        self.changed.wait_for(|| (self.state.borrow().in_flight.len() == 0).then_some(())).await;
    }

    pub(super) fn lose(&self, reason: &'static str) {
        let mut state = self.state.borrow_mut();
        if state.phase == Phase::Gone {
            return;
        }
        let was_wanted = state.phase == Phase::Open;
        state.phase = Phase::Gone;
        state.queue.clear();
        let senders = state.in_flight.lose_all();
        drop(state);
        // Ends the waits of the tasks; a socket that is already gone needs no ending.
        let _ = rustix::net::shutdown(&*self.socket, Shutdown::Both);
        for sender in senders {
            let _ = sender.send(Err(Failure::Lost));
        }
        self.changed.notify();
        if was_wanted && let Some(link) = self.link.upgrade() {
            link.connection_lost(reason);
        }
    }

    pub(super) fn close(self: Rc<Self>, handle: &Handle) {
        let mut state = self.state.borrow_mut();
        if state.phase != Phase::Open {
            return;
        }
        state.phase = Phase::SayingGoodbye;
        state.queue.push_back(Outgoing { header: DISCONNECT.encode(), payload: None });
        drop(state);
        self.changed.notify();
        let handle = handle.clone();
        handle.clone().spawn(async move {
            let gone = self.changed.wait_for(|| (self.state.borrow().phase == Phase::Gone).then_some(()));
            if let Either::Right(_) = select(gone, handle.sleep(GOODBYE_TIMEOUT)).await {
                self.lose("it was closed");
            }
        });
    }

    async fn send_all(&self, engine: &Rc<dyn Engine>) {
        loop {
            let look = || {
                let state = self.state.borrow();
                (state.phase == Phase::Gone || !state.queue.is_empty()).then_some(state.phase)
            };
            if self.changed.wait_for(look).await == Phase::Gone {
                return;
            }
            let pieces = self.next_batch(engine);
            if let Err(error) = engine.send(&self.socket, pieces).await {
                tracing::debug!(%error, "cannot send to a remote server");
                return self.lose("sending failed");
            }
        }
    }

    /// Returns the buffers of one send: headers of several requests share one piece of memory.
    fn next_batch(&self, engine: &Rc<dyn Engine>) -> Vec<Buffer> {
        let mut state = self.state.borrow_mut();
        let count = state.queue.len().min(HEADERS_LENGTH / REQUEST_LENGTH).min(SEND_PIECES_MAX / 2);
        let batch: Vec<Outgoing> = state.queue.drain(..count).collect();
        drop(state);
        let mut headers = engine.buffers().take(count * REQUEST_LENGTH);
        if let Some(bytes) = headers.as_mut_slice() {
            for (target, outgoing) in bytes.chunks_exact_mut(REQUEST_LENGTH).zip(&batch) {
                target.copy_from_slice(&outgoing.header);
            }
        }
        let mut pieces = Vec::with_capacity(2 * count);
        let mut start = 0;
        for (end, outgoing) in (1..).map(|number| number * REQUEST_LENGTH).zip(batch) {
            if let Some(payload) = outgoing.payload {
                pieces.extend([headers.slice(start, end - start), payload]);
                start = end;
            }
        }
        if start < headers.len() {
            pieces.push(headers.slice(start, headers.len() - start));
        }
        pieces
    }

    async fn receive_all(&self, engine: &Rc<dyn Engine>) {
        let reason = match self.receive_until_end(engine).await {
            Ok(()) => "the server closed it",
            Err(reason) => reason,
        };
        self.lose(reason);
    }

    async fn receive_until_end(&self, engine: &Rc<dyn Engine>) -> Result<(), &'static str> {
        const FAILED: &str = "receiving failed";
        let mut receiver = Receiver::new(self.terms.structured);
        let mut memory = engine.buffers().take(RECEIVE_LENGTH);
        // Bytes at the start of `memory` that have arrived and were not taken: the start of a head.
        let mut arrived = 0;
        let mut completed = Vec::new();
        loop {
            if self.state.borrow().phase == Phase::Gone {
                return Ok(());
            }
            let loan =
                if arrived == 0 { receiver.lend(&mut self.state.borrow_mut().in_flight) } else { None };
            if let Some(mut loan) = loan {
                let (buffer, length) = engine.receive(&self.socket, loan.buffer).await.map_err(|_| FAILED)?;
                loan.buffer = buffer;
                let mut state = self.state.borrow_mut();
                receiver.give_back(loan, length, &mut state.in_flight);
                if length == 0 {
                    return Ok(());
                }
                // Its last byte may have been the request's last.
                receiver.take(&[], &mut state.in_flight, &mut completed)?;
            } else {
                memory.move_window(arrived, RECEIVE_LENGTH - arrived);
                let (buffer, length) = engine.receive(&self.socket, memory).await.map_err(|_| FAILED)?;
                memory = buffer;
                memory.move_window(0, RECEIVE_LENGTH);
                if length == 0 {
                    return Ok(());
                }
                arrived += length;
                let bytes = memory.as_mut_slice().ok_or(FAILED)?;
                let mut state = self.state.borrow_mut();
                let taken = receiver.take(&bytes[..arrived], &mut state.in_flight, &mut completed);
                drop(state);
                // Requests completed before a violation stay completed.
                self.complete(&mut completed);
                let taken = taken?;
                bytes.copy_within(taken..arrived, 0);
                arrived -= taken;
            }
            self.complete(&mut completed);
        }
    }

    /// Answers the callers. A change is in the ledger before its caller learns of it.
    fn complete(&self, completed: &mut Vec<Completed>) {
        if completed.is_empty() {
            return;
        }
        let link = self.link.upgrade();
        for Completed { sender, result, change } in completed.drain(..) {
            if let (Some(link), Some(change)) = (&link, change) {
                link.record(change);
            }
            let _ = sender.send(result);
        }
        self.changed.notify();
        if let Some(link) = link {
            link.answered();
        }
    }
}
