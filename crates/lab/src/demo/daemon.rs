//! The daemon of the demo: a child process, and what the demo asks of it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use api::{
    Address, Client, ExportSettings, JoinHost, MigrateVolume, Migration, MigrationHistory, MigrationState,
    NewIdentity, NewInvitation, NewVolume, Volume, VolumeSource, Watch,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use super::folder::DemoFolder;

/// How long the daemon may take to answer for the first time.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// How long it may take to end after it was asked to.
const STOP_DEADLINE: Duration = Duration::from_secs(60);
/// How long an invitation of the lab is good: it is redeemed at once.
const INVITATION_LIFETIME: Duration = Duration::from_secs(60);
/// How often it is looked whether it answers.
const START_PAUSE: Duration = Duration::from_millis(20);
/// How much of its log a failure shows.
const LOG_LINES_SHOWN: usize = 20;

/// A running daemon.
///
/// Dropping it kills the process.
#[derive(Debug)]
pub(crate) struct Daemon {
    child: Child,
    client: Client,
    log: PathBuf,
}

impl Daemon {
    /// Starts `PROGRAM serve` on the folder's stores and waits until it answers.
    ///
    /// # Errors
    /// If it does not start or answer; the message ends with its log.
    pub(crate) async fn start(program: &Path, folder: &DemoFolder) -> anyhow::Result<Self> {
        Self::start_by(Command::new(program), folder).await
    }

    /// The same by a command to which the daemon's arguments are added: by the program itself, or by one that becomes it.
    ///
    /// # Errors
    /// If it does not start or answer; the message ends with its log.
    pub(crate) async fn start_by(mut command: Command, folder: &DemoFolder) -> anyhow::Result<Self> {
        let address = Address::unix(folder.api_socket())?;
        let log = File::create(folder.log()).context("make the daemon's log")?;
        let child = command
            .arg("serve")
            .arg("--config")
            .arg(folder.config())
            .arg("--data-dir")
            .arg(folder.data())
            .arg("--api")
            .arg(address.to_string())
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share the daemon's log")?)
            .stderr(log)
            // A group of its own: Ctrl-C is for the demo, which then ends the daemon in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {command:?}"))?;
        let mut daemon = Self { child, client: Client::new(address), log: folder.log() };
        match daemon.wait_until_it_answers().await {
            Ok(()) => Ok(daemon),
            Err(error) => Err(daemon.with_log(error)),
        }
    }

    /// Makes a volume of zeroes.
    ///
    /// # Errors
    /// What the daemon says; the message ends with its log.
    pub(crate) async fn create_volume(
        &self,
        name: &str,
        size_bytes: u64,
        store: &str,
    ) -> anyhow::Result<Volume> {
        let (size_bytes, store) = (Some(size_bytes), Some(store.to_owned()));
        let source = VolumeSource::Create { size_bytes, store, image: None, format: None };
        self.new_volume(name, source, ExportSettings::default()).await
    }

    /// Serves a raw image where it is.
    ///
    /// # Errors
    /// What the daemon says; the message ends with its log.
    pub(crate) async fn add_volume(&self, name: &str, image: &Path) -> anyhow::Result<Volume> {
        self.export_volume(name, image, ExportSettings::default()).await
    }

    /// Serves a raw image where it is, as `export` says.
    ///
    /// # Errors
    /// What the daemon says; the message ends with its log.
    pub(crate) async fn export_volume(
        &self,
        name: &str,
        image: &Path,
        export: ExportSettings,
    ) -> anyhow::Result<Volume> {
        let image = image.to_str().with_context(|| format!("{} is no Unicode", image.display()))?;
        self.new_volume(name, VolumeSource::file(image), export).await
    }

    /// Makes the identity of its host, which others call `name`.
    ///
    /// # Errors
    /// What the daemon says; the message ends with its log.
    pub(crate) async fn create_identity(&self, name: &str) -> anyhow::Result<()> {
        let made = self.client.create_identity(&NewIdentity { name: name.to_owned() }).await;
        let made = made.with_context(|| format!("make the identity of host {name}"));
        made.map(|_| ()).map_err(|error| self.with_log(error))
    }

    /// Pairs its host with that of `other`, which is called at `address`.
    ///
    /// # Errors
    /// What the daemons say; the message ends with the log of the one that failed.
    pub(crate) async fn join(&self, other: &Self, address: &str) -> anyhow::Result<()> {
        let lifetime_s = INVITATION_LIFETIME.as_secs();
        // Hosts of a demo bring each other whatever is to be seen.
        let order = NewInvitation { lifetime_s, allow_machines: true };
        let invitation = other.client.invite(&order).await.context("invite a host");
        let token = invitation.map_err(|error| other.with_log(error))?.token;
        let order = JoinHost { token, address: Some(address.to_owned()), allow_machines: Some(true) };
        let joined = self.client.join_host(&order).await;
        let joined = joined.with_context(|| format!("join the host at {address}"));
        joined.map(|_| ()).map_err(|error| self.with_log(error))
    }

    /// Number of its process; `None` once it has ended.
    pub(crate) fn process_id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Moves a volume and waits until that has ended. `progress` hears of every change.
    ///
    /// # Errors
    /// If the volume is not at the target in the end; the message says why and ends with the daemon's log.
    pub(crate) async fn migrate(
        &self,
        volume: &str,
        store: &str,
        mut progress: impl FnMut(&Migration),
    ) -> anyhow::Result<Migration> {
        let order = MigrateVolume::to(store);
        let migration = async {
            let mut migration = self.client.migrate(volume, &order).await?;
            progress(&migration);
            while !migration.state.has_ended() {
                let watch = Watch { after: Some(migration.change), wait_ms: api::WAIT_MAX_MS };
                migration = self.client.migration(&migration.id, watch).await?;
                progress(&migration);
            }
            ensure!(
                migration.state == MigrationState::Moved,
                "it ended as \"{}\": {}",
                migration.state.name(),
                migration.message.as_deref().unwrap_or("no reason is given")
            );
            Ok(migration)
        };
        let context = || format!("migrate volume {volume} to store {store}");
        migration.await.with_context(context).map_err(|error| self.with_log(error))
    }

    /// What speaks to it.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Describes a volume.
    ///
    /// # Errors
    /// What the daemon says.
    pub(crate) async fn volume(&self, name: &str) -> anyhow::Result<Volume> {
        self.client.volume(name).await.with_context(|| format!("ask for volume {name}"))
    }

    /// What was recorded of a migration; `None` if the daemon says nothing of it.
    pub(super) async fn history(&self, migration: &str) -> Option<MigrationHistory> {
        let history = self.client.migration_history(migration).await;
        history.inspect_err(|error| tracing::debug!(%error, "there is no history")).ok()
    }

    /// Asks the daemon to end, and waits for it.
    ///
    /// # Errors
    /// If it does not end in time (then it is killed), or ends with an error.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.signal(Signal::TERM);
        let ended = match timeout(STOP_DEADLINE, self.child.wait()).await {
            Ok(status) => status.context("wait for the daemon")?,
            Err(_) => {
                self.child.kill().await.context("kill the daemon")?;
                let seconds = STOP_DEADLINE.as_secs();
                return Err(
                    self.with_log(anyhow!("the daemon did not end within {seconds} s and was killed"))
                );
            }
        };
        if !ended.success() {
            return Err(self.with_log(anyhow!("the daemon ended with {ended}")));
        }
        Ok(())
    }

    async fn new_volume(
        &self,
        name: &str,
        source: VolumeSource,
        export: ExportSettings,
    ) -> anyhow::Result<Volume> {
        let volume = self.client.create_volume(&NewVolume { name: name.to_owned(), source, export }).await;
        volume.with_context(|| format!("create volume {name}")).map_err(|error| self.with_log(error))
    }

    async fn wait_until_it_answers(&mut self) -> anyhow::Result<()> {
        let give_up_at = Instant::now() + START_DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().context("look after the daemon")? {
                bail!("the daemon ended at once with {status}");
            }
            match self.client.host().await {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() >= give_up_at => {
                    let seconds = START_DEADLINE.as_secs();
                    return Err(error).with_context(|| format!("the daemon did not answer for {seconds} s"));
                }
                Err(_) => sleep(START_PAUSE).await,
            }
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        // No identity means that it has ended; a failure means the same.
        if let Some(Err(error)) = pid.map(|pid| kill_process(pid, signal)) {
            tracing::debug!(%error, "the daemon cannot be signalled");
        }
    }

    /// Adds the end of its log to an error.
    pub(super) fn with_log(&self, error: anyhow::Error) -> anyhow::Error {
        let log = std::fs::read(&self.log).unwrap_or_default();
        with_tail(error, "the daemon's log", &String::from_utf8_lossy(&log))
    }
}

/// Adds the last lines of a log to an error, which is all that a user sees of a folder that is removed.
pub(crate) fn with_tail(error: anyhow::Error, name: &str, log: &str) -> anyhow::Error {
    let lines: Vec<&str> = log.lines().collect();
    let tail = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
    if tail.is_empty() {
        return error;
    }
    anyhow!("{error:#}\n{name} ends with:\n  {}", tail.join("\n  "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_daemon_that_does_not_start_shows_its_log() {
        let parent = tempfile::tempdir().unwrap();
        let folder = DemoFolder::create(Some(parent.path()), 1 << 20).unwrap();
        // Any program that does not know the daemon's arguments.
        let error = Daemon::start(Path::new("/bin/ls"), &folder).await.unwrap_err().to_string();
        assert!(
            error.contains("exit status: 2") && error.contains("  /bin/ls: unrecognized option"),
            "{error}"
        );
    }

    #[test]
    fn only_the_end_of_a_log_is_shown() {
        let log: String = (0..100).map(|line| format!("line {line}\n")).collect();
        let error = with_tail(anyhow!("it failed"), "the log", &log).to_string();
        assert!(
            error.starts_with("it failed\nthe log ends with:\n  line 80\n") && error.ends_with("line 99")
        );
        assert_eq!(with_tail(anyhow!("it failed"), "the log", "").to_string(), "it failed");
    }
}
