//! What TLS needs to be known: whether a listener's clients encrypt, and by which certificates both sides know each
//! other. The bytes are in `stream/tls.rs`.
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
    /// They cannot.
    #[default]
    Off,
    /// They may.
    Offered(Credentials),
    /// They must: until TLS has begun nothing is told or served.
    Required(Credentials),
}

/// What a server proves its identity with, and what it asks of clients. A clone shares what is replaced later.
#[derive(Clone)]
pub struct Credentials {
    current: Arc<Mutex<Arc<ServerConfig>>>,
}

/// Where credentials are, as PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CredentialFiles {
    /// The server's certificate, and those between it and an authority that clients trust.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// What is asked of clients.
    pub clients: ClientCertificates,
}

/// Whether clients prove their identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientCertificates {
    /// They are not asked.
    NotAsked,
    /// One that is shown must be signed by an authority in this file.
    Optional(PathBuf),
    /// One must be shown, and be signed by an authority in this file.
    Required(PathBuf),
}

/// Why credentials cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file is not there, may not be read, or is no PEM of this kind.
    #[error("read the {content} in {path}")]
    Read {
        /// What it should hold.
        content: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: pem::Error,
    },
    /// A file is there and holds nothing of use.
    #[error("{path} holds no certificate: it must be PEM")]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Certificate and key do not belong together, or are of a kind that is not known.
    #[error("use the certificate in {certificate} with the key in {key}")]
    Unusable {
        /// File of the certificate.
        certificate: PathBuf,
        /// File of the key.
        key: PathBuf,
        /// What is wrong with them.
        source: rustls::Error,
    },
    /// An authority's certificate is none.
    #[error("trust the authority in {path}")]
    Authority {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: rustls::Error,
    },
    /// Clients cannot be checked against these authorities.
    #[error("check clients against the authority in {path}")]
    Verifier {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: VerifierBuilderError,
    },
}

impl Credentials {
    /// Reads credentials. May sleep.
    ///
    /// # Errors
    /// [`CredentialsError`].
    pub fn load(files: &CredentialFiles) -> Result<Self, CredentialsError> {
        Ok(Self { current: Arc::new(Mutex::new(read(files)?)) })
    }

    /// Reads credentials again, for connections that begin TLS from now on. May sleep.
    ///
    /// # Errors
    /// [`CredentialsError`]; what was used before goes on being used.
    pub fn reload(&self, files: &CredentialFiles) -> Result<(), CredentialsError> {
        let new = read(files)?;
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// Begins TLS on one connection.
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
