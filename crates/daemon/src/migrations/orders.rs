//! The orders about migrations.
//!
//! ```text
//!   queued: checks, waits for its turn ─► migrate: what is to move, and where to ─┬─► departures
//!     │                                     ├─ together: several volumes ─────────┤
//!     ├─ plan      a dry run                └─ vms: a VM with its volumes ─────────┘
//!     ├─ retry     a migration that failed, once more
//!     ├─ foresight what to expect, and what ended migrations have shown
//!     └─ accounts  what has ended
//! ```

pub(crate) mod accounts;
mod foresight;
pub(crate) mod migrate;
pub(crate) mod plan;
pub(crate) mod queued;
pub(crate) mod retry;
pub(crate) mod together;
mod vms;

use std::sync::Arc;

use crate::config::Config;
use crate::host::{
    Departures, Operations, Parts, Serving, SessionRunner, Stopping, VmOrders, VolumeClaims, VolumeViews,
};
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::migrations::ends::Ends;
use crate::migrations::forecasts::Forecasts;
use crate::migrations::history::Histories;
use crate::migrations::metadata::MetadataFolder;
use crate::migrations::queue::Queue;
use crate::migrations::registry::Migrations;
use crate::migrations::sessions::Sessions;
use crate::stores::Stores;
use crate::vms::Vms;
use crate::volumes::chronicles::Chronicles;
use crate::volumes::registry::Volumes;

/// Queues, plans, begins, changes and ends migrations by order.
pub(crate) struct MigrationOrders {
    config: Arc<Config>,
    journal: Journal,
    chronicles: Chronicles,
    stores: Arc<Stores>,
    volumes: Arc<Volumes>,
    migrations: Arc<Migrations>,
    queue: Arc<Queue>,
    metadata_folder: Arc<MetadataFolder>,
    histories: Arc<Histories>,
    forecasts: Arc<Forecasts>,
    ends: Arc<Ends>,
    sessions: Arc<Sessions>,
    hosts: Arc<Hosts>,
    vms: Arc<Vms>,
    operations: Operations,
    stopping: Stopping,
    claims: Arc<VolumeClaims>,
    serving: Arc<Serving>,
    views: Arc<VolumeViews>,
    vm_orders: Arc<VmOrders>,
    runner: Arc<SessionRunner>,
    departures: Arc<Departures>,
}

impl MigrationOrders {
    pub(crate) fn new(
        parts: &Parts,
        claims: &Arc<VolumeClaims>,
        serving: &Arc<Serving>,
        views: &Arc<VolumeViews>,
        vm_orders: &Arc<VmOrders>,
        runner: &Arc<SessionRunner>,
        departures: &Arc<Departures>,
    ) -> Arc<Self> {
        let Parts {
            config,
            journal,
            chronicles,
            stores,
            volumes,
            migrations,
            queue,
            metadata_folder,
            histories,
            forecasts,
            ends,
            sessions,
            hosts,
            vms,
            operations,
            stopping,
            ..
        } = parts.clone();
        let orders = Arc::new(Self {
            config,
            journal,
            chronicles,
            stores,
            volumes,
            migrations,
            queue,
            metadata_folder,
            histories,
            forecasts,
            ends,
            sessions,
            hosts,
            vms,
            operations,
            stopping,
            claims: Arc::clone(claims),
            serving: Arc::clone(serving),
            views: Arc::clone(views),
            vm_orders: Arc::clone(vm_orders),
            runner: Arc::clone(runner),
            departures: Arc::clone(departures),
        });
        let retrying = Arc::downgrade(&orders);
        departures.repeat_with(move |migration| match retrying.upgrade() {
            Some(orders) => orders.begin_anew_if_interrupted(migration),
            None => Box::pin(std::future::ready(())),
        });
        orders
    }
}
