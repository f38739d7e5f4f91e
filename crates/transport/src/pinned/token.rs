//! An access token, as a line of text: the daemon's key, and a secret with which a client of the API registers its own key.

use std::fmt;
use std::str::FromStr;

use crate::host_id::HostId;
use crate::identity::{Identity, IdentityError};

/// Prefix of every token: its kind and the version of its content.
const PREFIX: &str = "sterna-access-1-";
/// Bytes of a token: the daemon's key, the secret, and a checksum of both.
const BYTES: usize = 32 + 32 + 4;
/// Name in the certificate that goes with the secret.
const NAME: &str = "invitation";

/// A token with which a client registers its key for a daemon's API. It can be redeemed once.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessToken {
    /// The daemon's key: no other server gets the secret.
    pub server: HostId,
    /// The secret from which the client's temporary key is derived.
    pub secret: [u8; 32],
}

impl AccessToken {
    /// Makes a new token of the daemon that has this key.
    #[must_use]
    pub fn new(server: HostId) -> Option<Self> {
        let mut secret = [0; 32];
        ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut secret).ok()?;
        Some(Self { server, secret })
    }

    /// Derives the identity of the client until it has registered its own key.
    ///
    /// # Errors
    /// The key cannot be made.
    pub fn identity(&self) -> Result<Identity, IdentityError> {
        Identity::of_secret(NAME, &self.secret)
    }
}

/// The token as people copy it. **N.B.** It holds the secret.
impl fmt::Display for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let content = [self.server.0, self.secret].concat();
        let sum = crc32c::crc32c(&content).to_le_bytes();
        f.write_str(PREFIX)?;
        content.iter().chain(&sum).try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AccessToken(of {:?})", self.server)
    }
}

impl FromStr for AccessToken {
    type Err = GarbledAccessToken;

    fn from_str(text: &str) -> Result<Self, GarbledAccessToken> {
        let digits = text.trim().strip_prefix(PREFIX).ok_or(GarbledAccessToken::NoToken)?.as_bytes();
        if digits.len() != 2 * BYTES {
            return Err(GarbledAccessToken::Damaged);
        }
        let value = |digit: u8| char::from(digit).to_digit(16).ok_or(GarbledAccessToken::Damaged);
        let mut bytes = [0; BYTES];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = (value(pair[0])? * 16 + value(pair[1])?) as u8;
        }
        let (mut server, mut secret) = ([0; 32], [0; 32]);
        server.copy_from_slice(&bytes[..32]);
        secret.copy_from_slice(&bytes[32..64]);
        if crc32c::crc32c(&bytes[..64]).to_le_bytes() != bytes[64..] {
            return Err(GarbledAccessToken::Damaged);
        }
        Ok(Self { server: HostId(server), secret })
    }
}

/// The error for a text which is not a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GarbledAccessToken {
    /// The text lacks the prefix of a token.
    #[error("this is no access token: copy the whole line that begins with {PREFIX}")]
    NoToken,
    /// The text after the prefix is damaged.
    #[error("the access token is damaged: copy the whole line again")]
    Damaged,
}

#[cfg(test)]
mod tests {
    use super::{AccessToken, GarbledAccessToken};
    use crate::host_id::HostId;

    #[test]
    fn a_token_survives_being_copied_and_a_damaged_one_is_noticed() {
        let token = AccessToken { server: HostId([7; 32]), secret: [2; 32] };
        let text = token.to_string();
        assert_eq!(format!(" {text}\n").parse(), Ok(token.clone()));
        assert!(!format!("{token:?}").contains("0202"));
        for damaged in [
            &text[..text.len() - 2],
            &format!("{text}00"),
            &text.replacen("07", "08", 1),
            &text.replace('7', "é"),
        ] {
            assert_eq!(damaged.parse::<AccessToken>(), Err(GarbledAccessToken::Damaged), "{damaged}");
        }
        for other in ["", "sterna-invitation-1-00", "sterna-access-2-00"] {
            assert_eq!(other.parse::<AccessToken>(), Err(GarbledAccessToken::NoToken), "{other}");
        }
        assert_ne!(AccessToken::new(HostId([7; 32])), AccessToken::new(HostId([7; 32])));
    }
}
