//! Two hosts that are paired: a daemon and a folder each.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use api::{Client, JoinHost, NewIdentity, NewInvitation, Volume, VolumeState};
use tokio::time::{Instant, sleep};

use super::NAMES;
use super::link::Link;
use crate::demo::{Daemon, DemoFolder};

/// Lets a demo's machine bring its kernel and its console, which are in folders of the demo's own.
const MACHINES: &str = "[machines]\nfolders = [\"/\"]\n";
/// How long an invitation holds, in seconds: it is used at once.
const INVITATION_LIFETIME_S: u64 = 60;
/// How long a host may take to see that it has a volume that has arrived.
const ARRIVAL_DEADLINE: Duration = Duration::from_secs(60);
/// How often it is asked.
const ARRIVAL_PAUSE: Duration = Duration::from_millis(20);

/// Both hosts' folders, in the order of [`NAMES`].
pub(super) type Folders = [DemoFolder; 2];

/// Two daemons that know each other.
#[derive(Debug)]
pub(crate) struct Pair {
    /// Where the volume begins, and its guest stays. It calls the other one.
    pub(crate) near: Daemon,
    /// Where the volume goes.
    pub(crate) far: Daemon,
}

impl Pair {
    /// Starts a daemon on each host and pairs them.
    ///
    /// # Errors
    /// If one does not start, or refuses the other; the message ends with the logs.
    pub(crate) async fn start(program: &Path, folders: &Folders, link: &Link) -> anyhow::Result<Self> {
        let (listen, call) = link.addresses();
        let [near, far] = folders;
        near.configure(&format!("{MACHINES}[hosts]\nlisten = []\n"))?;
        let links = call.map(|call| format!("links = [{{ address = \"{call}\" }}]\n")).unwrap_or_default();
        far.configure(&format!("{MACHINES}[hosts]\nlisten = [\"{listen}\"]\n{links}"))?;
        let (near, far) = tokio::try_join!(
            Daemon::start_by(link.command(0, program)?, near),
            Daemon::start_by(link.command(1, program)?, far),
        )?;
        let pair = Self { near, far };
        match pair.introduce(link, call).await {
            Ok(()) => Ok(pair),
            Err(error) => Err(pair.with_logs(error)),
        }
    }

    /// Ends both daemons, and waits for them.
    ///
    /// # Errors
    /// If one of them does not end in order.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        let (near, far) = tokio::join!(self.near.stop(), self.far.stop());
        near.with_context(|| format!("on host {}", NAMES[0]))?;
        far.with_context(|| format!("on host {}", NAMES[1]))
    }

    /// Adds the ends of both logs to an error.
    pub(crate) fn with_logs(&self, error: anyhow::Error) -> anyhow::Error {
        self.near.with_log(self.far.with_log(error))
    }

    async fn introduce(&self, link: &Link, call: Option<SocketAddr>) -> anyhow::Result<()> {
        name(self.near.client(), NAMES[0]).await?;
        let listening = name(self.far.client(), NAMES[1]).await?;
        let listening = listening.first().context("the second host listens nowhere")?;
        let listening = listening.parse().context("read where the second host listens")?;
        link.lead_to(listening);
        let call = call.unwrap_or(listening).to_string();
        // Machines of either may go to the other.
        let order = NewInvitation { lifetime_s: INVITATION_LIFETIME_S, allow_machines: true };
        let invitation = self.far.client().invite(&order).await.context("ask for an invitation")?;
        let order = JoinHost { token: invitation.token, address: Some(call), allow_machines: Some(true) };
        self.near.client().join_host(&order).await.context("pair the hosts")?;
        Ok(())
    }
}

/// Waits until a host serves a volume that has just arrived.
///
/// # Errors
/// If it does not in time.
pub(super) async fn arrived(host: &Daemon, volume: &str) -> anyhow::Result<Volume> {
    let give_up_at = Instant::now() + ARRIVAL_DEADLINE;
    loop {
        let found = host.volume(volume).await?;
        if found.state == VolumeState::Serving {
            return Ok(found);
        }
        if Instant::now() >= give_up_at {
            bail!("volume {volume} has been moved, but it is still {:?}: {:?}", found.state, found.message);
        }
        sleep(ARRIVAL_PAUSE).await;
    }
}

/// Gives a host its identity; returns where it listens.
async fn name(client: &Client, name: &str) -> anyhow::Result<Vec<String>> {
    let identity = client.create_identity(&NewIdentity { name: name.to_owned() }).await;
    Ok(identity.with_context(|| format!("name host {name}"))?.listening)
}
