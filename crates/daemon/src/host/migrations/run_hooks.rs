//! The hooks of a migration: made for a VM, and run here for volumes that move without one, between two hosts or on one.
//!
//! Whether anything is to be run, the source asks the target before it begins; with a VM it is run by
//! [`crate::host::vms::move_vm`].

use std::sync::Arc;

use migration::MigrationId;
use migration::journal::{Outcome, Stage};
use migration::source::Moves;
use transport::Session;

use crate::hooks::{HookContext, HookRunner, HookSide};
use crate::host::Host;
use crate::migrations::volume_hooks::answer;
use crate::peers::host_id;

impl Host {
    /// Whether something is to be run at this host.
    pub(in crate::host) fn has_hooks(&self) -> bool {
        self.config.hooks.before.is_some() || self.config.hooks.after.is_some()
    }

    /// Volumes go to another store of this host.
    pub(in crate::host) fn prepare_hooks_here(self: &Arc<Self>, migration: MigrationId) -> Moves {
        if !self.has_hooks() {
            return Moves::Volumes;
        }
        let hooks = self.hook_runner(migration, "", HookSide::Both, "");
        self.volume_hooks.leaves(migration, hooks, None);
        self.run_hooks_after(migration);
        Moves::VolumesAfterHooks
    }

    /// Volumes leave for another host.
    pub(in crate::host) fn prepare_hooks_away(self: &Arc<Self>, migration: MigrationId, session: &Session) {
        let host = self.hosts.name_of(host_id(session.peer()));
        let hooks = self.hook_runner(migration, "", HookSide::Source, &host);
        let line = self.peers.hooks_channel(session, self.peers.own(), migration);
        self.volume_hooks.leaves(migration, hooks, Some(line));
        self.run_hooks_after(migration);
    }

    /// Volumes come from another host, which asks for this host's part when they are copied; `remote` is the number that the
    /// migration has there.
    pub(in crate::host) fn prepare_hooks_in(
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
            // None: the daemon stops, and the next one goes on with it.
            if let Some(outcome) = outcome {
                hooks.after(&outcome).await;
            }
        });
    }

    fn run_hooks_after(self: &Arc<Self>, migration: MigrationId) {
        let host = Arc::clone(self);
        tokio::spawn(async move {
            let outcome = host.migrations.outcome(migration).await;
            let hooks = host.volume_hooks.forget(migration);
            if let (Some(outcome), Some(hooks)) = (outcome, hooks) {
                hooks.after(&outcome).await;
            }
        });
    }

    /// What is to be run for a VM that leaves for the host `other`, or comes from there.
    pub(in crate::host) fn hook_runner(
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

    /// Has people told of hooks that fail when nothing depends on them any more, and runs what a daemon before has left to be run
    /// after migrations that have ended. Those that have not ended see to it themselves.
    pub(crate) fn settle_hooks(self: &Arc<Self>) {
        let host = Arc::downgrade(self);
        self.hooks.warn_of(move |migration, warning| {
            let Some(host) = host.upgrade() else { return };
            tokio::spawn(async move {
                if let Some(begun) = host.begun_unix_ms(migration) {
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
                // It was forgotten, or never begun.
                None => Some(Outcome::Cancelled),
            });
            if let Some(outcome) = outcome {
                let hooks = Arc::clone(&self.hooks);
                tokio::spawn(async move { hooks.after(migration, &outcome).await });
            }
        }
    }
}
