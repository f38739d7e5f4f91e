//! A token: an invitation as a line of text that people can copy.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::InvitationId;
use crate::host_id::HostId;

/// Prefix of every token: its kind and the version of its content.
const PREFIX: &str = "sterna-invitation-1-";

/// Longest token, in characters: room for all the addresses of a host.
const LENGTH_MAX: usize = 16 << 10;

/// An invitation to be paired with a host: the host's identity, its addresses, and a secret. It is redeemed by one host.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    pub(crate) inviter: HostId,
    pub(crate) invitation: [u8; 16],
    pub(crate) secret: [u8; 32],
    pub(crate) expires: SystemTime,
    pub(crate) addresses: Vec<String>,
}

impl Token {
    /// Returns the host that invites.
    #[must_use]
    pub fn inviter(&self) -> HostId {
        self.inviter
    }

    /// Returns the addresses of that host, in the order in which they are tried.
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Returns which invitation of that host it is.
    #[must_use]
    pub fn invitation(&self) -> InvitationId {
        InvitationId(self.invitation)
    }

    /// Returns the time at which it expires.
    #[must_use]
    pub fn expires(&self) -> SystemTime {
        self.expires
    }

    /// Replaces the addresses by one, where the inviter does not know the address under which others reach it.
    #[must_use]
    pub fn at(self, address: impl Into<String>) -> Self {
        Self { addresses: vec![address.into()], ..self }
    }
}

#[derive(Serialize, Deserialize)]
struct Content {
    inviter: HostId,
    invitation: [u8; 16],
    secret: [u8; 32],
    expires_s: u64,
    addresses: Vec<String>,
}

/// The token as people copy it. **N.B.** It holds the secret.
impl fmt::Display for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let expires = self.expires.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let Self { inviter, invitation, secret, addresses, .. } = self.clone();
        let content = Content { inviter, invitation, secret, expires_s: expires.as_secs(), addresses };
        let mut bytes = postcard::to_stdvec(&content).map_err(|_| fmt::Error)?;
        bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
        formatter.write_str(PREFIX)?;
        bytes.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Token(of {:?} at {:?})", self.inviter, self.addresses)
    }
}

impl FromStr for Token {
    type Err = GarbledToken;

    fn from_str(text: &str) -> Result<Self, GarbledToken> {
        let digits = text.trim().strip_prefix(PREFIX).ok_or(GarbledToken::NoToken)?.as_bytes();
        if digits.len() > LENGTH_MAX || !digits.len().is_multiple_of(2) {
            return Err(GarbledToken::Damaged);
        }
        let value = |digit: u8| char::from(digit).to_digit(16).ok_or(GarbledToken::Damaged);
        let mut bytes = Vec::with_capacity(digits.len() / 2);
        for pair in digits.chunks_exact(2) {
            bytes.push((value(pair[0])? * 16 + value(pair[1])?) as u8);
        }
        let (content, sum) = bytes.split_last_chunk::<4>().ok_or(GarbledToken::Damaged)?;
        if crc32c::crc32c(content).to_le_bytes() != *sum {
            return Err(GarbledToken::Damaged);
        }
        let content: Content = postcard::from_bytes(content).map_err(|_| GarbledToken::Damaged)?;
        let Content { inviter, invitation, secret, expires_s, addresses } = content;
        let expires = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(expires_s));
        let expires = expires.ok_or(GarbledToken::Damaged)?;
        Ok(Self { inviter, invitation, secret, expires, addresses })
    }
}

/// The error for a text which is not a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GarbledToken {
    /// The text lacks the prefix of a token.
    #[error("this is no invitation: copy the whole line that begins with {PREFIX}")]
    NoToken,
    /// The text after the prefix is damaged.
    #[error("the invitation is damaged: copy the whole line again")]
    Damaged,
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::{GarbledToken, Token};
    use crate::host_id::HostId;

    fn token() -> Token {
        Token {
            inviter: HostId([7; 32]),
            invitation: [1; 16],
            secret: [2; 32],
            expires: SystemTime::UNIX_EPOCH + Duration::from_secs(2_000_000_000),
            addresses: vec!["10.0.0.1:7423".into(), "[fd00::1]:7423".into()],
        }
    }

    #[test]
    fn a_token_survives_being_copied() {
        let text = token().to_string();
        assert_eq!(text.parse(), Ok(token()));
        assert_eq!(format!(" {text}\n").parse(), Ok(token()));
        assert!(!format!("{:?}", token()).contains("0202"));
    }

    #[test]
    fn a_token_that_was_not_copied_whole_is_refused() {
        let text = token().to_string();
        assert_eq!("nonsense".parse::<Token>(), Err(GarbledToken::NoToken));
        for length in super::PREFIX.len()..text.len() {
            assert_eq!(text[..length].parse::<Token>(), Err(GarbledToken::Damaged), "{length}");
        }
        let wrong = text.replacen("0707", "0708", 1);
        assert_eq!(wrong.parse::<Token>(), Err(GarbledToken::Damaged));
    }
}
