//! The orders about volumes and their images: create, add, import, clone, snapshot, revert, resize, remove; and about images that are kept.

pub(crate) mod chain;
pub(crate) mod clone;
pub(crate) mod create;
mod cutting;
pub(crate) mod given;
pub(crate) mod growth;
pub(crate) mod import;
pub(crate) mod kept;
pub(crate) mod release;
pub(crate) mod remove;
pub(crate) mod resize;
pub(crate) mod retention;
pub(crate) mod revert;
pub(crate) mod snapshot;
pub(crate) mod store_files;

use std::sync::Arc;

use tokio::sync::{Mutex, Semaphore};

use crate::config::Config;
use crate::custody::Custody;
use crate::files::sockets::SocketFolder;
use crate::host::{Draining, Exports, Parts, PresentLimits, Serving, Stopping, VolumeClaims, VolumeViews};
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::migrations::ownership::restoration::Restoring;
use crate::stores::Stores;
use crate::vms::Vms;
use crate::vms::proved::Finders;
use crate::volumes::chronicles::Chronicles;
use crate::volumes::registry::Volumes;

/// Carries out the orders about volumes and their images.
pub(crate) struct VolumeOrders {
    config: Arc<Config>,
    limits: Arc<PresentLimits>,
    journal: Journal,
    chronicles: Chronicles,
    custody: Custody,
    stores: Arc<Stores>,
    volumes: Arc<Volumes>,
    sockets: Arc<SocketFolder>,
    hosts: Arc<Hosts>,
    restoring: Arc<Restoring>,
    vms: Arc<Vms>,
    finders: Arc<Finders>,
    looks: Arc<Semaphore>,
    stopping: Stopping,
    draining: Arc<Draining>,
    exports: Arc<Exports>,
    claims: Arc<VolumeClaims>,
    serving: Arc<Serving>,
    views: Arc<VolumeViews>,
    /// Held while an image becomes a volume, from its check until it is in the journal.
    adding_image: Mutex<()>,
}

impl VolumeOrders {
    pub(crate) fn new(
        parts: &Parts,
        exports: &Arc<Exports>,
        claims: &Arc<VolumeClaims>,
        serving: &Arc<Serving>,
        views: &Arc<VolumeViews>,
    ) -> Arc<Self> {
        let Parts {
            config,
            limits,
            journal,
            chronicles,
            custody,
            stores,
            volumes,
            sockets,
            hosts,
            restoring,
            vms,
            finders,
            looks,
            stopping,
            draining,
            ..
        } = parts.clone();
        Arc::new(Self {
            config,
            limits,
            journal,
            chronicles,
            custody,
            stores,
            volumes,
            sockets,
            hosts,
            restoring,
            vms,
            finders,
            looks,
            stopping,
            draining,
            exports: Arc::clone(exports),
            claims: Arc::clone(claims),
            serving: Arc::clone(serving),
            views: Arc::clone(views),
            adding_image: Mutex::new(()),
        })
    }
}
