//! Versions of QEMU.

use std::fmt;

use serde_json::Value;

/// A version of QEMU. Versions are ordered by release.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The first number of the version.
    pub major: u64,
    /// The second number of the version.
    pub minor: u64,
    /// The third number of the version.
    pub micro: u64,
    /// The distribution's name of its package; may be empty.
    pub package: String,
}

impl Version {
    /// Reads `{"qemu": {"major": …, "minor": …, "micro": …}, "package": …}`.
    pub(super) fn read(value: &Value) -> Option<Self> {
        let number = |name| value["qemu"][name].as_u64();
        Some(Self {
            major: number("major")?,
            minor: number("minor")?,
            micro: number("micro")?,
            package: value["package"].as_str().unwrap_or_default().to_owned(),
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn versions_are_read_and_ordered() {
        let version = |major: u64, minor: u64| {
            let numbers = json!({"qemu": {"major": major, "minor": minor, "micro": 1}, "package": "Debian"});
            Version::read(&numbers).unwrap()
        };
        assert!(version(7, 2) < version(10, 0));
        assert_eq!(version(7, 2).to_string(), "7.2.1");
        assert_eq!(Version::read(&json!({"qemu": {"major": -1}})), None);
    }
}
