//! Who may use the API over TLS: keys, each with a role.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The rights of a user of the API over TLS. Each role includes the roles before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// See everything except tickets and definitions of VMs, and run preflight checks; change nothing.
    Read,
    /// Operations that lose nothing: migrate, pause, cancel, start and stop VMs.
    Operate,
    /// Every operation of the API.
    Admin,
}

/// A key that may use the API over TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Grant {
    /// Name of the user, as in the audit log.
    pub name: String,
    /// Rights of the user.
    pub role: Role,
    /// Digest of the public key, 64 hexadecimal digits; `None` until the access token is redeemed.
    #[serde(default)]
    pub key: Option<String>,
    /// End of the access token's life, in milliseconds since 1970; `None`: it was redeemed, or there is none.
    #[serde(default)]
    pub invited_until_unix_ms: Option<u64>,
    /// When it was granted, in milliseconds since 1970.
    pub granted_unix_ms: u64,
}

/// Who may use the API over TLS, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Access {
    /// Where the daemon listens, by its configuration; `None`: nowhere.
    #[serde(default)]
    pub listen: Option<String>,
    /// Digest of the daemon's public key, 64 hexadecimal digits, by which clients know it. `None`: it does not listen.
    #[serde(default)]
    pub key: Option<String>,
    /// Why no client can connect; `None` if clients can.
    #[serde(default)]
    pub problem: Option<String>,
    /// The keys that may use the API, by name.
    pub grants: Vec<Grant>,
}

/// Grants a user access to the API over TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewGrant {
    /// Name of the user: letters, digits, '.', '-' and '_'.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// Rights of the user.
    pub role: Role,
    /// Digest of the user's public key, 64 hexadecimal digits; `None`: the answer has an access token, which registers the key.
    #[serde(default)]
    #[schema(pattern = "^[0-9a-fA-F]{64}$")]
    pub key: Option<String>,
    /// Life of the access token, in seconds.
    #[serde(default = "an_hour")]
    #[schema(minimum = 1, maximum = 604800)]
    pub lifetime_s: u64,
}

/// A new grant, with its access token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewlyGranted {
    /// The grant that was made.
    pub grant: Grant,
    /// The access token for the user; `None`: the key is known. **It holds a secret.**
    #[serde(default)]
    pub token: Option<String>,
    /// Where the daemon listens, by its configuration.
    #[serde(default)]
    pub listen: Option<String>,
}

/// Changes the role of a user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetGrant {
    /// The new role of the user.
    pub role: Role,
}

/// Redeems an access token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RedeemGrant {
    /// Digest of the client's own public key, 64 hexadecimal digits, which has the role from now on.
    #[schema(pattern = "^[0-9a-fA-F]{64}$")]
    pub key: String,
}

fn an_hour() -> u64 {
    60 * 60
}

impl Role {
    /// Every role, the lowest first.
    pub const ALL: [Self; 3] = [Self::Read, Self::Operate, Self::Admin];

    /// Returns the role's word in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Admin => "admin",
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The error for a text that is not a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the roles are read, operate and admin")]
pub struct RoleError;

impl FromStr for Role {
    type Err = RoleError;

    fn from_str(text: &str) -> Result<Self, RoleError> {
        Self::ALL.into_iter().find(|role| role.name() == text).ok_or(RoleError)
    }
}

#[cfg(test)]
mod tests {
    use super::Role;

    #[test]
    fn a_role_is_read_as_it_is_written_and_each_may_more_than_the_one_before() {
        for role in Role::ALL {
            assert_eq!(role.to_string().parse(), Ok(role));
            assert_eq!(serde_json::to_value(role).unwrap(), role.name());
        }
        assert!(Role::ALL.is_sorted() && "root".parse::<Role>().is_err());
    }
}
