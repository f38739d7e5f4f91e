//! Hears what the other host says of a migration: its halves are told, or the journal answers.

use std::rc::{Rc, Weak};

use lane::SourceFollower;
use lane::peer::{Conversation, Listener};
use migration::recovery;
use migration::wire::{self, Message};

use super::party::Party;
use super::place::Place;
use super::serving::{Channel, Serving};

/// Listens on the line of one migration.
pub(super) struct Ear {
    party: Weak<Party>,
    incarnation: u64,
    peer: Place,
    channel: Weak<Channel>,
}

impl Ear {
    pub(super) fn new(party: &Rc<Party>, peer: Place, channel: Weak<Channel>) -> Rc<Self> {
        Rc::new(Self { party: Rc::downgrade(party), incarnation: party.incarnation(), peer, channel })
    }

    fn with(&self, tell: impl FnOnce(&Party, &Serving, &Rc<Channel>)) {
        let party = self.party.upgrade().filter(|party| party.incarnation() == self.incarnation);
        let (Some(party), Some(channel)) = (party, self.channel.upgrade()) else { return };
        if let Some(serving) = &*party.serving.borrow() {
            tell(&party, serving, &channel);
        }
    }
}

impl Listener for Ear {
    fn said(&self, message: &[u8]) {
        self.with(|party, serving, channel| {
            let peer = self.peer.host();
            let state = party.journal().acknowledged();
            match wire::decode(message) {
                Ok(Message::ToSource { migration, message }) => match serving.source_of(channel.subject) {
                    Some(source) => source.baton.deliver(message),
                    None => {
                        if let Some(message) = recovery::answer_as_source(&state, peer, migration, &message) {
                            say(&channel.conversation, &Message::ToTarget { migration, message });
                        }
                    }
                },
                Ok(Message::ToTarget { migration, message }) => {
                    let known = state.incoming(peer, migration);
                    let under_way = known.is_some_and(|(_, recorded)| !recorded.has_ended());
                    match serving.target_of(channel.subject).filter(|_| under_way) {
                        Some(baton) => baton.deliver(message),
                        None => {
                            let answer = recovery::answer_as_target(&state, peer, migration, &message);
                            if let Some(message) = answer {
                                say(&channel.conversation, &Message::ToSource { migration, message });
                            }
                        }
                    }
                }
                other => party.world.violated("link", || format!("a message that nobody sends: {other:?}")),
            }
        });
    }

    fn lost(&self, _: &str) {
        self.with(|_, serving, channel| {
            if let Some(source) = serving.source_of(channel.subject) {
                source.baton.link_lost();
            }
        });
    }

    fn back(&self) {
        self.with(|_, serving, channel| {
            if let Some(source) = serving.source_of(channel.subject) {
                source.baton.link_back();
            }
            if let Some(baton) = serving.target_of(channel.subject) {
                baton.link_back();
            }
        });
    }

    fn restarted(&self) {
        self.with(|_, serving, channel| {
            if let Some(source) = serving.source_of(channel.subject) {
                source.followers.iter().for_each(SourceFollower::peer_restarted);
                source.baton.peer_restarted();
                source.baton.link_back();
            }
            if let Some(baton) = serving.target_of(channel.subject) {
                baton.link_back();
            }
        });
    }
}

/// Says something of a migration to the other host.
pub(super) fn say(conversation: &Conversation, message: &Message) {
    if let Ok(bytes) = wire::encode(message) {
        conversation.say(bytes);
    }
}

/// Hears nothing: of a conversation that is only calls.
pub(super) struct Deaf;

impl Listener for Deaf {
    fn said(&self, _: &[u8]) {}

    fn lost(&self, _: &str) {}

    fn back(&self) {}

    fn restarted(&self) {}
}
