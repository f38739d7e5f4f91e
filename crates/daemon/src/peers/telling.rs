//! Messages to other hosts about migrations without a lane that has a channel.
//!
//! ```text
//!   source ── complete? ──► journal: yes ─────────────────────► complete
//!                              └─ no ──► lanes: how much? ────► how much is missing
//!   nothing is missing, durably ──────────────────────────────► complete, unasked
//! ```

use migration::message::{ToSource, ToTarget};
use migration::wire::{self, Message};
use migration::{Attempt, HostId, MigrationId, VolumeIndex};
use transport::{ChannelId, Priority, Session};

use super::channel::{Kind, Subject};
use super::{Head, Peers, host_id, say_all, send};

impl Peers {
    /// Sends a message to the target of a migration for which no lane has a channel.
    pub(crate) fn tell_target(&self, session: &Session, migration: MigrationId, message: ToTarget) {
        let (kind, source, volume) = (Kind::Migration, self.own(), VolumeIndex(0));
        let subject = Subject { kind, source, migration, volume };
        if let Ok(bytes) = wire::encode(&Message::ToTarget { migration, message }) {
            let channel = subject.channel(host_id(session.peer()));
            send(session, channel, Priority::Control, Head::Message.encode(), bytes.into());
        }
    }

    /// Answers the source of volumes that asks whether they are complete.
    pub(super) fn asked_whether_whole(
        &self,
        session: &Session,
        channel: ChannelId,
        migration: MigrationId,
        attempt: Attempt,
    ) {
        let (Some(host), peer) = (self.host(), host_id(session.peer())) else { return };
        let answers = host.resumption.answers_as_target(peer, migration, &ToTarget::IsWhole(attempt));
        if !answers.is_empty() {
            return say_all(session, channel, to_source(migration, answers));
        }
        let session = session.clone();
        self.runtime.spawn(async move {
            if let Some(units) = host.resumption.units_missing(peer, migration).await {
                let message = ToSource::Lacks { attempt, units };
                say_all(&session, channel, to_source(migration, vec![message]));
            }
        });
    }

    /// Sends the journal's answer to a source that has not asked. A source that cannot be reached now will ask itself.
    pub(crate) fn answer_unasked(&self, source: HostId, migration: MigrationId, asked: &ToTarget) {
        let Some(host) = self.host() else { return };
        let Ok(session) = host.hosts.session_with(source) else { return };
        let answers = host.resumption.answers_as_target(source, migration, asked);
        let subject = Subject { kind: Kind::Migration, source, migration, volume: VolumeIndex(0) };
        say_all(&session, subject.channel(self.own()), to_source(migration, answers));
    }
}

fn to_source(migration: MigrationId, said: Vec<ToSource>) -> impl Iterator<Item = Message> {
    said.into_iter().map(move |message| Message::ToSource { migration, message })
}
