//! Describes the host as a whole: to clients, for the page, for monitoring and for service managers.

pub(crate) mod metrics;
pub(crate) mod overview;
pub(crate) mod readiness;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use migration::MigrationId;
use tokio::sync::Semaphore;

use crate::audit::Audit;
use crate::config::Config;
use crate::grants::Grants;
use crate::host::description::overview::Overviews;
use crate::host::{Draining, Parts, PresentLimits, Standbys, Stopping, VmOrders, VolumeViews};
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::migrations::ends::Ends;
use crate::migrations::history::Histories;
use crate::migrations::queue::Queue;
use crate::migrations::registry::{Migrations, parse_id};
use crate::migrations::shares::Shares;
use crate::peers::Peers;
use crate::stores::Stores;
use crate::volumes::registry::Volumes;

/// Describes the host as a whole: for the page, for monitoring, for service managers.
pub(crate) struct Description {
    audit: Audit,
    grants: Arc<Grants>,
    config: Arc<Config>,
    limits: Arc<PresentLimits>,
    journal: Journal,
    stores: Arc<Stores>,
    volumes: Arc<Volumes>,
    migrations: Arc<Migrations>,
    queue: Arc<Queue>,
    shares: Arc<Shares>,
    histories: Arc<Histories>,
    ends: Arc<Ends>,
    hosts: Arc<Hosts>,
    peers: Arc<Peers>,
    overviews: Arc<Overviews>,
    started_unix_ms: u64,
    looks: Arc<Semaphore>,
    stopping: Stopping,
    draining: Arc<Draining>,
    views: Arc<VolumeViews>,
    vm_orders: Arc<VmOrders>,
    standbys: Arc<Standbys>,
}

impl Description {
    pub(crate) fn new(
        parts: &Parts,
        views: &Arc<VolumeViews>,
        vm_orders: &Arc<VmOrders>,
        standbys: &Arc<Standbys>,
    ) -> Arc<Self> {
        let Parts {
            audit,
            grants,
            config,
            limits,
            journal,
            stores,
            volumes,
            migrations,
            queue,
            shares,
            histories,
            ends,
            hosts,
            peers,
            overviews,
            started_unix_ms,
            looks,
            stopping,
            draining,
            ..
        } = parts.clone();
        Arc::new(Self {
            audit,
            grants,
            config,
            limits,
            journal,
            stores,
            volumes,
            migrations,
            queue,
            shares,
            histories,
            ends,
            hosts,
            peers,
            overviews,
            started_unix_ms,
            looks,
            stopping,
            draining,
            views: Arc::clone(views),
            vm_orders: Arc::clone(vm_orders),
            standbys: Arc::clone(standbys),
        })
    }

    /// Returns the numbers of the migrations that have not ended, and of all that the journal knows.
    pub(crate) fn migration_numbers(&self) -> (BTreeSet<u64>, Vec<u64>) {
        let unfinished = self.migrations.list_unfinished(&self.journal).into_iter();
        let unfinished = unfinished.filter_map(|migration| parse_id(&migration.id).ok());
        let all = self.journal.read(|state| state.migrations.keys().map(|id| id.0).collect());
        (unfinished.map(|id| id.0).collect(), all)
    }

    /// Describes a migration, without its ticket; `None`: it is not known.
    pub(crate) fn migration(&self, number: u64) -> Option<api::Migration> {
        let migration = self.migrations.get(&self.journal, MigrationId(number)).ok()?;
        Some(api::Migration { ticket: None, ..migration })
    }

    pub(crate) fn describe(&self) -> api::Host {
        let text = |path: &Path| path.display().to_string();
        api::Host {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started_unix_ms: self.started_unix_ms,
            data_dir: text(&self.config.data_dir),
            runtime_dir: text(&self.config.volume_sockets_dir),
            engine: self.config.engine.name().to_owned(),
            volumes: self.volumes.list().len(),
            migrations_running: self.migrations.running(),
            drained: self.draining.is_drained(),
            evacuating: self.draining.is_evacuating(),
        }
    }
}
