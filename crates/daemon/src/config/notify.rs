//! Where notices go: what the host tells its administrators by itself.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use hyper::Uri;
use serde::Deserialize;

use super::hooks::check as check_program;
use super::{ConfigError, HookProblem, require_absolute};
use crate::files::whole_file;

/// The largest secret.
const SECRET_BYTES_MAX: u64 = 4096;
/// The mode bits by which others than the owner may read or write a file.
const OTHERS: u32 = 0o077;

/// Where notices go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NotifyConfig {
    /// Runs once for each notice.
    pub program: Option<PathBuf>,
    /// Gets each notice by HTTP: an address with a host, of the scheme `https` or `http`.
    pub webhook: Option<Uri>,
    /// The file with the key of the webhook's signatures.
    pub secret_file: Option<PathBuf>,
    /// Whether warnings are told, too.
    pub warnings: bool,
}

/// Why notices cannot be sent as configured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotifyFault {
    /// The text is no address of a web server.
    #[error(
        "webhook = \"{0}\" is no address of a web server; write for example \"https://example.net/hook\""
    )]
    Address(String),
    /// There is a secret, and nothing that it is for.
    #[error("secret_file is for a webhook, and there is none")]
    NoWebhook,
}

/// Why a secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SecretProblem {
    /// It cannot be read.
    #[error(transparent)]
    Unreadable(#[from] std::io::Error),
    /// Other users may read or change it.
    #[error("other users may read or change it: chmod 600, and chown it to the user of the daemon")]
    OfOthers,
    /// It has no content.
    #[error("it is empty: openssl rand -hex 32 makes a secret")]
    Empty,
}

impl NotifyConfig {
    /// Checks whether the program can be run; fails with [`ConfigError::Hook`].
    pub(super) fn look(&self, path: &Path) -> Result<(), ConfigError> {
        let Some(program) = &self.program else { return Ok(()) };
        check_program(program).map_err(|problem| ConfigError::Hook {
            path: path.to_owned(),
            key: "notify.program",
            program: program.clone(),
            problem,
        })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileNotify {
    program: Option<PathBuf>,
    webhook: Option<String>,
    secret_file: Option<PathBuf>,
    warnings: bool,
}

impl FileNotify {
    /// Checks the settings of the file at `path`, without examining the program and the secret.
    pub(super) fn check(self, path: &Path) -> Result<NotifyConfig, ConfigError> {
        let fault = |fault| ConfigError::Notify { path: path.to_owned(), fault };
        let absolute =
            |key, value: Option<PathBuf>| value.map(|value| require_absolute(path, key, value)).transpose();
        let webhook = self.webhook.map(|text| address(&text).ok_or(NotifyFault::Address(text)));
        let webhook = webhook.transpose().map_err(fault)?;
        if self.secret_file.is_some() && webhook.is_none() {
            return Err(fault(NotifyFault::NoWebhook));
        }
        Ok(NotifyConfig {
            program: absolute("notify.program", self.program)?,
            webhook,
            secret_file: absolute("notify.secret_file", self.secret_file)?,
            warnings: self.warnings,
        })
    }
}

fn address(text: &str) -> Option<Uri> {
    let address: Uri = text.parse().ok()?;
    let is_web = matches!(address.scheme_str(), Some("http" | "https"));
    (is_web && address.host().is_some_and(|host| !host.is_empty())).then_some(address)
}

/// Returns why the program of an administrator cannot be run. May block.
pub(crate) fn program_problem(program: &Path) -> Option<HookProblem> {
    check_program(program).err()
}

/// Reads a secret: the content of a file that is only the daemon's, without white space around it. May block.
pub(crate) fn read_secret(path: &Path) -> Result<Vec<u8>, SecretProblem> {
    let file = whole_file::open(path)?;
    let metadata = file.metadata()?;
    if metadata.mode() & OTHERS != 0 || metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(SecretProblem::OfOthers);
    }
    let secret = whole_file::content(file, SECRET_BYTES_MAX)?.trim_ascii().to_vec();
    if secret.is_empty() { Err(SecretProblem::Empty) } else { Ok(secret) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_webhook_has_a_scheme_and_a_host() {
        for good in ["https://example.net/hook?key=1", "http://127.0.0.1:9000", "https://[::1]:8443/a"] {
            assert!(address(good).is_some(), "{good}");
        }
        for bad in ["", "example.net/hook", "/hook", "ftp://example.net", "https://", "https:///hook", "a b"]
        {
            assert!(address(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_secret_that_others_may_read_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let set = |content: &str, mode| {
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        set(" word\n", 0o600);
        assert_eq!(read_secret(&path).unwrap(), b"word");
        set("word", 0o640);
        assert!(matches!(read_secret(&path), Err(SecretProblem::OfOthers)));
        set("\n", 0o600);
        assert!(matches!(read_secret(&path), Err(SecretProblem::Empty)));
        // Whoever opens a pipe would wait for its other end.
        std::fs::remove_file(&path).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).unwrap();
        assert!(matches!(read_secret(&path), Err(SecretProblem::Unreadable(_))));
    }
}
