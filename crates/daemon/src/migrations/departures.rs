//! Volumes that leave their store, for another one or for another host.
//!
//! ```text
//!   to a store    local: room ─► started ─► image ─► the lane copies ─► the handover          after a restart: local/again
//!   to a host     leave ─► ahead: checks ─► outgoing: started ─► offer ─► outgoing/begin: the lanes copy ─► the handover
//! ```

pub(crate) mod ahead;
mod clients;
pub(crate) mod leave;
pub(crate) mod local;
pub(crate) mod outgoing;
pub(crate) mod probing;
pub(crate) mod strategies;

use std::sync::{Arc, OnceLock};

use futures_util::future::BoxFuture;
use migration::MigrationId;
use tokio::sync::Semaphore;

use crate::config::Config;
use crate::custody::Custody;
use crate::files::sockets::SocketFolder;
use crate::host::{
    Arrivals, MigrationHooks, Parts, PresentLimits, Serving, SessionRunner, VmOrders, VolumeClaims,
};
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::migrations::history::Histories;
use crate::migrations::metadata::MetadataFolder;
use crate::migrations::registry::Migrations;
use crate::peers::Peers;
use crate::standbys::Standbys;
use crate::stores::Stores;
use crate::vms::Vms;
use crate::vms::moving::VmMoves;
use crate::vms::proved::Finders;
use crate::volumes::chronicles::Chronicles;
use crate::volumes::registry::Volumes;

/// Repeats a migration from the beginning, if an orderly stop of the daemon interrupted it.
type Repeat = Box<dyn Fn(MigrationId) -> BoxFuture<'static, ()> + Send + Sync>;

/// Sends volumes to other stores and hosts.
pub(crate) struct Departures {
    custody: Custody,
    moving: Arc<VmMoves>,
    histories: Arc<Histories>,
    config: Arc<Config>,
    limits: Arc<PresentLimits>,
    journal: Journal,
    chronicles: Chronicles,
    stores: Arc<Stores>,
    volumes: Arc<Volumes>,
    migrations: Arc<Migrations>,
    metadata_folder: Arc<MetadataFolder>,
    sockets: Arc<SocketFolder>,
    hosts: Arc<Hosts>,
    peers: Arc<Peers>,
    vms: Arc<Vms>,
    finders: Arc<Finders>,
    looks: Arc<Semaphore>,
    claims: Arc<VolumeClaims>,
    serving: Arc<Serving>,
    migration_hooks: Arc<MigrationHooks>,
    vm_orders: Arc<VmOrders>,
    runner: Arc<SessionRunner>,
    arrivals: Arc<Arrivals>,
    standbys: Arc<Standbys>,
    /// Repeats a migration between stores that a restart has interrupted.
    repeat: OnceLock<Repeat>,
}

impl Departures {
    pub(crate) fn new(
        parts: &Parts,
        claims: &Arc<VolumeClaims>,
        serving: &Arc<Serving>,
        migration_hooks: &Arc<MigrationHooks>,
        vm_orders: &Arc<VmOrders>,
        runner: &Arc<SessionRunner>,
        arrivals: &Arc<Arrivals>,
    ) -> Arc<Self> {
        let Parts {
            custody,
            moving,
            histories,
            config,
            limits,
            journal,
            chronicles,
            stores,
            volumes,
            migrations,
            metadata_folder,
            sockets,
            hosts,
            peers,
            vms,
            finders,
            looks,
            ..
        } = parts.clone();
        Arc::new(Self {
            custody,
            moving,
            histories,
            config,
            limits,
            journal,
            chronicles,
            stores,
            volumes,
            migrations,
            metadata_folder,
            sockets,
            hosts,
            peers,
            vms,
            finders,
            looks,
            claims: Arc::clone(claims),
            serving: Arc::clone(serving),
            migration_hooks: Arc::clone(migration_hooks),
            vm_orders: Arc::clone(vm_orders),
            runner: Arc::clone(runner),
            arrivals: Arc::clone(arrivals),
            standbys: arrivals.standbys(),
            repeat: OnceLock::new(),
        })
    }

    /// Names what repeats migrations: their orders are in a room above this one.
    pub(crate) fn repeat_with(
        &self,
        repeat: impl Fn(MigrationId) -> BoxFuture<'static, ()> + Send + Sync + 'static,
    ) {
        // There is one.
        let _ = self.repeat.set(Box::new(repeat));
    }

    pub(crate) async fn repeat(&self, migration: MigrationId) {
        if let Some(repeat) = self.repeat.get() {
            repeat(migration).await;
        }
    }
}
