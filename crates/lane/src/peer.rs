//! Talking to the half of a migration, or to the owner of a volume, on another host.
//!
//! ```text
//!   this host                                                the other host
//!   PeerStore  ─┬ read, write, flush … ─► RpcChannel ═channel═► RpcChannel ──► Service ──► store or volume
//!   PeerVolume ─┘ ◄────── answers ───────    │                     │
//!   Source or Target ◄──── messages ─────────┴─────────────────────┘
//! ```
//! A channel carries heads and payloads, once each while both processes live, in any order. What is said about a call is
//! in its head ([`head`]), the bytes of a write or of what was read are the payload. Nothing is decided here: whoever
//! calls decides how much is under way, and what an unanswered call means.

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

pub use asked::Asked;
pub use service::Service;
pub use store::PeerStore;
pub use volume::PeerVolume;

/// Bytes of payload in one call at most: larger requests are cut by [`PeerStore`].
pub const PAYLOAD_BYTES_MAX: usize = 1 << 20;

/// What goes first when a channel is busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestPriority {
    /// Messages of a handover, answers without a payload, flushes.
    Control,
    /// A guest waits for it: forwarded requests and their answers.
    Awaited,
    /// Guest writes by value that nobody waits for.
    Mirrored,
    /// What the mover copies.
    Bulk,
}

/// A way to another host: what is sent on it, and what it brings.
pub struct PeerChannel {
    /// The sending end. That it is dropped ends the channel on this host.
    pub channel: Box<dyn Channel + Send>,
    /// What the peer sends, and what becomes of the channel.
    pub events: ChannelEvents,
}

/// The sending end of a channel to a host that nobody knows any more.
struct Nowhere;

impl Channel for Nowhere {
    fn send(&self, _: RequestPriority, _: Bytes, _: Bytes) {}

    fn capabilities(&self) -> Capabilities {
        Capabilities::Unknown
    }
}

impl PeerChannel {
    /// A channel to nobody, which has ended.
    pub fn nowhere() -> Self {
        let (_, receiver) = mpsc::unbounded();
        Self { channel: Box::new(Nowhere), events: receiver.into() }
    }
}

/// What a channel brings. What nobody has taken when it ends goes to whoever may find another one to hear it.
pub struct ChannelEvents {
    receiver: mpsc::UnboundedReceiver<ChannelEvent>,
    unheard: Option<Box<dyn FnMut(ChannelEvent) + Send>>,
}

impl ChannelEvents {
    /// Has `unheard` take what comes, and is not taken from here.
    #[must_use]
    pub fn or_else(
        receiver: mpsc::UnboundedReceiver<ChannelEvent>,
        unheard: impl FnMut(ChannelEvent) + Send + 'static,
    ) -> Self {
        Self { receiver, unheard: Some(Box::new(unheard)) }
    }

    /// What has come already.
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
        // N.B. first: what is sent from now on is known not to be heard.
        self.receiver.close();
        while let Some(arrival) = self.try_next() {
            self.give_back(arrival);
        }
    }
}

/// The sending end of a way to another host.
pub trait Channel {
    /// Queues something for the peer; never blocks. How much is under way is the caller's to bound.
    fn send(&self, priority: RequestPriority, head: Bytes, payload: Bytes);

    /// What the peer's present process understands.
    fn capabilities(&self) -> Capabilities;

    /// Changes the priority of everything that is on the channel, and will be. A channel that has a link to itself need not do
    /// anything.
    fn set_boost(&self, _: PriorityBoost) {}
}

/// Whether a channel goes before its usual priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PriorityBoost {
    /// What is copied and mirrored goes when nothing more urgent is to be sent.
    Off,
    /// It is all that a VM's handover still waits for, so it goes before the VM's memory.
    AboveMemory,
}

/// What a peer understands, each with all that comes before it. It is known from the first connection to its process on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Capabilities {
    /// There has been no connection to it yet.
    Unknown,
    /// Calls; of fencing tokens it knows nothing.
    Calls,
    /// Calls that bear fencing tokens, too.
    FencingTokens,
    /// Calls about any range of bytes of a volume, too: the owner claims the blocks that they touch.
    Parts,
    /// What copies at other hosts lack, too.
    Copies,
    /// How large a volume is at its owner, too.
    Sizes,
}

/// What comes over a channel.
pub enum ChannelEvent {
    /// Something that the peer sent.
    Message {
        /// Its head: see [`head`].
        head: Bytes,
        /// Its payload.
        payload: Bytes,
        /// The right to send as much again: goes back to the peer when this is dropped.
        credit: Box<dyn Any + Send>,
    },
    /// The channel is broken, for this reason; what was sent waits.
    Lost(String),
    /// The channel works again, and nothing was lost.
    Restored,
    /// The peer's process is another one now: what was not answered is lost.
    PeerRestarted,
}

/// Whoever is told what a channel brings besides calls and answers.
pub trait Listener {
    /// A message of a handover, encoded as its machine's messages are.
    fn message(&self, message: &[u8]);

    /// The channel is broken: why.
    fn link_lost(&self, reason: &str);

    /// The channel works again.
    fn link_restored(&self);

    /// The peer has restarted. Calls that were not answered have failed already.
    fn peer_restarted(&self);
}

/// Listens to a channel that carries nothing but calls.
pub struct CallsOnly;

impl Listener for CallsOnly {
    fn message(&self, _: &[u8]) {}

    fn link_lost(&self, _: &str) {}

    fn link_restored(&self) {}

    fn peer_restarted(&self) {}
}

/// A call that has not been answered.
struct PendingRequest {
    answer: oneshot::Sender<Result<Answer, IoError>>,
    /// What it takes of its volume's window until it is answered, whether somebody still waits for it or not.
    _permit: Option<Permit>,
}

/// The answer to a call: what its head says, and its payload.
pub(crate) struct Answer {
    pub(crate) answered: Answered,
    pub(crate) payload: Bytes,
    /// Given back when the payload has been used.
    _credit: Box<dyn Any + Send>,
}

/// One end of a channel: calls and their answers find each other.
pub struct RpcChannel {
    channel: Box<dyn Channel>,
    waiting: RefCell<BTreeMap<u64, PendingRequest>>,
    next_call: Cell<u64>,
    news: Rc<News>,
}

/// What has become of the peer, for whoever waits for that.
#[derive(Default)]
struct News {
    /// Told when the peer has been heard of.
    heard: Signal,
    /// How often it has been heard of anew: over a channel that was broken, or as another process.
    times: Cell<u64>,
}

impl News {
    fn come(&self) {
        self.times.set(self.times.get() + 1);
        self.heard.notify();
    }
}

/// What is asked of a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    pub(crate) address: Address,
    pub(crate) operation: Operation,
    /// `None`: it bears none.
    pub(crate) fence: Option<FencingToken>,
}

impl RpcChannel {
    /// Makes an end that listens once it is [run](RpcChannel::run).
    pub fn new(channel: Box<dyn Channel>) -> Rc<Self> {
        Rc::new(Self { channel, waiting: RefCell::default(), next_call: Cell::new(0), news: Rc::default() })
    }

    /// Takes what the channel brings: answers end calls, calls go to `service`, the rest to `listener`. It goes on until
    /// nobody holds the channel any more, or the channel brings nothing any more.
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
                // Nobody waits for it any more: its call has failed with the channel, or its caller has gone.
                let Some(waiting) = self.waiting.borrow_mut().remove(&call) else { return };
                let answer = result.map_err(IoError::from);
                let _ =
                    waiting.answer.send(answer.map(|answered| Answer { answered, payload, _credit: credit }));
            }
            Ok(Head::Message) => listener.message(&payload),
            Err(error) => {
                tracing::warn!(%error, "what a peer sent is not understood, and left out");
            }
        }
    }

    /// Sends a message of a handover.
    pub fn send_message(&self, message: Vec<u8>) {
        self.channel.send(RequestPriority::Control, Head::Message.encode(), message.into());
    }

    /// Changes the priority of this end's channel.
    pub(crate) fn set_boost(&self, boost: PriorityBoost) {
        self.channel.set_boost(boost);
    }

    /// Asks the peer to do something; resolves when it has answered.
    ///
    /// It is asked for when this is called, not when the future is polled.
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
        let head = match fence.filter(|_| self.capabilities() >= Capabilities::FencingTokens) {
            Some(fence) => Head::FencedCall { call, address, operation, fence },
            // An owner that knows fencing tokens refuses a change without one, and says which is the present one.
            None => Head::Call { call, address, operation },
        };
        self.channel.send(priority, head.encode(), payload);
        async move { answered.await.unwrap_or(Err(IoError::Closed)) }
    }

    /// What the peer's present process understands.
    pub(crate) fn capabilities(&self) -> Capabilities {
        self.channel.capabilities()
    }

    /// Resolves when it is known what the peer's present process understands.
    pub(crate) async fn known_capabilities(&self) -> Capabilities {
        let capabilities =
            || Some(self.capabilities()).filter(|capabilities| *capabilities != Capabilities::Unknown);
        self.news.heard.wait_for(capabilities).await
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

    /// Ends all calls: their peer knows nothing of them any more.
    fn fail_calls(&self) {
        for (_, waiting) in self.waiting.take() {
            // Whoever has gone needs no answer.
            let _ = waiting.answer.send(Err(lost()));
        }
    }
}

/// The peer that was asked is another process now: it may have done what it was asked for, or not.
fn lost() -> IoError {
    IoError::os("hear the other host's answer", Errno::CONNRESET)
}

/// Tells whether a call failed only because the peer has restarted.
pub(crate) fn is_lost(error: &IoError) -> bool {
    *error == lost()
}
