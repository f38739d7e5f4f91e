//! The number of a host.

use std::fmt;

use migration::HostId;

/// A host of a simulation, by its number: A, B, C …
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(u8);

impl Place {
    pub(crate) const A: Self = Self(0);

    pub(crate) fn all(count: usize) -> impl Iterator<Item = Self> + Clone {
        (0..count as u8).map(Self)
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }

    pub(crate) fn host(self) -> HostId {
        HostId([self.0 + 1; 32])
    }

    pub(crate) fn of(host: HostId) -> Self {
        Self(host.0[0].saturating_sub(1))
    }

    pub(crate) fn letter(self) -> char {
        char::from(b'a' + self.0)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.letter().to_ascii_uppercase())
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
