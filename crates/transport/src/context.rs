//! State that all parts of an endpoint share: its identity, its peers, its sessions, its runtime.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use ring::rand::{SecureRandom, SystemRandom};
use tokio::runtime::Handle;

use crate::accept::Strangers;
use crate::host_id::HostId;
use crate::invitation::Book;
use crate::pairing::Incarnation;
use crate::peer::Peers;
use crate::session::{Session, Shared};
use crate::settings::Settings;
use crate::tls::Tls;

/// Refused connections that are kept for the status.
const REFUSED_MAX: usize = 16;

pub(crate) struct Context {
    pub(crate) settings: Settings,
    pub(crate) tls: Tls,
    pub(crate) peers: Arc<dyn Peers>,
    pub(crate) receiver: Arc<dyn crate::Receiver>,
    pub(crate) runtime: Handle,
    pub(crate) invitations: Mutex<Book>,
    pub(crate) strangers: Arc<Strangers>,
    sessions: Mutex<Sessions>,
    refused: Mutex<VecDeque<String>>,
}

#[derive(Default)]
struct Sessions {
    by_peer: HashMap<HostId, Arc<Shared>>,
    is_stopped: bool,
}

impl Context {
    pub(crate) fn new(
        settings: Settings,
        tls: Tls,
        peers: Arc<dyn Peers>,
        receiver: Arc<dyn crate::Receiver>,
        runtime: Handle,
    ) -> Arc<Self> {
        Arc::new(Self {
            settings,
            tls,
            peers,
            receiver,
            runtime,
            invitations: Mutex::default(),
            strangers: Arc::default(),
            sessions: Mutex::default(),
            refused: Mutex::default(),
        })
    }

    pub(crate) fn id(&self) -> HostId {
        self.settings.identity.id()
    }

    /// Returns the session with a peer, which begins at the first call. An endpoint that has been
    /// stopped returns closed sessions.
    pub(crate) fn session(self: &Arc<Self>, peer: HostId) -> Session {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        if sessions.is_stopped {
            let shared = Shared::new(self, peer);
            shared.close("the endpoint has been stopped");
            return Session { shared };
        }
        let shared = sessions.by_peer.entry(peer).or_insert_with(|| Shared::new(self, peer));
        Session { shared: Arc::clone(shared) }
    }

    pub(crate) fn existing_session(&self, peer: HostId) -> Option<Session> {
        let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.by_peer.get(&peer).map(|shared| Session { shared: Arc::clone(shared) })
    }

    /// Removes a session from the list: the next call begins another.
    pub(crate) fn take_session(&self, peer: HostId) -> Option<Arc<Shared>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).by_peer.remove(&peer)
    }

    pub(crate) fn take_all_sessions(&self) -> Vec<Arc<Shared>> {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.is_stopped = true;
        sessions.by_peer.drain().map(|(_, session)| session).collect()
    }

    pub(crate) fn fresh_incarnation(&self) -> Incarnation {
        Incarnation(random_number())
    }

    pub(crate) fn note_refusal(&self, text: String) {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        if refused.len() == REFUSED_MAX {
            refused.pop_front();
        }
        refused.push_back(text);
    }

    pub(crate) fn refused(&self) -> Vec<String> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

pub(crate) fn random<const COUNT: usize>() -> [u8; COUNT] {
    let mut bytes = [0; COUNT];
    let filled = SystemRandom::new().fill(&mut bytes);
    // `getrandom` fails only where the system has no such call. No key could have been made there either.
    assert!(filled.is_ok(), "the system gives no random numbers");
    bytes
}

pub(crate) fn random_number() -> u64 {
    u64::from_le_bytes(random())
}
