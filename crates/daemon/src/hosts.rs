//! Other hosts: this host's identity, the paired hosts, and the endpoint that connects them.
//!
//! ```text
//!   data_dir/identity/    key, certificate, name: made once by `sterna host init`
//!   data_dir/hosts.json   the paired hosts, and their addresses
//!   data_dir/hosts-history.json   the changes of that list
//!   [hosts] listen, links in the configuration
//! ```
//!
//! The endpoint runs once there is an identity. A problem with it affects nothing else, and `sterna host show` displays it. The
//! caller provides the receiver of all messages.

mod history;
mod known;
#[cfg(test)]
mod tests;
mod view;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use migration::journal::Unlisted;
use transport::{
    Endpoint, GarbledToken, HandshakeError, Identity, IdentityError, JoinError, LINKS_MAX, Link, Peer,
    Receiver, Session, Settings, Token,
};

pub(crate) use self::history::{hosts_since, listed};
use self::known::Known;
pub(crate) use self::known::{Acquaintance, Trust, id as id_text};
use crate::audit::Audit;
use crate::config::{Config, HostsConfig};
use crate::files::listing::ListingError;

const IDENTITY_FOLDER: &str = "identity";
/// The longest lifetime of a host invitation: long enough to reach an administrator, short enough to be forgotten safely.
pub(crate) const LIFETIME_S_MAX: u64 = 7 * 24 * 60 * 60;

/// The other hosts, and this host's identity.
pub(crate) struct Hosts {
    identity_folder: PathBuf,
    config: HostsConfig,
    receiver: Arc<dyn Receiver>,
    /// `Err` holds why the list could not be loaded.
    known: Result<Arc<Known>, String>,
    state: Mutex<EndpointState>,
}

enum EndpointState {
    NoIdentity,
    Running(Arc<Endpoint>, Identity),
    /// The identity exists but cannot be used.
    Failed {
        identity: Option<Identity>,
        problem: String,
    },
    Stopped,
}

/// Why an operation on other hosts failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HostsError {
    #[error("this host has no identity yet: sterna host init")]
    NoIdentity,
    /// The identity exists but cannot be used.
    #[error("this host cannot reach others: {0}")]
    Unusable(String),
    #[error("there is no host \"{0}\"; see: sterna host list")]
    NotFound(String),
    /// The lifetime of a host invitation is out of its range.
    #[error("an invitation is good for between 1 and {LIFETIME_S_MAX} seconds, not for {0}")]
    Lifetime(u64),
    #[error(
        "this host does not listen for others: set hosts.listen in the configuration, for example listen = [\"0.0.0.0:7423\"], \
         and hosts.links if others reach it at other addresses; then restart the daemon"
    )]
    NotListening,
    /// It is no address of a host.
    #[error("\"{0}\" is no HOST:PORT, such as 10.0.0.2:7423, rack3-b:7423 or [fd00::2]:7423")]
    Address(String),
    #[error("a host has at most {LINKS_MAX} addresses")]
    Addresses,
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Known(#[from] ListingError),
    #[error(transparent)]
    Token(#[from] GarbledToken),
    #[error(transparent)]
    Join(JoinError),
}

/// Returns the links with these addresses, as an administrator has given them.
fn links(addresses: &[String]) -> Result<Vec<Link>, HostsError> {
    if addresses.len() > LINKS_MAX {
        return Err(HostsError::Addresses);
    }
    let link = |address: &String| Link::parse(address).ok_or_else(|| HostsError::Address(address.clone()));
    addresses.iter().map(link).collect()
}

impl Hosts {
    /// Starts the endpoint, if there is an identity; `receiver` gets the messages of other hosts.
    pub(crate) fn start(config: &Config, audit: Audit, receiver: Arc<dyn Receiver>) -> Arc<Self> {
        let known = Known::open(&config.data_dir).map(|known| Arc::new(known.audited(audit)));
        let hosts = Self {
            identity_folder: config.data_dir.join(IDENTITY_FOLDER),
            config: config.hosts.clone(),
            receiver,
            known: known.map_err(|error| crate::error::with_causes(&error)),
            state: Mutex::new(EndpointState::NoIdentity),
        };
        match Identity::load(&hosts.identity_folder) {
            Ok(identity) => hosts.run(identity),
            Err(error) if error.is_missing() && !hosts.identity_folder.exists() => {}
            Err(error) => hosts.fail(None, &error),
        }
        Arc::new(hosts)
    }

    /// Creates this host's identity, and begins to listen for other hosts. May block.
    pub(crate) fn create_identity(&self, name: &str) -> Result<(), HostsError> {
        if let Err(problem) = &self.known {
            return Err(HostsError::Unusable(problem.clone()));
        }
        let identity = Identity::create(&self.identity_folder, name)?;
        tracing::info!(%name, id = %identity.id(), "this host has an identity");
        self.run(identity);
        Ok(())
    }

    /// Makes a host invitation; the host that redeems it gets this trust.
    pub(crate) fn invite(&self, lifetime_s: u64, trust: Trust) -> Result<Token, HostsError> {
        if !(1..=LIFETIME_S_MAX).contains(&lifetime_s) {
            return Err(HostsError::Lifetime(lifetime_s));
        }
        let known = self.known()?;
        let token = self.endpoint()?.invite(Duration::from_secs(lifetime_s)).map_err(HostsError::join)?;
        // No host has it yet.
        known.agree(token.invitation(), trust);
        Ok(token)
    }

    /// Redeems another host's invitation, and trusts that host; `None` keeps the former trust. Waits for the other host.
    pub(crate) fn join(
        &self,
        token: &str,
        address: Option<String>,
        trust: Option<Trust>,
    ) -> Result<Acquaintance, HostsError> {
        let token: Token = token.parse()?;
        let token = address.into_iter().fold(token, Token::at);
        let known = self.known()?;
        // Stopping the endpoint ends the wait.
        let joining = self.endpoint()?.joining(token);
        let joined = known.add(&joining.wait().map_err(HostsError::join)?, trust)?;
        tracing::info!(host = %joined.peer.name, id = %joined.peer.id, "paired with a host");
        drop(self.endpoint()?.session(&joined.peer));
        Ok(joined)
    }

    /// Changes what another host is trusted with, and where it is reached, where that is given. It is dialled at new addresses at
    /// once. May block.
    pub(crate) fn set(
        &self,
        name: &str,
        trust: Option<Trust>,
        addresses: Option<Vec<String>>,
    ) -> Result<Acquaintance, HostsError> {
        let links = addresses.map(|addresses| links(&addresses)).transpose()?;
        let changed = self.known()?.set(name, trust, links)?;
        let changed = changed.ok_or_else(|| HostsError::NotFound(name.to_owned()))?;
        let addresses =
            changed.peer.links.iter().map(|link| link.address.as_str()).collect::<Vec<_>>().join(" ");
        tracing::info!(host = %name, machines = changed.trust.machines, %addresses, "what is known of a host has changed");
        if let Ok(endpoint) = self.endpoint() {
            drop(endpoint.session(&changed.peer));
        }
        Ok(changed)
    }

    pub(crate) fn may_bring_vms(&self, host: migration::HostId) -> bool {
        let trust = self.known().map(|known| known.trust(transport::HostId(host.0)));
        self.config.machines && trust.is_ok_and(|trust| trust.machines)
    }

    /// Returns whether what a host has described may not become VMs here. A host that was removed had its permission when it did.
    pub(crate) fn refuses_vms_of(&self, host: migration::HostId) -> bool {
        !self.config.machines || self.is_paired(host) && !self.may_bring_vms(host)
    }

    /// Forgets another host and closes the session with it. May block.
    pub(crate) fn remove(&self, name: &str) -> Result<Peer, HostsError> {
        let known = self.known()?;
        let missing = || HostsError::NotFound(name.to_owned());
        let id = known.get(name).ok_or_else(missing)?.id;
        // N.B. Invitations end first, so that the removed host cannot return by one that it has redeemed.
        let endpoint = self.endpoint().ok();
        if let Some(endpoint) = &endpoint {
            endpoint.end_invitations_of(id);
        }
        let removed = known.remove(name)?.ok_or_else(missing)?;
        if let Some(endpoint) = endpoint {
            endpoint.close(removed.id);
        }
        tracing::info!(host = %removed.name, id = %removed.id, "a host was removed");
        Ok(removed)
    }

    /// Returns the host with this name; `None`: there is none, or the list cannot be read.
    pub(crate) fn find(&self, name: &str) -> Option<Peer> {
        self.known().ok()?.get(name)
    }

    /// Returns all other hosts, or why the list cannot be read.
    pub(crate) fn paired(&self) -> Result<BTreeSet<migration::HostId>, Unlisted> {
        let known = self.known().map_err(|_| Unlisted::Unreadable)?.list();
        Ok(known.into_iter().map(|peer| migration::HostId(peer.id.0)).collect())
    }

    pub(crate) fn is_paired(&self, host: migration::HostId) -> bool {
        self.paired().is_ok_and(|paired| paired.contains(&host))
    }

    pub(crate) fn session(&self, peer: &Peer) -> Result<Session, HostsError> {
        Ok(self.endpoint()?.session(peer))
    }

    pub(crate) fn session_with(&self, host: migration::HostId) -> Result<Session, HostsError> {
        let id = transport::HostId(host.0);
        let peer = self.known()?.list().into_iter().find(|peer| peer.id == id);
        self.session(&peer.ok_or_else(|| HostsError::NotFound(id.short()))?)
    }

    /// Returns why another host is not connected; `None`: it is.
    pub(crate) fn silence_of(&self, host: migration::HostId) -> Option<String> {
        let status = match self.session_with(host) {
            Ok(session) => session.status(),
            Err(error) => return Some(error.to_string()),
        };
        let seconds = status.since.as_secs();
        (!status.is_connected)
            .then(|| format!("the host that has it, which has been disconnected for {seconds} s"))
    }

    /// Returns this host's identity; `None`: it has none.
    pub(crate) fn own(&self) -> Option<migration::HostId> {
        match &*self.lock() {
            EndpointState::Running(_, identity) => Some(migration::HostId(identity.id().0)),
            _ => None,
        }
    }

    pub(crate) fn is_own_name(&self, name: &str) -> bool {
        matches!(&*self.lock(), EndpointState::Running(_, identity) if identity.name() == name)
    }

    /// Returns the names of all other hosts, for messages.
    pub(crate) fn names(&self) -> String {
        let peers = self.known().map(|known| known.list()).unwrap_or_default();
        let names: Vec<String> = peers.into_iter().map(|peer| peer.name).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    }

    pub(crate) fn name_of(&self, host: migration::HostId) -> String {
        let id = transport::HostId(host.0);
        let peers = self.known().map(|known| known.list()).unwrap_or_default();
        peers.into_iter().find(|peer| peer.id == id).map_or_else(|| id.short(), |peer| peer.name)
    }

    /// Ends all sessions. May block for a second or two.
    pub(crate) fn stop(&self) {
        let before = std::mem::replace(&mut *self.lock(), EndpointState::Stopped);
        if let EndpointState::Running(endpoint, _) = before {
            endpoint.stop();
        }
    }

    fn run(&self, identity: Identity) {
        let known = match &self.known {
            Ok(known) => Arc::clone(known),
            Err(problem) => {
                let problem = problem.clone();
                *self.lock() = EndpointState::Failed { identity: Some(identity), problem };
                return;
            }
        };
        known.is_called(identity.name());
        let mut settings = Settings::new(identity.clone());
        settings.listen = self.config.listen.clone();
        settings.links = self.config.links.clone();
        let peers = known.list();
        match Endpoint::start(settings, known, Arc::clone(&self.receiver)) {
            Ok(endpoint) => {
                // Connects before connections are needed, so that `host list` shows whether it is possible.
                peers.iter().for_each(|peer| drop(endpoint.session(peer)));
                *self.lock() = EndpointState::Running(Arc::new(endpoint), identity);
            }
            Err(error) => self.fail(Some(identity), &error),
        }
    }

    fn fail(&self, identity: Option<Identity>, error: &dyn std::error::Error) {
        let problem = crate::error::with_causes(error);
        tracing::warn!(%problem, "other hosts cannot be reached");
        *self.lock() = EndpointState::Failed { identity, problem };
    }

    fn known(&self) -> Result<&Arc<Known>, HostsError> {
        self.known.as_ref().map_err(|problem| HostsError::Unusable(problem.clone()))
    }

    /// Returns the endpoint, for use without the lock: it may wait for its receiver, which asks for this host's identity.
    fn endpoint(&self) -> Result<Arc<Endpoint>, HostsError> {
        match &*self.lock() {
            EndpointState::Running(endpoint, _) => Ok(Arc::clone(endpoint)),
            EndpointState::NoIdentity => Err(HostsError::NoIdentity),
            EndpointState::Failed { problem, .. } => Err(HostsError::Unusable(problem.clone())),
            EndpointState::Stopped => Err(HostsError::Unusable("the daemon is shutting down".to_owned())),
        }
    }

    fn lock(&self) -> MutexGuard<'_, EndpointState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostsError {
    fn join(error: JoinError) -> Self {
        match error {
            JoinError::NotListening => Self::NotListening,
            error => Self::Join(error),
        }
    }

    pub(crate) fn code(&self) -> api::ErrorCode {
        use api::ErrorCode;
        match self {
            Self::NoIdentity | Self::Unusable(_) | Self::NotListening => ErrorCode::NoIdentity,
            Self::NotFound(_) => ErrorCode::HostNotFound,
            Self::Lifetime(_)
            | Self::Address(_)
            | Self::Addresses
            | Self::Identity(IdentityError::Name { .. }) => ErrorCode::InvalidRequest,
            Self::Identity(IdentityError::Exists { .. }) => ErrorCode::IdentityExists,
            Self::Identity(_) | Self::Known(_) => ErrorCode::StorageFailed,
            Self::Token(_) => ErrorCode::InvitationRefused,
            Self::Join(JoinError::Handshake { reason, .. }) => match **reason {
                HandshakeError::Refused { .. } => ErrorCode::InvitationRefused,
                _ => ErrorCode::HostUnreachable,
            },
            Self::Join(JoinError::Stopped) => ErrorCode::ShuttingDown,
            Self::Join(_) => ErrorCode::InvitationRefused,
        }
    }
}
