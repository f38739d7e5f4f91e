//! The keys that may use the API over TLS, each with a role. `http/roles.rs` says what a role may do.
//!
//! ```text
//!   grant() ─► invited: the key of a token ── redeem() ─► known: the client's own key ── revoke() ─► gone
//!                 └─ expired: as if it did not exist
//!   data_dir/api/         the daemon's key and certificate: made at the first start with [api_tls]
//!   data_dir/access.json  the grants
//! ```
//! A problem here affects nothing else: no client is admitted then, and `sterna access list` says why.

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use api::Role;
use serde::{Deserialize, Serialize};
use transport::pinned::{Acceptor, AccessToken};
use transport::{HostId, Identity, IdentityError};

use crate::config::Config;
use crate::error::with_causes;
use crate::files::listing::{Listed, Listing, ListingError};
use crate::hosts::LIFETIME_S_MAX;

/// The folder of the daemon's key, in the data folder.
const IDENTITY_FOLDER: &str = "api";
const IDENTITY_NAME: &str = "sterna-api";
/// The largest number of grants: more than one host needs, and few enough to be searched at each connection.
const GRANTS_MAX: usize = 256;

/// The grants for the API over TLS.
pub(crate) struct Grants {
    data_dir: PathBuf,
    /// The address at which the daemon listens, for descriptions.
    listen: Option<String>,
    /// The daemon's identity; `Ok(None)`: it does not listen.
    identity: Result<Option<Identity>, String>,
    /// `Err` holds why the list could not be loaded.
    listing: RwLock<Result<Arc<Listing<Entry>>, String>>,
}

/// An admitted client, by its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) name: String,
    pub(crate) key: HostId,
    pub(crate) standing: Standing,
}

/// What an admitted client may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Redeem its access token.
    Invited,
    Has(Role),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    name: String,
    role: Role,
    /// The client's key, or the key of an access token.
    #[serde(with = "crate::hosts::id_text")]
    key: HostId,
    /// The expiry of the access token; `None`: the key is the client's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    invited_until_unix_ms: Option<u64>,
    granted_unix_ms: u64,
}

/// Why an operation on grants failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrantsError {
    #[error(
        "this daemon does not serve its API over TLS: set api_tls.listen in the configuration, for example listen = \
         \"0.0.0.0:7425\", and restart it, which breaks no connection"
    )]
    NotListening,
    #[error("no user may use the API over TLS: {0}")]
    Unusable(String),
    #[error("no user \"{0}\" may use the API over TLS; see: sterna access list")]
    NotFound(String),
    /// Another grant has the name, or the key.
    #[error(
        "\"{0}\" may use the API over TLS already; change it with sterna access set, or revoke it: sterna access revoke {0}"
    )]
    Exists(String),
    #[error(
        "{GRANTS_MAX} users, the most allowed, may use the API over TLS: sterna access revoke those that are not needed"
    )]
    TooMany,
    #[error(transparent)]
    Name(IdentityError),
    #[error(
        "a key is written as 64 hexadecimal digits, the SHA-256 of the public key; sterna remote key prints it"
    )]
    Key,
    /// The lifetime of an access token is out of its range.
    #[error("an access token lives between 1 and {LIFETIME_S_MAX} seconds, not {0}")]
    Lifetime(u64),
    /// The access token is not valid.
    #[error(
        "the access token was redeemed or revoked, or has expired; ask for a new one: sterna access grant"
    )]
    NotInvited,
    /// The system has no randomness for a secret, or no key can be made of it.
    #[error("cannot make a key for the access token; the daemon's log says more")]
    Secret,
    #[error(transparent)]
    Listing(#[from] ListingError),
}

impl Grants {
    /// Reads the list. Makes the daemon's key if the daemon listens and has none. May block.
    pub(crate) fn begin(config: &Config) -> Arc<Self> {
        let data_dir = config.data_dir.clone();
        let identity = config.api_tls.listen.map(|_| identity(&data_dir)).transpose();
        let listing = Listing::open(&data_dir).map(Arc::new).map_err(|error| with_causes(&error));
        let listen = config.api_tls.listen.map(|address| address.to_string());
        let identity = identity.map_err(|error| with_causes(&error));
        let grants = Self { data_dir, listen, identity, listing: RwLock::new(listing) };
        if let Some(problem) = grants.problem() {
            tracing::error!(%problem, "no user may use the API over TLS");
        }
        Arc::new(grants)
    }

    /// Reads the list again, because the file may have been changed or restored. May block.
    pub(crate) fn reload(&self) {
        match Listing::open(&self.data_dir) {
            Ok(listing) => {
                *self.listing.write().unwrap_or_else(PoisonError::into_inner) = Ok(Arc::new(listing));
            }
            Err(error) => {
                let reason = with_causes(&error);
                tracing::error!(%reason, "cannot reload the list of the API's users; the previous list stays in effect");
            }
        }
    }

    /// Returns an acceptor that admits known keys; `None`: the daemon does not listen, or cannot.
    pub(crate) fn acceptor(self: &Arc<Self>) -> Option<Acceptor> {
        let Ok(Some(identity)) = &self.identity else { return None };
        let grants = Arc::clone(self);
        let acceptor = Acceptor::new(identity, move |key| grants.who(key).is_some());
        acceptor.inspect_err(|error| tracing::error!(%error, "the API is not served over TLS")).ok()
    }

    /// Returns the client with this key, if it is admitted at this moment.
    pub(crate) fn who(&self, key: HostId) -> Option<Granted> {
        let now = crate::journal::now_unix_ms();
        self.listing().ok()?.find(|entry| entry.key == key && entry.is_good(now)).map(Granted::from)
    }

    /// Returns why no client is admitted; `None`: there is no problem.
    pub(crate) fn problem(&self) -> Option<String> {
        self.listen.as_ref()?;
        let of_listing = || self.listing().err().map(|error| error.to_string());
        self.identity.as_ref().err().cloned().or_else(of_listing)
    }

    pub(crate) fn describe(&self) -> Result<api::Access, GrantsError> {
        let key = self.identity.as_ref().ok().and_then(Option::as_ref);
        let problem = self.problem();
        let entries = self.listing().map(|listing| listing.list()).or_else(|error| match problem {
            // The description includes the problem.
            Some(_) => Ok(Vec::new()),
            None => Err(error),
        })?;
        Ok(api::Access {
            listen: self.listen.clone(),
            key: key.map(|identity| identity.id().to_string()),
            problem,
            grants: entries.into_iter().map(api::Grant::from).collect(),
        })
    }

    /// Admits a client by its key or by an access token. May block.
    pub(crate) fn grant(
        &self,
        order: api::NewGrant,
        now_unix_ms: u64,
    ) -> Result<api::NewlyGranted, GrantsError> {
        let Some(identity) =
            self.identity.as_ref().map_err(|reason| GrantsError::Unusable(reason.clone()))?
        else {
            return Err(GrantsError::NotListening);
        };
        transport::check_name(&order.name).map_err(GrantsError::Name)?;
        if !(1..=LIFETIME_S_MAX).contains(&order.lifetime_s) {
            return Err(GrantsError::Lifetime(order.lifetime_s));
        }
        let (key, token) = match order.key {
            Some(key) => (key.parse().map_err(|_| GrantsError::Key)?, None),
            None => {
                let token = AccessToken::new(identity.id()).ok_or(GrantsError::Secret)?;
                (token.identity().map_err(|_| GrantsError::Secret)?.id(), Some(token))
            }
        };
        let entry = Entry {
            name: order.name,
            role: order.role,
            key,
            invited_until_unix_ms: token.is_some().then(|| now_unix_ms + order.lifetime_s * 1000),
            granted_unix_ms: now_unix_ms,
        };
        self.listing()?.change(|entries| {
            // Expired access tokens use neither a place nor a name.
            entries.retain(|_, entry| entry.is_good(now_unix_ms));
            let same = entries.values().find(|other| other.name == entry.name || other.key == entry.key);
            if let Some(same) = same {
                return Err(GrantsError::Exists(same.name.clone()));
            }
            if entries.len() >= GRANTS_MAX {
                return Err(GrantsError::TooMany);
            }
            entries.insert(entry.name.clone(), entry.clone());
            Ok(())
        })??;
        let (listen, token) = (self.listen.clone(), token.map(|token| token.to_string()));
        Ok(api::NewlyGranted { grant: entry.into(), token, listen })
    }

    /// Changes the role of a client, in effect from its next request. May block.
    pub(crate) fn set(&self, name: &str, role: Role) -> Result<api::Grant, GrantsError> {
        let changed = self.listing()?.change(|entries| {
            let entry = entries.get_mut(name)?;
            entry.role = role;
            Some(entry.clone())
        })?;
        changed.map(api::Grant::from).ok_or_else(|| GrantsError::NotFound(name.to_owned()))
    }

    /// Revokes a grant, in effect from the client's next request. May block.
    pub(crate) fn revoke(&self, name: &str) -> Result<api::Grant, GrantsError> {
        let revoked = self.listing()?.remove(name)?;
        revoked.map(api::Grant::from).ok_or_else(|| GrantsError::NotFound(name.to_owned()))
    }

    /// Replaces the key of an access token by the client's own key. May block.
    pub(crate) fn redeem(
        &self,
        invited: HostId,
        key: &str,
        now_unix_ms: u64,
    ) -> Result<api::Grant, GrantsError> {
        let key: HostId = key.parse().map_err(|_| GrantsError::Key)?;
        self.listing()?.change(|entries| {
            if let Some(same) = entries.values().find(|entry| entry.key == key) {
                return Err(GrantsError::Exists(same.name.clone()));
            }
            let is_invited = |entry: &&mut Entry| {
                entry.key == invited && entry.invited_until_unix_ms.is_some() && entry.is_good(now_unix_ms)
            };
            let entry = entries.values_mut().find(is_invited).ok_or(GrantsError::NotInvited)?;
            // N.B. the token is invalid from here on.
            (entry.key, entry.invited_until_unix_ms) = (key, None);
            Ok(entry.clone().into())
        })?
    }

    fn listing(&self) -> Result<Arc<Listing<Entry>>, GrantsError> {
        let listing = self.listing.read().unwrap_or_else(PoisonError::into_inner);
        listing.as_ref().map(Arc::clone).map_err(|problem| GrantsError::Unusable(problem.clone()))
    }
}

impl GrantsError {
    pub(crate) fn code(&self) -> api::ErrorCode {
        use api::ErrorCode;
        match self {
            Self::NotListening | Self::Unusable(_) => ErrorCode::NoIdentity,
            Self::NotFound(_) => ErrorCode::GrantNotFound,
            Self::Exists(_) | Self::TooMany => ErrorCode::GrantExists,
            Self::Name(_) | Self::Key | Self::Lifetime(_) => ErrorCode::InvalidRequest,
            Self::NotInvited => ErrorCode::InvitationRefused,
            Self::Secret => ErrorCode::Internal,
            Self::Listing(_) => ErrorCode::StorageFailed,
        }
    }
}

impl Entry {
    fn is_good(&self, now_unix_ms: u64) -> bool {
        self.invited_until_unix_ms.is_none_or(|until| now_unix_ms < until)
    }
}

impl Listed for Entry {
    const FILE: &'static str = "access.json";
    const VERSION: u32 = 1;
    const KEY: &'static str = "grants";
    const OTHERWISE: &'static str =
        "no list of the API's users: restore it, or remove it and grant access again";

    fn name(&self) -> &str {
        &self.name
    }
}

impl From<Entry> for Granted {
    fn from(Entry { name, role, key, invited_until_unix_ms, .. }: Entry) -> Self {
        let standing = invited_until_unix_ms.map_or(Standing::Has(role), |_| Standing::Invited);
        Self { name, key, standing }
    }
}

impl From<Entry> for api::Grant {
    fn from(Entry { name, role, key, invited_until_unix_ms, granted_unix_ms }: Entry) -> Self {
        let key = invited_until_unix_ms.is_none().then(|| key.to_string());
        Self { name, role, key, invited_until_unix_ms, granted_unix_ms }
    }
}

/// Returns the daemon's identity for clients of its API.
fn identity(data_dir: &std::path::Path) -> Result<Identity, IdentityError> {
    let folder = data_dir.join(IDENTITY_FOLDER);
    match Identity::load(&folder) {
        // N.B. a folder without its key is not replaced, because every client knows the former key.
        Err(error) if error.is_missing() && !folder.exists() => Identity::create(&folder, IDENTITY_NAME),
        loaded => loaded,
    }
}
