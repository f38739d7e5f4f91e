//! The exchange of requests and replies on one connection.
//!
//! It runs in the connection's task, which is polled when a receive, a send or a request has ended:
//!
//! ```text
//!        ┌────────────── one turn ───────────────┐
//!   receive ─► intake ─► request set ─► outbox ─► send        at most one receive and one send at a time
//!      ▲         │ no room: the socket is not read
//!      └─────────┘
//! ```
//!
//! The intake ends when the client says goodbye, vanishes, breaks the protocol, or the server shuts down. Accepted requests are
//! still carried out: a write is executed whole or never started. Replies are sent as long as the socket takes them.
//!
//! If the server passes its connections on, the current receive is interrupted, which loses nothing. Bytes that were received and
//! not accepted are passed on too. So the cut is at a byte of either direction that both servers know.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use block::engine::{Engine, Interrupt, Received};
use block::executor::Sleep;
use block::{BlockDevice, Buffer, IoError, IoFuture};

use crate::nbd::budget::Share;
use crate::nbd::caller::Caller;
use crate::nbd::execute::execute;
use crate::nbd::intake::{Intake, Taken};
use crate::nbd::negotiation::Agreement;
use crate::nbd::outbox::{Outbox, Weight};
use crate::nbd::reply::{Body, Reply};
use crate::nbd::request_set::RequestSet;
use crate::nbd::server::{ConnectionPhase, Member, Shared, Stage};
use crate::nbd::stream::Stream;
use crate::nbd::timeline::Timeline;
use crate::nbd::transmission::{Command, Terms, Violation};

/// Bytes received at a time: sixteen requests of 8 KiB with their payload.
const READ_AHEAD: usize = 256 << 10;
/// Missing bytes from which on a payload is received directly into its buffer. Fewer are copied out of the read-ahead: that costs
/// less than a separate receive, and may bring the next requests.
const DIRECT_RECEIVE_MIN: usize = 64 << 10;
/// Turns of one poll: a client that never pauses must not block the lane.
const TURNS_MAX: usize = 16;

/// Time to read the last replies before a connection is passed on: guests of other volumes wait meanwhile. A slower client
/// has to connect again.
const PASSING_LINGER: Duration = Duration::from_millis(100);

/// Executes requests until the connection is over. Returns the reason, or `None` if the server cut it.
pub(super) async fn exchange(
    server: &Rc<Shared>,
    member: &Rc<Member>,
    stream: &Stream,
    (agreement, caller): (&Agreement, Caller),
    first_bytes: &[u8],
) -> Option<Ending> {
    let device = agreement.export.device_for(caller);
    let mut requests = RequestSet::with_capacity(server.limits.requests_in_flight_max);
    let style = agreement.offer.replies;
    let start = |cookie, command, buffer| execute(Rc::clone(&device), style, cookie, command, buffer);
    let mut exchange = Exchange::new(server, member, stream, agreement, first_bytes);
    poll_fn(|context| exchange.poll(context, &mut requests, &start)).await;
    if let Some(timeline) = &exchange.timeline {
        timeline.log(&agreement.export.name);
    }
    if let Some(Ending::PassedOn(_)) = exchange.ending
        && (!requests.is_empty() || exchange.sending.is_some() || exchange.outlet == Outlet::Broken)
    {
        return Some(Ending::NotPassedOn);
    }
    exchange.ending
}

#[derive(Debug)]
pub(super) enum Ending {
    Disconnected,
    Vanished,
    Broken(#[expect(dead_code, reason = "shown in the log")] IoError),
    Violation(#[expect(dead_code, reason = "shown in the log")] Violation),
    ServerShutdown,
    /// Another server continues, beginning with these bytes of the client.
    PassedOn(Unread),
    /// Another server was to continue, but a request or a reply was unfinished.
    NotPassedOn,
    /// Another server was to continue, but does not have the keys.
    NotPassedOnEncrypted,
    /// Others waited too long for the memory that it holds.
    Stalled,
}

/// Bytes of a client that no request was accepted from.
pub(super) struct Unread(pub(super) Vec<u8>);

impl fmt::Debug for Unread {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} bytes", self.0.len())
    }
}

struct Exchange {
    server: Rc<Shared>,
    member: Rc<Member>,
    engine: Rc<dyn Engine>,
    stream: Stream,
    /// Asked for the size before requests are checked: it may have grown.
    device: Rc<dyn BlockDevice>,
    terms: Terms,
    intake: Intake,
    read_ahead: ReadAhead,
    interrupt: Interrupt,
    receiving: Option<Receiving>,
    outbox: Outbox,
    sending: Option<(IoFuture<'static, ()>, Weight)>,
    share: Share,
    requests_in_flight: usize,
    /// `None` as long as requests are accepted.
    ending: Option<Ending>,
    outlet: Outlet,
    /// Runs once only sending is left.
    linger: Option<Pin<Box<Sleep>>>,
    /// Runs while more than the allowance is held and the client has to act; restarted by each of its actions.
    stall: Option<Pin<Box<Sleep>>>,
    /// `None` unless the log shows these times.
    timeline: Option<Box<Timeline>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Outlet {
    Open,
    /// Nobody is there to read replies: they are dropped.
    Broken,
}

#[derive(Default)]
struct ReadAhead {
    /// `None` before the first receive, and during one.
    buffer: Option<Buffer>,
    start: usize,
    end: usize,
}

struct Receiving {
    future: IoFuture<'static, Received>,
    into: ReceiveInto,
}

#[derive(Clone, Copy)]
enum ReceiveInto {
    ReadAhead,
    Payload,
}

/// Whether a step has changed anything that lets another one continue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Made,
    None,
}

impl Exchange {
    fn new(
        server: &Rc<Shared>,
        member: &Rc<Member>,
        stream: &Stream,
        agreement: &Agreement,
        first_bytes: &[u8],
    ) -> Self {
        let buffer = if first_bytes.is_empty() { None } else { Some(Buffer::copy_of(first_bytes)) };
        Self {
            server: Rc::clone(server),
            member: Rc::clone(member),
            engine: Rc::clone(&server.engine),
            stream: stream.clone(),
            device: Rc::clone(&agreement.export.device),
            terms: Terms { offer: agreement.offer, allocation: agreement.allocation },
            intake: Intake::default(),
            read_ahead: ReadAhead { buffer, start: 0, end: first_bytes.len() },
            interrupt: Interrupt::default(),
            receiving: None,
            outbox: Outbox::new(agreement.offer.replies),
            sending: None,
            share: server.budget.share(server.limits.payload_in_flight_max),
            requests_in_flight: 0,
            ending: None,
            outlet: Outlet::Open,
            linger: None,
            stall: None,
            timeline: Timeline::if_wanted(),
        }
    }

    /// Does everything that can be done now. Ready when the connection is over.
    fn poll<F: Future<Output = Reply>>(
        &mut self,
        context: &mut Context<'_>,
        requests: &mut RequestSet<F>,
        start: &impl Fn(u64, Command, Option<Buffer>) -> F,
    ) -> Poll<()> {
        self.member.wake_on_stage(context);
        let mut over = false;
        for turn in 0.. {
            if self.server.stage() == Stage::Closed {
                over = true;
                break;
            }
            let received = self.receive(context, requests, start);
            self.complete(context, requests);
            let sent = self.send(context);
            if self.ending.is_some() && requests.is_empty() && self.is_sent(context) {
                over = true;
                break;
            }
            if (received, sent) == (Progress::None, Progress::None) {
                if self.cut_off_if_stalled(context) == Progress::Made {
                    continue;
                }
                break;
            }
            if turn == TURNS_MAX {
                context.waker().wake_by_ref();
                break;
            }
        }
        self.member.requests_in_flight.set(self.requests_in_flight);
        self.member.payload_in_flight.set(self.share.bytes_held());
        if over { Poll::Ready(()) } else { Poll::Pending }
    }

    fn receive<F: Future<Output = Reply>>(
        &mut self,
        context: &mut Context<'_>,
        requests: &mut RequestSet<F>,
        start: &impl Fn(u64, Command, Option<Buffer>) -> F,
    ) -> Progress {
        if self.ending.is_some() {
            return Progress::None;
        }
        match self.server.stage() {
            Stage::Serving => {}
            Stage::Passing if !self.stream.is_encrypted() => return self.stop_receiving(context),
            Stage::Passing => {
                self.end_intake(Ending::NotPassedOnEncrypted);
                return Progress::Made;
            }
            Stage::Draining | Stage::Closed => {
                self.end_intake(Ending::ServerShutdown);
                return Progress::Made;
            }
        }
        if self.receiving.is_none() {
            if self.take_requests(context, requests, start) == Progress::None {
                return Progress::None;
            }
            if self.ending.is_some() {
                return Progress::Made;
            }
            self.receiving = Some(self.start_receive());
        }
        self.go_on_receiving(context)
    }

    fn go_on_receiving(&mut self, context: &mut Context<'_>) -> Progress {
        let Some(Receiving { future, into }) = &mut self.receiving else { return Progress::None };
        let Poll::Ready(result) = future.as_mut().poll(context) else { return Progress::None };
        let into = *into;
        self.receiving = None;
        if let Some(timeline) = &mut self.timeline {
            timeline.received(Instant::now());
        }
        match (result, into) {
            (Err(error), _) => self.end_intake(Ending::Broken(error)),
            (Ok(Received::Bytes(_, 0)), _) => self.end_intake(Ending::Vanished),
            (Ok(Received::Bytes(buffer, count)), ReceiveInto::ReadAhead) => {
                self.read_ahead = ReadAhead { buffer: Some(buffer), start: 0, end: count };
            }
            (Ok(Received::Bytes(buffer, count)), ReceiveInto::Payload) => {
                self.intake.return_payload(buffer, count);
            }
            (Ok(Received::Interrupted(_)), ReceiveInto::ReadAhead) => {}
            (Ok(Received::Interrupted(buffer)), ReceiveInto::Payload) => {
                self.intake.return_payload(buffer, 0);
            }
        }
        Progress::Made
    }

    /// Stops receiving. Afterwards another server begins with the bytes that were received and not accepted.
    fn stop_receiving(&mut self, context: &mut Context<'_>) -> Progress {
        self.interrupt.raise();
        if self.receiving.is_some() {
            return self.go_on_receiving(context);
        }
        let ReadAhead { buffer, start, end } = &self.read_ahead;
        let rest = buffer.as_ref().and_then(|buffer| buffer.as_slice().get(*start..*end)).unwrap_or_default();
        let ending = match self.intake.unfinished(self.terms.offer.replies) {
            Some(begun) => Ending::PassedOn(Unread([&begun[..], rest].concat())),
            None => Ending::NotPassedOn,
        };
        self.end_intake(ending);
        Progress::Made
    }

    /// Starts the requests in the read-ahead. No progress means that there is no room, so nothing must be received.
    fn take_requests<F: Future<Output = Reply>>(
        &mut self,
        context: &Context<'_>,
        requests: &mut RequestSet<F>,
        start: &impl Fn(u64, Command, Option<Buffer>) -> F,
    ) -> Progress {
        self.terms.offer.size = self.device.geometry().size;
        // Taken out for as long as its bytes are borrowed.
        let buffer = self.read_ahead.buffer.take();
        let bytes = buffer.as_ref().map_or(&[][..], |buffer| &buffer.as_slice()[..self.read_ahead.end]);
        let mut input = &bytes[self.read_ahead.start..];
        let outcome = loop {
            if self.requests_in_flight >= self.server.limits.requests_in_flight_max {
                break Ok(Progress::None);
            }
            let admit = |length| self.share.reserve(length, context.waker());
            match self.intake.take(&mut input, &self.terms, self.engine.buffers(), admit) {
                Ok(Taken::NeedBytes) => break Ok(Progress::Made),
                Ok(Taken::NoRoom) => break Ok(Progress::None),
                Ok(Taken::Request { command: Command::Disconnect, .. }) => break Err(Ending::Disconnected),
                Ok(Taken::Request { cookie, command, buffer }) => {
                    self.requests_in_flight += 1;
                    self.stall = None;
                    let slot = requests.insert(start(cookie, command, buffer));
                    if let Some(timeline) = &mut self.timeline {
                        timeline.taken(slot, Instant::now());
                    }
                }
                Ok(Taken::Refused { cookie, offset, refusal }) => {
                    tracing::debug!(?refusal, "refused an NBD request");
                    self.requests_in_flight += 1;
                    let body = Body::Failed { code: refusal.code, message: refusal.reason };
                    self.outbox.push(Reply { cookie, offset, reserved: 0, body });
                    if let Some(timeline) = &mut self.timeline {
                        timeline.refused();
                    }
                }
                Err(violation) => break Err(Ending::Violation(violation)),
            }
        };
        self.read_ahead.start = self.read_ahead.end - input.len();
        self.read_ahead.buffer = buffer;
        outcome.unwrap_or_else(|ending| {
            self.end_intake(ending);
            Progress::Made
        })
    }

    fn start_receive(&mut self) -> Receiving {
        if let Some(rest) = self.intake.lend_payload(DIRECT_RECEIVE_MIN) {
            let future = self.stream.receive_unless(&self.interrupt, rest);
            return Receiving { future, into: ReceiveInto::Payload };
        }
        let used = self.read_ahead.buffer.take();
        let buffer = used.filter(|buffer| buffer.len() == READ_AHEAD);
        let buffer = buffer.unwrap_or_else(|| self.engine.buffers().take(READ_AHEAD));
        let future = self.stream.receive_unless(&self.interrupt, buffer);
        Receiving { future, into: ReceiveInto::ReadAhead }
    }

    fn complete<F: Future<Output = Reply>>(&mut self, context: &Context<'_>, requests: &mut RequestSet<F>) {
        requests.poll(context, |slot, reply| {
            self.outbox.push(reply);
            if let Some(timeline) = &mut self.timeline {
                timeline.finished(slot, Instant::now());
            }
        });
    }

    /// Sends replies, a few at a time, each batch as soon as the send before it has ended.
    fn send(&mut self, context: &mut Context<'_>) -> Progress {
        let mut progress = Progress::None;
        loop {
            if let Some((sending, weight)) = &mut self.sending {
                let Poll::Ready(result) = sending.as_mut().poll(context) else { return progress };
                let weight = *weight;
                self.sending = None;
                self.settle(weight);
                if let Some(timeline) = &mut self.timeline {
                    timeline.sent(Instant::now());
                }
                if let Err(error) = result {
                    self.outlet = Outlet::Broken;
                    self.end_intake(Ending::Broken(error));
                }
                progress = Progress::Made;
            }
            if self.outlet == Outlet::Broken {
                let thrown_away = self.outbox.clear();
                self.settle(thrown_away);
                return progress;
            }
            let Some(batch) = self.outbox.next_batch(self.engine.buffers()) else { return progress };
            if let Some(timeline) = &mut self.timeline {
                timeline.send_begins(batch.weight.replies, Instant::now());
            }
            self.sending = Some((self.stream.send(batch.pieces), batch.weight));
        }
    }

    fn settle(&mut self, weight: Weight) {
        self.requests_in_flight -= weight.replies;
        self.stall = None;
        self.share.release(weight.reserved);
        let answered = &self.member.requests_answered;
        answered.set(answered.get() + weight.replies as u64);
    }

    /// Accepts no more requests. The first reason counts.
    fn end_intake(&mut self, ending: Ending) {
        if self.ending.is_some() {
            return;
        }
        self.ending = Some(ending);
        self.share.close();
        self.receiving = None;
        self.read_ahead = ReadAhead::default();
        self.intake = Intake::default();
        self.member.phase.replace_with(|phase| {
            match std::mem::replace(phase, ConnectionPhase::Negotiating) {
                ConnectionPhase::Serving(name) => ConnectionPhase::Draining(name),
                other => other,
            }
        });
    }

    /// Cuts off a client that does nothing for too long with memory for which others wait.
    fn cut_off_if_stalled(&mut self, context: &mut Context<'_>) -> Progress {
        let is_clients_turn = self.sending.is_some() || self.intake.awaits_payload();
        if !is_clients_turn || !self.share.is_beyond_allowance() {
            self.stall = None;
            return Progress::None;
        }
        let (handle, limit) = (&self.server.handle, self.server.limits.stall_timeout);
        loop {
            let stall = self.stall.get_or_insert_with(|| Box::pin(handle.sleep(limit)));
            if stall.as_mut().poll(context).is_pending() {
                return Progress::None;
            }
            self.stall = None;
            if self.share.keeps_others_waiting() {
                break;
            }
        }
        self.outlet = Outlet::Broken;
        self.end_intake(Ending::Stalled);
        if let Some((_, weight)) = self.sending.take() {
            self.settle(weight);
        }
        Progress::Made
    }

    /// Returns whether no reply is left to send; a client that does not read is waited for a limited time.
    fn is_sent(&mut self, context: &mut Context<'_>) -> bool {
        if self.sending.is_none() {
            return true;
        }
        let limit = match self.ending {
            Some(Ending::PassedOn(_)) => PASSING_LINGER,
            _ => self.server.limits.linger_timeout,
        };
        let handle = &self.server.handle;
        let linger = self.linger.get_or_insert_with(|| Box::pin(handle.sleep(limit)));
        linger.as_mut().poll(context).is_ready()
    }
}
