//! Remote calls to the other half of a migration, or to the owner of a volume, on another host.
//!
//! ```text
//!   this host                                                the other host
//!   PeerStore  ─┬ read, write, flush … ─► RpcChannel ═channel═► RpcChannel ──► Service ──► store or volume
//!   PeerVolume ─┘ ◄────── answers ───────    │                     │
//!   Source or Target ◄──── messages ─────────┴─────────────────────┘
//! ```
//! A channel carries heads and payloads, exactly once while both processes live, in any order. The head describes the call
//! ([`head`]); the payload holds the bytes written or read. The caller decides how many calls are in flight, and what an
//! unanswered call means.

mod arriving;
mod asked;
pub mod head;
mod service;
mod store;
mod volume;
mod window;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;

use block::IoError;
use bytes::Bytes;
use futures_channel::{mpsc, oneshot};
use futures_util::StreamExt;
use rustix::io::Errno;

use self::head::{Address, Answered, Head, Operation};
use self::window::Permit;
use crate::fencing::FencingToken;
use crate::signal::Signal;

pub use arriving::ArrivingChunks;
pub use asked::Asked;
pub use service::Service;
pub use store::PeerStore;
pub use volume::PeerVolume;

/// The limit of a payload in bytes: [`PeerStore`] splits larger requests.
pub const PAYLOAD_BYTES_MAX: usize = 1 << 20;

/// The order of requests on a busy channel, most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestPriority {
    /// Messages of a handover, answers without a payload, flushes.
    Control,
    /// Forwarded requests that a guest waits for, and their answers.
    Awaited,
    /// Guest writes by value that no guest waits for.
    Mirrored,
    /// The data that the mover copies.
    Bulk,
}

/// A channel to another host: its sending end and its events.
pub struct PeerChannel {
    /// The sending end. Dropping it ends the channel on this host.
    pub channel: Box<dyn Channel + Send>,
    /// Messages of the peer, and changes of the channel's state.
    pub events: ChannelEvents,
}

struct Nowhere;

impl Channel for Nowhere {
    fn send(&self, _: RequestPriority, _: Bytes, _: Bytes) {}
}

impl PeerChannel {
    /// Makes a channel to no host, which has ended.
    pub fn nowhere() -> Self {
        let (_, receiver) = mpsc::unbounded();
        Self { channel: Box::new(Nowhere), events: receiver.into() }
    }
}

/// The events of a channel. Those that are not taken before the end go to another receiver, if there is one.
pub struct ChannelEvents {
    receiver: mpsc::UnboundedReceiver<ChannelEvent>,
    unheard: Option<Box<dyn FnMut(ChannelEvent) + Send>>,
}

impl ChannelEvents {
    /// Makes events whose rest, when dropped, goes to `unheard`.
    #[must_use]
    pub fn or_else(
        receiver: mpsc::UnboundedReceiver<ChannelEvent>,
        unheard: impl FnMut(ChannelEvent) + Send + 'static,
    ) -> Self {
        Self { receiver, unheard: Some(Box::new(unheard)) }
    }

    /// Returns an event that has already arrived.
    pub fn try_next(&mut self) -> Option<ChannelEvent> {
        self.receiver.try_recv().ok()
    }

    async fn next(&mut self) -> Option<ChannelEvent> {
        self.receiver.next().await
    }

    fn give_back(&mut self, arrival: ChannelEvent) {
        if let Some(unheard) = &mut self.unheard {
            unheard(arrival);
        }
    }
}

impl From<mpsc::UnboundedReceiver<ChannelEvent>> for ChannelEvents {
    fn from(receiver: mpsc::UnboundedReceiver<ChannelEvent>) -> Self {
        Self { receiver, unheard: None }
    }
}

impl Drop for ChannelEvents {
    fn drop(&mut self) {
        // N.B. Closed first: the sender of later events then knows that no task receives them.
        self.receiver.close();
        while let Some(arrival) = self.try_next() {
            self.give_back(arrival);
        }
    }
}

/// The sending end of a channel to another host.
pub trait Channel {
    /// Queues a message for the peer; never blocks. The caller limits how much is in flight.
    fn send(&self, priority: RequestPriority, head: Bytes, payload: Bytes);

    /// Changes the priority of all present and future messages of the channel. A channel with a link of its own may ignore this.
    fn set_boost(&self, _: PriorityBoost) {}
}

/// Whether a channel has more than its usual priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PriorityBoost {
    /// Copied and mirrored data waits for everything more urgent.
    Off,
    /// The VM's handover waits for this data only, so it precedes the VM's memory.
    AboveMemory,
}

/// An event of a channel to another host.
pub enum ChannelEvent {
    /// A message from the peer.
    Message {
        /// Its head, encoded: see [`head`].
        head: Bytes,
        /// The payload, perhaps empty.
        payload: Bytes,
        /// The right to send as much again: goes back to the peer when this is dropped.
        credit: Box<dyn Any + Send>,
    },
    /// The channel is broken, for this reason; sent messages wait.
    Lost(String),
    /// The channel works again, and nothing was lost.
    Restored,
    /// The peer has restarted: unanswered calls are lost.
    PeerRestarted,
}

/// Receives the events of a channel other than calls and answers.
pub trait Listener {
    /// Takes a message of a handover, encoded as its machine's messages are.
    fn message(&self, message: &[u8]);

    /// Takes note that the channel is broken, with the reason.
    fn link_lost(&self, reason: &str);

    /// Takes note that the channel works again.
    fn link_restored(&self);

    /// Takes note that the peer has restarted. Unanswered calls have failed already.
    fn peer_restarted(&self);
}

/// The listener of a channel that carries only calls.
pub struct CallsOnly;

impl Listener for CallsOnly {
    fn message(&self, _: &[u8]) {}

    fn link_lost(&self, _: &str) {}

    fn link_restored(&self) {}

    fn peer_restarted(&self) {}
}

struct PendingRequest {
    answer: oneshot::Sender<Result<Answer, IoError>>,
    /// Its share of the volume's window until it is answered, even if its caller has gone.
    _permit: Option<Permit>,
}

pub(crate) struct Answer {
    pub(crate) answered: Answered,
    pub(crate) payload: Bytes,
    /// Given back when the payload has been used.
    _credit: Box<dyn Any + Send>,
}

/// One end of a channel: matches calls and answers.
pub struct RpcChannel {
    channel: Box<dyn Channel>,
    waiting: RefCell<BTreeMap<u64, PendingRequest>>,
    next_call: Cell<u64>,
    news: Rc<News>,
}

#[derive(Default)]
struct News {
    heard: Signal,
    /// How often the peer was reached anew: after a break, or as another process.
    times: Cell<u64>,
}

impl News {
    fn come(&self) {
        self.times.set(self.times.get() + 1);
        self.heard.notify();
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    pub(crate) address: Address,
    pub(crate) operation: Operation,
    pub(crate) fence: Option<FencingToken>,
}

impl RpcChannel {
    /// Makes an end that receives once it is [run](RpcChannel::run).
    pub fn new(channel: Box<dyn Channel>) -> Rc<Self> {
        Rc::new(Self { channel, waiting: RefCell::default(), next_call: Cell::new(0), news: Rc::default() })
    }

    /// Handles the channel's events: answers end calls, calls go to `service`, all others to `listener`. Ends when the last
    /// reference to the channel is dropped, or the channel brings no more events.
    pub fn run<A: Into<ChannelEvents>>(
        self: &Rc<Self>,
        arrivals: A,
        service: Rc<Service>,
        listener: Rc<dyn Listener>,
    ) -> impl Future<Output = ()> + use<A> {
        let (channel, mut arrivals) = (Rc::downgrade(self), arrivals.into());
        async move {
            while let Some(arrival) = service.unless_ended(arrivals.next()).await {
                let Some(channel) = channel.upgrade() else {
                    arrivals.give_back(arrival);
                    return;
                };
                match arrival {
                    ChannelEvent::Message { head, payload, credit } => {
                        channel.sent(&head, payload, credit, &service, &*listener).await;
                    }
                    ChannelEvent::Lost(reason) => listener.link_lost(&reason),
                    ChannelEvent::Restored => {
                        channel.news.come();
                        listener.link_restored();
                    }
                    ChannelEvent::PeerRestarted => {
                        channel.fail_calls();
                        channel.news.come();
                        service.restarted();
                        listener.peer_restarted();
                    }
                }
            }
            if let Some(channel) = channel.upgrade() {
                channel.fail_calls();
            }
        }
    }

    async fn sent(
        self: &Rc<Self>,
        head: &Bytes,
        payload: Bytes,
        credit: Box<dyn Any + Send>,
        service: &Rc<Service>,
        listener: &dyn Listener,
    ) {
        match Head::decode(head) {
            Ok(Head::Call { call, address, operation }) => {
                let question = Question { address, operation, fence: None };
                service.carry_out(Rc::clone(self), call, question, payload, credit).await;
            }
            Ok(Head::FencedCall { call, address, operation, fence }) => {
                let question = Question { address, operation, fence: Some(fence) };
                service.carry_out(Rc::clone(self), call, question, payload, credit).await;
            }
            Ok(Head::Answer { call, result }) => {
                // No task waits: the call has failed with the channel, or its caller has gone.
                let Some(waiting) = self.waiting.borrow_mut().remove(&call) else { return };
                let answer = result.map_err(IoError::from);
                let _ =
                    waiting.answer.send(answer.map(|answered| Answer { answered, payload, _credit: credit }));
            }
            Ok(Head::Message) => listener.message(&payload),
            Err(error) => {
                tracing::warn!(%error, "ignored an invalid message of a peer");
            }
        }
    }

    /// Sends a message of a handover to the peer.
    pub fn send_message(&self, message: Vec<u8>) {
        self.channel.send(RequestPriority::Control, Head::Message.encode(), message.into());
    }

    pub(crate) fn set_boost(&self, boost: PriorityBoost) {
        self.channel.set_boost(boost);
    }

    /// Sends a call to the peer; resolves with its answer.
    ///
    /// The call is sent at once, not when the future is polled.
    pub(crate) fn call(
        &self,
        priority: RequestPriority,
        question: Question,
        payload: Bytes,
        permit: Option<Permit>,
    ) -> impl Future<Output = Result<Answer, IoError>> + use<> {
        let call = self.next_call.get();
        self.next_call.set(call + 1);
        let (answer, answered) = oneshot::channel();
        self.waiting.borrow_mut().insert(call, PendingRequest { answer, _permit: permit });
        let Question { address, operation, fence } = question;
        let head = match fence {
            Some(fence) => Head::FencedCall { call, address, operation, fence },
            // An owner refuses a change without a fencing token, and answers with the present one.
            None => Head::Call { call, address, operation },
        };
        self.channel.send(priority, head.encode(), payload);
        async move { answered.await.unwrap_or(Err(IoError::Closed)) }
    }

    pub(crate) fn answer(
        &self,
        priority: RequestPriority,
        call: u64,
        result: Result<Answered, IoError>,
        payload: Bytes,
    ) {
        let result = result.map_err(head::Fault::from);
        self.channel.send(priority, Head::Answer { call, result }.encode(), payload);
    }

    /// Fails all calls: the peer's new process does not know them.
    fn fail_calls(&self) {
        for (_, waiting) in self.waiting.take() {
            let _ = waiting.answer.send(Err(lost()));
        }
    }
}

/// The error of a call to a peer that has restarted: the call may or may not have been carried out.
fn lost() -> IoError {
    IoError::os("receive the other host's answer", Errno::CONNRESET)
}

pub(crate) fn is_lost(error: &IoError) -> bool {
    *error == lost()
}
