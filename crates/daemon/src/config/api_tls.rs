//! The address of the API over TLS, besides its socket.

use std::net::SocketAddr;
use std::path::Path;

use serde::Deserialize;

use super::ConfigError;

/// The address of the API over TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApiTlsConfig {
    /// An address and a port; `None`: the API is not served over TLS.
    pub listen: Option<SocketAddr>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileApiTls {
    listen: Option<String>,
}

impl FileApiTls {
    pub(super) fn check(self, path: &Path) -> Result<ApiTlsConfig, ConfigError> {
        let Some(listen) = self.listen else { return Ok(ApiTlsConfig::default()) };
        match listen.parse::<SocketAddr>() {
            Ok(address) if address.port() > 0 => Ok(ApiTlsConfig { listen: Some(address) }),
            _ => Err(ConfigError::ApiTls { path: path.to_owned(), listen }),
        }
    }
}
