//! How volumes are served over NBD: limits, and TLS where they have a port.

use std::path::{Path, PathBuf};

use lane::{ClientCertificates, CredentialFiles};
use serde::Deserialize;

use super::{ConfigError, require_absolute};

/// Range of `nbd.connections_max`. Above, one volume's clients use up the descriptors of the daemon.
const CONNECTIONS: std::ops::RangeInclusive<u64> = 1..=1024;

/// How volumes are served over NBD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NbdConfig {
    /// Connections to one volume at a time; `None`: as many as suit one.
    pub connections_max: Option<usize>,
    /// TLS on the ports of volumes; `None`: none.
    pub tls: Option<TlsConfig>,
}

/// TLS on the ports of volumes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    /// Where certificate and key are, and by which authority those of clients are signed.
    pub files: CredentialFiles,
    /// Whether clients have a choice.
    pub policy: TlsPolicy,
}

/// Whether clients encrypt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsPolicy {
    /// They may.
    Offered,
    /// They must.
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
    /// Encryption is demanded unless somebody says otherwise.
    #[serde(default = "yes")]
    required: bool,
}

fn yes() -> bool {
    true
}

impl FileNbd {
    /// Checks what is written in the file at `path`.
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
