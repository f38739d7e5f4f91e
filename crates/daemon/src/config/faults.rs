//! Collects all faults of a configuration, rather than the first one.
//! Each part is checked to a `Result`; [`both()`] and [`all()`] combine these without losing a fault.

use super::ConfigError;

/// The faults of a configuration, at least one.
#[derive(Debug)]
pub struct Faults {
    first: Box<ConfigError>,
    more: Vec<ConfigError>,
}

impl Faults {
    /// Returns the first of the faults.
    pub fn into_first(self) -> ConfigError {
        *self.first
    }

    /// Returns all faults in order.
    pub fn iter(&self) -> impl Iterator<Item = &ConfigError> {
        std::iter::once(&*self.first).chain(&self.more)
    }

    fn and(mut self, other: Self) -> Self {
        self.more.push(*other.first);
        self.more.extend(other.more);
        self
    }
}

impl From<ConfigError> for Faults {
    fn from(first: ConfigError) -> Self {
        Self { first: Box::new(first), more: Vec::new() }
    }
}

/// Combines two parts, or all their faults.
pub(super) fn both<A, B>(
    one: Result<A, impl Into<Faults>>,
    other: Result<B, impl Into<Faults>>,
) -> Result<(A, B), Faults> {
    match (one.map_err(Into::into), other.map_err(Into::into)) {
        (Ok(one), Ok(other)) => Ok((one, other)),
        (Err(one), Err(other)) => Err(one.and(other)),
        (Err(faults), Ok(_)) | (Ok(_), Err(faults)) => Err(faults),
    }
}

/// Combines any number of parts, or all their faults.
pub(super) fn all<T>(
    parts: impl IntoIterator<Item = Result<T, impl Into<Faults>>>,
) -> Result<Vec<T>, Faults> {
    let mut found = Ok(Vec::new());
    for part in parts {
        found = both(found, part).map(|(mut found, part)| {
            found.push(part);
            found
        });
    }
    found
}
