//! The address of a daemon, as users write it.

use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Longest path of a unix socket in bytes: `sun_path` has 108, one is for the terminating zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Address of a daemon's API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A unix socket, written `unix:PATH`.
    Unix(PathBuf),
}

/// Why a text is not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The kind of address is missing or unknown.
    #[error(
        "\"{text}\" is no address of a daemon: write unix:PATH, for example unix:/run/sterna/sterna.sock"
    )]
    Kind {
        /// The text that was given.
        text: String,
    },
    /// The path of the socket is empty.
    #[error("the path of the socket is missing: write unix:PATH")]
    Empty,
    /// The path is longer than the system allows for a socket.
    #[error(
        "the socket path {path} has {length} bytes, the system allows {SOCKET_PATH_BYTES_MAX}: choose a shorter one"
    )]
    TooLong {
        /// The path that was given.
        path: String,
        /// Its length in bytes.
        length: usize,
    },
}

impl Address {
    /// Returns the address of a unix socket.
    ///
    /// # Errors
    /// [`AddressError::Empty`], [`AddressError::TooLong`].
    pub fn unix(path: impl Into<PathBuf>) -> Result<Self, AddressError> {
        let path = path.into();
        match path.as_os_str().len() {
            0 => Err(AddressError::Empty),
            length if length > SOCKET_PATH_BYTES_MAX => {
                Err(AddressError::TooLong { path: path.display().to_string(), length })
            }
            _ => Ok(Self::Unix(path)),
        }
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        let Self::Unix(path) = self;
        path
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        match text.strip_prefix("unix:") {
            // URIs are written `unix:///path`.
            Some(path) => Self::unix(path.strip_prefix("//").unwrap_or(path)),
            None => Err(AddressError::Kind { text: text.to_owned() }),
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "unix:{}", self.path().display())
    }
}

#[cfg(test)]
mod tests {
    use super::{Address, AddressError};

    #[test]
    fn address_is_read_as_it_is_written() {
        for text in ["unix:/run/sterna/sterna.sock", "unix:relative.sock"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("unix:///run/a".parse::<Address>().unwrap().to_string(), "unix:/run/a");
    }

    #[test]
    fn address_without_kind_or_path_and_overlong_path_are_refused() {
        assert!(matches!("/run/a".parse::<Address>(), Err(AddressError::Kind { .. })));
        assert!(matches!("tcp:1.2.3.4:5".parse::<Address>(), Err(AddressError::Kind { .. })));
        assert_eq!("unix:".parse::<Address>(), Err(AddressError::Empty));
        let long = format!("unix:/{}", "x".repeat(107));
        assert!(matches!(long.parse::<Address>(), Err(AddressError::TooLong { length: 108, .. })));
        assert!(format!("unix:/{}", "x".repeat(106)).parse::<Address>().is_ok());
    }
}
