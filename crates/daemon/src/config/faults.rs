//! All that is wrong with a configuration, rather than the first of it.
//!
//! Parts are checked one by one, each to a `Result`; [`both()`] and [`all()`] put them together, and lose no fault.

use super::ConfigError;

/// What is wrong with a configuration: one fault at least.
#[derive(Debug)]
pub struct Faults {
    first: Box<ConfigError>,
    more: Vec<ConfigError>,
}

impl Faults {
    /// The first of them.
    pub fn into_first(self) -> ConfigError {
        *self.first
    }

    /// All of them.
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

/// Two parts, or all that is wrong with either.
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

/// Any number of parts, or all that is wrong with any.
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
