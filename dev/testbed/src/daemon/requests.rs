//! Requests to a daemon's API. A failure shows its log.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{
    ExportSettings, JoinHost, MigrateVolume, Migration, MigrationHistory, MigrationState, NewIdentity,
    NewInvitation, NewVm, NewVolume, VmState, Volume, VolumeSource, VolumeState, Watch,
};
use tokio::time::{Instant, sleep};

use super::Daemon;
use crate::wait::{DEADLINE, INTERVAL};

/// Life of an invitation, which is redeemed at once.
const INVITATION_LIFETIME: Duration = Duration::from_secs(60);

impl Daemon {
    /// Makes a volume of zeroes.
    ///
    /// # Errors
    /// What the daemon says; the message ends with its log.
    pub async fn create_volume(&self, name: &str, size_bytes: u64, store: &str) -> anyhow::Result<Volume> {
        let (size_bytes, store) = (Some(size_bytes), Some(store.to_owned()));
        let source = VolumeSource::Create { size_bytes, store, image: None, format: None };
        self.new_volume(name, source, ExportSettings::default()).await
    }

    /// Serves a raw image in place.
    ///
    /// # Errors
    /// What the daemon says; the message ends with its log.
    pub async fn add_volume(&self, name: &str, image: &Path) -> anyhow::Result<Volume> {
        self.export_volume(name, image, ExportSettings::default()).await
    }

    /// Serves a raw image in place with these export settings.
    ///
    /// # Errors
    /// What the daemon says; the message ends with its log.
    pub async fn export_volume(
        &self,
        name: &str,
        image: &Path,
        export: ExportSettings,
    ) -> anyhow::Result<Volume> {
        let image = image.to_str().with_context(|| format!("{} is no Unicode", image.display()))?;
        self.new_volume(name, VolumeSource::file(image), export).await
    }

    /// Makes the identity of its host with this name, and returns its addresses for other hosts.
    ///
    /// # Errors
    /// What the daemon says; the message ends with its log.
    pub async fn create_identity(&self, name: &str) -> anyhow::Result<Vec<String>> {
        let made = self.client.create_identity(&NewIdentity { name: name.to_owned() }).await;
        let made = made.with_context(|| format!("make the identity of host {name}"));
        made.map(|identity| identity.listening).map_err(|error| self.with_log(error))
    }

    /// Pairs its host with that of `other`, whose address is `address`.
    ///
    /// # Errors
    /// What the daemons say; the message ends with the log of the one that failed.
    pub async fn join(&self, other: &Self, address: &str) -> anyhow::Result<()> {
        let lifetime_s = INVITATION_LIFETIME.as_secs();
        // Each host permits VMs of the other.
        let order = NewInvitation { lifetime_s, allow_machines: true };
        let invitation = other.client.invite(&order).await.context("invite a host");
        let token = invitation.map_err(|error| other.with_log(error))?.token;
        let order = JoinHost { token, address: Some(address.to_owned()), allow_machines: Some(true) };
        let joined = self.client.join_host(&order).await;
        let joined = joined.with_context(|| format!("join the host at {address}"));
        joined.map(|_| ()).map_err(|error| self.with_log(error))
    }

    /// Adds a VM by its definition, and starts it.
    ///
    /// # Errors
    /// What the daemon says.
    pub async fn start_vm(&self, name: &str, definition: String) -> anyhow::Result<()> {
        let vm = NewVm { name: name.to_owned(), definition };
        self.client.add_vm(&vm).await.with_context(|| format!("add VM {name}"))?;
        self.client
            .start_vm(name, api::StartVm::default())
            .await
            .with_context(|| format!("start VM {name}"))?;
        Ok(())
    }

    /// Moves a volume and waits for the end. `progress` gets every change.
    ///
    /// # Errors
    /// If the volume is not at the target at the end; the message has the reason and the daemon's log.
    pub async fn migrate(
        &self,
        volume: &str,
        order: &MigrateVolume,
        mut progress: impl FnMut(&Migration),
    ) -> anyhow::Result<Migration> {
        let migration = async {
            let mut migration = self.client.migrate(volume, order).await?;
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
        let context = || format!("migrate volume {volume} to store {}", order.to);
        migration.await.with_context(context).map_err(|error| self.with_log(error))
    }

    /// Waits for the end of a migration, without a deadline, and returns its outcome.
    pub(super) async fn ended(&self, id: &str) -> anyhow::Result<Migration> {
        let mut migration = self.client.migration(id, Watch::default()).await?;
        while !migration.state.has_ended() {
            let watch = Watch { after: Some(migration.change), wait_ms: api::WAIT_MAX_MS };
            migration = self.client.migration(id, watch).await?;
        }
        Ok(migration)
    }

    /// Returns the volume of this name.
    ///
    /// # Errors
    /// What the daemon says.
    pub async fn volume(&self, name: &str) -> anyhow::Result<Volume> {
        self.client.volume(name).await.with_context(|| format!("ask for volume {name}"))
    }

    /// Waits until it serves a volume that has just arrived.
    ///
    /// # Errors
    /// If it does not in time.
    pub async fn serves(&self, volume: &str) -> anyhow::Result<Volume> {
        let give_up_at = Instant::now() + DEADLINE;
        loop {
            let found = self.volume(volume).await?;
            if found.state == VolumeState::Serving {
                return Ok(found);
            }
            ensure!(
                Instant::now() < give_up_at,
                "volume {volume} has been moved, but it is still {:?}: {:?}",
                found.state,
                found.message
            );
            sleep(INTERVAL).await;
        }
    }

    /// Waits until it sees that a VM that has just arrived runs.
    ///
    /// # Errors
    /// If it does not in time.
    pub async fn runs(&self, vm: &str) -> anyhow::Result<()> {
        let give_up_at = Instant::now() + DEADLINE;
        loop {
            let found = self.client.vm(vm).await.with_context(|| format!("ask for VM {vm}"))?;
            if found.state == VmState::Running {
                return Ok(());
            }
            ensure!(
                Instant::now() < give_up_at,
                "VM {vm} has been moved, but it is still {:?}: {:?}",
                found.state,
                found.message
            );
            sleep(INTERVAL).await;
        }
    }

    /// Returns the recording of a migration; `None` if the daemon has none.
    pub async fn history(&self, migration: &str) -> Option<MigrationHistory> {
        let history = self.client.migration_history(migration).await;
        history.inspect_err(|error| tracing::debug!(%error, "there is no history")).ok()
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
}
