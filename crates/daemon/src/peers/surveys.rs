//! Preflight checks at other hosts: their answers to a future offer, and whether they see a folder of this host.
//! A question is forgotten when the caller stops waiting, or when the process that was asked has ended.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use migration::restoration::{self, Answer};
use migration::wire::{ASKED_MAX, Message, ProbeSeen, Refusal, Survey, Surveyed};
use migration::{HostId, VolumeId};
use tokio::sync::oneshot;
use transport::Session;

use super::veil::{all_unveiled, veiled};
use super::{Peers, host_id, lock, send_opening, turns};

pub(super) type Waiting<T> = Arc<Mutex<BTreeMap<(HostId, u64), oneshot::Sender<T>>>>;

/// Questions to other hosts that have no answer yet.
#[derive(Default)]
pub(super) struct Questions {
    next: AtomicU64,
    surveys: Waiting<Surveyed>,
    probes: Waiting<Vec<ProbeSeen>>,
    whose: Waiting<Answer>,
    /// Attachments: the refusal, if there is one.
    pub(super) attached: Waiting<Option<Refusal>>,
}

/// A question, while its answer is awaited.
struct Question<T> {
    waiting: Waiting<T>,
    key: (HostId, u64),
}

impl Peers {
    /// Asks another host for its preflight check of an offer. The caller limits the time, because the host may never
    /// answer. `None`: its process ended.
    pub(crate) async fn survey(&self, session: &Session, survey: Survey) -> Option<Surveyed> {
        self.ask(session, &self.questions.surveys, |question| Message::Survey { question, survey }).await
    }

    /// Asks another host whether it finds these probes in a folder of its own store; waits like [`Self::survey`].
    pub(crate) async fn probe(
        &self,
        session: &Session,
        store: String,
        secrets: Vec<[u8; 32]>,
    ) -> Option<Vec<ProbeSeen>> {
        let message = |question| Message::Probe { question, store, secrets };
        self.ask(session, &self.questions.probes, message).await
    }

    /// Asks another host what it knows of volumes; waits like [`Self::survey`].
    pub(crate) async fn whose(&self, session: &Session, volumes: &[VolumeId]) -> Option<Answer> {
        let mut all = Answer { knows_all: true, ..Answer::default() };
        for some in volumes.chunks(ASKED_MAX) {
            let called: BTreeMap<VolumeId, VolumeId> =
                some.iter().map(|volume| (veiled(*volume), *volume)).collect();
            let names = called.keys().copied().collect();
            let message = |question| Message::Whose { question, volumes: names };
            let answer = self.ask(session, &self.questions.whose, message).await?;
            let known = answer.known.into_iter();
            all.known.extend(known.filter_map(|(name, known)| Some((*called.get(&name)?, known))));
            all.knows_all &= answer.knows_all;
        }
        Some(all)
    }

    pub(super) async fn ask<T>(
        &self,
        session: &Session,
        waiting: &Waiting<T>,
        message: impl FnOnce(u64) -> Message,
    ) -> Option<T> {
        let number = self.questions.next.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let key = (host_id(session.peer()), number);
        let waiting = Arc::clone(waiting);
        lock(&waiting).insert(key, answer);
        let _question = Question { waiting, key };
        send_opening(session, &message(number));
        answered.await.ok()
    }

    /// Answers another host's preflight check.
    pub(super) fn asked(&self, session: &Session, question: u64, survey: Survey) {
        let Some(host) = self.host() else { return };
        let Some(turn) = self.turns.take(host_id(session.peer())) else {
            let surveyed = Surveyed { refusals: vec![turns::refusal()], ..Surveyed::default() };
            send_opening(session, &Message::Surveyed { question, surveyed });
            return;
        };
        let session = session.clone();
        self.runtime.spawn(async move {
            let _turn = turn;
            let surveyed = host.arrivals.survey(host_id(session.peer()), survey).await;
            send_opening(&session, &Message::Surveyed { question, surveyed });
        });
    }

    /// Answers another host, whose journal was restored, about volumes.
    pub(super) fn asked_whose(&self, session: &Session, question: u64, volumes: Vec<VolumeId>) {
        let Some(host) = self.host() else { return };
        // Each name is compared with all that are known here, so the number of concurrent answers is limited. A host
        // without an answer asks again.
        let asker = host_id(session.peer());
        let Some(turn) = self.turns.take(asker) else { return };
        let session = session.clone();
        self.runtime.spawn_blocking(move || {
            let _turn = turn;
            let state = host.journal.read(migration::journal::State::clone);
            let names = all_unveiled(&state, &volumes);
            let known = names.filter_map(|(name, volume)| {
                let known = restoration::knowledge(&state, asker, volume)?;
                Some((name, if host.claims.cannot_serve(&state, volume) { known.unsure() } else { known }))
            });
            let (known, knows_all) = (known.collect(), restoration::knows_all(&state));
            send_opening(&session, &Message::Known { question, known, knows_all });
        });
    }

    /// Answers another host about its probes.
    pub(super) fn asked_for_probes(
        &self,
        session: &Session,
        question: u64,
        store: String,
        secrets: Vec<[u8; 32]>,
    ) {
        let Some(host) = self.host() else { return };
        let Some(turn) = self.turns.take(host_id(session.peer())) else {
            let seen = vec![ProbeSeen::Nothing; secrets.len()];
            send_opening(session, &Message::Probed { question, seen });
            return;
        };
        let session = session.clone();
        self.runtime.spawn(async move {
            let _turn = turn;
            let seen = host.departures.see_probes(store, secrets).await;
            send_opening(&session, &Message::Probed { question, seen });
        });
    }
}

impl Questions {
    /// Passes on another host's answer; the requester may have given up.
    pub(super) fn answered(&self, peer: HostId, question: u64, surveyed: Surveyed) {
        let waits = lock(&self.surveys).remove(&(peer, question));
        let _ = waits.map(|answer| answer.send(surveyed));
    }

    /// Passes on another host's answer about probes; the requester may have given up.
    pub(super) fn probed(&self, peer: HostId, question: u64, seen: Vec<ProbeSeen>) {
        let waits = lock(&self.probes).remove(&(peer, question));
        let _ = waits.map(|answer| answer.send(seen));
    }

    /// Passes on another host's answer about volumes; the requester may have given up.
    pub(super) fn known(&self, peer: HostId, question: u64, answer: Answer) {
        let waits = lock(&self.whose).remove(&(peer, question));
        let _ = waits.map(|told| told.send(answer));
    }

    /// Passes on another host's answer about an attachment; the requester may have given up.
    pub(super) fn attached(&self, peer: HostId, question: u64, refused: Option<Refusal>) {
        let waits = lock(&self.attached).remove(&(peer, question));
        let _ = waits.map(|answer| answer.send(refused));
    }

    /// Forgets the questions to a process of another host that has ended.
    pub(super) fn forget(&self, peer: HostId) {
        lock(&self.surveys).retain(|(host, _), _| *host != peer);
        lock(&self.probes).retain(|(host, _), _| *host != peer);
        lock(&self.whose).retain(|(host, _), _| *host != peer);
        lock(&self.attached).retain(|(host, _), _| *host != peer);
    }
}

impl<T> Drop for Question<T> {
    fn drop(&mut self) {
        lock(&self.waiting).remove(&self.key);
    }
}
