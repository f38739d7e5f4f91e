//! The settings of TLS: whether a listener's clients encrypt, and the certificates of both sides. The bytes
//! are handled in `stream/tls.rs`.
//!
//! Files are read on a control thread, because that may sleep; lanes share the result.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};

/// Whether the clients of a listener encrypt.
#[derive(Clone, Default)]
pub enum Encryption {
    /// Clients cannot encrypt their connections.
    #[default]
    Off,
    /// Clients may encrypt their connections.
    Offered(Credentials),
    /// Clients must encrypt: before TLS has begun nothing is disclosed or served.
    Required(Credentials),
}

/// A server's certificate and key, and its demands on clients. A clone shares later replacements.
#[derive(Clone)]
pub struct Credentials {
    current: Arc<Mutex<Arc<ServerConfig>>>,
}

/// Paths of the credentials, as PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialFiles {
    /// The server's certificate, and those between it and an authority that clients trust.
    pub certificate: PathBuf,
    /// The server's private key.
    pub key: PathBuf,
    /// The demands on clients' certificates.
    pub clients: ClientCertificates,
}

/// Whether clients prove their identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// Clients need no certificate.
    NotAsked,
    /// A certificate that is shown must be signed by an authority in this file.
    Optional(PathBuf),
    /// A certificate must be shown, and be signed by an authority in this file.
    Required(PathBuf),
}

/// Why credentials cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file does not exist, may not be read, or is not PEM of this kind.
    #[error("read the {content} in {path}")]
    Read {
        /// The content that it should have.
        content: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The error that reading reported.
        source: pem::Error,
    },
    /// A file exists but holds no certificate.
    #[error("{path} holds no certificate: it must be PEM")]
    Empty {
        /// The path of the file.
        path: PathBuf,
    },
    /// Certificate and key do not belong together, or are of an unknown kind.
    #[error("use the certificate in {certificate} with the key in {key}")]
    Unusable {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// The error that TLS reported.
        source: rustls::Error,
    },
    /// An authority's certificate is invalid.
    #[error("trust the authority in {path}")]
    Authority {
        /// The path of the file.
        path: PathBuf,
        /// The error that TLS reported.
        source: rustls::Error,
    },
    /// Clients cannot be checked against these authorities.
    #[error("check clients against the authority in {path}")]
    Verifier {
        /// The path of the file.
        path: PathBuf,
        /// The error that the verifier reported.
        source: VerifierBuilderError,
    },
}

impl Credentials {
    /// Reads credentials. It may sleep.
    pub fn load(files: &CredentialFiles) -> Result<Self, CredentialsError> {
        Ok(Self { current: Arc::new(Mutex::new(read(files)?)) })
    }

    /// Reads credentials again, for connections that begin TLS from now on. It may sleep.
    ///
    /// # Errors
    /// [`CredentialsError`]; then the earlier credentials stay in use.
    pub fn reload(&self, files: &CredentialFiles) -> Result<(), CredentialsError> {
        let new = read(files)?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    pub(super) fn accept(&self) -> Result<ServerConnection, rustls::Error> {
        let current = Arc::clone(&self.current.lock().unwrap_or_else(PoisonError::into_inner));
        ServerConnection::new(current)
    }
}

fn read(files: &CredentialFiles) -> Result<Arc<ServerConfig>, CredentialsError> {
    let CredentialFiles { certificate, key, clients } = files;
    let unusable =
        |source| CredentialsError::Unusable { certificate: certificate.clone(), key: key.clone(), source };
    let chain = read_certificates("certificate", certificate)?;
    let private_key = PrivateKeyDer::from_pem_file(key).map_err(|source| CredentialsError::Read {
        content: "private key",
        path: key.clone(),
        source,
    })?;
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(unusable)?;
    let (authority, is_optional) = match clients {
        ClientCertificates::NotAsked => {
            let config = builder.with_no_client_auth().with_single_cert(chain, private_key);
            return config.map(Arc::new).map_err(unusable);
        }
        ClientCertificates::Optional(authority) => (authority, true),
        ClientCertificates::Required(authority) => (authority, false),
    };
    let mut roots = RootCertStore::empty();
    for root in read_certificates("authority's certificate", authority)? {
        let refused = |source| CredentialsError::Authority { path: authority.clone(), source };
        roots.add(root).map_err(refused)?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    let verifier = if is_optional { verifier.allow_unauthenticated() } else { verifier };
    let refused = |source| CredentialsError::Verifier { path: authority.clone(), source };
    let builder = builder.with_client_cert_verifier(verifier.build().map_err(refused)?);
    builder.with_single_cert(chain, private_key).map(Arc::new).map_err(unusable)
}

fn read_certificates(
    content: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let found: Vec<_> =
        read.map_err(|source| CredentialsError::Read { content, path: path.to_owned(), source })?;
    if found.is_empty() {
        return Err(CredentialsError::Empty { path: path.to_owned() });
    }
    Ok(found)
}
