//! A host's identity: a display name, a key, and a self-signed certificate. It is made once and kept.
//!
//! ```text
//!   folder/  key.pem          the private key, mode 0600
//!            certificate.pem  sent to peers, which pin the digest of its public key
//!            name             the host's display name
//! ```
//!
//! The folder appears whole or not at all: it is made under another name, synced, and renamed.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::host_id::HostId;
use crate::tls;

/// Longest name of a host, in characters, so that it fits into tables and certificates.
pub const NAME_LENGTH_MAX: usize = 63;

/// The bytes before the 32 of an Ed25519 key in PKCS #8 (RFC 8410).
const ED25519_HEAD: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

const KEY: &str = "key.pem";
const CERTIFICATE: &str = "certificate.pem";
const NAME: &str = "name";

/// A host's name, key and certificate.
pub struct Identity {
    id: HostId,
    name: String,
    key: PrivateKeyDer<'static>,
    certificate: CertificateDer<'static>,
}

impl Identity {
    /// Makes a new identity and stores it in a folder that must not exist yet.
    ///
    /// # Errors
    ///
    /// There is one already, the name is invalid, or the folder cannot be written.
    pub fn create(folder: &Path, name: &str) -> Result<Self, IdentityError> {
        check_name(name)?;
        if folder.exists() {
            return Err(IdentityError::Exists { folder: folder.to_owned() });
        }
        let made = Made::new(name)?;
        let write = |source| IdentityError::Write { folder: folder.to_owned(), source };
        made.write(folder, name).map_err(write)?;
        Self::load(folder)
    }

    /// Makes an identity for tests, which is not stored.
    ///
    /// # Errors
    ///
    /// The name is invalid, or the key cannot be made.
    pub fn in_memory(name: &str) -> Result<Self, IdentityError> {
        check_name(name)?;
        let made = Made::new(name)?;
        Self::from_pem(Path::new(""), name, made.key.as_bytes(), made.certificate.as_bytes())
    }

    /// Derives an identity from a secret, always the same one; it is not stored.
    ///
    /// # Errors
    ///
    /// The name is invalid, or the key cannot be made.
    pub fn of_secret(name: &str, secret: &[u8; 32]) -> Result<Self, IdentityError> {
        check_name(name)?;
        let make = |source| IdentityError::Make { source };
        let key = PrivatePkcs8KeyDer::from([&ED25519_HEAD[..], secret].concat());
        let pair = KeyPair::try_from(&key).map_err(make)?;
        let made = Made::of(name, &pair).map_err(make)?;
        Self::from_pem(Path::new(""), name, made.key.as_bytes(), made.certificate.as_bytes())
    }

    /// Loads the identity from a folder.
    ///
    /// # Errors
    ///
    /// There is none (see [`IdentityError::is_missing`]), others can read its key, or its files do not belong together.
    pub fn load(folder: &Path) -> Result<Self, IdentityError> {
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read(&path).map_err(|source| IdentityError::Read { path, source })
        };
        let name = String::from_utf8_lossy(&read(NAME)?).trim().to_owned();
        check_name(&name)?;
        let key_path = folder.join(KEY);
        let metadata = fs::metadata(&key_path)
            .map_err(|source| IdentityError::Read { path: key_path.clone(), source })?;
        if metadata.mode() & 0o077 != 0 {
            return Err(IdentityError::KeyIsOpen { path: key_path, mode: metadata.mode() & 0o777 });
        }
        Self::from_pem(folder, &name, &read(KEY)?, &read(CERTIFICATE)?)
    }

    fn from_pem(folder: &Path, name: &str, key: &[u8], certificate: &[u8]) -> Result<Self, IdentityError> {
        let broken = |file: &'static str| IdentityError::Broken { path: folder.join(file) };
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| broken(KEY))?;
        let certificate = CertificateDer::from_pem_slice(certificate).map_err(|_| broken(CERTIFICATE))?;
        let id = tls::host_of_certificate(&certificate).ok_or_else(|| broken(CERTIFICATE))?;
        let pair = KeyPair::try_from(&key).map_err(|_| broken(KEY))?;
        if HostId::of_public_key(&rcgen::PublicKeyData::subject_public_key_info(&pair)) != id {
            return Err(IdentityError::Mismatch { folder: folder.to_owned() });
        }
        Ok(Self { id, name: name.to_owned(), key, certificate })
    }

    /// Returns the digest of the public key, by which peers know this host.
    #[must_use]
    pub fn id(&self) -> HostId {
        self.id
    }

    /// Returns the display name of this host.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn key(&self) -> &PrivateKeyDer<'static> {
        &self.key
    }

    pub(crate) fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        let Self { id, name, key, certificate } = self;
        Self { id: *id, name: name.clone(), key: key.clone_key(), certificate: certificate.clone() }
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Identity({} {:?})", self.name, self.id)
    }
}

/// Checks the name of a host: letters, digits, `.`, `-` and `_`, up to [`NAME_LENGTH_MAX`].
///
/// # Errors
///
/// The name is invalid.
pub fn check_name(name: &str) -> Result<(), IdentityError> {
    let is_good = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    let begins_well = name.starts_with(|character: char| character.is_ascii_alphanumeric());
    match begins_well && name.len() <= NAME_LENGTH_MAX && name.chars().all(is_good) {
        true => Ok(()),
        false => Err(IdentityError::Name { name: name.chars().take(NAME_LENGTH_MAX).collect() }),
    }
}

/// Why an identity could not be made or loaded.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The folder holds an identity, which must not be replaced by accident: all peers know it.
    #[error("{} already holds an identity, by which every peer knows this host", folder.display())]
    Exists {
        /// The folder that holds it.
        folder: PathBuf,
    },
    /// The name is invalid.
    #[error(
        "\"{name}\" cannot be a host's name: use at most {NAME_LENGTH_MAX} letters, digits, dots, dashes and \
         underscores, and begin with a letter or digit"
    )]
    Name {
        /// The given name, cut to the longest allowed.
        name: String,
    },
    /// The key could not be made.
    #[error("failed to make a key")]
    Make {
        /// The error that key generation reported.
        #[source]
        source: rcgen::Error,
    },
    /// The folder cannot be written.
    #[error("failed to write the identity to {}", folder.display())]
    Write {
        /// The folder for the identity.
        folder: PathBuf,
        /// The error that the system reported.
        #[source]
        source: io::Error,
    },
    /// A file cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// The path of the file.
        path: PathBuf,
        /// The error that the system reported.
        #[source]
        source: io::Error,
    },
    /// Others can read the key.
    #[error("others may read {} (mode {mode:o}): `chmod 600` it, and make a new identity if they may have done so", path.display())]
    KeyIsOpen {
        /// The path of the key.
        path: PathBuf,
        /// The mode of its file.
        mode: u32,
    },
    /// A file does not hold what it should.
    #[error("{} is damaged: restore it, or make a new identity and pair the hosts again", path.display())]
    Broken {
        /// The path of the file.
        path: PathBuf,
    },
    /// Key and certificate belong to different identities.
    #[error("key and certificate in {} do not belong together: restore both", folder.display())]
    Mismatch {
        /// The folder that holds both.
        folder: PathBuf,
    },
}

impl IdentityError {
    /// Returns whether there is no identity yet.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

struct Made {
    key: String,
    certificate: String,
}

impl Made {
    fn new(name: &str) -> Result<Self, IdentityError> {
        let made = KeyPair::generate().and_then(|key| Self::of(name, &key));
        made.map_err(|source| IdentityError::Make { source })
    }

    fn of(name: &str, key: &KeyPair) -> Result<Self, rcgen::Error> {
        let mut parameters = CertificateParams::new(Vec::new())?;
        parameters.distinguished_name = DistinguishedName::new();
        parameters.distinguished_name.push(DnType::CommonName, name);
        let certificate = parameters.self_signed(key)?;
        Ok(Self { key: key.serialize_pem(), certificate: certificate.pem() })
    }

    fn write(&self, folder: &Path, name: &str) -> io::Result<()> {
        let begun = folder.with_extension("new");
        match fs::remove_dir_all(&begun) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        DirBuilder::new().mode(0o700).create(&begun)?;
        for (file, content) in
            [(KEY, &self.key), (CERTIFICATE, &self.certificate), (NAME, &format!("{name}\n"))]
        {
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(begun.join(file))?;
            file.write_all(content.as_bytes())?;
            file.sync_all()?;
        }
        File::open(&begun)?.sync_all()?;
        fs::rename(&begun, folder)?;
        match folder.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
            _ => File::open(".")?.sync_all(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::{CERTIFICATE, Identity, IdentityError, KEY};

    #[test]
    fn an_identity_is_kept_and_made_only_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("identity");
        assert!(Identity::load(&path).unwrap_err().is_missing());
        let made = Identity::create(&path, "host-a").unwrap();
        let loaded = Identity::load(&path).unwrap();
        assert_eq!((made.id(), made.name()), (loaded.id(), "host-a"));
        assert!(matches!(Identity::create(&path, "host-a"), Err(IdentityError::Exists { .. })));
        assert_eq!(fs::metadata(path.join(KEY)).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn what_is_broken_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| folder.path().join(name));
        Identity::create(&one, "one").unwrap();
        Identity::create(&other, "other").unwrap();
        fs::copy(one.join(CERTIFICATE), other.join(CERTIFICATE)).unwrap();
        assert!(matches!(Identity::load(&other), Err(IdentityError::Mismatch { .. })));
        fs::write(other.join(CERTIFICATE), "nothing").unwrap();
        assert!(matches!(Identity::load(&other), Err(IdentityError::Broken { .. })));
        fs::set_permissions(one.join(KEY), Permissions::from_mode(0o640)).unwrap();
        let error = Identity::load(&one).unwrap_err();
        assert!(error.to_string().contains("mode 640") && !error.is_missing(), "{error}");
    }

    #[test]
    fn names_that_break_tables_are_refused() {
        for name in ["", "-a", "a b", "ä", &"a".repeat(64)] {
            assert!(matches!(Identity::in_memory(name), Err(IdentityError::Name { .. })), "{name}");
        }
    }
}
