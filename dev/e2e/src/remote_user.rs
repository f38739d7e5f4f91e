//! A user who reaches a daemon over TLS, with a home folder and a key of their own.

use std::net::SocketAddr;

use anyhow::Context as _;
use tempfile::TempDir;
use testbed::{Host, Outcome};

/// A user with a grant. Dropping this deletes the home folder.
pub struct RemoteUser {
    home: TempDir,
    address: String,
}

impl RemoteUser {
    /// Grants a user access to a daemon that serves its API at this address.
    ///
    /// # Errors
    /// What the daemon says.
    pub fn admit(host: &Host, tls: SocketAddr, name: &str, role: &str) -> anyhow::Result<Self> {
        let home = tempfile::tempdir().context("make a home folder")?;
        let user = Self { home, address: format!("https://{tls}") };
        let granted: api::NewlyGranted = host.ask(&["access", "grant", name, "--role", role])?;
        let token = user.home.path().join("token");
        std::fs::write(&token, granted.token.context("there is no access token")?)?;
        let token = token.display().to_string();
        user.run(host, &["remote", "add", &user.address, "--token-file", &token])?.success()?;
        Ok(user)
    }

    /// Runs a command of this user to its end.
    ///
    /// # Errors
    /// If it does not end.
    pub fn run(&self, host: &Host, arguments: &[&str]) -> anyhow::Result<Outcome> {
        let command = host.command(arguments)?.env("STERNA_HOST", &self.address);
        let home = self.home.path();
        command.env("HOME", home).env("XDG_CONFIG_HOME", home.join(".config")).run()
    }
}
