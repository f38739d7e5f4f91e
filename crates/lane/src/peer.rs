//! Talking to the half of a migration, or to the owner of a volume, on another host.
//!
//! ```text
//!   this host                                                the other host
//!   PeerStore ──read, write, flush …──► Conversation ══line══► Conversation ──► Service ──► store or volume
//!       ◄────────── answers ───────────      │                     │
//!   Source or Target ◄──── messages ─────────┴─────────────────────┘
//! ```
//! A line carries heads and payloads, once each while both processes live, in any order. What is said about a call is
//! in its head ([`head`]), the bytes of a write or of what was read are the payload. Nothing is decided here: whoever
//! calls decides how much is under way, and what an unanswered call means.

mod asked;
pub mod head;
mod service;
mod store;

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
use crate::fence::Fence;
use crate::signal::Signal;

pub use asked::Asked;
pub use service::Service;
pub use store::PeerStore;

/// Bytes of payload in one call at most: larger requests are cut by [`PeerStore`].
pub const PAYLOAD_BYTES_MAX: usize = 1 << 20;

/// What goes first when a line is busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
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
pub struct PeerLine {
    /// The sending end. That it is dropped ends the line on this host.
    pub line: Box<dyn Line + Send>,
    /// What the peer sends, and what becomes of the line.
    pub arrivals: mpsc::UnboundedReceiver<Arrival>,
}

/// The sending end of a way to another host.
pub trait Line {
    /// Queues something for the peer; never blocks. How much is under way is the caller's to bound.
    fn send(&self, urgency: Urgency, head: Bytes, payload: Bytes);

    /// What the peer's present process understands.
    fn speech(&self) -> Speech;

    /// Changes how much of a hurry everything is in that is on the line, and will be. A line that nothing else goes
    /// beside need not do anything.
    fn set_haste(&self, _: Haste) {}
}

/// How much of a hurry a line is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Haste {
    /// What is copied and mirrored goes when nothing more urgent is to be sent.
    Usual,
    /// It is all that a machine's handover still waits for, so it goes before the machine's memory.
    BeforeMemory,
}

/// What a peer understands. It is known from the first connection to its process on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speech {
    /// It has not been heard of yet.
    Unknown,
    /// Calls; of fences it knows nothing.
    Calls,
    /// Calls that bear fences, too.
    Fences,
}

/// What comes over a line.
pub enum Arrival {
    /// Something that the peer sent.
    Sent {
        /// Its head: see [`head`].
        head: Bytes,
        /// Its payload.
        payload: Bytes,
        /// The right to send as much again: goes back to the peer when this is dropped.
        credit: Box<dyn Any + Send>,
    },
    /// The line is broken, for this reason; what was sent waits.
    Lost(String),
    /// The line works again, and nothing was lost.
    Back,
    /// The peer's process is another one now: what was not answered is lost.
    Restarted,
}

/// Whoever is told what a line brings besides calls and answers.
pub trait Listener {
    /// A message of a handover, encoded as its machine's messages are.
    fn said(&self, message: &[u8]);

    /// The line is broken: why.
    fn lost(&self, reason: &str);

    /// The line works again.
    fn back(&self);

    /// The peer has restarted. Calls that were not answered have failed already.
    fn restarted(&self);
}

type Waiting = BTreeMap<u64, oneshot::Sender<Result<Answer, IoError>>>;

/// The answer to a call: what its head says, and its payload.
pub(crate) struct Answer {
    pub(crate) answered: Answered,
    pub(crate) payload: Bytes,
    /// Given back when the payload has been used.
    _credit: Box<dyn Any + Send>,
}

/// One end of a line: calls and their answers find each other.
pub struct Conversation {
    line: Box<dyn Line>,
    waiting: RefCell<Waiting>,
    next_call: Cell<u64>,
    /// Told when the peer has been heard of.
    heard: Signal,
}

/// What is asked of a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    pub(crate) address: Address,
    pub(crate) operation: Operation,
    /// `None`: it bears none.
    pub(crate) fence: Option<Fence>,
}

impl Conversation {
    /// Makes an end that listens once it is [run](Conversation::run).
    pub fn new(line: Box<dyn Line>) -> Rc<Self> {
        let (waiting, heard) = (RefCell::default(), Signal::default());
        Rc::new(Self { line, waiting, next_call: Cell::new(0), heard })
    }

    /// Takes what the line brings: answers end calls, calls go to `service`, the rest to `listener`. It goes on until
    /// nobody holds the conversation any more, or the line brings nothing any more.
    pub fn run(
        self: &Rc<Self>,
        mut arrivals: mpsc::UnboundedReceiver<Arrival>,
        service: Rc<Service>,
        listener: Rc<dyn Listener>,
    ) -> impl Future<Output = ()> + use<> {
        let conversation = Rc::downgrade(self);
        async move {
            while let Some(arrival) = arrivals.next().await {
                let Some(conversation) = conversation.upgrade() else { return };
                match arrival {
                    Arrival::Sent { head, payload, credit } => {
                        conversation.sent(&head, payload, credit, &service, &*listener).await;
                    }
                    Arrival::Lost(reason) => listener.lost(&reason),
                    Arrival::Back => {
                        conversation.heard.notify();
                        listener.back();
                    }
                    Arrival::Restarted => {
                        conversation.fail_calls();
                        conversation.heard.notify();
                        service.restarted();
                        listener.restarted();
                    }
                }
            }
            if let Some(conversation) = conversation.upgrade() {
                conversation.fail_calls();
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
                // Nobody waits for it any more: its call has failed with the line, or its caller has gone.
                let Some(waiting) = self.waiting.borrow_mut().remove(&call) else { return };
                let answer = result.map_err(IoError::from);
                let _ = waiting.send(answer.map(|answered| Answer { answered, payload, _credit: credit }));
            }
            Ok(Head::Said) => listener.said(&payload),
            Err(error) => {
                tracing::warn!(%error, "what a peer sent is not understood, and left out");
            }
        }
    }

    /// Sends a message of a handover.
    pub fn say(&self, message: Vec<u8>) {
        self.line.send(Urgency::Control, Head::Said.encode(), message.into());
    }

    /// Changes how much of a hurry this end's line is in.
    pub(crate) fn set_haste(&self, haste: Haste) {
        self.line.set_haste(haste);
    }

    /// Asks the peer to do something; resolves when it has answered.
    ///
    /// It is asked for when this is called, not when the future is polled.
    pub(crate) fn call(
        &self,
        urgency: Urgency,
        question: Question,
        payload: Bytes,
    ) -> impl Future<Output = Result<Answer, IoError>> + use<> {
        let call = self.next_call.get();
        self.next_call.set(call + 1);
        let (answer, answered) = oneshot::channel();
        self.waiting.borrow_mut().insert(call, answer);
        let Question { address, operation, fence } = question;
        let head = match fence.filter(|_| self.speech() == Speech::Fences) {
            Some(fence) => Head::FencedCall { call, address, operation, fence },
            // An owner that knows fences refuses a change without one, and says what its fence is.
            None => Head::Call { call, address, operation },
        };
        self.line.send(urgency, head.encode(), payload);
        async move { answered.await.unwrap_or(Err(IoError::Closed)) }
    }

    /// What the peer's present process understands.
    pub(crate) fn speech(&self) -> Speech {
        self.line.speech()
    }

    /// Resolves when it is known whether the peer knows fences: to whether it does.
    pub(crate) async fn knows_fences(&self) -> bool {
        let speech = || Some(self.speech()).filter(|speech| *speech != Speech::Unknown);
        self.heard.wait_for(speech).await == Speech::Fences
    }

    pub(crate) fn answer(
        &self,
        urgency: Urgency,
        call: u64,
        result: Result<Answered, IoError>,
        payload: Bytes,
    ) {
        let result = result.map_err(head::Fault::from);
        self.line.send(urgency, Head::Answer { call, result }.encode(), payload);
    }

    /// Ends all calls: their peer knows nothing of them any more.
    fn fail_calls(&self) {
        for (_, waiting) in self.waiting.take() {
            // Whoever has gone needs no answer.
            let _ = waiting.send(Err(lost()));
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
