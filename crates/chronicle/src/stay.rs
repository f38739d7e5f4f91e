//! The identity of a volume's residency at a host.
//!
//! ```text
//!   made, or arrived ──── stay: epochs, marks, known copies, how its image looks ────► left, or removed
//!                           └ all of it bears the stay's identity, in name and content
//! ```
//! A volume that returns begins a new residency, which inherits nothing from the previous one: writes made on other
//! hosts meanwhile are not known here.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Identifies one residency of a volume at one host. No two residencies of a volume at a host share an identity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum StayId {
    /// The volume was created at this host. This happens once, because its identity is drawn then.
    #[default]
    Made,
    /// The volume arrived by the migration of this number. The host never reuses a number.
    Arrived(u64),
}

impl fmt::Display for StayId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Made => formatter.write_str("made"),
            Self::Arrived(migration) => write!(formatter, "m{migration}"),
        }
    }
}

/// A text that is not the name of a residency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("read the name of a stay")]
pub struct NoStay;

impl FromStr for StayId {
    type Err = NoStay;

    fn from_str(text: &str) -> Result<Self, NoStay> {
        if text == "made" {
            return Ok(Self::Made);
        }
        let number = text.strip_prefix('m').and_then(|number| number.parse().ok()).ok_or(NoStay)?;
        // "m07" would be a second name of one residency.
        Some(Self::Arrived(number)).filter(|stay| stay.to_string() == text).ok_or(NoStay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stay_has_one_name() {
        for stay in [StayId::Made, StayId::Arrived(0), StayId::Arrived(u64::MAX)] {
            assert_eq!(stay.to_string().parse(), Ok(stay));
        }
        for text in ["", "m", "m07", "m+7", "7", "made ", "m-1", "M7"] {
            assert_eq!(text.parse::<StayId>(), Err(NoStay), "{text}");
        }
    }
}
