//! What the rooms of a host are made of. [`Parts`] exists only while they are put together: each room takes its few.

use std::future::Future;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use lane::Encryption;
use tokio::sync::{Semaphore, watch};

use crate::audit::Audit;
use crate::config::{Config, Limits};
use crate::custody::Custody;
use crate::error::RequestError;
use crate::files::sockets::SocketFolder;
use crate::grants::Grants;
use crate::hooks::Hooks;
use crate::host::Draining;
use crate::host::description::overview::Overviews;
use crate::hosts::Hosts;
use crate::journal::{Journal, now_unix_ms};
use crate::migrations::ends::Ends;
use crate::migrations::forecasts::Forecasts;
use crate::migrations::history::Histories;
use crate::migrations::metadata::MetadataFolder;
use crate::migrations::ownership::restoration::Restoring;
use crate::migrations::queue::Queue;
use crate::migrations::registry::Migrations;
use crate::migrations::sessions::Sessions;
use crate::migrations::shares::Shares;
use crate::migrations::volume_hooks::VolumeHooks;
use crate::peers::Peers;
use crate::sign_ins::SignIns;
use crate::standbys::permissions::Permissions;
use crate::stores::Stores;
use crate::vms::Vms;
use crate::vms::moving::VmMoves;
use crate::vms::proved::Finders;
use crate::volumes::chronicles::Chronicles;
use crate::volumes::registry::Volumes;

/// The number of operations that run at a time. Others wait; each may hold a helper thread.
const OPERATIONS_MAX: u32 = 32;
/// The number of helper threads that query stores at a time, so that a hanging store does not use all of them.
const LOOKS_MAX: usize = 64;
const HOOKS_FOLDER: &str = "hooks";

/// The parts of a host; a clone has the same ones.
#[derive(Clone)]
pub(crate) struct Parts {
    /// The record of orders and who gave them.
    pub(crate) audit: Audit,
    /// Who may use the API over TLS.
    pub(crate) grants: Arc<Grants>,
    /// The browsers that may give orders on the page.
    pub(crate) sign_ins: Arc<SignIns>,
    pub(crate) config: Arc<Config>,
    pub(crate) limits: Arc<PresentLimits>,
    pub(crate) journal: Journal,
    /// The chronicles of volumes, across restarts.
    pub(crate) chronicles: Chronicles,
    /// Deletes and renames images.
    pub(crate) custody: Custody,
    pub(crate) stores: Arc<Stores>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) migrations: Arc<Migrations>,
    /// Migrations that wait for their turn.
    pub(crate) queue: Arc<Queue>,
    /// What other hosts use here, and may use.
    pub(crate) shares: Arc<Shares>,
    /// The metadata of migrations besides the journal.
    pub(crate) metadata_folder: Arc<MetadataFolder>,
    pub(crate) histories: Arc<Histories>,
    /// What earlier migrations have shown of each way.
    pub(crate) forecasts: Arc<Forecasts>,
    pub(crate) ends: Arc<Ends>,
    pub(crate) sessions: Arc<Sessions>,
    /// The TLS of volumes' ports.
    pub(crate) encryption: Encryption,
    pub(crate) sockets: Arc<SocketFolder>,
    pub(crate) hosts: Arc<Hosts>,
    /// The messages with other hosts about migrations.
    pub(crate) peers: Arc<Peers>,
    /// Hooks that run before volumes without a VM change hands.
    pub(crate) volume_hooks: Arc<VolumeHooks>,
    /// Hooks that run before and after migrations.
    pub(crate) hooks: Arc<Hooks>,
    /// Determines the owners of volumes after the journal was restored.
    pub(crate) restoring: Arc<Restoring>,
    /// Whether volumes that have standbys may be served.
    pub(crate) permissions: Arc<Permissions>,
    /// VMs that are leaving or arriving.
    pub(crate) moving: Arc<VmMoves>,
    pub(crate) vms: Arc<Vms>,
    /// The files of adopted disks.
    pub(crate) finders: Arc<Finders>,
    pub(crate) overviews: Arc<Overviews>,
    pub(crate) started_unix_ms: u64,
    pub(crate) operations: Operations,
    /// Limits queries of stores for descriptions; those at a hanging disk keep their permits.
    pub(crate) looks: Arc<Semaphore>,
    pub(crate) stopping: Stopping,
    /// Whether this host takes anything new.
    pub(crate) draining: Arc<Draining>,
}

/// What a host remembers across restarts.
pub(crate) struct Books {
    pub(crate) audit: Audit,
    pub(crate) journal: Journal,
    pub(crate) chronicles: Chronicles,
}

impl Parts {
    pub(crate) fn new(
        config: Config,
        Books { audit, journal, chronicles }: Books,
        stores: Stores,
        sockets: SocketFolder,
        encryption: Encryption,
        hosts: Arc<Hosts>,
        peers: Arc<Peers>,
    ) -> Self {
        let migrations = Arc::<Migrations>::default();
        migrations.name({
            let hosts = Arc::clone(&hosts);
            move || hosts.own()
        });
        let queue = Arc::new(Queue::new(config.limits.queue));
        let metadata_folder = Arc::new(journal.read(|state| MetadataFolder::open(&config.data_dir, state)));
        migrations.add_waiting(&queue, &metadata_folder);
        let moving = VmMoves::new(tokio::runtime::Handle::current());
        migrations.ask_of_vms(&moving);
        let volumes = Arc::<Volumes>::default();
        let permissions =
            Permissions::new(&config.data_dir, config.standby.if_silent, &sockets, &volumes, &hosts, &peers);
        let vms = Vms::open(&config.data_dir, &sockets, &config.machines);
        Self {
            audit,
            grants: Grants::begin(&config),
            sign_ins: Arc::default(),
            limits: Arc::new(PresentLimits(RwLock::new(config.limits))),
            custody: Custody::new(journal.clone(), &stores),
            stores: Arc::new(stores),
            migrations,
            queue,
            shares: Arc::new(Shares::new(config.limits.shares)),
            metadata_folder,
            histories: Arc::new(Histories::new(&config.data_dir)),
            forecasts: Arc::new(Forecasts::open(&config.data_dir)),
            ends: Arc::default(),
            sessions: Arc::default(),
            encryption,
            sockets: Arc::new(sockets),
            peers,
            volume_hooks: VolumeHooks::new(tokio::runtime::Handle::current()),
            hooks: Hooks::open(config.hooks.clone(), config.data_dir.join(HOOKS_FOLDER)),
            restoring: Arc::new(Restoring::new(&journal, &volumes, &hosts)),
            permissions,
            moving,
            finders: Arc::new(Finders::new(&vms)),
            vms,
            overviews: Arc::default(),
            started_unix_ms: now_unix_ms(),
            operations: Operations(Arc::new(Semaphore::new(OPERATIONS_MAX as usize))),
            looks: Arc::new(Semaphore::new(LOOKS_MAX)),
            stopping: Stopping(Arc::new(watch::Sender::new(false))),
            draining: Draining::open(&config.data_dir),
            config: Arc::new(config),
            journal,
            chronicles,
            volumes,
            hosts,
        }
    }
}

/// The limits of the configuration, which can change while the daemon serves.
pub(crate) struct PresentLimits(RwLock<Limits>);

impl PresentLimits {
    pub(crate) fn now(&self) -> Limits {
        *self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, limits: Limits) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = limits;
    }
}

/// Whether the daemon is to stop; a clone tells the same.
#[derive(Clone)]
pub(crate) struct Stopping(Arc<watch::Sender<bool>>);

impl Stopping {
    /// Resolves once the daemon is to stop.
    pub(crate) fn begins(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut told = self.0.subscribe();
        let sender = Arc::clone(&self.0);
        async move {
            // The sender lives as long as this future.
            let _ = told.wait_for(|stopping| *stopping).await;
            drop(sender);
        }
    }

    pub(crate) fn has_begun(&self) -> bool {
        *self.0.borrow()
    }

    pub(super) fn begin(&self) {
        self.0.send_replace(true);
    }
}

/// Runs the operations of the API, up to a number at a time; a clone counts the same ones.
#[derive(Clone)]
pub(crate) struct Operations(Arc<Semaphore>);

impl Operations {
    /// Runs an operation to its end, even if its client has left. Errors: the operation's;
    /// [`RequestError::ShuttingDown`]; [`RequestError::Internal`] if it panicked.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T, RequestError>> + Send + 'static,
    ) -> Result<T, RequestError> {
        let permit = Arc::clone(&self.0).acquire_owned().await;
        let permit = permit.map_err(|_| RequestError::ShuttingDown)?;
        let task = tokio::spawn(async move {
            let result = operation.await;
            drop(permit);
            result
        });
        task.await.unwrap_or_else(|error| Err(RequestError::Internal(error.to_string())))
    }

    /// Waits for the end of every operation, for up to `wait_max`, and admits no further one. Returns whether all have ended.
    pub(super) async fn end(&self, wait_max: Duration) -> bool {
        let ended = tokio::time::timeout(wait_max, self.0.acquire_many(OPERATIONS_MAX)).await;
        self.0.close();
        ended.is_ok()
    }
}
