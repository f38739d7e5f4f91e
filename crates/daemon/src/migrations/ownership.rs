//! Volumes that become this host's without a handover: by order, or because the other hosts confirm it.
//!
//! ```text
//!   promote        by order: a copy that arrived, one that was exchanged, one that has departed
//!   restoration    after the journal was restored from a backup
//! ```

pub(crate) mod departed;
pub(crate) mod promote;
pub(crate) mod restoration;

use std::sync::Arc;

use crate::custody::Custody;
use crate::host::{
    Arrivals, Parts, PresentLimits, Resumption, Serving, Stopping, VmOrders, VolumeClaims, VolumeViews,
};
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::migrations::ownership::restoration::Restoring;
use crate::migrations::queue::Queue;
use crate::migrations::registry::Migrations;
use crate::peers::Peers;
use crate::standbys::permissions::Permissions;
use crate::stores::Stores;
use crate::volumes::chronicles::Chronicles;
use crate::volumes::registry::Volumes;

/// Gives volumes to this host by order, or because other hosts confirm that they are its own.
pub(crate) struct Ownership {
    limits: Arc<PresentLimits>,
    journal: Journal,
    chronicles: Chronicles,
    custody: Custody,
    stores: Arc<Stores>,
    volumes: Arc<Volumes>,
    migrations: Arc<Migrations>,
    queue: Arc<Queue>,
    hosts: Arc<Hosts>,
    peers: Arc<Peers>,
    restoring: Arc<Restoring>,
    permissions: Arc<Permissions>,
    stopping: Stopping,
    claims: Arc<VolumeClaims>,
    serving: Arc<Serving>,
    views: Arc<VolumeViews>,
    vm_orders: Arc<VmOrders>,
    arrivals: Arc<Arrivals>,
    resumption: Arc<Resumption>,
}

impl Ownership {
    pub(crate) fn new(
        parts: &Parts,
        claims: &Arc<VolumeClaims>,
        serving: &Arc<Serving>,
        views: &Arc<VolumeViews>,
        vm_orders: &Arc<VmOrders>,
        arrivals: &Arc<Arrivals>,
        resumption: &Arc<Resumption>,
    ) -> Arc<Self> {
        let Parts {
            limits,
            journal,
            chronicles,
            custody,
            stores,
            volumes,
            migrations,
            queue,
            hosts,
            peers,
            restoring,
            permissions,
            stopping,
            ..
        } = parts.clone();
        Arc::new(Self {
            limits,
            journal,
            chronicles,
            custody,
            stores,
            volumes,
            migrations,
            queue,
            hosts,
            peers,
            restoring,
            permissions,
            stopping,
            claims: Arc::clone(claims),
            serving: Arc::clone(serving),
            views: Arc::clone(views),
            vm_orders: Arc::clone(vm_orders),
            arrivals: Arc::clone(arrivals),
            resumption: Arc::clone(resumption),
        })
    }
}
