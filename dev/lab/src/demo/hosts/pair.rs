//! Two paired hosts: a daemon and a folder each.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context as _;
use testbed::{Daemon, Folder};

use super::NAMES;
use super::link::Link;
use crate::demo::start_daemon;

/// Lets a demo's VM use its kernel and its console, which are in the demo's own folders.
const MACHINES: &str = "[machines]\nfolders = [\"/\"]\n";
/// Both hosts' folders, in the order of [`NAMES`].
pub(super) type Folders = [Folder; 2];

#[derive(Debug)]
pub(crate) struct Pair {
    /// The host where the volume begins and its guest stays. It connects to the other.
    pub(crate) near: Daemon,
    pub(crate) far: Daemon,
}

impl Pair {
    /// Starts a daemon on each host and pairs them. If this fails, the error ends with the logs.
    pub(crate) async fn start(program: &Path, folders: &Folders, link: &Link) -> anyhow::Result<Self> {
        let (listen, call) = link.addresses();
        let [near, far] = folders;
        near.configure(&format!("{MACHINES}[hosts]\nlisten = []\n"))?;
        let links = call.map(|call| format!("links = [{{ address = \"{call}\" }}]\n")).unwrap_or_default();
        far.configure(&format!("{MACHINES}[hosts]\nlisten = [\"{listen}\"]\n{links}"))?;
        let (near, far) = tokio::try_join!(
            start_daemon(link.command(0, program)?, near),
            start_daemon(link.command(1, program)?, far),
        )?;
        let pair = Self { near, far };
        match pair.introduce(link, call).await {
            Ok(()) => Ok(pair),
            Err(error) => Err(pair.with_logs(error)),
        }
    }

    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        let (near, far) = tokio::join!(self.near.stop(), self.far.stop());
        near.with_context(|| format!("on host {}", NAMES[0]))?;
        far.with_context(|| format!("on host {}", NAMES[1]))
    }

    pub(crate) fn with_logs(&self, error: anyhow::Error) -> anyhow::Error {
        self.near.with_log(self.far.with_log(error))
    }

    async fn introduce(&self, link: &Link, call: Option<SocketAddr>) -> anyhow::Result<()> {
        self.near.create_identity(NAMES[0]).await?;
        let listening = self.far.create_identity(NAMES[1]).await?;
        let listening = listening.first().context("the second host listens nowhere")?;
        let listening = listening.parse().context("read where the second host listens")?;
        link.lead_to(listening);
        self.near.join(&self.far, &call.unwrap_or(listening).to_string()).await
    }
}
