//! Ends the host in order: operations, lanes, links. What does not end in time is left to the next start.

use std::sync::Arc;
use std::time::Duration;

use crate::custody::Custody;
use crate::files::sockets::SocketFolder;
use crate::hooks::Hooks;
use crate::host::{MigrationOrders, Operations, Parts, PresentLimits, Serving, Stopping};
use crate::hosts::Hosts;
use crate::journal::{Journal, now_unix_ms};
use crate::migrations::recovery;
use crate::take_over::{Clients, Estate};
use crate::volumes::registry::Volumes;

/// How long a stopping daemon waits for running hooks. The next daemon continues with the rest.
const HOOKS_WAIT_MAX: Duration = Duration::from_secs(5);

/// Ends the rooms of the host, in the order in which they need each other.
pub(crate) struct Shutdown {
    limits: Arc<PresentLimits>,
    journal: Journal,
    custody: Custody,
    volumes: Arc<Volumes>,
    sockets: Arc<SocketFolder>,
    hosts: Arc<Hosts>,
    hooks: Arc<Hooks>,
    operations: Operations,
    stopping: Stopping,
    serving: Arc<Serving>,
    migration_orders: Arc<MigrationOrders>,
}

impl Shutdown {
    pub(super) fn new(
        parts: &Parts,
        serving: &Arc<Serving>,
        migration_orders: &Arc<MigrationOrders>,
    ) -> Arc<Self> {
        let Parts { limits, journal, custody, volumes, sockets, hosts, hooks, operations, stopping, .. } =
            parts.clone();
        let (serving, migration_orders) = (Arc::clone(serving), Arc::clone(migration_orders));
        Arc::new(Self {
            limits,
            journal,
            custody,
            volumes,
            sockets,
            hosts,
            hooks,
            operations,
            stopping,
            serving,
            migration_orders,
        })
    }

    /// Returns how long guests may wait for the end.
    pub(crate) fn wait_max(&self) -> Duration {
        self.limits.now().stop_wait_max
    }

    /// Stops serving, in order: operations end, lanes drain, interrupted migrations are left to the next daemon. Returns the
    /// rest of the restart state, which is empty if clients are to be closed. Whatever does not end in time is in the
    /// journal for the next start.
    pub(crate) async fn stop(&self, clients: Clients) -> Estate {
        let deadline = self.limits.now().stop_wait_max;
        // While guests are served: a running hook may be what their addresses depend on.
        self.hooks.stop(HOOKS_WAIT_MAX).await;
        self.stopping.begin();
        self.volumes.give_up_all();
        if !self.operations.end(deadline).await {
            tracing::warn!("an operation is still under way; the next start completes it");
        }
        if clients == Clients::PassedOn {
            self.serving.settle_lanes(deadline).await;
        }
        let since_unix_ms = now_unix_ms();
        let passed = self.serving.stop_lanes(deadline, clients).await;
        let hosts = Arc::clone(&self.hosts);
        if tokio::task::spawn_blocking(move || hosts.stop()).await.is_err() {
            tracing::warn!("the connections to other hosts were not ended in order");
        }
        self.migration_orders.note_interrupted().await;
        // The lanes of these migrations are gone, so the work of a restart can be done at once.
        if let Err(error) = recovery::run(&self.journal, &self.custody).await {
            tracing::warn!(%error, "an interrupted migration waits for the next start");
        }
        if clients == Clients::PassedOn {
            let mut left = self.sockets.listening().leave();
            left.since_unix_ms = since_unix_ms;
            left.clients.extend(passed);
            return left;
        }
        for (name, _, _) in self.volumes.list() {
            if let Err(error) = self.sockets.forget_volume(&name) {
                tracing::warn!(volume = %name, %error, "a socket is left over");
            }
        }
        Estate::default()
    }
}
