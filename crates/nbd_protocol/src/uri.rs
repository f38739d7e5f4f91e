//! Addresses of exports, as people write them: `nbd://HOST[:PORT]/EXPORT` and `nbd+unix:///EXPORT?socket=PATH`.
//!
//! The form is that of the NBD project's URI specification, which `qemu`, `nbdkit` and `libnbd` read as well. `nbds` and
//! `nbds+unix` (TLS) are parsed, so that a caller without TLS can say so. Unknown parameters of the query are ignored,
//! as that specification requires.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::STRING_LENGTH_MAX;

/// The port of a server whose address has none.
pub const DEFAULT_PORT: u16 = 10_809;

/// Longest path of a unix socket in bytes: `sun_path` has 108, one is for the terminating zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The address of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// Where the server listens.
    pub server: Server,
    /// Whether the connection is encrypted.
    pub security: Security,
    /// The export's name; empty for the server's default.
    pub export: String,
}

/// The socket of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Server {
    /// Path of a unix socket.
    Unix(PathBuf),
    /// Host and port of TCP.
    Tcp {
        /// A name, or an address without brackets.
        host: String,
        /// The port of the server.
        port: u16,
    },
}

/// Whether a connection is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Security {
    /// The connection is not encrypted.
    Plain,
    /// The connection must use TLS.
    Tls,
}

/// Why a text is not the address of an export.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{text}\" is no address of an NBD export: {reason}; write nbd://HOST/EXPORT or nbd+unix:///EXPORT?socket=PATH"
)]
pub struct UriError {
    /// The text that was given.
    pub text: String,
    /// The reason, for the message.
    pub reason: &'static str,
}

impl NbdUri {
    /// Makes the address of `export` on a unix socket.
    pub fn unix(socket: impl Into<PathBuf>, export: impl Into<String>) -> Self {
        Self { server: Server::Unix(socket.into()), security: Security::Plain, export: export.into() }
    }

    /// Makes the address of `export` on TCP.
    pub fn tcp(host: impl Into<String>, port: u16, export: impl Into<String>) -> Self {
        let server = Server::Tcp { host: host.into(), port };
        Self { server, security: Security::Plain, export: export.into() }
    }
}

impl FromStr for NbdUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        parse(text).map_err(|reason| UriError { text: text.to_owned(), reason })
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.security {
            Security::Plain => "nbd",
            Security::Tls => "nbds",
        };
        let export = Encoded(&self.export);
        match &self.server {
            Server::Unix(socket) => {
                write!(f, "{scheme}+unix:///{export}?socket={}", Encoded(&socket.to_string_lossy()))
            }
            Server::Tcp { host, port } => {
                // An IPv6 address contains colons.
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                write!(f, "{scheme}://{open}{host}{close}")?;
                if *port != DEFAULT_PORT {
                    write!(f, ":{port}")?;
                }
                write!(f, "/{export}")
            }
        }
    }
}

fn parse(text: &str) -> Result<NbdUri, &'static str> {
    let (scheme, rest) = text.split_once("://").ok_or("it has no scheme")?;
    let (security, is_unix) = match scheme {
        "nbd" => (Security::Plain, false),
        "nbds" => (Security::Tls, false),
        "nbd+unix" => (Security::Plain, true),
        "nbds+unix" => (Security::Tls, true),
        _ => return Err("its scheme is not one of nbd, nbds, nbd+unix and nbds+unix"),
    };
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let export = decode(path)?;
    if export.len() > STRING_LENGTH_MAX {
        return Err("the export's name is longer than 4096 bytes");
    }
    let server = if is_unix { parse_unix(authority, query)? } else { parse_tcp(authority)? };
    Ok(NbdUri { server, security, export })
}

fn parse_unix(authority: &str, query: &str) -> Result<Server, &'static str> {
    if !authority.is_empty() {
        return Err("a unix socket has no host: write three slashes before the export");
    }
    let socket = query.split('&').find_map(|pair| pair.strip_prefix("socket=")).unwrap_or_default();
    let socket = decode(socket)?;
    match socket.len() {
        0 => Err("it has no ?socket="),
        length if length > SOCKET_PATH_BYTES_MAX => Err("the path of the socket is longer than 107 bytes"),
        _ => Ok(Server::Unix(socket.into())),
    }
}

fn parse_tcp(authority: &str) -> Result<Server, &'static str> {
    let authority = authority.rsplit_once('@').map_or(authority, |(_user, place)| place);
    let (host, port) = match authority.strip_prefix('[') {
        Some(bracketed) => {
            let (host, rest) = bracketed.split_once(']').ok_or("a bracket is not closed")?;
            match rest.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None if rest.is_empty() => (host, None),
                None => return Err("only a port may follow a bracket"),
            }
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let host = decode(host)?;
    if host.is_empty() {
        return Err("it has no host");
    }
    let port = match port {
        None | Some("") => DEFAULT_PORT,
        Some(port) => port.parse().map_err(|_| "its port is not a number below 65536")?,
    };
    Ok(Server::Tcp { host, port })
}

/// Text that is percent-encoded when it is shown.
struct Encoded<'a>(&'a str);

impl fmt::Display for Encoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                    write!(f, "{}", char::from(byte))?;
                }
                _ => write!(f, "%{byte:02X}")?,
            }
        }
        Ok(())
    }
}

fn decode(text: &str) -> Result<String, &'static str> {
    const WRONG: &str = "a percent sign is not followed by a UTF-8 byte";
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|byte| char::from(byte).to_digit(16)).ok_or(WRONG);
        // Two digits of 16 make at most 255.
        decoded.push((digit()? * 16 + digit()?) as u8);
    }
    if decoded.contains(&0) {
        return Err("it has a zero byte");
    }
    String::from_utf8(decoded).map_err(|_| WRONG)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(text: &str, expected: NbdUri) {
        assert_eq!(text.parse(), Ok(expected), "{text}");
    }

    #[test]
    fn every_form_of_the_specification_is_understood() {
        check("nbd+unix:///disk0?socket=/run/sterna/nbd.sock", NbdUri::unix("/run/sterna/nbd.sock", "disk0"));
        check("nbd+unix:///?socket=/run/a.sock", NbdUri::unix("/run/a.sock", ""));
        check("nbd+unix://?tls-type=x&socket=a%20b&x", NbdUri::unix("a b", ""));
        check("nbd://host", NbdUri::tcp("host", DEFAULT_PORT, ""));
        check("nbd://host/", NbdUri::tcp("host", DEFAULT_PORT, ""));
        check("nbd://user@host:7/a/b", NbdUri::tcp("host", 7, "a/b"));
        check("nbd://host:/%C3%A9", NbdUri::tcp("host", DEFAULT_PORT, "é"));
        check("nbd://[::1]:7/a", NbdUri::tcp("::1", 7, "a"));
        check("nbd://[::1]/a", NbdUri::tcp("::1", DEFAULT_PORT, "a"));
        let secure = NbdUri { security: Security::Tls, ..NbdUri::tcp("host", DEFAULT_PORT, "a") };
        check("nbds://host/a", secure);
    }

    #[test]
    fn what_is_no_address_says_why() {
        for (text, reason) in [
            ("/run/a.sock", "no scheme"),
            ("http://host/a", "scheme is not"),
            ("nbd:///a", "no host"),
            ("nbd://host:99999/a", "port"),
            ("nbd://[::1/a", "bracket"),
            ("nbd://[::1]7/a", "bracket"),
            ("nbd+unix:///a", "?socket="),
            ("nbd+unix:///a?socket=", "?socket="),
            ("nbd+unix://host/a?socket=/s", "three slashes"),
            ("nbd+unix:///%f?socket=/s", "percent"),
            ("nbd+unix:///%ff?socket=/s", "percent"),
            ("nbd+unix:///%00?socket=/s", "zero byte"),
        ] {
            let error = text.parse::<NbdUri>().unwrap_err();
            assert!(error.reason.contains(reason), "{error}");
        }
        let long = format!("nbd+unix:///a?socket=/{}", "x".repeat(107));
        assert!(long.parse::<NbdUri>().is_err());
        let long = format!("nbd://host/{}", "x".repeat(4097));
        assert!(long.parse::<NbdUri>().is_err());
    }

    proptest! {
        #[test]
        fn an_address_survives_printing_and_parsing(
            socket in "[^\0]{1,20}", export in "[^\0]{0,20}", host in "([a-z0-9.-]{1,20}|[0-9a-f]{1,4}::[0-9]{1,3})", port: u16,
        ) {
            for address in [NbdUri::unix(socket, export.clone()), NbdUri::tcp(host, port, export)] {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "(nbds?(\\+unix)?://)?.{0,60}") {
            let _ = text.parse::<NbdUri>();
        }
    }
}
