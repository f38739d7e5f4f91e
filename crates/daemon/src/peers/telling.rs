//! What this host tells others of migrations for which no lane has a line.
//!
//! ```text
//!   source ── is whole? ──► journal: yes ─────────────────────► whole
//!                              └─ no ──► lanes: how much? ────► lacks so much
//!   nothing is missing any more, durably ─────────────────────► whole, unasked
//! ```

use migration::message::{ToSource, ToTarget};
use migration::wire::{self, Message};
use migration::{Attempt, HostId, MigrationId, VolumeIndex};
use transport::{ChannelId, Priority, Session};

use super::channel::{Kind, Subject};
use super::{Head, Peers, host_id, say_all, send};

impl Peers {
    /// Tells the other host of a migration for which no lane here has a line.
    pub(crate) fn tell_target(&self, session: &Session, migration: MigrationId, message: ToTarget) {
        let (kind, source, volume) = (Kind::Migration, self.own(), VolumeIndex(0));
        let subject = Subject { kind, source, migration, volume };
        if let Ok(bytes) = wire::encode(&Message::ToTarget { migration, message }) {
            let channel = subject.channel(host_id(session.peer()));
            send(session, channel, Priority::Control, Head::Message.encode(), bytes.into());
        }
    }

    /// The source of volumes asks whether they have everything.
    pub(super) fn asked_whether_whole(
        &self,
        session: &Session,
        channel: ChannelId,
        migration: MigrationId,
        attempt: Attempt,
    ) {
        let (Some(host), peer) = (self.host(), host_id(session.peer())) else { return };
        let answers = host.answers_as_target(peer, migration, &ToTarget::IsWhole(attempt));
        if !answers.is_empty() {
            return say_all(session, channel, to_source(migration, answers));
        }
        let session = session.clone();
        self.runtime.spawn(async move {
            if let Some(units) = host.units_missing(peer, migration).await {
                let message = ToSource::Lacks { attempt, units };
                say_all(&session, channel, to_source(migration, vec![message]));
            }
        });
    }

    /// Answers a source that has not asked, if the journal has an answer. One that cannot be reached now asks by itself.
    pub(crate) fn answer_unasked(&self, source: HostId, migration: MigrationId, asked: &ToTarget) {
        let Some(host) = self.host() else { return };
        let Ok(session) = host.hosts.session_with(source) else { return };
        let answers = host.answers_as_target(source, migration, asked);
        let subject = Subject { kind: Kind::Migration, source, migration, volume: VolumeIndex(0) };
        say_all(&session, subject.channel(self.own()), to_source(migration, answers));
    }
}

fn to_source(migration: MigrationId, said: Vec<ToSource>) -> impl Iterator<Item = Message> {
    said.into_iter().map(move |message| Message::ToSource { migration, message })
}
