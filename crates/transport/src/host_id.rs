//! The identifier of a host: the digest of its public key. It does not depend on where the host is.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes of a shortened identifier: enough to tell the hosts of a fleet apart.
const SHORT_BYTES: usize = 6;

/// Names a host permanently: the SHA-256 of its public key.
///
/// Peers pin it, for it cannot be claimed without the private key. It is written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HostId(pub [u8; 32]);

impl HostId {
    /// Computes the identifier that belongs to a public key (its `SubjectPublicKeyInfo`, in DER).
    #[must_use]
    pub fn of_public_key(public_key: &[u8]) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, public_key);
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest.as_ref());
        Self(bytes)
    }

    /// Shortens the identifier to its first twelve digits, for display. The result must not be compared.
    #[must_use]
    pub fn short(&self) -> String {
        self.0[..SHORT_BYTES].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "HostId({}…)", self.short())
    }
}

impl FromStr for HostId {
    type Err = HostIdError;

    fn from_str(text: &str) -> Result<Self, HostIdError> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(HostIdError);
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let value = |digit: u8| char::from(digit).to_digit(16).ok_or(HostIdError);
            let number = value(pair[0])? * 16 + value(pair[1])?;
            *byte = u8::try_from(number).map_err(|_| HostIdError)?;
        }
        Ok(Self(bytes))
    }
}

/// The error for a text which is not a host's identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a host's identifier is 64 hexadecimal digits")]
pub struct HostIdError;

#[cfg(test)]
mod tests {
    use super::{HostId, HostIdError};

    #[test]
    fn an_identifier_survives_being_written_and_read() {
        let id = HostId::of_public_key(b"a key");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(id.to_string().to_uppercase().parse(), Ok(id));
        assert!(id.to_string().starts_with(&id.short()));
        assert_ne!(id, HostId::of_public_key(b"another key"));
    }

    #[test]
    fn what_is_no_identifier_is_refused() {
        for text in ["", "12", &"g".repeat(64), &"a".repeat(63), &"é".repeat(32)] {
            assert_eq!(text.parse::<HostId>(), Err(HostIdError), "{text}");
        }
    }
}
