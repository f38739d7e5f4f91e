//! The orders about VMs: add, start, stop, adopt, release; and what migrations need of them: described, moved, settled.

pub(crate) mod adopt;
pub(crate) mod adopted;
pub(crate) mod bind;
pub(crate) mod cold;
pub(crate) mod exchange;
pub(crate) mod libvirt;
pub(crate) mod manage;
pub(crate) mod move_vm;
pub(crate) mod preflight;
pub(crate) mod prove;
pub(crate) mod stall;
pub(crate) mod standing;
pub(crate) mod starting;
pub(crate) mod suspend;

use crate::config::Config;
use crate::custody::Custody;
use crate::files::sockets::SocketFolder;
use crate::host::{Draining, Exports, MigrationHooks, Parts, Stopping, VolumeClaims, VolumeOrders};
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::migrations::volume_hooks::VolumeHooks;
use crate::peers::Peers;
use crate::stores::Stores;
use crate::vms::Vms;
use crate::vms::moving::VmMoves;
use crate::vms::proved::Finders;
use crate::vms::starts::AwaitedStarts;
use crate::volumes::registry::Volumes;
use std::sync::Arc;

/// Carries out the orders about VMs, and keeps what migrations need to know of them.
pub(crate) struct VmOrders {
    config: Arc<Config>,
    journal: Journal,
    custody: Custody,
    stores: Arc<Stores>,
    volumes: Arc<Volumes>,
    sockets: Arc<SocketFolder>,
    hosts: Arc<Hosts>,
    peers: Arc<Peers>,
    volume_hooks: Arc<VolumeHooks>,
    moving: Arc<VmMoves>,
    vms: Arc<Vms>,
    finders: Arc<Finders>,
    starts: Arc<AwaitedStarts>,
    stopping: Stopping,
    draining: Arc<Draining>,
    exports: Arc<Exports>,
    claims: Arc<VolumeClaims>,
    volume_orders: Arc<VolumeOrders>,
    migration_hooks: Arc<MigrationHooks>,
}

impl VmOrders {
    pub(crate) fn new(
        parts: &Parts,
        exports: &Arc<Exports>,
        claims: &Arc<VolumeClaims>,
        volume_orders: &Arc<VolumeOrders>,
        migration_hooks: &Arc<MigrationHooks>,
    ) -> Arc<Self> {
        let Parts {
            config,
            journal,
            custody,
            stores,
            volumes,
            sockets,
            hosts,
            peers,
            volume_hooks,
            moving,
            vms,
            finders,
            stopping,
            draining,
            ..
        } = parts.clone();
        Arc::new(Self {
            config,
            journal,
            custody,
            stores,
            volumes,
            sockets,
            hosts,
            peers,
            volume_hooks,
            moving,
            vms,
            finders,
            starts: Arc::default(),
            stopping,
            draining,
            exports: Arc::clone(exports),
            claims: Arc::clone(claims),
            volume_orders: Arc::clone(volume_orders),
            migration_hooks: Arc::clone(migration_hooks),
        })
    }
}
