//! A certificate authority for tests, in the file layout that libnbd and QEMU share.

use std::path::Path;

use export::nbd::{ClientCertificates, CredentialFiles};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

pub(crate) struct Authority {
    directory: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

#[derive(Clone, Copy)]
pub(crate) enum Role {
    Server,
    Client,
}

impl Authority {
    /// Makes an authority with a certificate for the server, and one for clients.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut parameters = CertificateParams::new(vec![]).unwrap();
        parameters.distinguished_name.push(DnType::CommonName, "an authority for tests");
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = parameters.self_signed(&key).unwrap();
        std::fs::write(directory.path().join("ca-cert.pem"), certificate.pem()).unwrap();
        let authority = Self { directory, issuer: Issuer::new(parameters, key) };
        authority.issue(Role::Server);
        authority.issue(Role::Client);
        authority
    }

    pub(crate) fn issue(&self, role: Role) {
        let (name, purpose) = match role {
            Role::Server => ("server", ExtendedKeyUsagePurpose::ServerAuth),
            Role::Client => ("client", ExtendedKeyUsagePurpose::ClientAuth),
        };
        let key = KeyPair::generate().unwrap();
        let names = ["localhost", "127.0.0.1"].map(String::from);
        let mut parameters = CertificateParams::new(names).unwrap();
        parameters.distinguished_name.push(DnType::CommonName, name);
        // QEMU requires the second as well.
        parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        parameters.extended_key_usages = vec![purpose];
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.path().join(format!("{name}-cert.pem")), certificate.pem()).unwrap();
        std::fs::write(self.path().join(format!("{name}-key.pem")), key.serialize_pem()).unwrap();
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Makes a directory for a client that trusts the authority and has no certificate.
    pub(crate) fn without_client_certificate(&self) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        std::fs::copy(self.path().join("ca-cert.pem"), directory.path().join("ca-cert.pem")).unwrap();
        directory
    }

    /// Returns the server's files; clients need no certificate.
    pub(crate) fn files(&self) -> CredentialFiles {
        CredentialFiles {
            certificate: self.path().join("server-cert.pem"),
            key: self.path().join("server-key.pem"),
            clients: ClientCertificates::NotAsked,
        }
    }
}
