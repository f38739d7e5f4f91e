//! The address of the page for browsers.

use std::net::SocketAddr;
use std::path::Path;

use serde::Deserialize;

use super::ConfigError;

/// The address of the page for browsers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WebConfig {
    /// A loopback address and a port; `None`: the page is only on the API's socket.
    pub listen: Option<SocketAddr>,
}

/// Why the address of the page is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WebFault {
    /// The text is not an address with a port.
    #[error("it is no address with a port; write for example \"127.0.0.1:7424\"")]
    Address,
    /// Other hosts could reach the address.
    #[error(
        "the page asks for no password, so it is served to this host alone: write 127.0.0.1 or [::1]; other users come by ssh \
         -L, or by a web server that authenticates them (docs/observe.md)"
    )]
    BeyondThisHost,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileWeb {
    listen: Option<String>,
}

impl FileWeb {
    pub(super) fn check(self, path: &Path) -> Result<WebConfig, ConfigError> {
        let Some(listen) = self.listen else { return Ok(WebConfig::default()) };
        match address(&listen) {
            Ok(address) => Ok(WebConfig { listen: Some(address) }),
            Err(fault) => Err(ConfigError::Web { path: path.to_owned(), listen, fault }),
        }
    }
}

fn address(text: &str) -> Result<SocketAddr, WebFault> {
    let address: SocketAddr = text.parse().map_err(|_| WebFault::Address)?;
    if address.port() == 0 {
        return Err(WebFault::Address);
    }
    if address.ip().to_canonical().is_loopback() { Ok(address) } else { Err(WebFault::BeyondThisHost) }
}

#[cfg(test)]
mod tests {
    use super::{WebFault, address};

    #[test]
    fn the_page_is_served_to_this_host_alone() {
        for good in ["127.0.0.1:7424", "[::1]:7424", "127.1.2.3:80", "[::ffff:127.0.0.1]:7424"] {
            assert!(address(good).is_ok(), "{good}");
        }
        for beyond in ["0.0.0.0:7424", "[::]:7424", "192.0.2.1:7424", "[fe80::1]:7424", "[::ffff:10.0.0.1]:1"]
        {
            assert_eq!(address(beyond), Err(WebFault::BeyondThisHost), "{beyond}");
        }
        for none in ["", "7424", "localhost:7424", "127.0.0.1", "127.0.0.1:0", "http://127.0.0.1:7424"] {
            assert_eq!(address(none), Err(WebFault::Address), "{none}");
        }
    }
}
