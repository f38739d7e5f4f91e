//! The control plane of one host: rooms, each with the parts that it works on and the rooms below it that it uses.
//!
//! ```text
//!   http ──► Host ─┬─ description ───────────────┐            pairing ───────► ownership, migration orders
//!                  ├─ migration orders ──► departures ──► arrivals ─┐     ownership ─────► resumption
//!                  ├─ resumption ──────────┴──────────────┘         ├──► runner ──► VM orders ──┬──► volume orders ──► views
//!                  │                                                                            ├──► migration hooks
//!                  ├─ attachments ──► resumption, departures, standbys, claims, views
//!                  ├─ notices ──► description
//!                  ├─ access, reloading, shutdown                                               └──► serving ──► claims, exports
//!                  ├─ standbys ──► serving, volume orders; arrivals and the description use them
//!                  ├─ evacuations ──► migration orders, VM orders, standbys, views
//!                  └─ operations: each runs in a task of its own, so a client that disconnects does not leave it half done
//! ```
//! An arrow is a field: a room has no way to the rooms above it. [`Parts`] is what rooms are made of: the journal, the stores, the
//! registries. No room has the `Host`.

mod access;
pub(crate) mod description;
mod draining;
mod pairing;
mod parts;
pub(crate) mod reload;
mod shutdown;

pub(crate) use self::access::Access;
pub(crate) use self::description::Description;
pub(crate) use self::draining::Draining;
pub(crate) use self::pairing::Pairing;
pub(crate) use self::parts::{Books, Operations, Parts, PresentLimits, Stopping};
pub(crate) use self::reload::Reloading;
pub(crate) use self::shutdown::Shutdown;
pub(crate) use crate::evacuations::Evacuations;
pub(crate) use crate::migrations::arrivals::Arrivals;
pub(crate) use crate::migrations::attachments::Attachments;
pub(crate) use crate::migrations::departures::Departures;
pub(crate) use crate::migrations::departures::ahead::roomy;
pub(crate) use crate::migrations::hooks::MigrationHooks;
pub(crate) use crate::migrations::orders::MigrationOrders;
pub(crate) use crate::migrations::ownership::Ownership;
pub(crate) use crate::migrations::resumption::Resumption;
pub(crate) use crate::migrations::sessions::SessionRunner;
pub(crate) use crate::standbys::Standbys;
pub(crate) use crate::vms::orders::VmOrders;
pub(crate) use crate::volumes::claims::VolumeClaims;
pub(crate) use crate::volumes::exports::Exports;
pub(crate) use crate::volumes::orders::VolumeOrders;
pub(crate) use crate::volumes::serving::Serving;
pub(crate) use crate::volumes::views::VolumeViews;

use std::future::Future;
use std::sync::Arc;

use crate::config::Config;
use crate::error::RequestError;
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::migrations::attachments::Rooms;
use crate::notices::Notices;

/// The rooms of a host, for the API, for other hosts, and for the start and the end of the daemon.
pub(crate) struct Host {
    pub(crate) config: Arc<Config>,
    pub(crate) journal: Journal,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) operations: Operations,
    pub(crate) stopping: Stopping,
    pub(crate) claims: Arc<VolumeClaims>,
    pub(crate) serving: Arc<Serving>,
    pub(crate) views: Arc<VolumeViews>,
    pub(crate) volume_orders: Arc<VolumeOrders>,
    pub(crate) migration_hooks: Arc<MigrationHooks>,
    pub(crate) vm_orders: Arc<VmOrders>,
    pub(crate) arrivals: Arc<Arrivals>,
    pub(crate) departures: Arc<Departures>,
    pub(crate) resumption: Arc<Resumption>,
    pub(crate) attachments: Arc<Attachments>,
    pub(crate) migration_orders: Arc<MigrationOrders>,
    pub(crate) ownership: Arc<Ownership>,
    pub(crate) pairing: Arc<Pairing>,
    pub(crate) access: Arc<Access>,
    pub(crate) description: Arc<Description>,
    pub(crate) reloading: Arc<Reloading>,
    pub(crate) shutdown: Arc<Shutdown>,
    pub(crate) standbys: Arc<Standbys>,
    pub(crate) notices: Arc<Notices>,
    pub(crate) evacuations: Arc<Evacuations>,
}

impl Host {
    /// Puts the rooms together. Nothing is served yet.
    pub(crate) fn new(parts: &Parts) -> Arc<Self> {
        let exports = Exports::new(parts);
        let claims = VolumeClaims::new(parts);
        let serving = Serving::new(parts, &exports, &claims);
        let views = VolumeViews::new(parts, &exports);
        let volume_orders = VolumeOrders::new(parts, &exports, &claims, &serving, &views);
        let migration_hooks = MigrationHooks::new(parts);
        let vm_orders = VmOrders::new(parts, &exports, &claims, &volume_orders, &migration_hooks);
        let runner = SessionRunner::new(parts, &vm_orders);
        let standbys = Standbys::new(parts, &serving, &volume_orders, &vm_orders);
        let arrivals =
            Arrivals::new(parts, &exports, &serving, &migration_hooks, &vm_orders, &runner, &standbys);
        let departures =
            Departures::new(parts, &claims, &serving, &migration_hooks, &vm_orders, &runner, &arrivals);
        let resumption = Resumption::new(parts, &exports, &serving, &arrivals, &departures);
        let rooms = Rooms {
            claims: &claims,
            views: &views,
            volume_orders: &volume_orders,
            standbys: &standbys,
            runner: &runner,
            departures: &departures,
            resumption: &resumption,
        };
        let attachments = Attachments::new(parts, &rooms);
        let migration_orders =
            MigrationOrders::new(parts, &claims, &serving, &views, &vm_orders, &runner, &departures);
        let ownership = Ownership::new(parts, &claims, &serving, &views, &vm_orders, &arrivals, &resumption);
        let pairing = Pairing::new(parts, &standbys, &migration_orders, &ownership);
        let access = Access::new(parts);
        let description = Description::new(parts, &views, &vm_orders, &standbys);
        let notices = Notices::new(parts, &description);
        let reloading = Reloading::new(parts, &exports);
        let shutdown = Shutdown::new(parts, &serving, &migration_orders);
        let evacuations = Evacuations::new(parts, &views, &vm_orders, &migration_orders, &standbys);
        let Parts { config, journal, hosts, operations, stopping, .. } = parts.clone();
        Arc::new(Self {
            config,
            journal,
            hosts,
            operations,
            stopping,
            claims,
            serving,
            views,
            volume_orders,
            migration_hooks,
            vm_orders,
            arrivals,
            departures,
            resumption,
            attachments,
            migration_orders,
            ownership,
            pairing,
            access,
            description,
            reloading,
            shutdown,
            standbys,
            notices,
            evacuations,
        })
    }

    /// Runs an operation to its end, as [`Operations::run`] does.
    pub(crate) async fn operate<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T, RequestError>> + Send + 'static,
    ) -> Result<T, RequestError> {
        self.operations.run(operation).await
    }
}

/// Runs work that may block on a helper thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
) -> Result<T, RequestError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(RequestError::Internal(error.to_string())))
}
