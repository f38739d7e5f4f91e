//! Makes the hooks of a migration, and runs them for volumes that move without a VM. With a VM, [`crate::vms::orders::move_vm`]
//! runs them. The source asks the target before it begins whether hooks are to run.

use std::sync::Arc;

use futures_util::FutureExt as _;
use migration::MigrationId;
use migration::journal::{Outcome, Stage};
use migration::source::Moves;
use transport::Session;

use crate::config::Config;
use crate::hooks::{HookContext, HookRunner, HookSide, Hooks};
use crate::host::Parts;
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::migrations::metadata::MetadataFolder;
use crate::migrations::registry::Migrations;
use crate::migrations::volume_hooks::{VolumeHooks, answer, ask};
use crate::peers::{Peers, host_id};

/// Prepares and runs the hooks of migrations.
pub(crate) struct MigrationHooks {
    pub(crate) config: Arc<Config>,
    pub(crate) journal: Journal,
    pub(crate) migrations: Arc<Migrations>,
    pub(crate) metadata_folder: Arc<MetadataFolder>,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) volume_hooks: Arc<VolumeHooks>,
    pub(crate) hooks: Arc<Hooks>,
}

impl MigrationHooks {
    pub(crate) fn new(parts: &Parts) -> Arc<Self> {
        let Parts { config, journal, migrations, metadata_folder, hosts, peers, volume_hooks, hooks, .. } =
            parts.clone();
        Arc::new(Self { config, journal, migrations, metadata_folder, hosts, peers, volume_hooks, hooks })
    }

    pub(crate) fn has_hooks(&self) -> bool {
        self.config.hooks.before.is_some() || self.config.hooks.after.is_some()
    }

    /// Prepares hooks for volumes that go to another store of this host.
    pub(crate) fn prepare_hooks_here(self: &Arc<Self>, migration: MigrationId) -> Moves {
        if !self.has_hooks() {
            return Moves::Volumes;
        }
        let hooks = self.hook_runner(migration, "", HookSide::Both, "");
        self.volume_hooks.leaves(migration, hooks, None);
        self.run_hooks_after(migration);
        Moves::VolumesAfterHooks
    }

    /// Prepares hooks for volumes that leave for another host.
    pub(crate) fn prepare_hooks_away(self: &Arc<Self>, migration: MigrationId, session: &Session) {
        let host = self.hosts.name_of(host_id(session.peer()));
        let hooks = self.hook_runner(migration, "", HookSide::Source, &host);
        let line = self.peers.hooks_channel(session, self.peers.own(), migration);
        self.volume_hooks.leaves(migration, hooks, Some(ask(line).boxed()));
        self.run_hooks_after(migration);
    }

    /// Prepares hooks for volumes that come from another host, which asks for them once the volumes are copied. `remote`
    /// is the migration's number there.
    pub(crate) fn prepare_hooks_in(
        self: &Arc<Self>,
        migration: MigrationId,
        remote: MigrationId,
        session: &Session,
    ) {
        let peer = host_id(session.peer());
        let hooks = self.hook_runner(migration, "", HookSide::Target, &self.hosts.name_of(peer));
        let answers =
            tokio::spawn(answer(self.peers.hooks_channel(session, peer, remote), Arc::clone(&hooks)));
        let host = Arc::clone(self);
        tokio::spawn(async move {
            let outcome = host.migrations.outcome(migration).await;
            answers.abort();
            // None: the daemon stops, and the next one resumes the migration.
            if let Some(outcome) = outcome {
                hooks.after(&outcome).await;
            }
        });
    }

    pub(crate) fn run_hooks_after(self: &Arc<Self>, migration: MigrationId) {
        let host = Arc::clone(self);
        tokio::spawn(async move {
            let outcome = host.migrations.outcome(migration).await;
            let hooks = host.volume_hooks.forget(migration);
            if let (Some(outcome), Some(hooks)) = (outcome, hooks) {
                hooks.after(&outcome).await;
            }
        });
    }

    /// Returns the hooks for a VM that moves to or from the host `other`.
    pub(crate) fn hook_runner(
        self: &Arc<Self>,
        migration: MigrationId,
        vm: &str,
        side: HookSide,
        other: &str,
    ) -> Arc<HookRunner> {
        let volumes =
            self.journal.read(|state| state.migrations.get(&migration).map(|known| known.names.clone()));
        let context = HookContext {
            migration,
            vm: vm.to_owned(),
            volumes: volumes.unwrap_or_default(),
            side,
            own: self.hosts.describe_identity().map(|identity| identity.name).unwrap_or_default(),
            other: other.to_owned(),
            outcome: None,
        };
        HookRunner::new(&self.hooks, context)
    }

    /// Reports failures of hooks on which nothing depends, and runs hooks that an earlier daemon left for ended migrations.
    /// Other migrations run their own hooks.
    pub(crate) fn settle_hooks(self: &Arc<Self>) {
        let host = Arc::downgrade(self);
        self.hooks.warn_of(move |migration, warning| {
            let Some(host) = host.upgrade() else { return };
            tokio::spawn(async move {
                if let Some(begun) = host.journal.begun_unix_ms(migration) {
                    host.metadata_folder.note(migration, begun, |metadata| metadata.warn(warning)).await;
                }
            });
        });
        for migration in self.hooks.migrations() {
            let outcome = self.journal.read(|state| match state.migrations.get(&migration) {
                Some(known) => match &known.stage {
                    Stage::Ended(outcome) => Some(outcome.clone()),
                    _ => None,
                },
                // The migration was forgotten, or never began.
                None => Some(Outcome::Cancelled),
            });
            if let Some(outcome) = outcome {
                let hooks = Arc::clone(&self.hooks);
                tokio::spawn(async move { hooks.after(migration, &outcome).await });
            }
        }
    }
}
