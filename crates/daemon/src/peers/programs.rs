//! The program versions of other hosts, as they report them when they connect. They are only displayed.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use migration::HostId;
use migration::wire::Message;
use transport::Session;

use super::{Peers, send_opening};

/// The last reported version of each host.
#[derive(Debug, Default)]
pub(super) struct Programs(Mutex<BTreeMap<HostId, String>>);

impl Peers {
    /// Returns the program version of another host; `None`: it has not reported one.
    pub(crate) fn program_of(&self, peer: HostId) -> Option<String> {
        self.programs.of(peer)
    }

    /// Reports this program's version to a connected host.
    pub(super) fn say_program(&self, session: &Session) {
        let session = session.clone();
        // N.B. Sent by a task, because the caller holds the session.
        self.runtime.spawn(async move {
            let version = env!("CARGO_PKG_VERSION").to_owned();
            send_opening(&session, &Message::Program { version });
        });
    }
}

impl Programs {
    /// Records a host's program version, unless it cannot be one.
    pub(super) fn said(&self, peer: HostId, version: String) {
        let is_version = !version.is_empty()
            && version.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-+~_".contains(&byte));
        if is_version {
            self.lock().insert(peer, version);
        }
    }

    /// Forgets a host's version, because another program may run there later.
    pub(super) fn forget(&self, peer: HostId) {
        self.lock().remove(&peer);
    }

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
