//! Other hosts: the messages with them about migrations.
//!
//! ```text
//!   transport ──delivered──► Peers ──┬─ openings ──► Host: accepts a migration, or says why not
//!                                    ├─ a route ───► the lane that has the volume
//!                                    └─ no route ──► the journal answers: ended, forgotten, never begun
//!   lane ──Channel──► Session ──► transport
//! ```
//! Called on transport threads, where it never blocks.

mod access;
mod attaching;
pub(crate) mod channel;
mod noted;
mod programs;
mod routes;
mod surveys;
mod telling;
mod turns;
pub(crate) mod veil;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use bytes::Bytes;
use futures_channel::mpsc;
use lane::peer::head::{Address, Fault, Head};
use lane::peer::{Asked, ChannelEvent, ChannelEvents, PeerChannel};
use migration::authority::{Denied, Request};
use migration::message::ToTarget;
use migration::restoration;
use migration::wire::{self, Acceptance, Message, Offer, Refusal};
use migration::{Attempt, HostId, MigrationId, VolumeId, VolumeIndex};
use tokio::sync::oneshot;
use transport::{ChannelId, Delivery, Incarnation, Priority, Session};

use self::access::Access;
use self::channel::{Kind, OPENINGS, Subject};
use self::noted::Noted;
use self::programs::Programs;
use self::routes::{Former, Routes, SessionChannel, SessionStreams};
use self::surveys::Questions;
use self::turns::Turns;
use crate::host::Host;
use crate::standbys::frames::{Line, Way};
use crate::vms::moving;

type Answer = oneshot::Sender<Result<Acceptance, Refusal>>;

/// The messages with other hosts.
pub(crate) struct Peers {
    me: Weak<Self>,
    runtime: tokio::runtime::Handle,
    host: OnceLock<Weak<Host>>,
    routes: Arc<Routes>,
    /// Messages that came before this host was ready; `None`: it is ready.
    held: Mutex<Option<Vec<(Session, Delivery)>>>,
    /// Offers without an answer yet.
    opening: Mutex<BTreeMap<(HostId, MigrationId), Answer>>,
    /// Preflight checks without an answer yet.
    questions: Questions,
    programs: Programs,
    access: Access,
    turns: Arc<Turns>,
}

impl Peers {
    /// Returns a switchboard that answers nothing before it is [connected](Peers::connect) to its host.
    pub(crate) fn new(runtime: tokio::runtime::Handle) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            runtime,
            host: OnceLock::new(),
            routes: Arc::default(),
            held: Mutex::new(Some(Vec::new())),
            opening: Mutex::default(),
            questions: Questions::default(),
            programs: Programs::default(),
            access: Access::default(),
            turns: Arc::default(),
        })
    }

    pub(crate) fn connect(&self, host: &Arc<Host>) {
        // There is one.
        let _ = self.host.set(Arc::downgrade(host));
    }

    /// Begins to answer, once the lanes for earlier migrations exist again.
    pub(crate) fn begin(&self) {
        loop {
            let mut held = lock(&self.held);
            let waiting = held.take().unwrap_or_default();
            if waiting.is_empty() {
                return;
            }
            // Messages that come meanwhile are behind these.
            *held = Some(Vec::new());
            drop(held);
            waiting.into_iter().for_each(|(session, delivery)| self.take(&session, delivery));
        }
    }

    /// Returns this host's identity. Before it has one, no host asks.
    pub(crate) fn own(&self) -> HostId {
        self.host().and_then(|host| host.hosts.own()).unwrap_or(HostId([0; 32]))
    }

    /// Opens a channel to the other host about `subject`; received messages go to its holder until its sending end is dropped.
    pub(crate) fn line(&self, session: &Session, subject: Subject) -> PeerChannel {
        let peer = host_id(session.peer());
        let target = if subject.source == peer { self.own() } else { peer };
        self.open_route(session, subject.channel(target))
    }

    /// Returns the channels to the other host for a VM that moves with a migration, which began at `source`.
    pub(crate) fn vm_streams(
        &self,
        session: &Session,
        source: HostId,
        migration: MigrationId,
    ) -> Arc<dyn moving::channel::VmStreams> {
        let peer = host_id(session.peer());
        let target = if source == peer { self.own() } else { peer };
        let (session, routes) = (session.clone(), Arc::clone(&self.routes));
        Arc::new(SessionStreams { session, routes, source, target, migration })
    }

    /// Returns the channel to the other host for hooks of volumes without a VM: its sending end, and its receiving end.
    pub(crate) fn hooks_channel(
        &self,
        session: &Session,
        source: HostId,
        migration: MigrationId,
    ) -> (Arc<dyn moving::channel::Send>, mpsc::UnboundedReceiver<ChannelEvent>) {
        let peer = host_id(session.peer());
        let target = if source == peer { self.own() } else { peer };
        let volume = VolumeIndex(0);
        // No VM moves along, so the channel is free.
        let channel = Subject { kind: Kind::Vm, source, migration, volume }.channel(target);
        let (line, arrivals) = self.route(session, channel);
        (Arc::new(line), arrivals)
    }

    /// Opens the channel to the other host about a standby: its sending end, whose messages stay in order, and its receiving end.
    pub(crate) fn standby_channel(
        &self,
        session: &Session,
        subject: Subject,
    ) -> (Arc<dyn moving::channel::Send>, mpsc::UnboundedReceiver<ChannelEvent>) {
        let (line, arrivals) = self.route(session, subject.channel(host_id(session.peer())));
        (Arc::new(line), arrivals)
    }

    /// Offers a migration to another host and waits for its answer. The caller limits the time.
    pub(crate) async fn offer(
        &self,
        session: &Session,
        migration: MigrationId,
        offer: Offer,
    ) -> Result<Acceptance, Refusal> {
        let (answer, answered) = oneshot::channel();
        let key = (host_id(session.peer()), migration);
        lock(&self.opening).insert(key, answer);
        send_opening(session, &Message::Open { migration, offer });
        let outcome = answered.await;
        lock(&self.opening).remove(&key);
        outcome.unwrap_or_else(|_| {
            let detail = "the other host was restarted before it answered; try again".to_owned();
            Err(Refusal { code: wire::RefusalCode::Busy, detail })
        })
    }

    /// Stops waiting for the answer to an offer.
    pub(crate) fn give_up_offer(&self, peer: HostId, migration: MigrationId) {
        lock(&self.opening).remove(&(peer, migration));
    }

    /// Handles the removal of a paired host: its clients are not forwarded, and clients that are forwarded there wait.
    pub(crate) fn unpaired(&self, peer: HostId) {
        self.routes.forget_clients(peer, self.own());
    }

    fn open_route(&self, session: &Session, channel: ChannelId) -> PeerChannel {
        let (line, arrivals) = self.route(session, channel);
        let (me, session) = (Weak::clone(&self.me), session.clone());
        // Messages that an ending lane has not read go to the volume's next lane.
        let unheard = move |arrival| {
            let Some(me) = me.upgrade() else { return };
            // N.B. a stopping daemon does not answer: its next process is asked again. A runtime that ends would drop any
            // handler of a call at once and return the call here, without end.
            if me.host().is_none_or(|host| host.stopping.has_begun()) {
                return;
            }
            if let ChannelEvent::Message { head, payload, credit } = arrival {
                me.unrouted(&session, channel, head, payload, credit);
            }
        };
        PeerChannel { channel: Box::new(line), events: ChannelEvents::or_else(arrivals, unheard) }
    }

    /// Opens a channel: returns its sending end and its receiving end.
    fn route(
        &self,
        session: &Session,
        channel: ChannelId,
    ) -> (SessionChannel, mpsc::UnboundedReceiver<ChannelEvent>) {
        self.routes.open(session, channel)
    }

    /// Handles that the process of another host has ended or cannot be reached.
    fn forget_questions(&self, peer: HostId) {
        lock(&self.opening).retain(|(host, _), _| *host != peer);
        self.questions.forget(peer);
    }

    fn host(&self) -> Option<Arc<Host>> {
        self.host.get()?.upgrade()
    }
}

impl transport::Receiver for Peers {
    fn connected(&self, session: &Session, _: Incarnation) {
        self.say_program(session);
        if self.routes.lead_over(session) == Former::Closed {
            self.forget_questions(host_id(session.peer()));
        }
        self.routes.tell(host_id(session.peer()), || ChannelEvent::Restored);
    }

    fn delivered(&self, session: &Session, delivery: Delivery) {
        if let Some(held) = &mut *lock(&self.held) {
            // The credit of the peers limits the number.
            held.push((session.clone(), delivery));
            return;
        }
        self.take(session, delivery);
    }

    fn disconnected(&self, peer: transport::HostId, reason: &str) {
        self.routes.tell(host_id(peer), || ChannelEvent::Lost(reason.to_owned()));
        if let Some(host) = self.host() {
            host.standbys.lost(host_id(peer));
        }
    }

    fn restarted(&self, session: &Session, _: Incarnation, _: Incarnation) {
        let peer = host_id(session.peer());
        self.forget_questions(peer);
        self.programs.forget(peer);
        self.routes.tell(peer, || ChannelEvent::PeerRestarted);
    }
}

// Received messages.
impl Peers {
    fn take(&self, session: &Session, delivery: Delivery) {
        let Delivery { message, credit } = delivery;
        let (peer, channel) = (host_id(session.peer()), message.channel());
        let (head, payload) = message.into_parts();
        if channel == OPENINGS {
            self.opening_said(session, peer, &payload);
            return;
        }
        if let Some(subject) = Subject::of(channel, self.own(), peer)
            && (subject.kind, subject.source) == (Kind::Standby, peer)
        {
            let Some(host) = self.host() else { return };
            host.standbys.received(
                peer,
                Line { channel, way: Way::Peer(session.clone()) },
                &head,
                payload,
                Box::new(credit),
            );
            return;
        }
        if !self.may(session, channel, &head, &payload) {
            return;
        }
        let route = self.routes.get(peer, channel);
        let arrival = ChannelEvent::Message { head, payload, credit: Box::new(credit) };
        let unheard = match route {
            None => Some(arrival),
            Some(route) => route.unbounded_send(arrival).err().map(mpsc::TrySendError::into_inner),
        };
        if let Some(ChannelEvent::Message { head, payload, credit }) = unheard {
            self.unrouted(session, channel, head, payload, credit);
        }
    }

    /// Decides whether a host may send this request. A refused request is answered as if its object did not exist. Only the
    /// journal's answers about unknown or ended migrations go to every host.
    fn may(&self, session: &Session, channel: ChannelId, head: &[u8], payload: &[u8]) -> bool {
        let peer = host_id(session.peer());
        let Some(host) = self.host() else { return false };
        let subject = Subject::of(channel, self.own(), peer);
        let Some(subject) = subject else {
            self.access.refused(peer, channel, Denied::NotGiven);
            return false;
        };
        let asked = match subject.kind {
            // The source of a standby gets answers only, and drops those that it has not asked for.
            Kind::Standby => return self.routes.get(peer, channel).is_some(),
            // The receiver for the VM decides about its messages.
            Kind::Vm => Asked::Message(Request::Vm),
            Kind::Migration | Kind::Forwarding | Kind::Reservoir => Asked::by(head, payload),
        };
        let (call, request) = match asked {
            Asked::Nothing => return true,
            Asked::Call(call, request) => (Some(call), request),
            Asked::Message(request) => (None, request),
            Asked::Garbled => {
                self.access.refused(peer, channel, Denied::NotGiven);
                return false;
            }
        };
        let Err(denied) = self.access.judge(&host.journal, peer, channel, subject, request) else {
            if call.is_some() && subject.kind == Kind::Migration && subject.source == peer {
                self.access.goes_on(peer, subject.migration);
            }
            return true;
        };
        match (call, subject.kind, denied) {
            (Some(call), kind, _) => {
                refuse(session, channel, call);
                if kind == Kind::Migration {
                    self.tell_of_end(session, subject);
                }
            }
            // N.B. a host that has lost the end or the beginning of a migration is answered that there is none.
            (None, Kind::Migration, Denied::Unknown) => {
                self.answer_from_journal(session, channel, payload);
                return false;
            }
            (None, ..) => {}
        }
        self.access.refused(peer, channel, denied);
        false
    }

    fn opening_said(&self, session: &Session, peer: HostId, message: &[u8]) {
        match wire::decode(message) {
            Ok(Message::Open { migration, offer }) => self.opened(session, peer, migration, offer),
            Ok(Message::Accepted { migration, acceptance }) => {
                self.opening_answered(peer, migration, Ok(acceptance));
            }
            Ok(Message::Refused { migration, refusal }) => {
                self.opening_answered(peer, migration, Err(refusal));
            }
            Ok(Message::Survey { question, survey }) => self.asked(session, question, survey),
            Ok(Message::Surveyed { question, surveyed }) => self.questions.answered(peer, question, surveyed),
            Ok(Message::Probe { question, store, secrets }) => {
                self.asked_for_probes(session, question, store, secrets);
            }
            Ok(Message::Whose { question, volumes }) => self.asked_whose(session, question, volumes),
            Ok(Message::Known { question, known, knows_all }) => {
                let answer = restoration::Answer { known: known.into_iter().collect(), knows_all };
                self.questions.known(peer, question, answer);
            }
            Ok(Message::Program { version }) => self.programs.said(peer, version),
            Ok(Message::Attach { question, offered }) => self.asked_to_attach(session, question, offered),
            Ok(Message::Detach { question, volume, is_forced }) => {
                self.asked_to_detach(session, question, volume, is_forced);
            }
            Ok(Message::Attached { question, refused }) => self.questions.attached(peer, question, refused),
            Ok(Message::AttachmentGivenUp { volume }) => self.attachment_given_up(session, volume),
            Ok(Message::Probed { question, seen }) => self.questions.probed(peer, question, seen),
            Ok(_) => tracing::warn!(%peer, "ignored a host's message on the wrong channel"),
            Err(error) => tracing::warn!(%peer, %error, "ignored an invalid message of a host"),
        }
    }

    fn opened(&self, session: &Session, peer: HostId, migration: MigrationId, offer: Offer) {
        let Some(host) = self.host() else { return };
        let noted = Noted::begin(peer, migration, &offer);
        let answer = move |session: &Session, host: &Host, answer: Result<Acceptance, Refusal>| {
            host.access.audit.note(&noted.answered(&answer));
            let answer = match answer {
                Ok(acceptance) => Message::Accepted { migration, acceptance },
                Err(refusal) => Message::Refused { migration, refusal },
            };
            send_opening(session, &answer);
        };
        let Some(turn) = self.turns.take(peer) else {
            answer(session, &host, Err(turns::refusal()));
            return;
        };
        let session = session.clone();
        self.runtime.spawn(async move {
            let _turn = turn;
            let taken = host.arrivals.take_migration(&session, peer, migration, offer).await;
            answer(&session, &host, taken);
        });
    }

    fn opening_answered(&self, peer: HostId, migration: MigrationId, answer: Result<Acceptance, Refusal>) {
        if let Some(waiting) = lock(&self.opening).remove(&(peer, migration)) {
            // The requester may have given up.
            let _ = waiting.send(answer);
        }
    }

    /// Answers a message for which no lane has a channel: from the journal, or by finding a lane for it.
    fn unrouted(
        &self,
        session: &Session,
        channel: ChannelId,
        head: Bytes,
        payload: Bytes,
        credit: Box<dyn std::any::Any + Send>,
    ) {
        let peer = host_id(session.peer());
        match (Subject::of(channel, self.own(), peer), Head::decode(&head)) {
            (Some(subject @ Subject { kind: Kind::Vm, .. }), _) => {
                self.vm_said(session, subject, &head);
            }
            (
                Some(Subject { kind: Kind::Forwarding, .. }),
                Ok(
                    Head::Call { address: Address::Owner(volume), .. }
                    | Head::FencedCall { address: Address::Owner(volume), .. },
                ),
            ) => {
                let line = self.open_route(session, channel);
                // The first of many; later ones find the route.
                if let Some(route) = self.routes.get(peer, channel) {
                    let _ = route.unbounded_send(ChannelEvent::Message { head, payload, credit });
                }
                self.attach(session, channel, VolumeId(volume), line);
            }
            (Some(subject @ Subject { kind: Kind::Reservoir, .. }), Ok(Head::Call { .. })) => {
                let line = self.open_route(session, channel);
                if let Some(route) = self.routes.get(peer, channel) {
                    let _ = route.unbounded_send(ChannelEvent::Message { head, payload, credit });
                }
                self.attach_reservoir(session, channel, subject, line);
            }
            (subject, Ok(Head::Call { call, .. } | Head::FencedCall { call, .. })) => {
                refuse(session, channel, call);
                if let Some(subject @ Subject { kind: Kind::Migration, .. }) = subject {
                    self.tell_of_end(session, subject);
                }
            }
            (Some(Subject { kind: Kind::Migration, .. }), Ok(Head::Message)) => {
                self.answer_from_journal(session, channel, &payload);
            }
            // An answer that nothing waits for.
            (_, Ok(_)) => {}
            (_, Err(error)) => tracing::warn!(%peer, %error, "a host sent an invalid message"),
        }
    }

    /// Handles messages about a VM that runs here; others are late.
    fn vm_said(&self, session: &Session, subject: Subject, head: &[u8]) {
        let (Some(host), Some(said)) = (self.host(), moving::post_copy_request(head)) else { return };
        if subject.source == host_id(session.peer()) && subject.volume == VolumeIndex(0) {
            let session = session.clone();
            self.runtime.spawn(async move {
                host.vm_orders.post_copy_request(&session, subject.migration, said).await;
            });
        }
    }

    fn answer_from_journal(&self, session: &Session, channel: ChannelId, message: &[u8]) {
        let (Some(host), peer) = (self.host(), host_id(session.peer())) else { return };
        let answers: Vec<_> = match wire::decode(message) {
            Ok(Message::ToTarget { migration, message: ToTarget::IsWhole(attempt) }) => {
                return self.asked_whether_whole(session, channel, migration, attempt);
            }
            Ok(Message::ToTarget { migration, message: ToTarget::NothingKept(_) }) => {
                self.runtime.spawn(async move { host.resumption.forget_copies_of(peer, migration).await });
                return;
            }
            Ok(Message::ToTarget { migration, message }) => {
                let answers = host.resumption.answers_as_target(peer, migration, &message).into_iter();
                answers.map(|message| Message::ToSource { migration, message }).collect()
            }
            Ok(Message::ToSource { migration, message }) => {
                let answer = host.resumption.answer_as_source(peer, migration, &message).into_iter();
                answer.map(|message| Message::ToTarget { migration, message }).collect()
            }
            Ok(_) => Vec::new(),
            Err(error) => {
                tracing::warn!(%peer, %error, "ignored an invalid message of a host");
                Vec::new()
            }
        };
        say_all(session, channel, answers);
    }

    /// Tells a source that still copies that its migration has ended here. That message may have been lost with a process, and
    /// the source would take the target's store for broken.
    fn tell_of_end(&self, session: &Session, subject: Subject) {
        let Some(host) = self.host() else { return };
        let (migration, peer) = (subject.migration, host_id(session.peer()));
        let target = if subject.source == peer { self.own() } else { peer };
        let channel = subject.of_first().channel(target);
        let asked = ToTarget::Prepare(Attempt::NONE);
        let answers = host.resumption.answers_as_target(peer, migration, &asked).into_iter();
        say_all(session, channel, answers.map(|message| Message::ToSource { migration, message }));
    }

    /// Lets the new owner of a volume that left with blocks missing read them from its lane.
    fn attach_reservoir(
        &self,
        session: &Session,
        channel: ChannelId,
        subject: Subject,
        mut line: PeerChannel,
    ) {
        let (Some(host), session, Some(me)) = (self.host(), session.clone(), self.me.upgrade()) else {
            return;
        };
        let peer = host_id(session.peer());
        self.runtime.spawn(async move {
            let lane = host.resumption.lane_of_reservoir(subject.migration, subject.volume).await;
            if let Some(lane) = lane {
                lane.serve_reservoir(line, subject.migration, subject.volume);
                return;
            }
            me.routes.close(peer, channel);
            while let Some(arrival) = line.events.try_next() {
                let ChannelEvent::Message { head, .. } = arrival else { continue };
                // N.B. a stopping daemon does not answer: its next process is asked again.
                if let (false, Ok(Head::Call { call, .. })) = (host.stopping.has_begun(), Head::decode(&head))
                {
                    refuse(&session, channel, call);
                }
            }
        });
    }

    /// Lets another host's clients use a volume that is here.
    fn attach(&self, session: &Session, channel: ChannelId, volume: VolumeId, mut line: PeerChannel) {
        let (Some(host), session, Some(me)) = (self.host(), session.clone(), self.me.upgrade()) else {
            return;
        };
        let (peer, own) = (host_id(session.peer()), self.own());
        self.runtime.spawn(async move {
            match host.resumption.lane_of(volume).await {
                Some(lane) => lane.attach(line, peer, own),
                None => {
                    me.routes.close(peer, channel);
                    while let Some(arrival) = line.events.try_next() {
                        let ChannelEvent::Message { head, .. } = arrival else { continue };
                        // N.B. a stopping daemon does not answer: its next process is asked again.
                        if let (false, Ok(Head::Call { call, .. } | Head::FencedCall { call, .. })) =
                            (host.stopping.has_begun(), Head::decode(&head))
                        {
                            refuse(&session, channel, call);
                        }
                    }
                }
            }
        });
    }
}

fn send_opening(session: &Session, message: &Message) {
    match wire::encode(message) {
        Ok(bytes) => send(session, OPENINGS, Priority::Control, Bytes::new(), bytes.into()),
        Err(error) => tracing::error!(%error, "a message to another host cannot be encoded"),
    }
}

fn say_all(session: &Session, channel: ChannelId, messages: impl IntoIterator<Item = Message>) {
    // Messages from a journal are within the limits.
    for bytes in messages.into_iter().filter_map(|message| wire::encode(&message).ok()) {
        send(session, channel, Priority::Control, Head::Message.encode(), bytes.into());
    }
}

fn refuse(session: &Session, channel: ChannelId, call: u64) {
    let gone = Head::Answer { call, result: Err(Fault::Gone) };
    send(session, channel, Priority::Control, gone.encode(), Bytes::new());
}

fn send(session: &Session, channel: ChannelId, priority: Priority, head: Bytes, payload: Bytes) {
    match transport::Message::new(channel, priority, head, payload) {
        Ok(message) => session.send(message),
        // Payloads are made within the limit; a handover's messages are far below it.
        Err(error) => tracing::error!(%error, "dropped a message for another host"),
    }
}

pub(crate) fn host_id(id: transport::HostId) -> HostId {
    HostId(id.0)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
