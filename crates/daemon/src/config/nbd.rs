//! How volumes are served over NBD: limits, and TLS on their ports.

use std::path::{Path, PathBuf};

use lane::{ClientCertificates, CredentialFiles};
use serde::Deserialize;

use super::{ConfigError, require_absolute};

/// The range of `nbd.connections_max`. Above it, one volume's clients use up the descriptors of the daemon.
const CONNECTIONS: std::ops::RangeInclusive<u64> = 1..=1024;

/// How volumes are served over NBD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NbdConfig {
    /// The number of connections to one volume; `None`: the built-in limit.
    pub connections_max: Option<usize>,
    /// TLS on the ports of volumes; `None`: no TLS.
    pub tls: Option<TlsConfig>,
}

/// TLS on the ports of volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    /// The files of the certificate, the key, and the authority of clients' certificates.
    pub files: CredentialFiles,
    /// Whether clients may connect without TLS.
    pub policy: TlsPolicy,
}

/// Whether clients must encrypt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsPolicy {
    /// Clients may use TLS.
    Offered,
    /// Clients must use TLS.
    Required,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileNbd {
    connections_max: Option<u64>,
    tls: Option<FileTls>,
}

#[derive(Debug, Deserialize)]
struct FileTls {
    certificate: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
    /// TLS is required by default.
    #[serde(default = "yes")]
    required: bool,
}

fn yes() -> bool {
    true
}

impl FileNbd {
    pub(super) fn check(self, path: &Path) -> Result<NbdConfig, ConfigError> {
        let connections_max = match self.connections_max {
            Some(value) if !CONNECTIONS.contains(&value) => {
                let (least, most) = (*CONNECTIONS.start(), *CONNECTIONS.end());
                let (path, key) = (path.to_owned(), "nbd.connections_max");
                return Err(ConfigError::OutOfRange { path, key, value, least, most });
            }
            value => value.and_then(|value| usize::try_from(value).ok()),
        };
        let tls = match self.tls {
            None => None,
            Some(tls) => {
                let absolute = |key: &str, file| require_absolute(path, &format!("nbd.tls.{key}"), file);
                let clients = match tls.client_ca {
                    None => ClientCertificates::NotAsked,
                    Some(file) => ClientCertificates::Required(absolute("client_ca", file)?),
                };
                let files = CredentialFiles {
                    certificate: absolute("certificate", tls.certificate)?,
                    key: absolute("key", tls.key)?,
                    clients,
                };
                let policy = if tls.required { TlsPolicy::Required } else { TlsPolicy::Offered };
                Some(TlsConfig { files, policy })
            }
        };
        Ok(NbdConfig { connections_max, tls })
    }
}
