//! Volumes that come from other hosts.
//!
//! ```text
//!   survey ─► incoming ─► arrive: room, images ─► await_arrival: lanes ─► the handover
//!                           ├─ branches       refuses a volume that is another branch of one that is here
//!                           ├─ taking_back    the image that a volume has left here and returns to
//!                           └─ shared         the source's host may write the image itself
//! ```

pub(crate) mod arrive;
pub(crate) mod await_arrival;
pub(crate) mod branches;
pub(crate) mod incoming;
pub(crate) mod shared;
pub(crate) mod survey;
pub(crate) mod taking_back;

use std::sync::Arc;

use tokio::sync::Semaphore;

use crate::config::Config;
use crate::custody::Custody;
use crate::files::sockets::SocketFolder;
use crate::host::{
    Draining, Exports, MigrationHooks, Parts, PresentLimits, Serving, SessionRunner, Standbys, VmOrders,
};
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::migrations::metadata::MetadataFolder;
use crate::migrations::registry::Migrations;
use crate::migrations::sessions::Sessions;
use crate::migrations::shares::Shares;
use crate::peers::Peers;
use crate::stores::Stores;
use crate::vms::Vms;
use crate::vms::moving::VmMoves;
use crate::volumes::chronicles::Chronicles;
use crate::volumes::registry::Volumes;

/// Receives volumes from other hosts.
pub(crate) struct Arrivals {
    migrations: Arc<Migrations>,
    config: Arc<Config>,
    limits: Arc<PresentLimits>,
    journal: Journal,
    chronicles: Chronicles,
    custody: Custody,
    stores: Arc<Stores>,
    volumes: Arc<Volumes>,
    shares: Arc<Shares>,
    metadata_folder: Arc<MetadataFolder>,
    sessions: Arc<Sessions>,
    sockets: Arc<SocketFolder>,
    hosts: Arc<Hosts>,
    peers: Arc<Peers>,
    moving: Arc<VmMoves>,
    vms: Arc<Vms>,
    looks: Arc<Semaphore>,
    draining: Arc<Draining>,
    exports: Arc<Exports>,
    serving: Arc<Serving>,
    migration_hooks: Arc<MigrationHooks>,
    vm_orders: Arc<VmOrders>,
    runner: Arc<SessionRunner>,
    standbys: Arc<Standbys>,
}

impl Arrivals {
    /// Returns the room of standbys: departures tell them what leaves.
    pub(crate) fn standbys(&self) -> Arc<Standbys> {
        Arc::clone(&self.standbys)
    }

    pub(crate) fn new(
        parts: &Parts,
        exports: &Arc<Exports>,
        serving: &Arc<Serving>,
        migration_hooks: &Arc<MigrationHooks>,
        vm_orders: &Arc<VmOrders>,
        runner: &Arc<SessionRunner>,
        standbys: &Arc<Standbys>,
    ) -> Arc<Self> {
        let Parts {
            migrations,
            config,
            limits,
            journal,
            chronicles,
            custody,
            stores,
            volumes,
            shares,
            metadata_folder,
            sessions,
            sockets,
            hosts,
            peers,
            moving,
            vms,
            looks,
            draining,
            ..
        } = parts.clone();
        Arc::new(Self {
            migrations,
            config,
            limits,
            journal,
            chronicles,
            custody,
            stores,
            volumes,
            shares,
            metadata_folder,
            sessions,
            sockets,
            hosts,
            peers,
            moving,
            vms,
            looks,
            draining,
            exports: Arc::clone(exports),
            serving: Arc::clone(serving),
            migration_hooks: Arc::clone(migration_hooks),
            vm_orders: Arc::clone(vm_orders),
            runner: Arc::clone(runner),
            standbys: Arc::clone(standbys),
        })
    }
}
