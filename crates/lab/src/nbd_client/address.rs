//! Where an export is: the `nbd+unix` address that the daemon prints.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use super::ClientError;

/// An export on a unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    socket: PathBuf,
    export: String,
}

impl Address {
    /// The address of `export` at `socket`.
    pub fn new(socket: impl Into<PathBuf>, export: impl Into<String>) -> Self {
        Self { socket: socket.into(), export: export.into() }
    }

    /// Where the server listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The export's name.
    pub fn export(&self) -> &str {
        &self.export
    }
}

impl FromStr for Address {
    type Err = ClientError;

    /// Parses `nbd+unix:///EXPORT?socket=PATH`, both parts percent-encoded.
    fn from_str(text: &str) -> Result<Self, ClientError> {
        let fail = |reason| ClientError::Address { address: text.to_owned(), reason };
        let rest =
            text.strip_prefix("nbd+unix://").ok_or_else(|| fail("it does not start with nbd+unix://"))?;
        let (export, query) = rest.split_once('?').ok_or_else(|| fail("it has no ?socket="))?;
        let socket = query
            .split('&')
            .find_map(|pair| pair.strip_prefix("socket="))
            .filter(|socket| !socket.is_empty())
            .ok_or_else(|| fail("it has no ?socket="))?;
        let export = export.strip_prefix('/').unwrap_or(export);
        let decode =
            |part| percent_decode(part).ok_or_else(|| fail("a percent sign is not followed by a UTF-8 byte"));
        Ok(Self { socket: decode(socket)?.into(), export: decode(export)? })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let socket = self.socket.to_string_lossy();
        write!(formatter, "nbd+unix:///{}?socket={}", Encoded(&self.export), Encoded(&socket))
    }
}

/// Text that is percent-encoded when it is shown.
struct Encoded<'a>(&'a str);

impl fmt::Display for Encoded<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                    write!(formatter, "{}", char::from(byte))?;
                }
                _ => write!(formatter, "%{byte:02X}")?,
            }
        }
        Ok(())
    }
}

fn percent_decode(text: &str) -> Option<String> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let high = char::from(bytes.next()?).to_digit(16)?;
            let low = char::from(bytes.next()?).to_digit(16)?;
            decoded.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            decoded.push(byte);
        }
    }
    String::from_utf8(decoded).ok()
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
            ["nbd://host/disk", "nbd+unix:///disk", "nbd+unix:///disk?socket=", "nbd+unix:///%f?socket=/s"]
        {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
