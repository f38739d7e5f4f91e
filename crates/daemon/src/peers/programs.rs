//! Which programs run at other hosts, as these say when they connect: for people, and nothing is decided by it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use migration::HostId;
use migration::wire::Message;
use transport::Session;

use super::{Peers, send_opening};

/// The version of the protocol since which hosts say which program they run.
const PROGRAMS_SINCE: u16 = 7;

/// What hosts have said; of each the last.
#[derive(Debug, Default)]
pub(super) struct Programs(Mutex<BTreeMap<HostId, String>>);

impl Peers {
    /// The version of the program that runs at another host, as that says; `None`: it has not said.
    pub(crate) fn program_of(&self, peer: HostId) -> Option<String> {
        self.programs.of(peer)
    }

    /// Tells a host that has connected which program runs here, if it understands that.
    pub(super) fn say_program(&self, session: &Session) {
        if session.version().is_none_or(|version| version < PROGRAMS_SINCE) {
            return;
        }
        let session = session.clone();
        // N.B. not here: whoever calls holds the session.
        self.runtime.spawn(async move {
            let version = env!("CARGO_PKG_VERSION").to_owned();
            send_opening(&session, &Message::Program { version });
        });
    }
}

impl Programs {
    /// A host has said which it runs. What could not be the version of a program is not kept.
    pub(super) fn said(&self, peer: HostId, version: String) {
        let is_version = !version.is_empty()
            && version.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-+~_".contains(&byte));
        if is_version {
            self.lock().insert(peer, version);
        }
    }

    /// Another program may run at the host from now on.
    pub(super) fn forget(&self, peer: HostId) {
        self.lock().remove(&peer);
    }

    /// What the host has said.
    pub(super) fn of(&self, peer: HostId) -> Option<String> {
        self.lock().get(&peer).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<HostId, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_a_version_is_kept_and_not_longer_than_the_program_runs() {
        let (programs, peer) = (Programs::default(), HostId([1; 32]));
        for version in ["", "1\n2", "1 2", "\u{1b}[2J", "ä"] {
            programs.said(peer, version.to_owned());
            assert_eq!(programs.of(peer), None, "{version:?}");
        }
        programs.said(peer, "0.1.0-rc.1+git".to_owned());
        assert_eq!(programs.of(peer).as_deref(), Some("0.1.0-rc.1+git"));
        programs.forget(peer);
        assert_eq!(programs.of(peer), None);
    }
}
