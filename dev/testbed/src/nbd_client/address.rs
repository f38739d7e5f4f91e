//! The address of an export: the `nbd+unix` URI that the daemon prints.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nbd_protocol::{NbdUri, Security, Server, UriError};

use super::ClientError;

/// An export on a unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    socket: PathBuf,
    export: String,
}

impl Address {
    /// Returns the address of `export` at `socket`.
    pub fn new(socket: impl Into<PathBuf>, export: impl Into<String>) -> Self {
        Self { socket: socket.into(), export: export.into() }
    }

    /// Returns the path of the server's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the name of the export.
    pub fn export(&self) -> &str {
        &self.export
    }
}

impl FromStr for Address {
    type Err = ClientError;

    /// Parses `nbd+unix:///EXPORT?socket=PATH`, the only form that this client supports.
    fn from_str(text: &str) -> Result<Self, ClientError> {
        let fail = |reason| ClientError::Address { address: text.to_owned(), reason };
        let uri: NbdUri = text.parse().map_err(|error: UriError| fail(error.reason))?;
        match (uri.server, uri.security) {
            (Server::Unix(socket), Security::Plain) => Ok(Self { socket, export: uri.export }),
            (Server::Tcp { .. }, _) => Err(fail("it is not on a unix socket")),
            (_, Security::Tls) => Err(fail("this client knows no TLS")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        NbdUri::unix(&self.socket, &self.export).fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_printing_and_parsing() {
        let address = Address::new("/run/a folder/100%.sock", "disk é&?");
        assert_eq!(address.to_string().parse::<Address>().unwrap(), address);
    }

    #[test]
    fn the_address_of_the_documentation_is_understood() {
        let address: Address = "nbd+unix:///disk0?socket=/run/sterna/nbd.sock".parse().unwrap();
        assert_eq!(address, Address::new("/run/sterna/nbd.sock", "disk0"));
    }

    #[test]
    fn addresses_that_name_no_socket_are_refused() {
        for text in
            ["nbd://host/disk", "nbds+unix:///disk?socket=/s", "nbd+unix:///disk", "nbd+unix:///%f?socket=/s"]
        {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
