//! What is run before and after volumes change hands that move without a machine: between two hosts, and on one.
//!
//! Whether anything is to be run, the source asks the target before it begins; with a machine it is run by
//! [`super::machine`].

use std::sync::Arc;

use migration::MigrationId;
use migration::source::Moves;
use transport::Session;

use super::Host;
use crate::escorts::answer;
use crate::hooks::{Begun, HookSide};
use crate::peers::host_id;

impl Host {
    /// Whether something is to be run at this host.
    pub(super) fn has_hooks(&self) -> bool {
        self.config.hooks.before.is_some() || self.config.hooks.after.is_some()
    }

    /// Volumes go to another store of this host.
    pub(super) fn escort_here(self: &Arc<Self>, migration: MigrationId) -> Moves {
        if !self.has_hooks() {
            return Moves::Volumes;
        }
        let errand = self.errand(migration, "", HookSide::Both, "", Begun::No);
        self.escorts.leaves(migration, errand, None);
        self.see_escort_off(migration);
        Moves::VolumesAfterHooks
    }

    /// Volumes leave for another host.
    pub(super) fn escort_away(self: &Arc<Self>, migration: MigrationId, session: &Session, begun: Begun) {
        let host = self.hosts.name_of(host_id(session.peer()));
        let errand = self.errand(migration, "", HookSide::Source, &host, begun);
        let line = self.peers.hooks_line(session, self.peers.own(), migration);
        self.escorts.leaves(migration, errand, Some(line));
        self.see_escort_off(migration);
    }

    /// Volumes come from another host, which asks for this host's part when they are copied; `remote` is the number that the
    /// migration has there.
    pub(super) fn escort_in(
        self: &Arc<Self>,
        migration: MigrationId,
        remote: MigrationId,
        session: &Session,
        begun: Begun,
    ) {
        let peer = host_id(session.peer());
        let errand = self.errand(migration, "", HookSide::Target, &self.hosts.name_of(peer), begun);
        let answers = tokio::spawn(answer(self.peers.hooks_line(session, peer, remote), Arc::clone(&errand)));
        let host = Arc::clone(self);
        tokio::spawn(async move {
            let outcome = host.migrations.outcome(migration).await;
            answers.abort();
            // None: the daemon stops, and the next one goes on with it.
            if let Some(outcome) = outcome {
                errand.after(&outcome).await;
            }
        });
    }

    fn see_escort_off(self: &Arc<Self>, migration: MigrationId) {
        let host = Arc::clone(self);
        tokio::spawn(async move {
            let outcome = host.migrations.outcome(migration).await;
            let errand = host.escorts.forget(migration);
            if let (Some(outcome), Some(errand)) = (outcome, errand) {
                errand.after(&outcome).await;
            }
        });
    }
}
