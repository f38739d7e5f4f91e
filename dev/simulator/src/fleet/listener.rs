//! Receives the other host's messages of a migration: passes them to a half, or answers from the journal.

use std::rc::{Rc, Weak};

use lane::SourceParticipantRef;
use lane::peer::{Listener, RpcChannel};
use migration::message::ToTarget;
use migration::recovery;
use migration::wire::{self, Message};

use super::host::SimHost;
use super::place::Place;
use super::serving::{Channel, Serving};

pub(super) struct MigrationListener {
    host: Weak<SimHost>,
    incarnation: u64,
    peer: Place,
    channel: Weak<Channel>,
}

impl MigrationListener {
    pub(super) fn new(host: &Rc<SimHost>, peer: Place, channel: Weak<Channel>) -> Rc<Self> {
        Rc::new(Self { host: Rc::downgrade(host), incarnation: host.incarnation(), peer, channel })
    }

    fn with(&self, tell: impl FnOnce(&SimHost, &Serving, &Rc<Channel>)) {
        let host = self.host.upgrade().filter(|host| host.incarnation() == self.incarnation);
        let (Some(host), Some(channel)) = (host, self.channel.upgrade()) else { return };
        if let Some(serving) = &*host.serving.borrow() {
            tell(&host, serving, &channel);
        }
    }
}

impl Listener for MigrationListener {
    fn message(&self, message: &[u8]) {
        self.with(|host, serving, channel| {
            let peer = self.peer.host();
            let state = host.journal().acknowledged();
            match wire::decode(message) {
                Ok(Message::ToSource { migration, message }) => match serving.source_of(channel.subject) {
                    Some(source) => source.driver.deliver(message),
                    None => {
                        if let Some(message) = recovery::answer_as_source(&state, peer, migration, &message) {
                            send(&channel.channel, &Message::ToTarget { migration, message });
                        }
                    }
                },
                Ok(Message::ToTarget { migration, message }) => {
                    let known = state.incoming(peer, migration);
                    let under_way = known.is_some_and(|(_, recorded)| !recorded.has_ended());
                    match serving.target_of(channel.subject).filter(|_| under_way) {
                        Some(driver) => driver.deliver(message),
                        None if matches!(message, ToTarget::NothingKept(_)) => {
                            host.forget_copies(recovery::nothing_kept_of(&state, peer, migration));
                        }
                        None => {
                            let answer = recovery::answer_as_target(&state, peer, migration, &message);
                            let lacks = || host.lacks_still(peer, migration, &message);
                            if let Some(message) = answer.or_else(lacks) {
                                send(&channel.channel, &Message::ToSource { migration, message });
                            }
                        }
                    }
                }
                other => host.world.violated("link", || format!("a message that nobody sends: {other:?}")),
            }
        });
    }

    fn link_lost(&self, _: &str) {
        self.with(|_, serving, channel| {
            if let Some(source) = serving.source_of(channel.subject) {
                source.driver.link_lost("it was cut");
            }
            if let Some(driver) = serving.target_of(channel.subject) {
                driver.link_lost();
            }
        });
    }

    fn link_restored(&self) {
        self.with(|_, serving, channel| {
            if let Some(source) = serving.source_of(channel.subject) {
                source.driver.link_back();
            }
            if let Some(driver) = serving.target_of(channel.subject) {
                driver.link_back();
            }
        });
    }

    fn peer_restarted(&self) {
        self.with(|_, serving, channel| {
            if let Some(source) = serving.source_of(channel.subject) {
                source.followers.iter().for_each(SourceParticipantRef::peer_restarted);
                source.driver.peer_restarted();
                source.driver.link_back();
            }
            if let Some(driver) = serving.target_of(channel.subject) {
                driver.link_back();
            }
        });
    }
}

pub(super) fn send(channel: &RpcChannel, message: &Message) {
    if let Ok(bytes) = wire::encode(message) {
        channel.send_message(bytes);
    }
}
