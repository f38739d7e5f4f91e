//! Looks ahead: what another host would say to an offer, asked before one is made.
//!
//! Nobody waits for ever: a question whose answer is not wanted any more is forgotten, and so is one to a process that is
//! gone.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use migration::HostId;
use migration::wire::{Message, Survey, Surveyed};
use tokio::sync::oneshot;
use transport::Session;

use super::{Peers, host_id, lock, send_opening};

type Waiting = Arc<Mutex<BTreeMap<(HostId, u64), oneshot::Sender<Surveyed>>>>;

/// Questions to other hosts that have no answer yet.
#[derive(Default)]
pub(super) struct Questions {
    next: AtomicU64,
    waiting: Waiting,
}

/// One of them, for as long as somebody waits.
struct Question {
    waiting: Waiting,
    key: (HostId, u64),
}

impl Peers {
    /// Asks another host what it would say to an offer; waits without end while it does not answer, so the caller limits
    /// that. `None`: its process ended.
    pub(crate) async fn survey(&self, session: &Session, survey: Survey) -> Option<Surveyed> {
        let number = self.questions.next.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let key = (host_id(session.peer()), number);
        let waiting = Arc::clone(&self.questions.waiting);
        lock(&waiting).insert(key, answer);
        let _question = Question { waiting, key };
        send_opening(session, &Message::Survey { question: number, survey });
        answered.await.ok()
    }

    /// Another host asks.
    pub(super) fn asked(&self, session: &Session, question: u64, survey: Survey) {
        let Some(host) = self.host() else { return };
        let session = session.clone();
        self.runtime.spawn(async move {
            let surveyed = host.survey(survey).await;
            send_opening(&session, &Message::Surveyed { question, surveyed });
        });
    }
}

impl Questions {
    /// Another host has answered; whoever asked may have given up.
    pub(super) fn answered(&self, peer: HostId, question: u64, surveyed: Surveyed) {
        let waits = lock(&self.waiting).remove(&(peer, question));
        let _ = waits.map(|answer| answer.send(surveyed));
    }

    /// The process of another host has ended: it answers nothing that it was asked.
    pub(super) fn forget(&self, peer: HostId) {
        lock(&self.waiting).retain(|(host, _), _| *host != peer);
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        lock(&self.waiting).remove(&self.key);
    }
}
