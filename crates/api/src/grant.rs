//! Who may use the API over TLS: keys, each with a role.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What somebody may do who uses the API over TLS. Each role may do what those before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// See everything but tickets and definitions of VMs, and look ahead; change nothing.
    Read,
    /// Day-to-day operations that lose nothing: migrate, pause, cancel, start and stop VMs.
    Operate,
    /// Everything.
    Admin,
}

/// A key that may use the API over TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Grant {
    /// Whose key it is, as the audit log names him.
    pub name: String,
    /// What he may do.
    pub role: Role,
    /// Digest of the public key, 64 hexadecimal digits; `None` until the invitation is redeemed.
    #[serde(default)]
    pub key: Option<String>,
    /// Until when the invitation can be redeemed, in milliseconds since 1970; `None`: it was, or there is none.
    #[serde(default)]
    pub invited_until_unix_ms: Option<u64>,
    /// When it was granted, in milliseconds since 1970.
    pub granted_unix_ms: u64,
}

/// Who may use the API over TLS, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Access {
    /// Where the daemon listens, as the configuration says; `None`: nowhere.
    #[serde(default)]
    pub listen: Option<String>,
    /// Digest of the daemon's public key, 64 hexadecimal digits: what clients know it by. `None`: it does not listen.
    #[serde(default)]
    pub key: Option<String>,
    /// Why nobody is let in; `None` if nothing is wrong.
    #[serde(default)]
    pub problem: Option<String>,
    /// The keys, by name.
    pub grants: Vec<Grant>,
}

/// Lets somebody use the API over TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewGrant {
    /// What he is called: letters, digits, '.', '-' and '_'.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// What he may do.
    pub role: Role,
    /// Digest of his public key, 64 hexadecimal digits; `None`: he is invited, and brings one when he redeems that.
    #[serde(default)]
    #[schema(pattern = "^[0-9a-fA-F]{64}$")]
    pub key: Option<String>,
    /// How long the invitation is good, in seconds.
    #[serde(default = "an_hour")]
    #[schema(minimum = 1, maximum = 604800)]
    pub lifetime_s: u64,
}

/// What was granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewlyGranted {
    /// The grant.
    pub grant: Grant,
    /// What he is to be given; `None`: his key is known. **It holds a secret.**
    #[serde(default)]
    pub token: Option<String>,
    /// Where the daemon listens, as the configuration says.
    #[serde(default)]
    pub listen: Option<String>,
}

/// Changes what somebody may do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetGrant {
    /// What he may do from now on.
    pub role: Role,
}

/// Redeems an invitation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RedeemGrant {
    /// Digest of the public key by which the client is known from now on, 64 hexadecimal digits.
    #[schema(pattern = "^[0-9a-fA-F]{64}$")]
    pub key: String,
}

fn an_hour() -> u64 {
    60 * 60
}

impl Role {
    /// All of them, the least first.
    pub const ALL: [Self; 3] = [Self::Read, Self::Operate, Self::Admin];

    /// The word for it.
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

/// Says that a text is no role.
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
