//! A host that speaks the protocol and breaks its rules.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use lane::FencingToken;
use lane::peer::head::{Address, Answered, Fault, Head, Operation};
use migration::wire::{self, Message};
use transport::{
    ChannelId, Delivery, Endpoint, HostId, Identity, Incarnation, InvitationId, Peer, Peers, Priority,
    Receiver, Session, Settings,
};

/// Longest time for an answer, which only a hang reaches.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) type Outcome = Result<Answered, Fault>;

#[derive(Default)]
struct Known(Mutex<BTreeMap<[u8; 32], Peer>>);

impl Peers for Known {
    fn find(&self, id: HostId) -> Option<Peer> {
        self.0.lock().unwrap().get(&id.0).cloned()
    }

    fn is_at(&self, _: IpAddr) -> bool {
        false
    }

    fn joined(&self, peer: &Peer, _: InvitationId) -> Result<(), String> {
        self.0.lock().unwrap().insert(peer.id.0, peer.clone());
        Ok(())
    }
}

#[derive(Default)]
struct Inbox {
    heard: Mutex<Vec<(HostId, ChannelId, Vec<u8>, Vec<u8>)>>,
    more: Condvar,
}

impl Receiver for Inbox {
    fn connected(&self, _: &Session, _: Incarnation) {}

    fn delivered(&self, session: &Session, delivery: Delivery) {
        let message = delivery.message;
        let heard = (session.peer(), message.channel(), message.head().to_vec(), message.payload().to_vec());
        self.heard.lock().unwrap().push(heard);
        self.more.notify_all();
    }

    fn disconnected(&self, _: HostId, _: &str) {}

    fn restarted(&self, _: &Session, _: Incarnation, _: Incarnation) {}
}

pub(crate) struct Evil {
    endpoint: Endpoint,
    known: Arc<Known>,
    inbox: Arc<Inbox>,
    next_call: Mutex<u64>,
}

impl Evil {
    pub(crate) fn new() -> Self {
        let (known, inbox) = (Arc::<Known>::default(), Arc::<Inbox>::default());
        let mut settings = Settings::new(Identity::in_memory("evil").unwrap());
        settings.listen = vec!["127.0.0.1:0".parse().unwrap()];
        let endpoint = Endpoint::start(settings, Arc::clone(&known) as _, Arc::clone(&inbox) as _).unwrap();
        Self { endpoint, known, inbox, next_call: Mutex::default() }
    }

    pub(crate) fn id(&self) -> HostId {
        self.endpoint.id()
    }

    pub(crate) fn join(&self, token: &str) -> Result<Session, String> {
        let peer = self.endpoint.join(&token.parse().unwrap()).map_err(|error| error.to_string())?;
        self.known.0.lock().unwrap().insert(peer.id.0, peer.clone());
        Ok(self.endpoint.session(&peer))
    }

    /// Sends a call without waiting for its answer, and returns its number.
    pub(crate) fn call(
        &self,
        session: &Session,
        channel: u64,
        (address, operation): (Address, Operation),
        fence: Option<FencingToken>,
    ) -> u64 {
        let call = {
            let mut next = self.next_call.lock().unwrap();
            *next += 1;
            *next
        };
        let head = match fence {
            None => Head::Call { call, address, operation },
            Some(fence) => Head::FencedCall { call, address, operation, fence },
        };
        let payload = match operation {
            Operation::Write { .. } => b"pwned!!!".iter().copied().cycle().take(4096).collect(),
            _ => Vec::new(),
        };
        self.send(session, channel, head.encode().to_vec(), payload);
        call
    }

    /// Sends a call and waits for its result.
    pub(crate) fn ask(
        &self,
        session: &Session,
        channel: u64,
        what: (Address, Operation),
    ) -> (Outcome, Vec<u8>) {
        let call = self.call(session, channel, what, None);
        self.outcome(session, call)
    }

    pub(crate) fn outcome(&self, session: &Session, call: u64) -> (Outcome, Vec<u8>) {
        self.wait(session, "the answer to a call", |_, head, payload| match Head::decode(head) {
            Ok(Head::Answer { call: of, result }) if of == call => Some((result, payload.to_vec())),
            _ => None,
        })
    }

    /// Sends a message about a migration's handover.
    pub(crate) fn say(&self, session: &Session, channel: u64, message: &Message) {
        self.send(session, channel, Head::Message.encode().to_vec(), wire::encode(message).unwrap());
    }

    /// Sends a message about a migration before its beginning.
    pub(crate) fn open(&self, session: &Session, message: &Message) {
        self.send(session, 0, Vec::new(), wire::encode(message).unwrap());
    }

    /// Waits for a message about a migration before its beginning.
    pub(crate) fn opened<T>(&self, session: &Session, what: &str, pick: impl Fn(Message) -> Option<T>) -> T {
        self.wait(session, what, |channel, _, payload| {
            (channel == ChannelId(0)).then(|| wire::decode(payload).ok().and_then(&pick)).flatten()
        })
    }

    /// Waits for a message of a host, and removes it from the received ones.
    pub(crate) fn wait<T>(
        &self,
        session: &Session,
        what: &str,
        pick: impl Fn(ChannelId, &[u8], &[u8]) -> Option<T>,
    ) -> T {
        let (begun, from) = (Instant::now(), session.peer());
        let mut heard = self.inbox.heard.lock().unwrap();
        loop {
            let found = heard.iter().enumerate().find_map(|(at, (host, channel, head, payload))| {
                let picked = (*host == from).then(|| pick(*channel, head, payload)).flatten()?;
                Some((at, picked))
            });
            if let Some((at, picked)) = found {
                heard.swap_remove(at);
                return picked;
            }
            let left = PATIENCE.checked_sub(begun.elapsed());
            let left = left.unwrap_or_else(|| panic!("waited in vain for {what}"));
            heard = self.inbox.more.wait_timeout(heard, left).unwrap().0;
        }
    }

    pub(crate) fn send(&self, session: &Session, channel: u64, head: Vec<u8>, payload: Vec<u8>) {
        let message = transport::Message::new(ChannelId(channel), Priority::Control, head, payload);
        session.send(message.unwrap());
    }
}
