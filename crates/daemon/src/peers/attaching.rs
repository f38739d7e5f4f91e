//! Messages about volumes that are attached at hosts which do not have them.

use std::sync::Arc;

use migration::VolumeId;
use migration::wire::{Message, OfferedAttachment, Refusal};
use transport::Session;

use super::noted::Noted;
use super::{Peers, host_id, send_opening, turns};
use crate::migrations::departures::leave::refusal;

impl Peers {
    /// Asks another host to offer a volume. Returns its refusal, if it refuses; `None`: its process ended. The caller limits the
    /// time: an older program does not know the question.
    pub(crate) async fn attach_there(
        &self,
        session: &Session,
        offered: OfferedAttachment,
    ) -> Option<Option<Refusal>> {
        let message = |question| Message::Attach { question, offered };
        self.ask(session, &self.questions.attached, message).await
    }

    /// Asks another host to stop offering a volume; answers like [`Self::attach_there`].
    pub(crate) async fn detach_there(
        &self,
        session: &Session,
        volume: VolumeId,
        is_forced: bool,
    ) -> Option<Option<Refusal>> {
        let message = |question| Message::Detach { question, volume, is_forced };
        self.ask(session, &self.questions.attached, message).await
    }

    /// Tells another host that its volume was detached here.
    pub(crate) fn give_attachment_up(&self, session: &Session, volume: VolumeId) {
        send_opening(session, &Message::AttachmentGivenUp { volume });
    }

    /// Answers another host that asks to attach a volume here.
    pub(super) fn asked_to_attach(&self, session: &Session, question: u64, offered: OfferedAttachment) {
        let Some(host) = self.host() else { return };
        let peer = host_id(session.peer());
        let Some(turn) = self.turns.take(peer) else {
            return send_opening(session, &Message::Attached { question, refused: Some(turns::refusal()) });
        };
        let (session, noted) = (session.clone(), Noted::attach(peer, &offered));
        self.runtime.spawn(async move {
            let _turn = turn;
            let attachments = Arc::clone(&host.attachments);
            let taken = host.operate(async move { attachments.take(peer, offered).await }).await;
            let refused = taken.err().map(|error| refusal(&error));
            host.access.audit.note(&noted.ended(refused.as_ref()));
            send_opening(&session, &Message::Attached { question, refused });
        });
    }

    /// Answers another host that asks to detach a volume here.
    pub(super) fn asked_to_detach(
        &self,
        session: &Session,
        question: u64,
        volume: VolumeId,
        is_forced: bool,
    ) {
        let Some(host) = self.host() else { return };
        let peer = host_id(session.peer());
        let Some(turn) = self.turns.take(peer) else {
            return send_opening(session, &Message::Attached { question, refused: Some(turns::refusal()) });
        };
        let (session, noted) = (session.clone(), Noted::detach(peer, volume, is_forced));
        self.runtime.spawn(async move {
            let _turn = turn;
            let attachments = Arc::clone(&host.attachments);
            let released =
                host.operate(async move { attachments.release(peer, volume, is_forced).await }).await;
            let refused = released.err().map(|error| refusal(&error));
            host.access.audit.note(&noted.ended(refused.as_ref()));
            send_opening(&session, &Message::Attached { question, refused });
        });
    }

    /// Notes that another host has detached a volume of this host.
    pub(super) fn attachment_given_up(&self, session: &Session, volume: VolumeId) {
        let Some(host) = self.host() else { return };
        let peer = host_id(session.peer());
        self.runtime.spawn(async move { host.attachments.is_given_up(peer, volume).await });
    }
}
