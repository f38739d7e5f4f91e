//! TLS between hosts: version 1.3 only, self-signed certificates, and keys that are pinned by their digest.
//!
//! The verifier here checks that the other side has a well-formed certificate and holds its private key; its judge decides whose
//! key is accepted. Between hosts it accepts every key: `greeting.rs` checks the identity right after the handshake, before any
//! other exchange. Then both sides can report which host was expected and which answered, where a TLS alert would only say that
//! something is wrong. The API's clients are checked within the handshake (`pinned.rs`).

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};

use crate::host_id::HostId;
use crate::identity::Identity;

/// The protocol's name in the handshake (ALPN), which tells it from other TLS services at once.
const PROTOCOL: &[u8] = b"sterna-transport";

/// The server name that is called: hosts have none that certificates could hold, so it is the same for all.
const SERVER_NAME: &str = "sterna.invalid";

/// Decides whether the other side may have this key.
pub(crate) type Judge = Box<dyn Fn(HostId) -> Result<(), Error> + Send + Sync>;

#[derive(Clone)]
pub(crate) struct Tls {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl Tls {
    pub(crate) fn new(identity: &Identity) -> Result<Self, Error> {
        let anybody = || Box::new(|_| Ok(()));
        let client = client_config(identity, PROTOCOL, anybody())?;
        let server = server_config(identity, PROTOCOL, anybody())?;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }
}

pub(crate) fn server_name() -> Result<ServerName<'static>, rustls::pki_types::InvalidDnsNameError> {
    ServerName::try_from(SERVER_NAME)
}

/// Makes the settings of the client `identity`, which speaks `protocol` and accepts servers by `judge`.
pub(crate) fn client_config(
    identity: &Identity,
    protocol: &[u8],
    judge: Judge,
) -> Result<ClientConfig, Error> {
    let provider = Arc::new(ring::default_provider());
    let verifier = HoldsItsKey::of(&provider, judge);
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_auth_cert(vec![identity.certificate().clone()], identity.key().clone_key())?;
    config.alpn_protocols = vec![protocol.to_vec()];
    // Each handshake proves the key anew; nothing is resumed.
    config.resumption = rustls::client::Resumption::disabled();
    config.enable_sni = false;
    Ok(config)
}

/// Makes the settings of the server `identity`, which speaks `protocol` and accepts clients by `judge`.
pub(crate) fn server_config(
    identity: &Identity,
    protocol: &[u8],
    judge: Judge,
) -> Result<ServerConfig, Error> {
    let provider = Arc::new(ring::default_provider());
    let verifier = HoldsItsKey::of(&provider, judge);
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_single_cert(vec![identity.certificate().clone()], identity.key().clone_key())?;
    config.alpn_protocols = vec![protocol.to_vec()];
    // A removed client must not come back with an earlier ticket.
    config.send_tls13_tickets = 0;
    Ok(config)
}

pub(crate) fn host_of(certificates: Option<&[CertificateDer<'_>]>) -> Option<HostId> {
    host_of_certificate(certificates?.first()?)
}

pub(crate) fn host_of_certificate(certificate: &CertificateDer<'_>) -> Option<HostId> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    Some(HostId::of_public_key(&parsed.subject_public_key_info()))
}

/// Checks that the other side holds the key of its certificate, and has the key judged.
struct HoldsItsKey {
    algorithms: WebPkiSupportedAlgorithms,
    judge: Judge,
}

impl HoldsItsKey {
    fn of(provider: &CryptoProvider, judge: Judge) -> Self {
        Self { algorithms: provider.signature_verification_algorithms, judge }
    }

    /// N.B. The signature is checked later, so the judged side may yet turn out not to hold the key.
    fn check(&self, certificate: &CertificateDer<'_>, others: &[CertificateDer<'_>]) -> Result<(), Error> {
        let key = host_of_certificate(certificate).filter(|_| others.is_empty());
        (self.judge)(key.ok_or(CertificateError::BadEncoding)?)
    }
}

impl fmt::Debug for HoldsItsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldsItsKey").finish_non_exhaustive()
    }
}

impl ServerCertVerifier for HoldsItsKey {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity, intermediates).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOffered))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for HoldsItsKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end_entity, intermediates).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ServerCertVerifier::verify_tls12_signature(self, message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ServerCertVerifier::verify_tls13_signature(self, message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests;
