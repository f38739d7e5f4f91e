//! Writes audit records of ended migrations: a line in the log with all figures, and sums.

use std::sync::Arc;

use api::Migration;
use migration::MigrationId;
use migration::journal::{MigrationState, State};

use super::MigrationOrders;
use crate::migrations::ends;

impl MigrationOrders {
    /// Accounts for each migration that ends, after everything that belongs to it, until the daemon stops.
    pub(crate) fn account_for_migrations(self: &Arc<Self>) {
        let (host, mut ends) = (Arc::clone(self), self.migrations.ends());
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    // The channel lives as long as the host.
                    Some(migration) = ends.recv() => {
                        tokio::spawn(Arc::clone(&host).account_for(migration));
                    }
                    // N.B. a reference to the host keeps its data folder locked.
                    () = host.stopping.begins() => return,
                }
            }
        });
    }

    async fn account_for(self: Arc<Self>, migration: MigrationId) {
        tokio::select! {
            () = self.migrations.over(migration) => {}
            () = self.stopping.begins() => return,
        }
        let known = self.journal.read(|state: &State| state.migrations.get(&migration).cloned());
        let (Some(known), Ok(ended)) = (known, self.migrations.get(&self.journal, migration)) else { return };
        self.ends.add(ends::direction(&known.side), &ended);
        self.learn_from(migration, &known, &ended).await;
        let (histories, started) = (Arc::clone(&self.histories), known.started_unix_ms);
        let recording = tokio::task::spawn_blocking(move || histories.get(migration, started)).await;
        // A lost recording is missing here, as it is in a report.
        let felt = recording.ok().flatten().and_then(|recording| recording.during);
        log(&known, &ended, felt.as_ref());
    }
}

fn log(known: &MigrationState, ended: &Migration, felt: Option<&api::GuestFigures>) {
    let downtime = ended.machine.as_ref().and_then(|machine| machine.downtime.as_ref());
    tracing::info!(
        migration = %ended.id,
        volumes = %ended.volume,
        direction = ends::direction(&known.side),
        host = known.side.peer().map(|(_, name)| name),
        source = %ended.source.image,
        target = %ended.target.image,
        outcome = ended.state.name(),
        failure = ended.failure,
        seconds = ended.seconds,
        bytes_copied = ended.bytes_copied,
        bytes_mirrored = ended.bytes_mirrored,
        bytes_zero = ended.bytes_zero,
        bytes_cloned = ended.bytes_cloned,
        attempts = ended.attempt,
        gate_closed_ms = ended.switch_over.map(|switch_over| switch_over.gate_closed_ms),
        vm_downtime_ms = downtime.map(|downtime| downtime.total_ms),
        longest_request_us = felt.and_then(|felt| felt.worst_us),
        request_errors = felt.map(|felt| felt.errors),
        "a migration has ended"
    );
}
