//! TLS between hosts: version 1.3 alone, certificates that sign for themselves, keys that are pinned by their digest.
//!
//! The verifiers here check that the other side has a well-formed certificate and holds its private key. *Whose* key
//! that may be is judged right after the handshake, before a word is said (`greeting.rs`): then both sides can say in
//! words which host was expected and which came, where an alert of TLS would only say that something is wrong.

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

/// The protocol's name in the handshake (ALPN): a TLS service of another kind is told apart at once.
const PROTOCOL: &[u8] = b"sterna-transport";

/// The name that is called: hosts have none that certificates could hold, so it is the same for all.
const SERVER_NAME: &str = "sterna.invalid";

/// TLS settings of both roles.
#[derive(Clone)]
pub(crate) struct Tls {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl Tls {
    pub(crate) fn new(identity: &Identity) -> Result<Self, Error> {
        let provider = Arc::new(ring::default_provider());
        let verifier = Arc::new(HoldsItsKey::of(&provider));
        let chain = || vec![identity.certificate().clone()];
        let versions = [&rustls::version::TLS13];
        let mut client = ClientConfig::builder_with_provider(Arc::<CryptoProvider>::clone(&provider))
            .with_protocol_versions(&versions)?
            .dangerous()
            .with_custom_certificate_verifier(verifier.clone())
            .with_client_auth_cert(chain(), identity.key().clone_key())?;
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        // Each handshake proves the key anew; nothing is resumed.
        client.resumption = rustls::client::Resumption::disabled();
        client.enable_sni = false;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&versions)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain(), identity.key().clone_key())?;
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }

    pub(crate) fn server_name() -> Result<ServerName<'static>, rustls::pki_types::InvalidDnsNameError> {
        ServerName::try_from(SERVER_NAME)
    }
}

/// Whose certificate this is; `None` if it is none.
pub(crate) fn host_of(certificates: Option<&[CertificateDer<'_>]>) -> Option<HostId> {
    host_of_certificate(certificates?.first()?)
}

/// Whose certificate this is; `None` if it is none.
pub(crate) fn host_of_certificate(certificate: &CertificateDer<'_>) -> Option<HostId> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    Some(HostId::of_public_key(&parsed.subject_public_key_info()))
}

/// Checks that the other side holds the key of the certificate that it shows, and nothing else.
#[derive(Debug)]
pub(crate) struct HoldsItsKey(WebPkiSupportedAlgorithms);

impl HoldsItsKey {
    pub(crate) fn of(provider: &CryptoProvider) -> Self {
        Self(provider.signature_verification_algorithms)
    }

    fn check_form(certificate: &CertificateDer<'_>, others: &[CertificateDer<'_>]) -> Result<(), Error> {
        ParsedCertificate::try_from(certificate)?;
        if others.is_empty() { Ok(()) } else { Err(CertificateError::BadEncoding.into()) }
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
        Self::check_form(end_entity, intermediates).map(|()| ServerCertVerified::assertion())
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
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
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
        Self::check_form(end_entity, intermediates).map(|()| ClientCertVerified::assertion())
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
        self.0.supported_schemes()
    }
}
